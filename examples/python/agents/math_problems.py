r"""Math word problems: the reward is whether the final number is right.

Rows have a question and its answer; GSM8K's `... #### 72` is read as it is.

    {"question": "Ann has 3 apples and buys 4 more. How many?", "answer": "7"}

    molt rl --train.agent_path examples/python/agents/math_problems.py \
        --actor.model_name_or_path MODEL_DIR \
        --data.prompt_dataset train.jsonl --data.input_key question --data.label_key answer \
        --data.apply_chat_template --data.max_len 1024 \
        --eval.dataset test.jsonl --eval.steps 20 --eval.n_samples_per_prompt 1 \
        --algo.advantage.estimator grpo --rollout.batch_size 32 --rollout.n_samples_per_prompt 8

The final answer is the last `\boxed{...}`, else what follows `####`, else the last number of the text.
`score` counts right answers alone, so evaluation never sees the bonus for the box.
"""

import re
from fractions import Fraction

from molt.agents import Env, Result, StepEnvRunner

INSTRUCTION = "\nReason step by step and put the final answer in \\boxed{}."
BOX_BONUS = 0.1
"""Far below 1, so that a box around a wrong answer never pays."""

NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+|(?<=\d))(?:\s*/\s*\d+)?")
BRACE = re.compile(r"\\boxed\{|[{}]")
FRACTION = re.compile(r"\\[dt]?frac\{([-+]?\d+)\}\{(\d+)\}")


class MathWordProblem(Env):
    """One turn: right or wrong, with a small bonus for an answer in a box."""

    async def reset(self, state):
        prompt = state["prompt"]
        if isinstance(prompt, str):
            state["prompt"] = prompt + INSTRUCTION
        else:
            last = prompt[-1]
            state["prompt"] = [*prompt[:-1], last | {"content": last["content"] + INSTRUCTION}]
        return state

    async def step(self, state) -> Result:
        box = last_box(state["action"])
        # The last number of a text that was cut is one of the way, not the answer.
        answer = final_answer(state["action"]) if box or state["finish_reason"] == "stop" else None
        correct = answer is not None and equal(answer, final_answer(str(state["label"])))
        return Result(
            reward=correct + BOX_BONUS * (box is not None),
            score=float(correct),
            info={"boxed": box is not None, "answered": answer is not None},
        )


class AgentRunner(StepEnvRunner):
    def __init__(self):
        super().__init__(MathWordProblem)


def last_box(text: str) -> str | None:
    r"""What is inside the last `\boxed{...}` that is closed; braces may be nested."""
    opened, last, found = [], -1, None
    for brace in BRACE.finditer(text):
        if brace[0] != "}":
            opened.append(brace)
        elif opened and (start := opened.pop())[0] != "{" and start.start() > last:
            last, found = start.start(), text[start.end() : brace.start()]
    return found


def final_answer(text: str) -> str | None:
    """The box, what follows `####`, or the last number; None when there is none of them."""
    if (box := last_box(text)) is not None:
        return box
    if "####" in text:
        return text.rpartition("####")[2].strip()
    numbers = NUMBER.findall(text)
    return numbers[-1] if numbers else None


def number(text: str) -> Fraction | None:
    r"""The one number in a text: `$1,000.50`, `3/4`, `\frac{3}{4}`, `18 dollars`, `x = -2`."""
    found = NUMBER.findall(FRACTION.sub(r"\1/\2", text.replace("\\,", "").replace("\\!", "").replace("−", "-")))
    if len(found) != 1:
        return None
    try:
        return Fraction(re.sub(r"[,\s]", "", found[0]))
    except (ValueError, ZeroDivisionError):  # thousands of digits; x/0
        return None


def equal(answer: str, label: str | None) -> bool:
    """Integers exactly, other numbers within 0.1 %, anything else as text without white space and case."""
    if label is None:
        return False
    a, b = number(answer), number(label)
    if a is None or b is None:
        plain = (re.sub(r"[\s$]|\.$", "", text).casefold() for text in (answer, label))
        return len(set(plain)) == 1
    return a == b if b.denominator == 1 else abs(a - b) <= abs(b) / 1000
