"""A tiny model, a dataset and an agent in files: everything a run names."""

import json
from pathlib import Path

import pytest

from tests.tiny import save_tiny

AGENT = """
from molt.agents import Env, Result, StepEnvRunner


class Reverse(Env):
    async def step(self, state):
        return Result(reward=float(state["action"] == state["label"]))


class AgentRunner(StepEnvRunner):
    def __init__(self):
        super().__init__(Reverse)
"""


def write_rows(path: Path, numbers: range, **changes) -> Path:
    rows = [{"input": f"reverse {i:04d}", "label": f"{i:04d}"[::-1], **changes} for i in numbers]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def as_given(report: str) -> str:
    """The report with the paths in the current directory as they were given."""
    return report.replace(f"{Path.cwd()}/", "")


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def run(tmp_path, model, monkeypatch) -> Path:
    """An empty directory with prompts.jsonl, agent.py and the model; the current one."""
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "prompts.jsonl", range(20))
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "model").symlink_to(model)
    return tmp_path
