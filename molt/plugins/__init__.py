"""Users' files as modules that spawned processes can import: `molt.plugins.agent_1a2b3c4d` is some `agent.py`.

A process that `multiprocessing` spawns has the `sys.path` of its parent, and imports the module of each function that
it is sent. Importing `molt.plugins.NAME` imports this package first, whose finder looks for the file on that path. The
name has a checksum of the file's path, so a user's `math.py` is never taken for the module `math`.
"""

import importlib.util
import os
import re
import sys
import sysconfig
import zlib
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

_LIBRARIES = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}


def module_name(file: Path) -> str:
    """Two files of the same name are two modules."""
    stem = re.sub(r"\W", "_", file.stem)
    return f"{__name__}.{stem}_{zlib.crc32(str(file.resolve()).encode()):08x}"


def make_importable(folder: Path) -> None:
    """Put a folder last on `sys.path`, also if it was first: what it holds hides no library.

    The helpers beside a user's file can then be imported by name. A library's folder, and one that `PYTHONPATH` names,
    stay where they are.
    """
    chosen = {*_LIBRARIES, *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    entry = str(folder.absolute())
    if entry in chosen and entry in sys.path:
        return
    real = os.path.realpath(entry)
    others = [path for path in sys.path if os.path.realpath(path) != real]  # "" is the current directory
    sys.path[:] = [*others, entry]


class _Finder(MetaPathFinder):
    """Finds a user's file by the name of its module, in the folders of `sys.path`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.rpartition(".")[0] != __name__:
            return None
        for folder in reversed(sys.path):  # users' folders are last
            for file in Path(folder).glob("*.py"):
                if module_name(file) == fullname:
                    return importlib.util.spec_from_file_location(fullname, file)
        return None


sys.meta_path.append(_Finder())
