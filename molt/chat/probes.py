"""Short conversations that are rendered to find out how a model's chat template behaves."""

from dataclasses import dataclass

from molt.chat.protocol import Message, Tools
from molt.types import Json


def object_call(call_id: str, name: str, arguments: Json) -> Json:
    """A tool call as templates take it, with its arguments as an object."""
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


USER: Message = {"role": "user", "content": "hi"}
SYSTEM: Message = {"role": "system", "content": "Be brief."}
USER_WITH_IMAGE: Message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "hi"}]}
REASONED_ANSWER: Message = {"role": "assistant", "content": "one", "reasoning_content": "so"}

ADD_PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "b": {"type": "integer"}},
    "required": ["a"],
}
ADD_TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": ADD_PARAMETERS},
}
TOOLS: Tools = [ADD_TOOL]
TWO_CALLS: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        object_call("functions.add:0", "add", {"a": "0", "b": 1}),
        object_call("functions.add:1", "add", {"a": "1", "b": 1}),
    ],
}
TWO_RESULTS: list[Message] = [
    {"role": "tool", "content": "got 0", "tool_call_id": "functions.add:0", "name": "add"},
    {"role": "tool", "content": "got 1", "tool_call_id": "functions.add:1", "name": "add"},
]


@dataclass(frozen=True)
class Probe:
    """A conversation, and the tools it is rendered with."""

    messages: list[Message]
    tools: Tools = None


WITHOUT_HISTORY = Probe([SYSTEM, USER])
WITH_CALLS = Probe([USER, TWO_CALLS | {"reasoning_content": "so"}, *TWO_RESULTS], TOOLS)
WITH_HISTORY = Probe([USER, REASONED_ANSWER, USER])
WITH_IMAGE = Probe([USER_WITH_IMAGE])
