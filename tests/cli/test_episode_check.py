"""`molt check rl` and `molt check eval` play one episode; what fails it is an error with the user's line."""

import time

import pytest

from molt.cli import episode_check
from molt.cli.main import main
from tests.cli.conftest import as_given

RL = (
    "--actor.model_name_or_path model --data.prompt_dataset prompts.jsonl --data.label_key label "
    "--data.apply_chat_template --data.max_len 64 --train.agent_path agent.py --fsdp.device cpu"
)
STEP = """
import time
from molt.agents import Env, ReplaceGroup, Result, StepEnvRunner


class Judge(Env):
    async def step(self, state):
        {statement}


class AgentRunner(StepEnvRunner):
    def __init__(self):
        super().__init__(Judge)
"""


def check(capsys, *more, kind="rl"):
    """The exit code, and the lines of the report about the episode."""
    code = main(["check", kind, *RL.split(), *more])
    output = capsys.readouterr()
    assert "Traceback" not in output.err
    return code, [line for line in as_given(output.out).splitlines() if "episode" in line]


@pytest.mark.parametrize("kind", ["rl", "eval"])
def test_the_episode_gets_the_label_of_the_row_and_the_answer_of_the_model(run, capsys, kind):
    """The first row's label is 0000; the answer `hello` has 5 letters: 5 + 0 = 5."""
    (run / "agent.py").write_text(
        STEP.format(statement="return Result(float(len(state['action']) + int(state['label'])))")
    )
    more = ["--eval.dataset", "prompts.jsonl"] if kind == "eval" else []
    code, (line,) = check(capsys, *more, kind=kind)
    assert code == 0 and line.startswith("ok ")
    assert "when the model says 'hello' it ends as Scored: reward 5, score 5" in line


def test_what_the_agent_raises_is_an_error_with_its_line(run, capsys):
    (run / "agent.py").write_text(STEP.format(statement="return Result(1.0 / int(state['label']))"))
    code, (line,) = check(capsys)
    assert code == 1 and line.startswith("error ")
    assert "raised ZeroDivisionError" in line and "agent.py:8." in line and "--no_episode" in line


def test_a_step_that_is_not_there_is_an_error_and_a_plain_one_is_played(run, capsys):
    agent = STEP.format(statement="return Result(1.0)")
    (run / "agent.py").write_text(agent.replace("def step", "def stepp"))
    assert check(capsys)[0] == 1
    (run / "agent.py").write_text(agent.replace("async def step", "def step"))
    code, (line,) = check(capsys)
    assert code == 0 and "it ends as Scored: reward 1" in line


def test_an_agent_that_blocks_is_an_error_within_the_deadline(run, capsys, monkeypatch):
    monkeypatch.setattr(episode_check, "EPISODE_S", 1.5)
    (run / "agent.py").write_text(STEP.format(statement="time.sleep(9)"))
    started = time.monotonic()
    code, (line,) = check(capsys)
    assert code == 1 and "blocked its event loop at" in line and "agent.py:8:" in line
    assert time.monotonic() - started < 8


def test_the_episode_can_be_left_out(run, capsys):
    (run / "agent.py").write_text(STEP.format(statement="raise ConnectionError('no sandbox here')"))
    assert check(capsys)[0] == 1
    assert check(capsys, "--no_episode") == (0, [])


def test_a_row_that_the_agent_replaces_is_no_error(run, capsys):
    (run / "agent.py").write_text(STEP.format(statement="raise ReplaceGroup('stale', 'its image is gone')"))
    code, (line,) = check(capsys)
    assert code == 0 and line.startswith("ok ") and "stale: its image is gone" in line


def test_a_row_that_cannot_be_used_is_passed_over(run, capsys):
    rows = (run / "prompts.jsonl").read_text()
    (run / "prompts.jsonl").write_text('{"input": "", "label": "7"}\n' + rows)
    (run / "agent.py").write_text(STEP.format(statement="return Result(float(state['label']))"))
    code, (line,) = check(capsys)
    assert code == 0 and "reward 0," in line


UNASKED = """
from molt.agents import ChatAgent, ChatAgentRunner, Result


class Judge(ChatAgent):
    async def run(self, ctx):
        try:
            import openai
            await openai.AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="x", max_retries=0).models.list()
        except Exception:
            pass
        return Result(0.0)


class AgentRunner(ChatAgentRunner):
    def __init__(self):
        super().__init__(Judge)
"""


def test_an_episode_without_a_model_call_is_a_warning(run, capsys):
    """A client that swallows the error of a wrong address: a quiet 0.0."""
    (run / "agent.py").write_text(UNASKED)
    code, lines = check(capsys)
    assert code == 0 and [line.split()[0] for line in lines] == ["ok", "warning"]
    assert "without asking the model" in lines[1] and "ctx.openai_url" in lines[1]
