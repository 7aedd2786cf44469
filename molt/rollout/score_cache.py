"""Scores on disk (`--reward.cache_dir`): the same trajectory is scored once by the same scorer file.

    DIR/ab/abcdef....json     {"reward", "score", "info"}, or {"reward", "reason"} of a `PolicyFailure`

The name is the SHA-256 of the scorer file's digest and of the trajectory as canonical JSON, so an edited scorer starts
anew. Modules that the scorer imports, and the answers of a judge, are not in it. Many runners, and runs, may share one
directory: a file is written aside and renamed. Failures are not kept.
"""

import asyncio
import hashlib
import json
import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from molt.types import Json

# Agents with synchronous clients fill the threads of the event loop: scores would wait for them.
_DISK = ThreadPoolExecutor(max_workers=2, thread_name_prefix="molt-score-cache")


class ScoreCache:
    """The scores in a directory."""

    def __init__(self, folder: Path, digest: str):
        """digest: of the scorer file."""
        self.folder = folder
        self.digest = digest

    def key(self, trajectory: str) -> str:
        """trajectory: canonical JSON."""
        parts = f"{self.digest}\n{trajectory}"
        return hashlib.sha256(parts.encode()).hexdigest()

    async def get(self, trajectory: str) -> Json | None:
        """The message of a scorer's process that was kept, or None."""
        return await asyncio.get_running_loop().run_in_executor(_DISK, self._read, trajectory)

    async def put(self, trajectory: str, score: Json) -> None:
        """Keep the message. A disk that does not take it costs the next run a call of the scorer."""
        await asyncio.get_running_loop().run_in_executor(_DISK, self._write, trajectory, score)

    def _path(self, trajectory: str) -> Path:
        key = self.key(trajectory)
        return self.folder / key[:2] / f"{key}.json"

    def _read(self, trajectory: str) -> Json | None:
        try:
            kept = json.loads(self._path(trajectory).read_bytes())
        except (OSError, ValueError):  # not there, or torn by a full disk
            return None
        if not isinstance(kept, dict) or "reward" not in kept:
            return None
        return kept

    def _write(self, trajectory: str, score: Json) -> None:
        path = self._path(trajectory)
        aside = path.with_suffix(f".{secrets.token_hex(8)}.tmp")
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            aside.write_text(json.dumps(score))
            os.replace(aside, path)
