"""The agent: the answer to a sentence must be one JSON object with the person's name and age, and nothing else.

`score` is strict and is what evaluation reports; `reward` pays for parts of the way, so that a group in which no
answer is right can still tell better from worse. A right answer earns 1 in both.
"""

import json
from typing import Any

from molt.agents import Env, Result, StepEnvRunner

PARTS = {"object": 0.1, "keys": 0.1, "name": 0.2, "age": 0.2, "strict": 0.4}
"""What each part of the way earns."""


class JsonExtraction(Env):
    """One turn; `state["label"]` is `{"name": str, "age": int}`."""

    async def step(self, state) -> Result:
        parts = judge(state["action"], state["label"], ended=state["finish_reason"] == "stop")
        reward = sum(PARTS[part] for part, present in parts.items() if present)
        return Result(reward=reward, score=float(parts["strict"]), info=parts)


class AgentRunner(StepEnvRunner):
    def __init__(self):
        super().__init__(JsonExtraction)


def judge(answer: str, label: dict[str, Any], ended: bool) -> dict[str, bool]:
    """Which parts an answer has. `ended`: the model closed its answer itself, it was not cut.

    `strict`: the whole answer, apart from white space at both ends, is the object, with exactly the two keys, once
    each, the name letter for letter and the age an integer (no string, no 34.0). The other parts are looked for in
    the first `{` of the answer that opens a JSON object, whatever surrounds it.
    """
    pairs, alone = first_object(answer.strip())
    found = dict(pairs or ())
    parts = {
        "object": pairs is not None,
        "keys": sorted(key for key, _ in pairs or ()) == ["age", "name"],
        "name": same(found.get("name"), label["name"]),
        "age": same(found.get("age"), label["age"]),
    }
    return parts | {"strict": ended and alone and all(parts.values())}


def same(value: Any, expected: Any) -> bool:
    return type(value) is type(expected) and value == expected


def first_object(text: str) -> tuple[list[tuple[str, Any]] | None, bool]:
    """The pairs of the first JSON object in a text, doubled keys included, and whether it is the whole text."""
    decoder = json.JSONDecoder(object_pairs_hook=list)
    start = text.find("{")
    while start >= 0:
        try:
            pairs, end = decoder.raw_decode(text, start)
            return pairs, start == 0 and end == len(text)
        except (ValueError, RecursionError):  # not JSON; digits or brackets by the thousand
            start = text.find("{", start + 1)
    return None, False
