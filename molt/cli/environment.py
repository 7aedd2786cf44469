"""What the environment of a run lacks: proxies, temporary files, shared memory, limits of the system.

Each of these fails minutes after the start, in a library, with a message that does not name it.
"""

import importlib.util
import os
import resource
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from molt.cli.findings import Finding
from molt.cli.places import is_writable, nearest_existing
from molt.process import LONGEST_TEMP, short_sockets

PROXIES = ("ALL_PROXY", "HTTP_PROXY", "HTTPS_PROXY")
SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED = 128 << 20
"""Bytes of shared memory; with less, Ray keeps its objects on the disk."""
FULL_DISK = 0.95
"""At this share Ray stops writing to a disk."""
LEAST_FILES = 4096
LEAST_THREADS = 1024
"""Ray, an engine, a rank and a runner have some 600."""
MIB = 2**20


class Limit(NamedTuple):
    """A limit of the system for each process (`ulimit`)."""

    name: str
    flag: str
    """Of `ulimit`."""
    least: int
    consequence: str


ENOUGH = 2**50
LIMITS = (
    Limit("RLIMIT_NOFILE", "-n", LEAST_FILES, "Ray and the sessions of agents run out of open files"),
    Limit("RLIMIT_NPROC", "-u", LEAST_THREADS, "Ray cannot start its threads"),
    Limit("RLIMIT_AS", "-v", ENOUGH, "Ray, vLLM and torch reserve more addresses than they use, and would not start"),
    Limit("RLIMIT_FSIZE", "-f", ENOUGH, "a checkpoint that is larger ends the process that writes it"),
)


def check_environment(environment: Mapping[str, str], shares_weights: int = 0) -> Iterator[Finding]:
    """What is wrong or doubtful. shares_weights: bytes that go through shared memory at each weight sync."""
    yield from _proxies(environment)
    yield from _temporary_files(environment)
    yield from shared_memory(_free(SHARED_MEMORY), shares_weights)
    for limit in LIMITS:
        _, hard = resource.getrlimit(getattr(resource, limit.name))  # processes raise the soft one as they need
        yield from below(limit, hard)


def _free(folder: Path) -> int:
    """Bytes."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def _proxies(environment: Mapping[str, str]) -> Iterator[Finding]:
    """A proxy for other hosts is none of molt's business; one that no client can use is."""
    for name in PROXIES:
        for spelling in (name, name.lower()):
            scheme, separator, _ = environment.get(spelling, "").partition("://")
            has_socks = importlib.util.find_spec("socksio") is not None
            if separator and scheme.lower().startswith("socks") and not has_socks:
                yield Finding(
                    "warning",
                    f"{spelling} names a {scheme} proxy: an OpenAI or Anthropic client of an agent cannot be made, not "
                    "even for a session of this machine. Install httpx[socks], or unset it.",
                )
                return


def _temporary_files(environment: Mapping[str, str]) -> Iterator[Finding]:
    folder = Path(environment.get("TMPDIR") or tempfile.gettempdir())
    existing = nearest_existing(folder)
    if not existing.is_dir() or not is_writable(existing):
        yield Finding(
            "error",
            f"TMPDIR (={folder}): {existing} is not writable or full, so neither Ray nor an engine could start. Set it "
            "to a directory that takes files.",
        )
        return
    of_ray = environment.get("RAY_TMPDIR", "")
    length = len(os.fsencode(of_ray))
    if length > LONGEST_TEMP:
        yield Finding(
            "error",
            f"RAY_TMPDIR (={of_ray}) has {length} bytes: the paths of Ray's sockets would be longer than Linux takes "
            f"(AF_UNIX). Use one of at most {LONGEST_TEMP} bytes, or unset it.",
        )
    moved = short_sockets(environment)
    if moved:
        yield Finding("ok", f"TMPDIR is too long for sockets: those of Ray are in {moved['RAY_TMPDIR']}")
    of_objects = nearest_existing(Path(of_ray or moved.get("RAY_TMPDIR") or folder))
    yield from full_disk(of_objects, os.statvfs(of_objects))


def full_disk(folder: Path, disk: os.statvfs_result) -> Iterator[Finding]:
    """disk: that of the folder."""
    if not disk.f_blocks:  # a file system without blocks
        return
    used = 1 - disk.f_bavail / disk.f_blocks
    if used > FULL_DISK:
        yield Finding(
            "warning",
            f"the disk of {folder} is {used:.0%} full: above {FULL_DISK:.0%} Ray writes nothing to it, so a run that "
            "needs it for objects fails. Free some space, or set TMPDIR to another disk.",
        )


def shared_memory(free: int, shares_weights: int) -> Iterator[Finding]:
    """free: bytes of `SHARED_MEMORY`."""
    fix = "Free some, or give the container more (docker run --shm-size=8g)"
    if shares_weights > free:
        yield Finding(
            "error",
            f"{SHARED_MEMORY} has {free / MIB:,.0f} MiB free, and a weight sync takes {shares_weights / MIB:,.0f}: the "
            f"first one would fail. {fix}.",
        )
    elif free < LEAST_SHARED:
        yield Finding(
            "warning",
            f"{SHARED_MEMORY} has {free / MIB:,.0f} MiB free, so Ray keeps its objects on the disk, which is slow. "
            f"{fix}.",
        )


def below(limit: Limit, value: int) -> Iterator[Finding]:
    """value: the hard limit of this process."""
    is_root = os.getuid() == 0
    if value == resource.RLIM_INFINITY or value >= limit.least:
        return
    if limit.name == "RLIMIT_NPROC" and is_root:  # it does not hold for root
        return
    yield Finding(
        "warning",
        f"`ulimit -H {limit.flag}` is {value:,}: {limit.consequence}. Raise it (`ulimit {limit.flag}`, "
        "/etc/security/limits.conf, docker run --ulimit) or remove it.",
    )
