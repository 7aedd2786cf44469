"""A Python file of the user's as a module, the line of it that raised, and the line where something is defined."""

import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType

from molt.errors import ConfigError, MoltError, described, did_you_mean
from molt.plugins import make_importable, module_name

_LIBRARIES = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
_NOT_THE_USERS = tuple(f"{folder}{os.sep}" for folder in [*_LIBRARIES, str(Path(__file__).parent)])
"""The folders of Python, of installed packages and of molt; `molt_agent.py` beside molt's is a user's file."""
_LOOP = "base_events.py"
"""The file of Python that runs an event loop."""
_OF_AN_IDLE_LOOP = ("selectors.py", _LOOP, "threading.py")
"""Files of Python in which a thread is whose event loop has nothing to do."""


def load_module(path: str, flag: str, error: type[MoltError] = ConfigError) -> ModuleType:
    """Import FILE.py, as `plugins` says. Raises `error` with the setting `flag`, what is wrong and the fix."""
    file = Path(path)
    setting = f"`{flag}` (={path})"
    if not file.is_file():
        neighbours = [neighbour.name for neighbour in file.parent.glob("*.py")]
        near = did_you_mean(file.name, neighbours)
        raise error(f"{setting} is not a file: there is nothing to run.{near} Give the path of a FILE.py.")

    spec = importlib.util.spec_from_file_location(module_name(file), file)
    if spec is None or spec.loader is None:
        raise error(f"{setting} is not a Python file: it cannot be imported. Use FILE.py.")
    module = importlib.util.module_from_spec(spec)
    make_importable(file.parent)
    sys.modules[spec.name] = module  # dataclasses and pickle look a class's module up there
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except SystemExit as exited:
        raise error(
            f"{setting} exits when it is imported ({exited}) at {raised_at(exited)}. Nothing in it could run. Put that "
            'line under `if __name__ == "__main__":`.'
        ) from exited
    except BaseException as wrong:  # the user's file may raise anything
        raise error(
            f"{setting} cannot be imported: {described(wrong)} at {raised_at(wrong)}. Nothing in it could run. Run "
            f"`python {path}` to see the traceback."
        ) from wrong
    return module


def raised_at(error: BaseException) -> str:
    """`FILE:LINE`, the innermost line of the user's that led to the error; if there is none, the line that raised it.

    A `SyntaxError` names the line of the file that cannot be parsed; of text that the user's code parses, that code.
    """
    if isinstance(error, SyntaxError) and error.filename is not None and not error.filename.startswith("<"):
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "an unknown line"
    of_user = _frames_of_user(error)
    innermost = of_user[-1] if of_user else frames[-1]
    return f"{innermost.filename}:{innermost.lineno}"


def is_raised_by_user(error: BaseException) -> bool:
    """Whether a line of the user's led to the error."""
    return bool(_frames_of_user(error))


def _frames_of_user(error: BaseException) -> list[traceback.FrameSummary]:
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if _is_users(frame.filename)]


def place_of(defined: Callable[..., object]) -> str:
    """` (FILE:LINE)` where a function or a class is defined, or nothing where Python does not know it."""
    source = inspect.unwrap(defined)
    try:
        file = inspect.getsourcefile(source)
        _, line = inspect.getsourcelines(source)
    except (TypeError, OSError):  # of C; made by a call; its file is gone
        return ""
    return f" ({file}:{line})"


def running_at(frame: FrameType) -> str | None:
    """`FILE:LINE` of what a thread runs: the user's innermost line, or else the innermost; None for an idle event loop.

    frame: the innermost, as of `sys._current_frames`. Lines that only started the event loop do not count.
    """
    for each, line in traceback.walk_stack(frame):
        if Path(each.f_code.co_filename).name == _LOOP:
            break
        if _is_users(each.f_code.co_filename):
            return f"{each.f_code.co_filename}:{line}"
    innermost = frame.f_code.co_filename
    if Path(innermost).name in _OF_AN_IDLE_LOOP:
        return None
    return f"{innermost}:{frame.f_lineno}"


def _is_users(filename: str) -> bool:
    is_installed = bool({"site-packages", "dist-packages"} & set(Path(filename).parts))
    return not is_installed and not filename.startswith((*_NOT_THE_USERS, "<"))
