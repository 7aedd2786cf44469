"""Draft, then revise: half of a group's rollouts answer the prompt, and each of the others revises one of the drafts.

    molt rl ... --rollout.scheme examples/python/schemes/draft_revise.py --rollout.n_samples_per_prompt 8

All of them are one group: an estimator with a group baseline compares revisions with drafts.
"""

import asyncio

from molt.agents import RunRollout, SchemeTask

REQUEST = "Look for mistakes in your answer, and answer again."


async def run_group(task: SchemeTask, rollout: RunRollout) -> None:
    drafts = (task.n + 1) // 2

    async def draft_and_revise(index: int) -> None:
        draft = await rollout(index)
        if drafts + index < task.n:
            prompt = with_draft(task.prompt, draft.answer)
            await rollout(drafts + index, prompt=prompt, given={"draft_reward": draft.reward})

    await asyncio.gather(*(draft_and_revise(index) for index in range(drafts)))


def with_draft(prompt, draft: str):
    """The prompt, the draft as an answer to it, and the request to revise it."""
    if isinstance(prompt, str):
        return f"{prompt}{draft}\n{REQUEST}\n"
    return [*prompt, {"role": "assistant", "content": draft}, {"role": "user", "content": REQUEST}]
