"""Tools of all protocols as the functions that a model is offered, and what a client wants of their use.

| a client's tool | the model is offered |
|---|---|
| function | the same |
| custom (free text) | a function with one text, `input`; its calls are answered as custom ones |
| namespace | its functions, as `NAMESPACE__NAME`; the namespace is restored in the calls |
| Anthropic's bash, text editor, memory | a function with the arguments that Anthropic documents |
| any other | nothing: only the protocol's own servers could run it. `OfferedTools.ignored` names it |
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from molt.chat.protocol import TEXT_ARGUMENT, flat_name
from molt.chat.wires.fields import items, refuse
from molt.types import Json

SHOWN_SCHEMA = 200
"""Characters of a bad schema that a refusal shows."""


def _text(description: str) -> Json:
    return {"type": "string", "description": description}


def _integer(description: str) -> Json:
    return {"type": "integer", "description": description}


def _command_schema(commands: list[str], **arguments: Json) -> Json:
    """The parameters of a tool with several commands."""
    command = {"type": "string", "enum": commands}
    return {"type": "object", "properties": {"command": command, **arguments}, "required": ["command"]}


BASH = {
    "type": "object",
    "properties": {
        "command": _text("The bash command to run."),
        "restart": {"type": "boolean", "description": "Restart the shell instead."},
    },
}
EDITING = {
    "view_range": {"type": "array", "items": {"type": "integer"}, "description": "First and last line to view."},
    "file_text": _text("For create: the content of the file."),
    "old_str": _text("For str_replace: the text to replace."),
    "new_str": _text("For str_replace: the text in its place."),
    "insert_line": _integer("For insert: the line after which the text goes, 0 for the beginning."),
    "insert_text": _text("For insert: the text."),
}
"""The arguments that the commands of the text editor and of the memory share."""
TEXT_EDITOR = _command_schema(
    ["view", "create", "str_replace", "insert"],
    path=_text("Absolute path of the file or directory."),
    **EDITING,
)
MEMORY = _command_schema(
    ["view", "create", "str_replace", "insert", "delete", "rename"],
    path=_text("Path under /memories."),
    **EDITING,
    old_path=_text("For rename: the path now."),
    new_path=_text("For rename: the path then."),
)
CLIENT_TOOLS = {
    "bash_": ("Run a command in a bash shell that lives as long as the conversation.", BASH),
    "text_editor_": ("View, create and edit files.", TEXT_EDITOR),
    "memory_": ("Keep notes in files under /memories.", MEMORY),
}
"""Tools that Anthropic's clients run themselves: what their types begin with, a description, the arguments.

Source: the tool use pages of https://platform.claude.com/docs
"""


@dataclass
class OfferedTools:
    """The tools of a request."""

    functions: list[Json] = field(default_factory=list)
    """As OpenAI function schemas."""
    text_tools: list[str] = field(default_factory=list)
    """Names of those that take free text."""
    namespaces: dict[str, str] = field(default_factory=dict)
    """The namespace of a function, by its flat name."""
    ignored: list[str] = field(default_factory=list)
    """Types of tools that are not offered."""


@dataclass(frozen=True)
class ToolChoice:
    """What a client wants of the use of its tools."""

    allowed: list[str] | None = None
    """The flat names of those that may be called; None: all."""
    required: list[str] | None = None
    """The flat names of those of which one must be called; None: none must. Empty: one that is not offered."""


# Tools ----------------------------------------------------------------------------------------------------------------


def read_tools(tools: list[Json]) -> OfferedTools:
    """The tools of a body, which may be of any protocol. Raises ChatError."""
    offered = OfferedTools()
    for tool in tools:
        if tool.get("type") != "namespace":
            _add(offered, tool, namespace=None)
            continue
        namespace = tool.get("name")
        if not isinstance(namespace, str) or not namespace:
            refuse(f"a namespace of tools has the name {namespace!r}: name it with a string.")
        for inner in items(tool, "tools"):
            _add(offered, inner, namespace=namespace)
    return offered


def _add(offered: OfferedTools, tool: Json, *, namespace: str | None) -> None:
    function = _function(tool)
    if function is None:
        offered.ignored.append(str(tool.get("type")))
        return
    name = flat_name(namespace, function["name"])
    function["name"] = name
    offered.functions.append({"type": "function", "function": function})
    if _is_text_tool(tool):
        offered.text_tools.append(name)
    if namespace is not None:
        offered.namespaces[name] = namespace


def _function(tool: Json) -> Json | None:
    """Name, description and parameters of a tool; None if only the protocol's own servers can run it."""
    kind = tool.get("type")
    if _is_text_tool(tool):
        return _text_function(tool)
    if kind in (None, "function", "custom"):
        return _declared_function(tool)
    for begin, (description, parameters) in CLIENT_TOOLS.items():
        if isinstance(kind, str) and kind.startswith(begin):
            return {"name": _name_of(tool), "description": description, "parameters": parameters}
    return None


def _is_text_tool(tool: Json) -> bool:
    """Whether it takes free text. Anthropic calls a tool with a schema `custom` too."""
    return tool.get("type") == "custom" and "input_schema" not in tool


def _declared_function(tool: Json) -> Json:
    spec = tool.get("function", tool)
    name = _name_of(spec)
    schema = spec.get("parameters", spec.get("input_schema")) or {"type": "object"}
    if not _is_object_schema(schema):
        shown = json.dumps(schema)[:SHOWN_SCHEMA]
        refuse(f"the parameters of tool {name!r} are not the JSON schema of an object: {shown}")

    function: Json = {"name": name}
    if spec.get("description"):
        function["description"] = spec["description"]
    function["parameters"] = schema
    return function


def _text_function(tool: Json) -> Json:
    spec = tool.get("custom", tool)
    function: Json = {"name": _name_of(spec)}
    if spec.get("description"):
        function["description"] = spec["description"]
    function["parameters"] = {
        "type": "object",
        "properties": {TEXT_ARGUMENT: _text(_format_words(spec.get("format")))},
        "required": [TEXT_ARGUMENT],
    }
    return function


def _format_words(form: Any) -> str:
    """What the text of a custom tool has to look like."""
    if not isinstance(form, dict) or form.get("type") != "grammar":
        return "The text."
    grammar = form.get("grammar", form)  # chat completions nest it
    return f"The text, which must match this {grammar.get('syntax')} grammar:\n{grammar.get('definition')}"


def _name_of(spec: Json) -> str:
    name = spec.get("name")
    if not isinstance(name, str) or not name:
        refuse(f"a tool has the name {name!r}: the model could not call it. Name it with a string.")
    return name


def _is_object_schema(schema: Any) -> bool:
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        return False
    return isinstance(schema.get("properties", {}), dict)


# Choice ---------------------------------------------------------------------------------------------------------------


def read_choice(body: Json, offered: OfferedTools) -> ToolChoice:
    """What `tool_choice` of any protocol, or `function_call` of the oldest one, wants. Raises ChatError."""
    choice = body.get("tool_choice")
    if choice is None:
        choice = body.get("function_call")
    kind = choice
    if isinstance(choice, dict):
        kind = choice.get("type", "function")

    if kind in (None, "auto"):
        return ToolChoice()
    if kind == "none":
        return ToolChoice(allowed=[])
    if kind in ("required", "any"):
        return ToolChoice(required=_all_names(offered))
    if not isinstance(choice, dict) or not isinstance(kind, str):
        refuse(f"`tool_choice` is {choice!r}: it must be auto, none, required, or an object that names tools.")
    if kind == "allowed_tools":
        return _read_allowed(choice, offered)
    return ToolChoice(required=_chosen_names([choice], offered))


def _read_allowed(choice: Json, offered: OfferedTools) -> ToolChoice:
    nested = choice.get("allowed_tools")
    spec = nested if isinstance(nested, dict) else choice
    allowed = _chosen_names(items(spec, "tools"), offered)
    if spec.get("mode") == "required":
        return ToolChoice(allowed=allowed, required=allowed)
    return ToolChoice(allowed=allowed)


def _chosen_names(choices: list[Json], offered: OfferedTools) -> list[str]:
    """The flat names of offered tools that choices name: by their name, their namespace, or both."""
    chosen: set[str] = set()
    for choice in choices:
        chosen.update(_names_of_choice(choice, offered))
    return [name for name in _all_names(offered) if name in chosen]


def _names_of_choice(choice: Json, offered: OfferedTools) -> Iterator[str]:
    spec = choice
    for key in ("function", "custom"):
        if isinstance(choice.get(key), dict):
            spec = choice[key]
    name = spec.get("name")
    if choice.get("type") == "namespace":
        yield from (flat for flat, namespace in offered.namespaces.items() if namespace == name)
    elif isinstance(name, str):
        yield flat_name(choice.get("namespace"), name)


def _all_names(offered: OfferedTools) -> list[str]:
    return [tool["function"]["name"] for tool in offered.functions]
