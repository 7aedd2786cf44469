"""Structured outputs: what text a client wants, in the words of vLLM, and in words for the model."""

import json
from typing import Any

from molt.chat.protocol import Message
from molt.chat.wires.fields import refuse
from molt.types import Json

GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""vLLM's older names of its structured outputs."""
KINDS = ("json", "json_object", "regex", "choice", "grammar")
"""Structures of vLLM's `StructuredOutputsParams`."""
ALONE = "and nothing else"


def read_structure(body: Json, output_format: Any) -> Json | None:
    """The structure that an answer is to have, as arguments of vLLM's `StructuredOutputsParams`; None: any.

    Empty for a format that is not known. Raises ChatError.
    """
    if output_format is not None and not isinstance(output_format, dict):
        refuse(f"the output format is {output_format!r}: it must be an object with a `type`.")
    if output_format and output_format.get("type") not in (None, "text"):
        return _structure_of_format(output_format)

    extra = body.get("structured_outputs")
    if isinstance(extra, dict):
        return {kind: extra[kind] for kind in KINDS if extra.get(kind) is not None}
    for name, kind in GUIDED.items():
        if body.get(name) is not None:
            return {kind: body[name]}
    return None


def _structure_of_format(output_format: Json) -> Json:
    kind = output_format["type"]
    if kind == "json_object":
        return {"json_object": True}
    if kind != "json_schema":
        return {}
    spec = output_format.get("json_schema", output_format)  # chat completions nest it
    schema = spec.get("schema") if isinstance(spec, dict) else None
    if schema is None:
        return {"json_object": True}
    if not isinstance(schema, dict):
        refuse(f"the schema of the output format is {schema!r}: it must be a JSON schema, an object.")
    return {"json": schema}


def with_instruction(messages: list[Message], structure: Json | None) -> list[Message]:
    """The conversation with the structure described at the end of its first system message, or in one of its own.

    There, since a client that wants a structure wants it in every turn: the prompt then grows by appending.
    """
    words = _words(structure)
    if not words:
        return messages
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": words}, *messages]
    system = messages[0]
    said = system["content"]
    if isinstance(said, list):
        said = [*said, {"type": "text", "text": words}]
    elif said:
        said = f"{said}\n\n{words}"
    else:
        said = words
    return [system | {"content": said}, *messages[1:]]


def _words(structure: Json | None) -> str:
    if not structure:
        return ""
    kind, value = next(iter(structure.items()))
    if kind == "json_object":
        return f"Answer with one JSON object, {ALONE}."
    if kind == "json":
        schema = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return f"Answer with one JSON value that fits this JSON schema, {ALONE}:\n{schema}"
    if kind == "choice":
        return f"Answer with one of these texts, {ALONE}:\n{json.dumps(value, ensure_ascii=False)}"
    if kind == "regex":
        return f"Answer with a text that matches this regular expression, {ALONE}:\n{value}"
    return f"Answer with a text that this grammar describes, {ALONE}:\n{value}"
