"""`load_runner`: every way an agent file can be wrong, with the fix in the message."""

import pytest

from molt.agents.load import load_runner
from molt.errors import AgentError

GOOD = """
from __future__ import annotations

from dataclasses import dataclass

from molt.agents import Env, Result, StepEnvRunner


@dataclass
class Grade:
    value: float


class MyEnv(Env):
    async def step(self, state):
        return Result(Grade(1.0).value)


class AgentRunner(StepEnvRunner):
    def __init__(self):
        super().__init__(MyEnv)
"""


def write(tmp_path, text, name="agent.py"):
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def test_a_good_file_gives_a_runner_of_its_env(tmp_path):
    assert load_runner(write(tmp_path, GOOD)).env_class.__name__ == "MyEnv"


def test_a_missing_file_names_the_nearest(tmp_path):
    write(tmp_path, GOOD, "agent.py")
    with pytest.raises(AgentError, match=r"`train.agent_path` \(=.*agnet.py\) is not a file.*Did you mean 'agent.py'"):
        load_runner(str(tmp_path / "agnet.py"))
    with pytest.raises(AgentError, match=r"is not a file: there is nothing to run\. Give the path"):
        load_runner(str(tmp_path / "nowhere" / "agent.py"))
    with pytest.raises(AgentError, match="is not a file"):
        load_runner(str(tmp_path))


def test_a_file_that_is_not_python(tmp_path):
    with pytest.raises(AgentError, match=r"is not a Python file.*Use FILE.py"):
        load_runner(write(tmp_path, GOOD, "agent.txt"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("class AgentRuner: pass", r"exports no `AgentRunner`.*Did you mean 'AgentRuner'\?.*class AgentRunner\(Step"),
        ("x = 1", r"exports no `AgentRunner`: molt does not know what to run\. Add"),
        ("class AgentRunner: pass", r"molt cannot drive it. Derive it from molt.agents.StepEnvRunner"),
        ("AgentRunner = 3", r"`AgentRunner` in .* is 3: molt cannot drive it"),
        ("import not_there", r"cannot be imported: ModuleNotFoundError.*Run `python .*` to see the traceback"),
        ("def broken(:", r"cannot be imported: SyntaxError"),
        ("1 / 0", r"cannot be imported: ZeroDivisionError"),
        (GOOD.replace("super().__init__(MyEnv)", "raise KeyError('grader')"), r"cannot be built: KeyError\('grader'\)"),
        (GOOD.replace("__init__(self)", "__init__(self, judge)"), r"cannot be built: TypeError.*takes no arguments"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(tmp_path, text, message):
    with pytest.raises(AgentError, match=message):
        load_runner(write(tmp_path, text))
