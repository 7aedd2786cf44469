"""`ChatAgentRunner`: the user owns the loop, with any client or harness pointed at the URL of a session.

The server (`chat/server.py`) runs in the process of the runner, on loopback. What the clients of an episode sample is
recorded in the session's token tree; the branches of the tree are the samples.
"""

import asyncio
import contextlib
import copy
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from molt.agents.env import Result
from molt.agents.step_runner import Episode, EpisodeContext, outcome_of
from molt.chat.session import Session
from molt.chat.tree import Node
from molt.errors import AgentError
from molt.types import PolicyFailure, Scored, Turn

if TYPE_CHECKING:
    from molt.chat.server import ChatServer

API_KEY, MODEL = "molt", "policy"
KILL_S = 5.0
"""Between asking a harness to end and ending it."""


@dataclass(frozen=True)
class Finished:
    """How an external harness ended."""

    returncode: int
    stdout: str
    stderr: str
    timed_out: bool = False


@dataclass(frozen=True)
class ChatContext:
    """What one episode of a `ChatAgent` gets."""

    prompt: list[dict[str, Any]] | str
    """The row's messages, or its text; tools are in `tools`."""
    label: Any
    data_source: str
    tools: list[dict[str, Any]] | None
    seed: int
    """An integer of this rollout's own."""
    base_url: str
    """Of the session, for Anthropic clients; every call to it is recorded and trained."""
    judge_url: str
    """The same engines for a reward function, as `base_url`: recorded nowhere."""
    session: Session
    api_key: str = API_KEY
    model: str = MODEL

    @property
    def openai_url(self) -> str:
        """For OpenAI clients."""
        return f"{self.base_url}/v1"

    def exclude(self, what: Node | Callable[[Node], bool]) -> None:
        """Leave branches of the token tree out of training."""
        self.session.tree.exclude(what)

    async def harness(
        self, *command: str, cwd: str | os.PathLike | None = None, env: Mapping[str, str] | None = None,
        stdin: str = "", timeout_s: float | None = None,
    ) -> Finished:  # fmt: skip
        """Run an external program with the session in its environment; nothing of it outlives this call.

        `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `ANTHROPIC_BASE_URL`, `ANTHROPIC_API_KEY` are set; `env` is on top.
        """
        found = {"OPENAI_BASE_URL": self.openai_url, "ANTHROPIC_BASE_URL": self.base_url}
        found |= dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY"), self.api_key)
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
        process = await asyncio.create_subprocess_exec(
            *command, cwd=cwd, env={**os.environ, **found, **(env or {})}, start_new_session=True, **pipes
        )
        try:
            async with asyncio.timeout(timeout_s):
                said = await process.communicate(stdin.encode())
        except TimeoutError:
            return Finished(await _end(process), "", "", timed_out=True)
        finally:  # also what it left in the background, and when the rollout is cancelled
            await _end(process)
        return Finished(process.returncode, *(text.decode(errors="replace") for text in said))


async def _end(process: asyncio.subprocess.Process) -> int:
    """End the process and all of its group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_S):
                await process.wait()
                if number == signal.SIGTERM and not _alive(process.pid):
                    break
    return process.returncode


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


class ChatAgent:
    """The contract: one instance serves one episode."""

    async def run(self, ctx: ChatContext) -> Result:
        """Play the episode with any client, and return what it earned. Raise `PolicyFailure` for the model's doing."""
        raise AgentError(f"{type(self).__name__} defines no `async def run(self, ctx)`: no reward can arise. Add it.")


class ChatAgentRunner:
    """The runner of the `ChatAgent` contract. A user's file exports

    class AgentRunner(ChatAgentRunner):
        def __init__(self):
            super().__init__(MyAgent)
    """

    def __init__(self, agent_class: type[ChatAgent]):
        self.agent_class = agent_class
        self._server: asyncio.Task[ChatServer] | None = None

    async def run(self, context: EpisodeContext) -> Episode:
        """One episode. Raises `InfraFailure` when the engines fail; anything the agent raises passes through."""
        if self._server is None:  # one for all episodes; whoever comes first starts it
            from molt.chat.server import ChatServer  # an agent file is also loaded where nothing is served

            self._server = asyncio.create_task(ChatServer().__aenter__())
        server, turns = await asyncio.shield(self._server), []

        async def call_model(prompt_ids: list[int], max_tokens: int) -> Turn:
            turns.append(await context.call_model(prompt_ids, max_tokens))
            return turns[-1]

        limits = {"max_len": context.max_len, "max_new_tokens": context.max_new_tokens}
        session = Session(context.chat, call_model, call_freely=context.call_freely, **limits)
        judge = Session(context.chat, call_model, call_freely=context.call_freely, record=False, **limits)
        urls = [server.open(session), server.open(judge)]
        try:
            return await self._play(context, session, urls, turns)
        finally:
            for url in urls:
                server.close(url)

    async def _play(self, context: EpisodeContext, session: Session, urls: Sequence[str], turns: list[Turn]) -> Episode:
        prompt, agent = context.prompt, self.agent_class()
        given = copy.deepcopy(prompt.text if prompt.messages is None else prompt.messages)
        ctx = ChatContext(
            given, copy.deepcopy(prompt.label), prompt.data_source, prompt.tools, context.seed, *urls, session
        )
        episode = Episode(turns, Scored(0.0, 0.0), truncated=False)
        work, failed = asyncio.create_task(agent.run(ctx)), asyncio.create_task(session.failed.wait())
        try:
            await asyncio.wait({work, failed}, return_when=asyncio.FIRST_COMPLETED)
            if session.failure is not None:
                raise session.failure
            episode.settle(await work, agent)
        except PolicyFailure as failure:
            episode.outcome = outcome_of(failure, agent)
        finally:
            for task in (work, failed):
                task.cancel()
            await asyncio.gather(work, failed, return_exceptions=True)
        episode.truncated |= bool(turns) and turns[-1].finish_reason == "length"
        episode.tree, episode.samples = session.tree, session.tree.samples()
        episode.info |= {f"chat_{name}": float(n) for name, n in session.counters.items() if n}
        return episode
