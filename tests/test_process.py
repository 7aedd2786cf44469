"""The environment that every process of molt has."""

import os

import pytest

from molt.process import LONGEST_TEMP, RAY_SOCKET, loopback_without_proxy, prepare, safe_path, short_sockets


@pytest.mark.parametrize(
    ("environment", "exempt"),
    [
        ({}, "127.0.0.1,localhost"),
        ({"HTTP_PROXY": "http://proxy:3128"}, "127.0.0.1,localhost"),
        ({"NO_PROXY": "a.example, 10.0.0.0/8"}, "a.example,10.0.0.0/8,127.0.0.1,localhost"),
        ({"NO_PROXY": "a", "no_proxy": "b,localhost"}, "a,b,localhost,127.0.0.1"),
        ({"no_proxy": "*"}, "*,127.0.0.1,localhost"),
        ({"NO_PROXY": ""}, "127.0.0.1,localhost"),
    ],
)
def test_loopback_goes_past_every_proxy(environment, exempt):
    assert loopback_without_proxy(environment) == {"NO_PROXY": exempt, "no_proxy": exempt}


def test_it_says_the_same_twice():
    once = loopback_without_proxy({"no_proxy": "a"})
    assert loopback_without_proxy(once) == once


@pytest.mark.parametrize("scheme", ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "all_proxy"])
def test_clients_of_a_session_use_no_proxy(scheme, monkeypatch):
    """What httpx, which the OpenAI and Anthropic clients are made of, and urllib read."""
    import urllib.request

    import httpx

    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(scheme, "http://127.0.0.1:9")
    for name, value in loopback_without_proxy(os.environ).items():
        monkeypatch.setenv(name, value)
    client = httpx.Client()
    assert client._transport_for_url(httpx.URL("http://127.0.0.1:8000/s/x")) is client._transport
    assert client._transport_for_url(httpx.URL("http://elsewhere.example/")) is not client._transport or (
        scheme.lower() == "https_proxy"
    )
    assert urllib.request.proxy_bypass("127.0.0.1:8000")


def test_sockets_of_ray_fit():
    """107 bytes are what Linux takes: 107 - 68 = 39 are left for the directory."""
    assert len(RAY_SOCKET) == 68 and LONGEST_TEMP == 39
    assert short_sockets({}) == {}
    assert short_sockets({"TMPDIR": "/" + "x" * 38}) == {}
    moved = short_sockets({"TMPDIR": "/" + "x" * 39})
    assert set(moved) == {"RAY_TMPDIR", "VLLM_RPC_BASE_PATH"}
    assert len(moved["RAY_TMPDIR"]) <= LONGEST_TEMP
    assert short_sockets({"TMPDIR": "/" + "ü" * 20}) != {}, "bytes count, and ü has two"
    assert short_sockets({"TMPDIR": "/" + "x" * 39, "RAY_TMPDIR": "/tmp"}) == {}, "the user has chosen"


def test_the_current_directory_is_not_first_in_spawned_processes(monkeypatch):
    """Programs that an agent starts have the usual path: `python solution.py` imports what lies beside it."""
    monkeypatch.setattr("molt.process.collect_rarely", lambda: None)
    for name, value in safe_path({}).items():
        monkeypatch.setenv(name, value)
    prepare()
    assert "PYTHONSAFEPATH" not in os.environ
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # the user's own
    prepare()
    assert os.environ["PYTHONSAFEPATH"] == "1" and safe_path(os.environ) == {}
