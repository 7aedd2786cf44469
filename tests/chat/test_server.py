"""The server as a client on the same machine meets it: paths, bad input, disconnects, security."""

import asyncio
import base64
import io
import json
import socket
import time
from urllib.parse import urlsplit

import httpx
import pytest
from PIL import Image

from molt.chat.server import ChatServer
from molt.chat.session import Session
from tests.chat.scripted import ScriptedModel, renderer, scenario

SAID = [{"role": "user", "content": "hi"}]
BODIES = {
    "/chat/completions": {"messages": SAID},
    "/responses": {"input": "hi"},
    "/messages": {"messages": SAID, "max_tokens": 9},
}


async def post(world, path="/v1/chat/completions", body=None, content=None, headers=None, timeout=20):
    async with httpx.AsyncClient(timeout=timeout) as client:
        body = BODIES["/chat/completions"] if body is None and content is None else body
        return await client.post(world.url + path, json=body, content=content, headers=headers)


async def fetch(url, method="GET"):
    async with httpx.AsyncClient() as client:
        return await client.request(method, url)


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


def said(response) -> str:
    return response.json()["choices"][0]["message"]["content"]


@scenario(*["yes"] * 9)
async def test_every_path_with_and_without_v1_and_any_key_and_query(world):
    for path, body in BODIES.items():
        for prefix in ("/v1", "", "/v1/v1"):
            headers = {"authorization": "Bearer x", "x-api-key": "y", "anthropic-version": "z"}
            response = await post(world, f"{prefix}{path}?beta=true", body, headers=headers)
            assert response.status_code == 200 and "yes" in response.text, response.text


@scenario(max_len=4321)
async def test_what_can_be_got(world):
    for path in ("", "/", "/health", "/v1/models", "/v1/models/any/name"):
        assert (await fetch(world.url + path)).status_code == 200
    head = await fetch(world.url, "HEAD")
    assert (head.status_code, head.content) == (200, b"")
    assert (await fetch(f"http://127.0.0.1:{world.server.port}/health")).json() == {"status": "ok"}
    (model,) = (await fetch(f"{world.url}/v1/models")).json()["data"]
    assert model["max_model_len"] == 4321
    assert (await fetch(f"{world.url}/models/any/name")).json()["id"] == "any/name"


@scenario()
async def test_unknown_sessions_and_paths_are_refused_in_the_shape_of_the_protocol(world):
    root = f"http://127.0.0.1:{world.server.port}"
    world.url, own = f"{root}/s/{'A' * 32}", world.url
    for path in BODIES:
        response = await post(world, f"/v1{path}", {})
        assert response.status_code == 404 and response.headers["x-should-retry"] == "false"
        assert (response.json().get("type") == "error") == (path != "/chat/completions")
        assert "no session" in response.json()["error"]["message"]
    for url in (root, f"{root}/", f"{root}/s/", own[:-1], own.replace("/s/", "/judge/"), own.replace("/s/", "//s/")):
        assert (await fetch(url)).status_code == 404, url
    assert (await fetch(f"{own}/v1/embeddings")).status_code == 404
    assert (await fetch(f"{own}/v1/messages")).json()["error"]["type"] == "not_found_error"


@scenario("yes")
async def test_a_session_that_was_closed_is_unknown_and_its_siblings_live_on(world):
    sibling = Session(renderer(), ScriptedModel("sibling"), max_len=1000)
    other = world.server.open(sibling)
    assert len(other) == len(world.url) and other != world.url
    world.server.close(world.url)
    assert (await post(world)).status_code == 404
    world.url = other
    assert said(await post(world)) == "sibling"


@scenario("yes")
async def test_closing_stops_what_is_still_sampled(world):
    world.model.gate.clear()
    request = asyncio.create_task(post(world))
    await world.model.called.wait()
    world.server.close(world.url)
    await asyncio.wait([request])
    assert world.model.cancelled == 1 and world.session.failure is None and world.session.tree.nodes == []


@scenario("yes")
async def test_what_arrives_after_its_session_was_closed_is_not_sampled(world):
    at, body = urlsplit(world.url), json.dumps(BODIES["/chat/completions"]).encode()
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    head = f"POST {at.path}/chat/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode())
    assert b"100 Continue" in await reader.readline()  # sent once the server waits for the body
    world.server.close(world.url)
    writer.write(body)
    assert b"404" in await reader.readuntil(b"Not Found")
    writer.close()
    assert world.model.prompts == []


@scenario()
async def test_a_long_path_holds_nobody_up(world):
    began = time.thread_time()
    for path in ("/s/x" + "/" * 60_000 + "x", "/" * 60_000 + "x", "/s/x" + "/v1" * 20_000 + "/x"):
        assert (await fetch(f"http://127.0.0.1:{world.server.port}{path}")).status_code == 404
    assert time.thread_time() - began < 2


@scenario()
async def test_connections_live_longer_than_clients_keep_them(world):
    assert world.server._server.config.timeout_keep_alive > 2 * httpx.Limits().keepalive_expiry


@scenario("yes", server={"max_body": 5000, "body_s": 2})
async def test_bad_bodies_leave_the_session_alive(world):
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}
    cut = picture_of_one_pixel()[:-20]
    bad = [
        (400, b"{"),
        (400, json.dumps({"messages": [picture]}).encode()),
        (400, json.dumps({"messages": [{**picture, "content": [part_of(cut)]}]}).encode()),
        (400, json.dumps({"messages": SAID, "stream": True, "stream_options": 17}).encode()),
        (400, json.dumps({"messages": [{"role": "user", "content": "half \ud800"}]}).encode()),
        (400, json.dumps({"messages": [{"role": "user", "content": "not in the vocabulary: \u00e9"}]}).encode()),
        (413, b" " * 5001),
    ]
    for status, content in bad:
        response = await post(world, content=content)
        assert response.status_code == status, response.text
        assert response.json()["error"]["type"] == "invalid_request_error"
    assert world.session.failure is None and said(await post(world)) == "yes"


def picture_of_one_pixel() -> bytes:
    Image.new("RGB", (1, 1)).save(file := io.BytesIO(), "PNG")
    return file.getvalue()


def part_of(image: bytes) -> dict:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(image).decode()}"}}


CUT = "data:image/png;base64,iVBORw0KGgo="
BAD_IMAGES = {
    "/chat/completions": {"type": "image_url", "image_url": {"url": CUT}},
    "/responses": {"type": "input_image", "image_url": CUT},
    "/messages": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": CUT[22:]}},
}
BAD_TOOLS = {
    "/chat/completions": {"type": "function", "function": {"name": "f", "parameters": [1]}},
    "/responses": {"type": "function", "name": "f", "parameters": [1]},
    "/messages": {"name": "f", "input_schema": [1]},
}


@pytest.mark.parametrize("path", BODIES)
def test_a_bad_request_is_refused_in_the_shape_of_the_protocol_and_all_sessions_live_on(path):
    def turn(role, content):
        return json.dumps({key: [{"role": role, "content": content}] for key in ("messages", "input")}).encode()

    bad = {
        b'{"messages": [': "protocol",
        turn("wizard", "x"): "'wizard'",
        turn("user", [BAD_IMAGES[path]]): "cannot be read",
        json.dumps(BODIES[path] | {"tools": [BAD_TOOLS[path]]}).encode(): "JSON schema",
    }

    @scenario("yes")
    async def run(world):
        sibling = Session(renderer(), ScriptedModel("sibling"), max_len=1000)
        for content, says in bad.items():
            refused = await post(world, path, content=content)
            assert refused.status_code == 400 and refused.headers["x-should-retry"] == "false"
            assert (refused.json().get("type") == "error") == (path != "/chat/completions")
            error = refused.json()["error"]
            assert error["type"] == "invalid_request_error" and says in error["message"]
            assert (error.get("code") == "invalid_request") == (path != "/messages")
        assert world.session.failure is None and world.model.prompts == []
        assert "yes" in (await post(world, path, BODIES[path])).text
        world.url = world.server.open(sibling)
        assert "sibling" in (await post(world, path, BODIES[path])).text

    run()


@scenario("yes", server={"body_s": 2})
async def test_clients_that_hang_hold_nobody_up(world):
    at = urlsplit(world.url)
    mute = [await asyncio.open_connection(at.hostname, at.port) for _ in range(3)]
    for (_, writer), begun in zip(mute, (b"", b"POST", b"POST / HTTP/1.1\r\nHo"), strict=True):
        writer.write(begun)
    head = f"POST {at.path}/v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode()
    hanging = [await asyncio.open_connection(at.hostname, at.port) for _ in range(5)]
    for _, writer in hanging:
        writer.write(head)
        await writer.drain()
    assert said(await post(world)) == "yes"
    for reader, writer in hanging:
        assert b"408" in await reader.readline()
        writer.close()
    assert world.session.failure is None
    async with asyncio.timeout(5):  # nor the end of the server
        await world.server.__aexit__()
    for reader, writer in mute:
        assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_image_urls_are_refused(path, stream):
    image = {
        "/chat/completions": {"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}},
        "/responses": {"type": "input_image", "image_url": "file:///etc/passwd"},
        "/messages": {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}},
    }[path]

    @scenario("yes")
    async def run(world):
        turn = [{"role": "user", "content": [image]}]
        response = await post(world, path, {"messages": turn, "input": turn, "stream": stream})
        assert response.status_code == 400 and "not allowed" in response.json()["error"]["message"]
        assert world.model.prompts == []

    run()


@scenario("one", "two")
async def test_a_client_that_leaves_stops_its_sampling_and_its_retry_is_one_sample(world):
    world.model.gate.clear()
    request = asyncio.create_task(post(world))
    await world.model.called.wait()
    request.cancel()
    await until(lambda: world.model.cancelled)
    world.model.gate.set()
    assert said(await post(world)) == "one"
    assert len(world.session.tree.nodes) == 1
    assert said(await post(world)) == "two"  # after a delivered reply, the same body is a new sample
    assert len(world.session.tree.samples()) == 2


@scenario("one", "two", server={"ping_s": 0.05})
async def test_a_stream_says_that_it_lives_and_stops_with_its_client(world):
    world.model.gate.clear()
    async with httpx.AsyncClient(timeout=20) as client:
        async with client.stream(
            "POST", f"{world.url}/v1/messages", json={**BODIES["/messages"], "stream": True}
        ) as got:
            assert got.headers["content-type"].startswith("text/event-stream")
            lines = got.aiter_lines()
            assert [await anext(lines) for _ in range(3)] == [": still sampling", "", ": still sampling"]
    await until(lambda: world.model.cancelled)
    assert world.session.tree.nodes == [] and world.session.failure is None


@pytest.mark.parametrize("path", BODIES)
def test_a_failure_after_the_first_ping_is_an_event(path):
    @scenario(RuntimeError("gone"), server={"ping_s": 0.05})
    async def run(world):
        world.model.gate.clear()
        request = asyncio.create_task(post(world, path, {**BODIES[path], "stream": True}))
        await world.model.called.wait()
        await asyncio.sleep(1)  # 20 pings
        world.model.gate.set()
        response = await request
        assert response.status_code == 200
        *pings, last = response.text.strip().split("\n\n")
        name, data = last.split("\n")
        assert set(pings) == {": still sampling"} and name == "event: error" and data.startswith("data: {")
        assert "gone" in json.loads(data.removeprefix("data: "))["error"]["message"]

    run()


@scenario("x" * 100_000, "two", max_len=200_000)
async def test_a_stream_that_its_client_left_half_read_is_replayed_streamed_or_not(world):
    (listener,) = world.server._server.servers[0].sockets
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # the reply, six times its text, must not fit
    at, body = urlsplit(world.url), json.dumps({**BODIES["/responses"], "stream": True}).encode()
    left = socket.socket()
    left.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    left.connect((at.hostname, at.port))
    left.sendall(f"POST {at.path}/responses HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    await until(lambda: world.session.tree.nodes)
    left.close()
    ((work,),) = world.session._works.values()
    await until(lambda: not work.wanted)
    replayed = await post(world, "/responses", BODIES["/responses"])
    assert "x" * 100_000 in replayed.text and len(world.session.tree.nodes) == 1
    assert "two" in (await post(world, "/responses", content=body)).text


@scenario("x" * 100_000, "two", max_len=200_000)
async def test_a_client_that_reads_nothing_of_its_stream_holds_nobody_up(world):
    (listener,) = world.server._server.servers[0].sockets
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    at, body = urlsplit(world.url), json.dumps({**BODIES["/responses"], "stream": True}).encode()
    with socket.create_connection((at.hostname, at.port)) as deaf:
        deaf.sendall(
            f"POST {at.path}/responses HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        )
        await until(lambda: world.session.tree.nodes)
        assert said(await post(world)) == "two"
        async with asyncio.timeout(5):
            await world.server.__aexit__()
    assert len(world.session.tree.samples()) == 2 and world.session.failure is None


@scenario("one", "two")
async def test_a_call_opts_out_of_training_by_a_header(world):
    await post(world, headers={"x-molt-train": "0"})
    await post(world, headers={"x-molt-train": "1"})
    assert world.sampled == [["two<|im_end|>"]]
    assert len(world.session.tree.nodes) == 2


@scenario()
async def test_a_judge_has_a_root_of_its_own_and_records_nothing(world):
    asked = []

    async def freely(ids, max_tokens, sampling):
        asked.append(sampling)
        return await ScriptedModel("good")(ids, max_tokens)

    judge = Session(renderer(), world.model, max_len=1000, record=False, call_freely=freely)
    world.url = world.server.open(judge)
    assert "/judge/" in world.url
    body = {"messages": SAID, "temperature": 0}
    assert said(await post(world, body=body)) == "good" and asked == [{"temperature": 0}]
    assert judge.tree.nodes == [] and world.model.prompts == []
    assert said(await post(world, body=body | {"response_format": {"type": "json_object"}})) == "good"
    assert asked[1] == {"temperature": 0, "structure": {"json_object": True}} and judge.counters["requests"] == 2


@scenario()
async def test_the_server_listens_on_loopback_only(world):
    assert [s.getsockname()[0] for server in world.server._server.servers for s in server.sockets] == ["127.0.0.1"]
    others = {"127.0.0.2", *(info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET))}
    for address in others - {"127.0.0.1"}:
        with pytest.raises(OSError):
            await asyncio.wait_for(asyncio.open_connection(address, world.server.port), 5)


@scenario()
async def test_replies_are_not_held_back_for_an_acknowledgement(world):
    (listener,) = world.server._server.servers[0].sockets
    assert listener.proto == socket.IPPROTO_TCP  # what asyncio asks before it sets TCP_NODELAY


def test_session_ids_are_long_and_random():
    async def run():
        async with ChatServer() as server:
            return [server.open(Session(renderer(), ScriptedModel(), max_len=10)) for _ in range(100)]

    ids = {url.rsplit("/", 1)[1] for url in asyncio.run(run())}
    assert len(ids) == 100 and min(map(len, ids)) >= 32  # 24 random bytes in base64


@scenario(*["yes"] * 40)
async def test_many_at_once(world):
    replies = await asyncio.gather(
        *(post(world, body={"messages": [{"role": "user", "content": f"{i}"}]}) for i in range(40))
    )
    assert {said(reply) for reply in replies} == {"yes"}
    assert len(world.session.tree.samples()) == 40
