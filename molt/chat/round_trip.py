"""The check at start: does a chat come back from the model's format as it was sent?"""

from molt.chat import probes
from molt.chat.chat_renderer import ChatRenderer
from molt.chat.protocol import Message, Tools
from molt.chat.render import for_template
from molt.chat.shown import Part, hidden_parts
from molt.chat.tool_arguments import decode_arguments


def check_round_trip(renderer: ChatRenderer, *, tools: bool = True) -> list[str]:
    """What of a chat would not come back as it was sent, in words; empty if all does.

    `tools`: check calls and results too.
    """
    problems = _check_shown(renderer, tools=tools)
    messages = [probes.USER]
    for text in ("one", "two", "three"):
        answer: Message = {"role": "assistant", "content": text}
        problems += _check_bridge(renderer, messages, answer, [probes.USER], None)
        messages += [answer, probes.USER]

    if tools:
        problems += _check_calls(renderer)
        problems += _check_bridge(renderer, [probes.USER], probes.TWO_CALLS, probes.TWO_RESULTS, probes.TOOLS)
    return problems


def _check_shown(renderer: ChatRenderer, *, tools: bool) -> list[str]:
    """Whether the template shows a system message, and with `tools` results and tools; for calls see `_check_calls`."""
    if not renderer.tokenizer.chat_template:  # a family without it
        return []
    messages = [probes.SYSTEM, probes.USER]
    offered = None
    if tools:
        messages += [probes.TWO_CALLS, *probes.TWO_RESULTS]
        offered = probes.TOOLS
    fitting = for_template(renderer.tokenizer, messages, offered)
    hidden = [part for part in hidden_parts(renderer.tokenizer, fitting, offered) if part.part is not Part.CALLS]
    if not hidden:
        return []
    parts = ", ".join(dict.fromkeys(str(part) for part in hidden))
    return [f"the chat template does not show {parts}: what a client sends there is lost. Use another chat template."]


def _check_calls(renderer: ChatRenderer) -> list[str]:
    """Whether calls are read as the template writes them."""
    prompt = renderer.render([probes.USER], probes.TOOLS)
    rendered = renderer.render([probes.USER, probes.TWO_CALLS], probes.TOOLS, prompt=False)
    start = _common_prefix(prompt, rendered)
    parsed = renderer.parse(rendered[start:], probes.TOOLS, rendered[:start])

    read = [(call.name, decode_arguments(call.arguments)) for call in parsed.tool_calls]
    functions = [call["function"] for call in probes.TWO_CALLS["tool_calls"]]
    if read == [(function["name"], function["arguments"]) for function in functions]:
        return []
    shown = renderer.tokenizer.decode(rendered[start:])
    return [
        f"tool calls, as the chat template renders them (={shown!r}), are read back as {read}, "
        "so the model's calls would be missed. Use a family that `renderers` knows, or <tool_call> with JSON."
    ]


def _check_bridge(
    renderer: ChatRenderer, messages: list[Message], answer: Message, new: list[Message], tools: Tools
) -> list[str]:
    """Whether `new` can be appended to the turn `answer`, and gives what rendering the whole conversation gives.

    The turn is taken from the whole conversation, if that keeps the prompt.
    """
    prompt = renderer.render(messages, tools)
    rendered = renderer.render([*messages, answer, *new], tools)
    start = len(prompt)
    keeps_prompt = rendered[:start] == prompt
    end = None
    if keeps_prompt:
        end = _end_of_turn(renderer, rendered, start)

    grown = rendered[:end]
    if end is None:
        grown = prompt + renderer.tokenizer.encode(answer["content"])
    longer = renderer.bridge(grown, new, tools, sampled=len(grown) - start)

    show = renderer.tokenizer.decode
    subject = f"a {new[0]['role']} message after {show(grown[start:])!r}"
    if longer is None and (renderer.thinking_retention == "all" or not keeps_prompt):
        return [
            f"{subject} changes what was there (thinking_retention={renderer.thinking_retention}), so each starts "
            "a branch, a sample of its own. Use a chat template that keeps history, or thinking_retention all."
        ]
    if longer and end is not None and longer != rendered:
        return [
            f"{subject} is continued as {show(longer[start:])!r}, but the whole conversation is rendered as "
            f"{show(rendered[start:])!r}, so the model would see another format than it was trained on. "
            "Use another chat template."
        ]
    return []


def _end_of_turn(renderer: ChatRenderer, ids: list[int], start: int) -> int | None:
    """The index after the first end token from `start` on; None without one."""
    for index in range(start, len(ids)):
        if ids[index] in renderer.eos_ids:
            return index + 1
    return None


def _common_prefix(first: list[int], second: list[int]) -> int:
    """How many ids both begin with."""
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return min(len(first), len(second))
