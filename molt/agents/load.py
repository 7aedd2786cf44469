"""From `--train.agent_path` to a runner."""

import importlib
from pathlib import Path

from molt.agents.chat_runner import ChatAgentRunner
from molt.agents.step_runner import StepEnvRunner
from molt.errors import AgentError, did_you_mean
from molt.user_module import load_module

LIBRARIES = ("gymnasium", "reasoning_gym", "verifiers")
"""`LIBRARY:NAME` as an agent path is an environment of that library (`adapters.py`)."""

Runner = StepEnvRunner | ChatAgentRunner


def resolved(agent_path: str) -> str:
    """The agent path for a process that runs in another directory."""
    return agent_path if agent_path.partition(":")[0] in LIBRARIES else str(Path(agent_path).resolve())


def load_runner(agent_path: str) -> Runner:
    """Import FILE.py and build its `AgentRunner`, or take an `Env` of a library.

    Raises `AgentError` with what is wrong and the fix.
    """
    if agent_path.partition(":")[0] in LIBRARIES:  # by name, for most runs have no use for the adapters
        return StepEnvRunner(importlib.import_module(".adapters", __package__).adapter(agent_path))
    module = load_module(agent_path, "train.agent_path", AgentError)
    runner_class = getattr(module, "AgentRunner", None)
    if runner_class is None:
        near = did_you_mean("AgentRunner", vars(module))
        raise AgentError(
            f"`train.agent_path` (={agent_path}) exports no `AgentRunner`: molt does not know what to run.{near} Add "
            "`class AgentRunner(StepEnvRunner)` whose __init__ calls super().__init__(YourEnv), or one of "
            "ChatAgentRunner and your ChatAgent."
        )
    if not (isinstance(runner_class, type) and issubclass(runner_class, Runner)):
        raise AgentError(
            f"`AgentRunner` in {agent_path} is {runner_class!r}: molt cannot drive it. Derive it from "
            "molt.agents.StepEnvRunner or molt.agents.ChatAgentRunner."
        )
    try:
        return runner_class()
    except Exception as error:  # the user's constructor may raise anything
        raise AgentError(
            f"`AgentRunner` in {agent_path} cannot be built: {error!r}. No episode could start. It takes no arguments."
        ) from error
