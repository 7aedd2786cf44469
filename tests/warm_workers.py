"""Ray workers that are forked from a process with torch and transformers in it, which saves the imports of each.

A run over `FakeEngine` starts three workers; importing the same libraries in each takes longer than all its steps. Ray
starts a worker by `py_executable default_worker.py ...`. In the tests' Ray session that executable is this file: it
hands its arguments, environment and streams to a server, whose forked child goes on as the worker. Tests of whole
processes (signals, orphans, nodes, supervision) start theirs without it.

    python -m tests.warm_workers SOCKET            the server; it ends when its standard input does
    python tests/warm_workers.py SOCKET FILE ...   what Ray starts instead of `python FILE ...`
"""

import gc
import importlib
import json
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PRELOADED = (
    "molt.agents.chat_runner",
    "molt.chat.chat_renderer",
    "molt.train.critic",
    "molt.train.policy",
    "renderers",
    "torch.distributed.checkpoint",
    "transformers.models.qwen3.modeling_qwen3",
)
"""Not Ray: it reads the environment when it is imported, and a worker's comes later."""
ROOT = Path(__file__).resolve().parent.parent
LENGTH_BYTES = 4
START_S = 300.0


@contextmanager
def serving(path: Path, environment: dict[str, str]) -> Iterator[dict[str, str]]:
    """Run a server at the socket `path`; the value makes `ray.init` use it where it is in the environment."""
    command = [sys.executable, "-m", "tests.warm_workers", str(path)]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT, env={**os.environ, **environment})
    try:
        deadline = time.monotonic() + START_S
        while not path.exists():
            assert server.poll() is None, f"the server of warm workers ended with {server.returncode}"
            assert time.monotonic() < deadline, f"the server of warm workers did not start in {START_S:.0f} s"
            time.sleep(0.05)
        yield {"RAY_RUNTIME_ENV_HOOK": "tests.warm_workers.with_warm_workers", "MOLT_WARM_WORKERS": str(path)}
    finally:
        server.communicate()


def with_warm_workers(runtime_env: dict[str, Any] | None) -> dict[str, Any]:
    """Ray's hook: the environment of all workers, with this file as their Python."""
    command = [sys.executable, "-I", "-S", str(Path(__file__).resolve()), os.environ["MOLT_WARM_WORKERS"]]
    return {**(runtime_env or {}), "py_executable": shlex.join(command)}


def ask_for_worker(path: str, argv: list[str]) -> None:
    """Hand over what makes this process a worker, and wait until the server has forked it."""
    request = {"argv": argv, "directory": os.getcwd(), "environment": dict(os.environ)}
    payload = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        socket.send_fds(server, [len(payload).to_bytes(LENGTH_BYTES, "big")], [1, 2])
        server.sendall(payload)
        server.recv(1)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The request, and the asking process's streams for output and errors."""
    head, streams, *_ = socket.recv_fds(connection, LENGTH_BYTES, 2)
    length = int.from_bytes(head, "big")
    payload = b""
    while len(payload) < length:
        payload += connection.recv(length - len(payload))
    return json.loads(payload), streams


def become_worker(request: dict[str, Any], streams: list[int]) -> None:
    """In the forked child: what `execve` would have set, then the worker's main file."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream, number)
        os.close(stream)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)  # the server's end of input is not for the worker
    sys.argv = request["argv"]
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")


def serve(path: str) -> None:
    """Fork one worker for each request, until standard input ends."""
    for module in PRELOADED:
        importlib.import_module(module)
    gc.freeze()  # a collection in a worker would copy the pages it shares
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # a worker that ends leaves no zombie
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{path}.new")
        listener.listen()
        os.rename(f"{path}.new", path)
        while True:
            ready, _, _ = select.select([listener, sys.stdin], [], [])
            if sys.stdin in ready:
                return
            connection, _ = listener.accept()
            request, streams = receive(connection)
            if os.fork() == 0:
                listener.close()
                connection.close()
                become_worker(request, streams)
                os._exit(0)
            connection.close()
            for stream in streams:
                os.close(stream)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        serve(sys.argv[1])
    else:
        ask_for_worker(sys.argv[1], sys.argv[2:])
