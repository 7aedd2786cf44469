"""Whose line an error is blamed on."""

import asyncio
import importlib
import sys
from pathlib import Path

import pytest

import molt
from molt.agents.load import load_runner
from molt.user_module import is_raised_by_user, load_module, place_of, raised_at

MOLT = Path(molt.__file__).parent


def error_in(file: Path) -> ZeroDivisionError:
    """Raised in line 2 of the file, as the only frame."""
    with pytest.raises(ZeroDivisionError) as raised:
        exec(compile("\n1 / 0", file, "exec"), {})
    error = raised.value
    assert error.__traceback__ is not None
    return error.with_traceback(error.__traceback__.tb_next)  # without the line of this test


@pytest.mark.parametrize("file", [Path("agent.py"), MOLT.parent / "molt_agent.py"])
def test_a_file_beside_molt_is_a_users(file):
    error = error_in(file)
    assert is_raised_by_user(error) and raised_at(error) == f"{file}:2"


def test_a_line_of_molt_is_not_a_users():
    assert not is_raised_by_user(error_in(MOLT / "agents" / "env.py"))


def test_what_has_no_source_has_no_place():
    assert place_of(len) == ""
    assert place_of(error_in).startswith(f" ({__file__}:")


def test_text_that_the_user_parses_is_blamed_on_the_line_that_parses_it():
    """`eval` of what a model wrote: the line of `<string>` says nothing."""
    try:
        eval("1 +")
    except SyntaxError as error:
        place = raised_at(error)
    assert place.startswith(f"{__file__}:")


def test_an_installed_package_is_not_the_users(tmp_path):
    """Also one that belongs to another Python: `dist-packages` of the system, a second environment."""
    for folder in ("site-packages", "dist-packages"):
        assert not is_raised_by_user(error_in(tmp_path / folder / "lib.py"))
    assert is_raised_by_user(error_in(tmp_path / "my-site-packages" / "lib.py"))


POOLED = """
import asyncio
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import helper_of_the_agent
from molt.agents import Env, Result, StepEnvRunner


@dataclass
class Answer:
    text: str


def grade(answer, label):
    import math
    import random

    import numpy

    same = float(answer.text == label)
    return math.floor(same + numpy.float64(0.5)) * helper_of_the_agent.FULL + 0 * random.random()


class Pooled(Env):
    async def step(self, state):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            loop = asyncio.get_running_loop()
            reward = await loop.run_in_executor(pool, grade, Answer(state["action"]), state["label"])
        return Result(reward=reward)


class AgentRunner(StepEnvRunner):
    def __init__(self):
        super().__init__(Pooled)
"""


@pytest.fixture
def path(monkeypatch) -> list[str]:
    """A copy of `sys.path`."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    return sys.path


@pytest.mark.parametrize("name", ["agent.py", "math.py", "random.py", "my-agent.v2.py"])
def test_a_spawned_grader_imports_the_agent(name, tmp_path, path, monkeypatch):
    """Whatever the agent is called, and where Ray put the current directory first, as it does in every worker."""
    (tmp_path / name).write_text(POOLED)
    (tmp_path / "helper_of_the_agent.py").write_text("FULL = 2.0\n")
    path.insert(0, str(tmp_path))
    runner = load_runner(str(tmp_path / name))
    result = asyncio.run(runner.env_class().step({"action": "7", "label": "7"}))
    assert result.reward == 2.0
    sys.modules.pop("helper_of_the_agent")


def test_the_folder_of_an_agent_is_last(tmp_path, path, monkeypatch):
    (tmp_path / "a.py").write_text("")
    monkeypatch.chdir(tmp_path)
    path[:0] = ["", str(tmp_path)]
    others = path[2:]
    load_module(str(tmp_path / "a.py"), "train.agent_path")
    load_module("a.py", "train.agent_path")
    assert path == [*others, str(tmp_path)]


def test_a_folder_that_pythonpath_names_stays(tmp_path, path, monkeypatch):
    (tmp_path / "a.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    path.insert(0, str(tmp_path))
    load_module(str(tmp_path / "a.py"), "train.agent_path")
    assert path[0] == str(tmp_path)


def test_two_files_of_one_name_are_two_modules(tmp_path, path):
    modules = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "agent.py").write_text(f"NAME = {folder!r}\n")
        modules.append(load_module(str(tmp_path / folder / "agent.py"), "train.agent_path"))
    assert [module.NAME for module in modules] == ["one", "two"]
    assert [importlib.import_module(module.__name__).NAME for module in modules] == ["one", "two"]
    for module in modules:
        del sys.modules[module.__name__]
    assert [importlib.import_module(module.__name__).NAME for module in modules] == ["one", "two"], "found on the path"
