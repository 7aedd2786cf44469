"""What every process of molt does before anything else, and the environment that all of them have."""

import logging
import os
from collections.abc import Mapping

from molt.rare_gc import collect_rarely

LOOPBACK = ("127.0.0.1", "localhost")
"""Where sessions and judges answer."""
LONGEST_SOCKET = 107
"""Bytes that Linux takes as the path of a Unix socket."""
RAY_SOCKET = "/ray/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"
"""The longest that Ray makes below its directory for temporary files."""
LONGEST_TEMP = LONGEST_SOCKET - len(RAY_SOCKET)
"""Bytes of a directory in which Ray can make its sockets."""


SAFE_PATH = "PYTHONSAFEPATH"
OF_MOLT = "molt"
"""The value of that variable where molt has set it, and not the user."""


def prepare() -> None:
    """Make full garbage collections rare, and let third-party libraries report errors alone."""
    collect_rarely()
    if os.environ.get(SAFE_PATH) == OF_MOLT:  # for this process and those it spawns, not for programs that it starts
        del os.environ[SAFE_PATH]
    logging.getLogger("vllm").setLevel(logging.ERROR)  # it logs before it reads VLLM_LOGGING_LEVEL


def loopback_without_proxy(environment: Mapping[str, str]) -> dict[str, str]:
    """`NO_PROXY` and `no_proxy` with the loopback addresses added: a proxy cannot reach a session of this machine."""
    exempt: dict[str, None] = {}
    for name in ("NO_PROXY", "no_proxy"):
        hosts = environment.get(name, "").split(",")
        exempt.update(dict.fromkeys(host.strip() for host in hosts if host.strip()))
    exempt.update(dict.fromkeys(LOOPBACK))
    text = ",".join(exempt)
    return {"NO_PROXY": text, "no_proxy": text}


def safe_path(environment: Mapping[str, str]) -> dict[str, str]:
    """The variable with which Python never puts the current directory first on `sys.path`.

    `multiprocessing` passes it on as `-P`. Without it a `math.py` there ends every spawned process at its start.
    """
    if SAFE_PATH in environment:
        return {}
    return {SAFE_PATH: OF_MOLT}


def short_sockets(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that move the sockets of Ray and vLLM out of a `TMPDIR` that is too long for them; {} if it is not."""
    folder = environment.get("TMPDIR", "")
    if "RAY_TMPDIR" in environment or len(os.fsencode(folder)) <= LONGEST_TEMP:
        return {}
    return {"RAY_TMPDIR": f"/tmp/molt-{os.getuid()}", "VLLM_RPC_BASE_PATH": "/tmp"}
