"""A Python file of the user's as a module."""

import importlib.util
import sys
import zlib
from pathlib import Path
from types import ModuleType

from molt.errors import ConfigError, MoltError, did_you_mean


def load_module(path: str, flag: str, error: type[MoltError] = ConfigError) -> ModuleType:
    """Import FILE.py. Raises `error` with the setting `flag`, what is wrong and the fix."""
    file = Path(path)
    setting = f"`{flag}` (={path})"
    if not file.is_file():
        near = did_you_mean(file.name, [p.name for p in file.parent.glob("*.py")]) if file.parent.is_dir() else ""
        raise error(f"{setting} is not a file: there is nothing to run.{near} Give the path of a FILE.py.")
    name = f"molt_plugin_{file.stem}_{zlib.crc32(str(file.resolve()).encode()):08x}"  # agent.py may be there twice
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise error(f"{setting} is not a Python file: it cannot be imported. Use FILE.py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look a class's module up there
    try:
        spec.loader.exec_module(module)
    except Exception as wrong:  # the user's file may raise anything
        raise error(
            f"{setting} cannot be imported: {wrong!r}. Nothing in it could run. Run `python {path}` to see the "
            "traceback."
        ) from wrong
    return module
