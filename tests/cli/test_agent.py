"""`molt agent check`: what one episode leaves, token by token."""

import json
from pathlib import Path

import pytest

from molt.cli.main import main
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
    tools.write_text(json.dumps([{"type": "function", "function": schema}]))
    made = '<tool_call>\n{"name": "python", "arguments": {"code": "print(6 * 7)"}}\n</tool_call>'
    answers = ("--answer", made, "--answer", "42")
    out = shown(capsys, str(directory), "tool_env.py", "--tools", str(tools), "--label", "42", *answers)
    assert "2 calls, 1 samples" in out and "<tool_response>42" in out and "Scored: reward 1" in out
    tools.write_text("{")
    assert main(["agent", "check", str(AGENTS / "tool_env.py"), "--model", str(directory), "--tools", str(tools)]) == 2
    assert "Name a JSON list of schemas" in capsys.readouterr().err


def test_what_cannot_be(model, capsys, tmp_path):
    assert main(["agent", "check", str(AGENTS / "chat_minimal.py"), "--model", model, "--no_chat"]) == 2
    assert "a ChatAgent talks in messages" in capsys.readouterr().err
    assert main(["agent", "check", str(tmp_path / "none.py"), "--model", model]) == 1
    assert "is not a file" in capsys.readouterr().err


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
