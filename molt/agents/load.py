"""From `--train.agent_path` to a runner."""

import importlib.util
import sys
from pathlib import Path

from molt.agents.step_runner import StepEnvRunner
from molt.errors import AgentError, did_you_mean


def load_runner(agent_path: str) -> StepEnvRunner:
    """Import FILE.py and build its `AgentRunner`. Raises `AgentError` with what is wrong and the fix."""
    path = Path(agent_path)
    if not path.is_file():
        near = did_you_mean(path.name, [p.name for p in path.parent.glob("*.py")]) if path.parent.is_dir() else ""
        raise AgentError(f"train.agent_path (={agent_path}) is not a file: there is no agent to run.{near}")
    spec = importlib.util.spec_from_file_location(f"molt_agent_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise AgentError(f"train.agent_path (={agent_path}) is not a Python file: it cannot be imported. Use FILE.py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look a class's module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's file may raise anything
        raise AgentError(
            f"train.agent_path (={agent_path}) cannot be imported: {error!r}. No episode could start. Run "
            f"`python {agent_path}` to see the traceback."
        ) from error
    runner_class = getattr(module, "AgentRunner", None)
    if runner_class is None:
        near = did_you_mean("AgentRunner", vars(module))
        raise AgentError(
            f"train.agent_path (={agent_path}) exports no `AgentRunner`: molt does not know what to run.{near} Add "
            "`class AgentRunner(StepEnvRunner)` whose __init__ calls super().__init__(YourEnv)."
        )
    if not (isinstance(runner_class, type) and issubclass(runner_class, StepEnvRunner)):
        raise AgentError(
            f"`AgentRunner` in {agent_path} is {runner_class!r}: molt cannot drive it. Derive it from "
            "molt.agents.StepEnvRunner."
        )
    try:
        return runner_class()
    except Exception as error:  # the user's constructor may raise anything
        raise AgentError(
            f"`AgentRunner` in {agent_path} cannot be built: {error!r}. No episode could start. It takes no arguments."
        ) from error
