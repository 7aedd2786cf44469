"""What a user imports to write an agent, a scorer, or a rollout scheme."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from molt.agents.chat_runner import ChatAgent, ChatAgentRunner, ChatContext
    from molt.agents.env import Env, Result
    from molt.agents.scheme import FinishedRollout, RunRollout, SchemeTask
    from molt.agents.step_runner import StepEnvRunner
    from molt.agents.trajectory import Trajectory
    from molt.types import PolicyFailure, ReplaceGroup

__all__ = [
    "ChatAgent",
    "ChatAgentRunner",
    "ChatContext",
    "Env",
    "FinishedRollout",
    "PolicyFailure",
    "ReplaceGroup",
    "Result",
    "RunRollout",
    "SchemeTask",
    "StepEnvRunner",
    "Trajectory",
]

_HOMES = {
    "ChatAgent": "molt.agents.chat_runner",
    "ChatAgentRunner": "molt.agents.chat_runner",
    "ChatContext": "molt.agents.chat_runner",
    "Env": "molt.agents.env",
    "FinishedRollout": "molt.agents.scheme",
    "PolicyFailure": "molt.types",
    "ReplaceGroup": "molt.types",
    "Result": "molt.agents.env",
    "RunRollout": "molt.agents.scheme",
    "SchemeTask": "molt.agents.scheme",
    "StepEnvRunner": "molt.agents.step_runner",
    "Trajectory": "molt.agents.trajectory",
}


def __getattr__(name: str) -> object:
    """Imported at the first use: the process of a scorer needs `Result` alone, and so it starts at once."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
