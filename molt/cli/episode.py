"""One episode of an agent against a scripted model, for `molt agent check` and `molt check`.

It is played in a thread, as a runner plays it, so that an agent that blocks its event loop is found and left behind.
"""

import asyncio
import faulthandler
import itertools
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from molt.agents.loop_lag import BlockReporter, LoopLag
from molt.agents.step_runner import CLOSE_S
from molt.agents.user_errors import contain_tasks
from molt.errors import AgentError, MoltError, described
from molt.types import InfraFailure, ReplaceGroup
from molt.user_module import raised_at, running_at

if TYPE_CHECKING:
    from molt.agents.episode import Episode, EpisodeContext
    from molt.agents.load import Runner
    from molt.chat.render import Renderer
    from molt.types import Media, Turn

DEFAULT_ANSWER = "hello"
MAX_TURNS = 64
LOOK_S = 0.1
"""Between two looks at the thread of the episode."""
END_S = 5.0
"""What an event loop may take to end, beside its deadlines."""
ADVICE = (
    "Await an async client, or move the work to a thread: `await asyncio.to_thread(...)` (docs/agents.md, 'What must "
    "not happen in an agent')."
)


@dataclass(frozen=True)
class Limit:
    """How long an episode may take, and how its user raises that."""

    seconds: float
    name: str
    """`--timeout_s`."""
    fix: str
    """`raise --timeout_s`."""


class ScriptedModel:
    """A model that says given answers in order, and the last one for ever."""

    def __init__(self, renderer: "Renderer", answers: list[str], end_ids: list[int]):
        """end_ids: what closes an answer."""
        self._renderer = renderer
        self._answers = itertools.chain(answers, itertools.repeat(answers[-1]))
        self._end_ids = end_ids

    async def answer(
        self, prompt_ids: list[int], max_tokens: int, *_: object, media: "tuple[Media, ...]" = ()
    ) -> "Turn":
        """The next answer, as sampled by weights of version 0."""
        import numpy as np

        from molt.columns import token_columns
        from molt.types import Turn

        spelled = self._renderer.tokenizer.encode(next(self._answers), add_special_tokens=False)
        complete = [*spelled, *self._end_ids]
        token_ids = complete[:max_tokens]
        return Turn(
            prompt_ids=np.asarray(prompt_ids, np.int32),
            sampled=token_columns(
                token_ids=token_ids,
                versions=np.zeros(len(token_ids)),
                logprobs=np.full(len(token_ids), -1.0),
            ),
            finish_reason="stop" if len(complete) <= max_tokens else "length",
        )


def play(runner: "Runner", context: "EpisodeContext", agent: str, limit: Limit) -> "Episode":
    """The episode. agent: the file of the runner. Raises a MoltError for what would fail a rollout in a run.

    While the agent blocks its event loop, the line that does is printed. An agent that still does at the limit is left
    behind in its thread, which ends with the process.
    """
    thread = _EpisodeThread(runner, context, agent, limit)
    started = time.monotonic()
    reporter = BlockReporter(thread.lag)
    last_resort_s = limit.seconds + CLOSE_S + 2 * END_S
    stderr = sys.__stderr__
    if stderr is not None:  # code in C that keeps Python's lock stops this thread too
        faulthandler.dump_traceback_later(last_resort_s, exit=True, file=stderr)
    try:
        thread.start()
        while thread.is_alive():
            thread.join(LOOK_S)
            _look(thread, reporter, agent, limit, time.monotonic() - started)
    finally:
        if stderr is not None:
            faulthandler.cancel_dump_traceback_later()
    return thread.result()


def _look(thread: "_EpisodeThread", reporter: BlockReporter, agent: str, limit: Limit, elapsed_s: float) -> None:
    """Print what blocks the event loop. Raises `AgentError` if it is blocked at the limit, or does not end after it."""
    block = reporter.look()
    if block is not None:
        print(
            f"warning: {agent} has blocked its event loop at {block.place} for {block.seconds:.0f} s. In a run, all "
            f"rollouts of its runner would wait. {ADVICE}",
            file=sys.stderr,
            flush=True,
        )
    if elapsed_s <= limit.seconds or not thread.is_alive():
        return
    block = thread.lag.blocked(END_S / 5)
    if block is not None:
        raise AgentError(
            f"{agent} blocked its event loop at {block.place}: the episode did not end within {limit.name} "
            f"(={limit.seconds:g}). In a run, all rollouts of its runner would wait, and the runner would be replaced. "
            f"{ADVICE}"
        )
    if elapsed_s > limit.seconds + CLOSE_S + END_S:
        raise AgentError(
            f"{agent}: the episode did not end within {limit.name} (={limit.seconds:g}), nor {CLOSE_S:g} s later"
            f"{thread.place()}. The rollout would fail in a run. Look for a thread that never returns, or a "
            "cancellation that is caught."
        )


class _EpisodeThread(threading.Thread):
    """Plays an episode in an event loop of its own."""

    def __init__(self, runner: "Runner", context: "EpisodeContext", agent: str, limit: Limit):
        super().__init__(name="episode", daemon=True)
        self.lag = LoopLag()
        self._runner = runner
        self._context = context
        self._agent = agent
        self._limit = limit
        self._episode: Episode | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._episode = asyncio.run(self._play_watched())
        except BaseException as error:  # raised again in the thread that waits
            self._error = error

    def result(self) -> "Episode":
        """Of a thread that has ended. Raises what the episode raised."""
        if self._error is not None:
            raise self._error
        assert self._episode is not None, "a thread that has ended has an episode or an error"
        return self._episode

    def place(self) -> str:
        """`, at FILE:LINE`: what the thread runs; an empty string where its event loop waits."""
        frame = sys._current_frames().get(self.ident or 0)
        place = None
        if frame is not None:
            place = running_at(frame)
        if place is None:
            return ""
        return f", at {place}"

    async def _play_watched(self) -> "Episode":
        contain_tasks(asyncio.get_running_loop())
        measuring = asyncio.create_task(self.lag.run())
        await asyncio.sleep(0)  # the first mark
        try:
            return await _play(self._runner, self._context, self._agent, self._limit)
        finally:
            measuring.cancel()


async def _play(runner: "Runner", context: "EpisodeContext", agent: str, limit: Limit) -> "Episode":
    """The episode. Raises a MoltError for what would fail a rollout in a run."""
    deadline = asyncio.timeout(limit.seconds)
    try:
        async with deadline:
            return await runner.run(context)
    except MoltError:
        raise
    except InfraFailure as failure:
        raise AgentError(
            f"{agent}: {failure.reason}: {failure.detail}. The rollout would fail in a run. Fix the agent."
        ) from failure
    except ReplaceGroup:
        raise
    except Exception as error:  # the user's agent may raise anything
        if isinstance(error, TimeoutError) and deadline.expired():
            raise AgentError(
                f"{agent}: the episode did not end within {limit.name} (={limit.seconds:g}). The rollout would "
                f"fail in a run. Look for a loop without an end, or {limit.fix}."
            ) from error
        raise AgentError(
            f"{agent} raised {described(error)} at {raised_at(error)}. The rollout would fail in a run, and be "
            "retried. Fix that line; `PolicyFailure` is for what the model did wrong."
        ) from error
