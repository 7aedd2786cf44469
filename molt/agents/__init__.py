"""What a user imports to write an agent."""

from molt.agents.chat_runner import ChatAgent, ChatAgentRunner, ChatContext
from molt.agents.env import Env, Result
from molt.agents.scheme import FinishedRollout, RunRollout, SchemeTask
from molt.agents.step_runner import StepEnvRunner
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
]
