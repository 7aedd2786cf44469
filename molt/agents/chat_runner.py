"""`ChatAgentRunner`: the user owns the loop, with any client or harness pointed at the URL of a session.

The server (`chat/server.py`) runs in the process of the runner, on loopback. What the clients of an episode sample is
recorded in the session's token tree; the branches of the tree are the samples.
"""

import asyncio
import contextlib
import copy
import os
import secrets
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import psutil

from molt.agents.env import Result
from molt.agents.step_runner import CLOSE_S, Episode, EpisodeContext, Serving, judge_of, outcome_of
from molt.chat.session import Session, aside
from molt.chat.tree import Node
from molt.errors import AgentError
from molt.types import InfraFailure, Media, PolicyFailure, Scored, Turn

API_KEY, MODEL, MARK = "molt", "policy", "MOLT_HARNESS"
GRACE_S, KILL_S = 1.0, 5.0
"""What a harness may take to end when it is asked to, and to be gone when it is ended."""
KEPT_BYTES = 1 << 22
"""Of the beginning of what a harness writes, and of its end."""


@dataclass(frozen=True)
class Finished:
    """How an external harness ended."""

    returncode: int
    stdout: str
    """Its beginning and its end, where it is too long to be kept."""
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

    def train_side(self) -> None:
        """Train side conversations too: those without tools and with another system prompt than the main one."""
        self.session.tree.train_side = True

    def exclude(self, what: Node | Callable[[Node], bool]) -> None:
        """Leave branches of the token tree out of training."""
        self.session.tree.exclude(what)

    async def harness(
        self, *command: str, cwd: str | os.PathLike | None = None, env: Mapping[str, str] | None = None,
        stdin: str = "", timeout_s: float | None = None,
    ) -> Finished:  # fmt: skip
        """Run an external program with the session in its environment, and end what it started with it.

        `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `ANTHROPIC_BASE_URL`, `ANTHROPIC_API_KEY` are set; `env` is on top. Ended
        are its process group, its descendants, and whoever has its `MOLT_HARNESS` in the environment: all but a process
        that left the group, lost its parents and cleared its environment.
        """
        found = {"OPENAI_BASE_URL": self.openai_url, "ANTHROPIC_BASE_URL": self.base_url}
        found |= dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY"), self.api_key)
        found |= dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1")
        found |= {} if cwd is None else {"PWD": os.path.abspath(cwd)}  # some look there, and not where they are
        mark = secrets.token_hex(16)
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
        process = await asyncio.create_subprocess_exec(
            *command, cwd=cwd, env={**os.environ, **found, **(env or {}), MARK: mark}, start_new_session=True, **pipes
        )
        said = Said(), Said()
        pairs = zip((process.stdout, process.stderr), said, strict=True)
        talk = [asyncio.create_task(_read(*pair)) for pair in pairs] + [asyncio.create_task(_write(process, stdin))]
        timed_out = False
        try:
            async with asyncio.timeout(timeout_s):
                await _exited(process)
        except TimeoutError:
            timed_out = True
        finally:  # also what it left in the background, and when the rollout is cancelled
            await _end(process, mark)
            await asyncio.wait(talk, timeout=KILL_S)  # nobody holds the pipes any more
            for task in talk:
                task.cancel()
        return Finished(process.returncode, *map(str, said), timed_out)


async def _exited(process: asyncio.subprocess.Process) -> None:
    while process.returncode is None:  # `wait` would also wait for whoever else holds the pipes
        await asyncio.sleep(0.02)


class Said:
    """The beginning and the end of what a process writes, which a policy may make endless."""

    def __init__(self):
        self.head, self.tail, self.dropped = bytearray(), bytearray(), 0

    def add(self, chunk: bytes) -> None:
        space = KEPT_BYTES - len(self.head)
        self.head += chunk[:space]
        self.tail += chunk[space:]
        if len(self.tail) > 2 * KEPT_BYTES:
            self.dropped += len(self.tail) - KEPT_BYTES
            del self.tail[:-KEPT_BYTES]

    def __str__(self) -> str:
        gap = f"\n... {self.dropped:,} bytes ...\n".encode() if self.dropped else b""
        return (self.head + gap + self.tail).decode(errors="replace")


async def _read(stream: asyncio.StreamReader, into: Said) -> None:
    while chunk := await stream.read(1 << 16):
        into.add(chunk)


async def _write(process: asyncio.subprocess.Process, text: str) -> None:
    with contextlib.suppress(ConnectionError):  # it may end without reading
        process.stdin.write(text.encode())
        await process.stdin.drain()
        process.stdin.close()


async def _end(process: asyncio.subprocess.Process, mark: str) -> None:
    """End its group, and what has left the group but descends from it or has `mark` in its environment."""
    strays: set[psutil.Process] = set()
    for number in (signal.SIGTERM, signal.SIGKILL):
        # Before their parents are ended: then nothing says whose they were.
        strays |= await aside(_strays, process.pid if process.returncode is None else None, mark)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        for stray in strays:
            with contextlib.suppress(psutil.NoSuchProcess):
                stray.send_signal(number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_S if number == signal.SIGKILL else GRACE_S):
                await _exited(process)


def _strays(parent: int | None, mark: str) -> set[psutil.Process]:
    found = set()
    with contextlib.suppress(psutil.Error):
        found |= set(psutil.Process(parent).children(recursive=True)) if parent else set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                found.add(process)
    return found


class ChatAgent:
    """The contract: one instance serves one episode."""

    async def run(self, ctx: ChatContext) -> Result:
        """Play the episode with any client, and return what it earned. Raise `PolicyFailure` for the model's doing."""
        raise AgentError(f"{type(self).__name__} defines no `async def run(self, ctx)`: no reward can arise. Add it.")


class ChatAgentRunner(Serving):
    """The runner of the `ChatAgent` contract. A user's file exports

    class AgentRunner(ChatAgentRunner):
        def __init__(self):
            super().__init__(MyAgent)
    """

    def __init__(self, agent_class: type[ChatAgent]):
        self.agent_class = agent_class

    async def run(self, context: EpisodeContext) -> Episode:
        """One episode. Raises `InfraFailure` when the engines fail; anything the agent raises passes through."""
        server, turns = await self.server(), []

        async def call_model(prompt_ids: list[int], max_tokens: int, **shown: Sequence[Media]) -> Turn:
            turn = await context.call_model(prompt_ids, max_tokens, **shown)
            turns.append(replace(turn, prompt_ids=np.empty(0, np.int32)))  # the tree has them, once
            return turn

        limits = {"max_len": context.max_len, "max_new_tokens": context.max_new_tokens}
        session = Session(context.chat, call_model, call_freely=context.call_freely, **limits)
        judge = judge_of(context)
        judge.failed = session.failed  # whichever cannot answer ends the episode
        urls = [server.open(session), server.open(judge)]
        try:
            return await self._play(context, (session, judge), urls, turns)
        finally:
            for url in urls:
                server.close(url)

    async def _play(
        self, context: EpisodeContext, sessions: Sequence[Session], urls: Sequence[str], turns: list[Turn]
    ) -> Episode:
        prompt, agent, session = context.prompt, self.agent_class(), sessions[0]
        given = prompt.text if prompt.messages is None else prompt.messages
        given, label, tools = copy.deepcopy((given, prompt.label, prompt.tools))  # others play the same prompt
        ctx = ChatContext(given, label, prompt.data_source, tools, context.seed, *urls, session)
        episode = Episode(turns, Scored(0.0, 0.0), truncated=False)
        work, failed = asyncio.create_task(agent.run(ctx)), asyncio.create_task(session.failed.wait())
        try:
            await asyncio.wait({work, failed}, return_when=asyncio.FIRST_COMPLETED)
            for each in sessions:
                if each.failure is not None:
                    raise each.failure
            # Out of context: what was earned stands, and here that is nothing before the end.
            episode.truncated = _ran_out(work.exception(), session)
            if not episode.truncated:
                episode.settle(await work, agent)
        except PolicyFailure as failure:
            episode.outcome = outcome_of(failure, agent)
        finally:
            for task in (work, failed):
                task.cancel()
            await asyncio.wait({work, failed}, timeout=CLOSE_S)
            if work.done() and not work.cancelled():
                work.exception()  # seen: what an agent raises after its engine has failed is of no consequence
        tree = episode.tree = session.tree
        episode.samples, leaves = tree.samples(), tree.leaves()
        episode.truncated |= bool(leaves) and session.finishes[leaves[-1].index] == "length"
        session.counters["side_calls"] = sum(tree.side(node) for node in tree.nodes)
        episode.info |= {f"chat_{name}": float(n) for name, n in session.counters.items() if n}
        return episode


def _ran_out(error: BaseException | None, session: Session) -> bool:
    """Whether an agent gave up because its context is full: it had answers, and was refused the last one."""
    theirs = isinstance(error, Exception) and not isinstance(error, PolicyFailure | InfraFailure)
    return theirs and session.refused and bool(session.tree.nodes)
