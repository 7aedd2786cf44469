"""`molt agent check`: what one episode leaves, token by token."""

import json
import time
from pathlib import Path

import pytest

from molt.agents.loop_lag import BlockReporter
from molt.cli.demo import build_model
from molt.cli.main import main
from tests.chat.test_wire_cases import ALTERNATE
from tests.tiny import QWEN3, char_tokenizer, save_tiny
from tests.tiny_vlm import save_tiny_vlm

AGENTS = Path(__file__).parent.parent.parent / "examples" / "python" / "agents"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("model")))


def shown(capsys, model, agent, *flags):
    code = main(["agent", "check", str(AGENTS / agent), "--model", model, *flags])
    assert code == 0
    return capsys.readouterr().out


def test_an_env_is_one_stream(model, capsys):
    out = shown(
        capsys, model, "guess_number.py", "--prompt", "Guess.", "--label", "37", "--answer", "50", "--answer", "37"
    )
    assert "#0 at the root" in out and "#1 after #0" in out and "trained in sample 0" in out
    assert "2 calls, 1 samples, 6 trained tokens" in out  # 50, 37 and two ends of turn
    assert "Scored: reward 0.9, score 1" in out


def test_a_chat_agent_shows_its_tree(model, capsys):
    out = shown(capsys, model, "chat_minimal.py", "--label", "hi", "--answer", "hi")
    assert "1 calls, 1 samples, 3 trained tokens" in out and "Scored: reward 1, score 1" in out
    assert "'hi<|im_end|>'" in out


def test_an_env_with_tools_is_offered_them(capsys, tmp_path):
    directory, tools = save_tiny(tmp_path / "model", tokenizer=char_tokenizer(QWEN3)), tmp_path / "tools.json"
    schema = {"name": "python", "parameters": {"type": "object", "properties": {"code": {"type": "string"}}}}
    offered = json.dumps([{"type": "function", "function": schema}])
    tools.write_text("\ufeff" + offered, encoding="utf-8")  # as some editors begin a file
    made = '<tool_call>\n{"name": "python", "arguments": {"code": "print(6 * 7)"}}\n</tool_call>'
    answers = ("--answer", made, "--answer", "42")
    out = shown(capsys, str(directory), "tool_env.py", "--tools", str(tools), "--label", "42", *answers)
    assert "2 calls, 1 samples" in out and "<tool_response>42" in out and "Scored: reward 1" in out
    tools.write_text("{")
    assert main(["agent", "check", str(AGENTS / "tool_env.py"), "--model", str(directory), "--tools", str(tools)]) == 2
    assert "Name a JSON list of schemas" in capsys.readouterr().err
    tools.write_text(offered, encoding="utf-16")
    assert main(["agent", "check", str(AGENTS / "tool_env.py"), "--model", str(directory), "--tools", str(tools)]) == 2
    assert "Name a JSON list of schemas" in capsys.readouterr().err


def test_a_scorer_gives_the_reward(model, capsys, tmp_path):
    scorer = tmp_path / "scorer.py"
    scorer.write_text(
        "from molt.agents import Result\n"
        "def score(trajectory):\n"
        "    info = {'tokens': trajectory.generated_tokens}\n"
        "    return Result(len(trajectory.answer), score=trajectory.agent_reward, info=info)\n"
    )
    flags = ("--label", "hi", "--answer", "hi", "--scorer", str(scorer))
    out = shown(capsys, model, "chat_minimal.py", *flags)
    assert "Scored: reward 2, score 1" in out and "  tokens 3" in out
    scorer.write_text("def score(trajectory):\n    raise KeyError('grader')\n")
    assert main(["agent", "check", str(AGENTS / "chat_minimal.py"), "--model", model, *flags]) == 1
    error = capsys.readouterr().err
    assert "scorer_KeyError: KeyError: 'grader' at " in error and "The score would fail in a run" in error


DEMANDING = """
import httpx

from molt.agents import ChatAgent, ChatAgentRunner, Result

USER = {"role": "user", "content": "hi"}


class Demanding(ChatAgent):
    async def run(self, ctx):
        wants = {"response_format": {"type": "json_object"}, "reasoning_effort": "low"}
        wants["tools"] = [{"type": "web_search"}]
        async with httpx.AsyncClient() as client:
            for body in ({"messages": [USER, USER], **wants}, {"messages": [USER]}, {"messages": []}):
                await client.post(f"{ctx.openai_url}/chat/completions", json=body)
        return Result(1.0)


class AgentRunner(ChatAgentRunner):
    def __init__(self):
        super().__init__(Demanding)
"""


def test_what_a_client_asked_in_vain_is_shown(tmp_path, capsys):
    """Two users in a row, which the template refuses; then the same without the rest, and an empty conversation."""
    directory = save_tiny(tmp_path / "model", tokenizer=char_tokenizer(ALTERNATE))
    agent = tmp_path / "agent.py"
    agent.write_text(DEMANDING)
    assert main(["agent", "check", str(agent), "--model", str(directory)]) == 0
    printed = capsys.readouterr()
    names = ["constraint", "response_format", "reasoning_effort", "tools", "tool_web_search"]
    assert [f"  chat_ignored_{name} 1" in printed.out for name in names] == [True] * 5
    assert "refused 1 times: 400 the conversation is empty" in printed.out
    assert "1 messages of the agent's client are joined to others" in printed.err


def test_what_cannot_be(model, capsys, tmp_path):
    assert main(["agent", "check", str(AGENTS / "chat_minimal.py"), "--model", model, "--no_chat"]) == 2
    assert "a ChatAgent talks in messages" in capsys.readouterr().err
    assert main(["agent", "check", str(tmp_path / "none.py"), "--model", model]) == 1
    assert "is not a file" in capsys.readouterr().err


LABEL_TYPE = """
from molt.agents import Env, Result, StepEnvRunner


class Shows(Env):
    async def step(self, state):
        return Result(1.0, info={f"label_is_{type(state['label']).__name__}": 1})


class AgentRunner(StepEnvRunner):
    def __init__(self):
        super().__init__(Shows)
"""


def test_a_label_is_text_unless_json_is_asked_for(model, capsys, tmp_path):
    (tmp_path / "agent.py").write_text(LABEL_TYPE)
    out = shown(capsys, model, tmp_path / "agent.py", "--label", "11249")
    assert "label: '11249'" in out and "label_is_str 1" in out
    out = shown(capsys, model, tmp_path / "agent.py", "--label_json", "11249")
    assert "label: 11249" in out and "label_is_int 1" in out
    assert main(["agent", "check", str(tmp_path / "agent.py"), "--model", model, "--label_json", "{"]) == 2
    assert "--label_json (={) is not JSON" in capsys.readouterr().err


def test_a_row_of_a_dataset_is_read_with_the_keys_of_the_run(model, capsys, tmp_path):
    rows = [{"question": "1 + 1?", "answer": "2"}, {"question": "3 + 4?", "answer": "7"}]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = ("--data", str(data), "--data.input_key", "question", "--data.label_key", "answer")
    out = shown(capsys, model, "chat_minimal.py", *keys, "--row", "1", "--answer", "7")
    assert out.startswith("prompt: 3 + 4?\nlabel: '7'\n") and "Scored: reward 1" in out
    command = ["agent", "check", str(AGENTS / "chat_minimal.py"), "--model", model, *keys]
    assert main([*command, "--row", "2"]) == 2
    assert "--row (=2)" in capsys.readouterr().err
    assert main([*command, "--label", "7"]) == 2
    assert "the label is that of the row" in capsys.readouterr().err
    assert main([*command[:-2], "--data.label_key", "answre"]) == 1
    assert "`data.label_key` (=answre)" in capsys.readouterr().err


RAISES = """
import json
from molt.agents import Env, Result, StepEnvRunner


class Raises(Env):
    async def step(self, state):
        return Result(json.loads("no json"))


class AgentRunner(StepEnvRunner):
    def __init__(self):
        super().__init__(Raises)
"""


def test_what_an_agent_raises_is_one_line_with_the_line_of_the_user(model, capsys, tmp_path):
    agent = tmp_path / "raises.py"
    agent.write_text(RAISES)
    assert main(["agent", "check", str(agent), "--model", model]) == 1
    output = capsys.readouterr()
    assert output.out.splitlines()[:2] == ["prompt: Say hello.", "label: None"]
    (line,) = output.err.splitlines()
    assert line.startswith(f"error: {agent} raised JSONDecodeError: Expecting value")
    assert f"at {agent}:8." in line, "the user's line, not one of the json module"


@pytest.mark.parametrize("statement", ["sys.exit(3)", "await asyncio.to_thread(sys.exit, 3)"])
def test_an_exit_of_an_agent_is_an_error_with_its_line(model, capsys, tmp_path, statement):
    agent = tmp_path / "exits.py"
    code = RAISES.replace("import json", "import asyncio, sys")
    agent.write_text(code.replace('return Result(json.loads("no json"))', statement))
    assert main(["agent", "check", str(agent), "--model", model]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {agent}: SystemExit: 3 at {agent}:8.")


def test_a_file_that_exits_when_it_is_imported_says_so(model, capsys, tmp_path):
    agent = tmp_path / "script.py"
    agent.write_text("import sys\nsys.exit(0)\n")
    assert main(["agent", "check", str(agent), "--model", model]) == 1
    error = capsys.readouterr().err
    assert f"exits when it is imported (0) at {agent}:2" in error and "__main__" in error


def test_an_episode_without_an_end_names_the_deadline(model, capsys, tmp_path):
    agent = tmp_path / "sleeps.py"
    agent.write_text(
        RAISES.replace("import json", "import asyncio").replace(
            'return Result(json.loads("no json"))', "await asyncio.sleep(60)"
        )
    )
    assert main(["agent", "check", str(agent), "--model", model, "--timeout_s", "0.2"]) == 1
    assert "did not end within --timeout_s (=0.2)" in capsys.readouterr().err


BLOCKS = """
import time
from molt.agents import ChatAgent, ChatAgentRunner, Result


class Blocks(ChatAgent):
    async def run(self, ctx):
        {statement}
        return Result(1.0)


class AgentRunner(ChatAgentRunner):
    def __init__(self):
        super().__init__(Blocks)
"""
SYNCHRONOUS = "__import__('urllib.request').request.urlopen(ctx.openai_url + '/models', timeout=8)"


@pytest.mark.parametrize("statement", ["time.sleep(8)", SYNCHRONOUS])
def test_an_agent_that_blocks_its_event_loop_is_left_behind_with_its_line(
    model, capsys, tmp_path, monkeypatch, statement
):
    """A synchronous client waits for a server in the loop that it blocks: no deadline of that loop can pass."""
    monkeypatch.setattr(BlockReporter.__init__, "__defaults__", (0.5,))
    agent = tmp_path / "blocks.py"
    agent.write_text(BLOCKS.format(statement=statement))
    started = time.monotonic()
    assert main(["agent", "check", str(agent), "--model", model, "--timeout_s", "2"]) == 1
    assert time.monotonic() - started < 7, "it waited for the agent"
    warning, error = capsys.readouterr().err.splitlines()
    assert warning.startswith(f"warning: {agent} has blocked its event loop at {agent}:8 for ")
    assert error.startswith(f"error: {agent} blocked its event loop at {agent}:8: the episode did not end within")
    assert "--timeout_s (=2)" in error and "asyncio.to_thread" in error


SHOWS = """
import openai
from molt.agents import ChatAgent, ChatAgentRunner, Result
from tests.tiny_vlm import data_url, picture


class Shows(ChatAgent):
    async def run(self, ctx):
        client = openai.AsyncOpenAI(base_url=ctx.openai_url, api_key=ctx.api_key)
        image = {"type": "image_url", "image_url": {"url": data_url(picture(1))}}
        await client.chat.completions.create(model=ctx.model, messages=[{"role": "user", "content": [image]}])
        return Result(1.0)


class AgentRunner(ChatAgentRunner):
    def __init__(self):
        super().__init__(Shows)
"""


def test_images_are_shown_as_their_tokens(capsys, tmp_path):
    (tmp_path / "shows.py").write_text(SHOWS)
    out = shown(capsys, str(save_tiny_vlm(tmp_path / "vlm")), tmp_path / "shows.py", "--answer", "hi")
    assert "1 image, trained in sample 0" in out and "user\\n<fake_token_around_image><global-img>" in out


def test_an_observation_that_the_tokenizer_cannot_spell_is_named(tmp_path, capsys):
    """The demo's tokenizer knows digits alone, and reads a blank for everything else."""
    model = tmp_path / "model"
    build_model(model, seed=0)
    agent = tmp_path / "agent.py"
    agent.write_text(
        "from molt.agents import Env, Result, StepEnvRunner\n"
        "class Wrong(Env):\n"
        "    async def step(self, state):\n"
        "        observation = ['12  34', '5 is wrong'][state['turn'] % 2]\n"
        "        return Result(reward=0.0, observation=observation, terminated=state['turn'] == 2)\n"
        "class AgentRunner(StepEnvRunner):\n"
        "    def __init__(self):\n"
        "        super().__init__(Wrong)\n"
    )
    assert main(["agent", "check", str(agent), "--model", str(model), "--prompt", "12", "--answer", "1"]) == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 1 and "cannot spell the observation '5 is wrong': the model reads '5 " in warnings[0]
