"""Options of a body that nothing here reads: each is ignored by name, never silently."""

import re
from typing import Any

from molt.types import Json

READ = {
    *("model", "messages", "input", "system", "instructions", "stream", "stream_options", "n", "stop"),
    *("stop_sequences", "max_tokens", "max_completion_tokens", "max_output_tokens", "tools", "tool_choice"),
    *("functions", "function_call", "parallel_tool_calls", "response_format", "text", "output_config"),
    *("output_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("logprobs", "top_logprobs", "include", "store", "background", "previous_response_id", "conversation"),
    *("prompt", "temperature", "top_p", "top_k", "min_p", "logit_bias", "frequency_penalty", "presence_penalty"),
    *("repetition_penalty", "seed"),
}
"""Options that a wire or the session reads."""
WITHOUT_EFFECT = {
    *("metadata", "client_metadata", "user", "safety_identifier", "service_tier", "prompt_cache_key"),
    *("prompt_cache_retention", "cache_control", "anthropic_version", "inference_geo", "prediction", "request_id"),
    *("stream_tool_calls", "moderation", "include_reasoning", "drop_params"),
}
"""Options that change nothing in what an answer says: accounting, caching, speed."""
DEFAULTS: Json = {
    "truncation": "disabled",
    "modalities": ["text"],
    "add_generation_prompt": True,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
}
"""Values that change nothing. Of other options, nothing, false, 0 and what is empty."""
MAX_NAMES = 20
"""Of one request: a metric each."""
NAME_LENGTH = 40


def ignored_options(body: Json) -> list[str]:
    """The names of options that are not read and would change the answer."""
    found = []
    for name, value in body.items():
        if name not in READ and name not in WITHOUT_EFFECT and not _changes_nothing(name, value):
            found.append(metric_name(name))
    for name, inner in (("text", "verbosity"), ("output_config", "effort")):
        options = body.get(name)
        if isinstance(options, dict) and options.get(inner):
            found.append(inner)
    if body.get("top_logprobs"):
        found.append("top_logprobs")
    return found[:MAX_NAMES]


def _changes_nothing(name: str, value: Any) -> bool:
    if value is None:
        return True
    if name in DEFAULTS:
        return value == DEFAULTS[name]
    if isinstance(value, dict):  # as {"effort": null}
        return not any(item is not None for item in value.values())
    return not value


def metric_name(text: str) -> str:
    """A client's text as a part of a metric's name."""
    return re.sub(r"\W+", "_", text, flags=re.ASCII).strip("_")[:NAME_LENGTH] or "unnamed"
