"""From `--train.agent_path` to a runner."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeGuard

from molt.agents.chat_runner import ChatAgentRunner
from molt.agents.step_runner import StepEnvRunner
from molt.errors import AgentError, did_you_mean
from molt.user_module import load_module

LIBRARIES = ("gymnasium", "reasoning_gym", "verifiers")
"""`LIBRARY:NAME` as an agent path is an environment of that library (`adapters.py`)."""

Runner = StepEnvRunner | ChatAgentRunner


def resolved(agent_path: str) -> str:
    """The agent path for a process that runs in another directory."""
    if _names_library(agent_path):
        return agent_path
    return str(Path(agent_path).resolve())


def scorer_of(agent_path: str, scorer: str | None) -> str | None:
    """The scorer file that is in force: the user's, or molt's for an agent that leaves its reward to one."""
    if scorer is None and agent_path.partition(":")[0] == "reasoning_gym":
        return str(Path(__file__).parent / "reasoning_gym_scorer.py")
    return scorer


def load_runner(agent_path: str) -> Runner:
    """Import FILE.py and build its `AgentRunner`, or take an `Env` of a library.

    Raises `AgentError` with what is wrong and the fix.
    """
    if _names_library(agent_path):
        adapters = importlib.import_module(".adapters", __package__)  # by name: most runs have no use for it
        return StepEnvRunner(adapters.adapter(agent_path))

    module = load_module(agent_path, "train.agent_path", AgentError)
    runner_class = getattr(module, "AgentRunner", None)
    if runner_class is None:
        near = did_you_mean("AgentRunner", vars(module))
        raise AgentError(
            f"`train.agent_path` (={agent_path}) exports no `AgentRunner`: molt does not know what to run.{near} Add "
            "`class AgentRunner(StepEnvRunner)` whose __init__ calls super().__init__(YourEnv), or one of "
            "ChatAgentRunner and your ChatAgent."
        )
    if not _is_runner_class(runner_class):
        raise AgentError(
            f"`AgentRunner` in {agent_path} is {runner_class!r}: molt cannot drive it. Derive it from "
            "molt.agents.StepEnvRunner or molt.agents.ChatAgentRunner."
        )
    try:
        return runner_class()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the user's constructor may raise anything, and exit
        raise AgentError(
            f"`AgentRunner` in {agent_path} cannot be built: {error!r}. No episode could start. It takes no arguments."
        ) from error


def _names_library(agent_path: str) -> bool:
    return agent_path.partition(":")[0] in LIBRARIES


def _is_runner_class(exported: object) -> TypeGuard[Callable[[], Runner]]:
    """Whether it derives from a runner; what its constructor takes is known only by calling it."""
    return isinstance(exported, type) and issubclass(exported, StepEnvRunner | ChatAgentRunner)
