"""From `--train.agent_path` to a runner."""

from molt.agents.step_runner import StepEnvRunner
from molt.errors import AgentError, did_you_mean
from molt.plugin import load_module


def load_runner(agent_path: str) -> StepEnvRunner:
    """Import FILE.py and build its `AgentRunner`. Raises `AgentError` with what is wrong and the fix."""
    module = load_module(agent_path, "train.agent_path", AgentError)
    runner_class = getattr(module, "AgentRunner", None)
    if runner_class is None:
        near = did_you_mean("AgentRunner", vars(module))
        raise AgentError(
            f"`train.agent_path` (={agent_path}) exports no `AgentRunner`: molt does not know what to run.{near} Add "
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
