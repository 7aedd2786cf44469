"""`ChatAgentRunner`: the user owns the loop, with any client or harness pointed at the URL of a session.

The server (`chat/server.py`) runs in the process of the runner, on loopback. What the clients of an episode sample is
recorded in the session's token tree; the branches of the tree are the samples.
"""

import asyncio
import copy
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from molt.agents.child_environment import for_harness
from molt.agents.env import Result
from molt.agents.episode import AgentMethods, Episode, EpisodeContext, built, checked, outcome_of
from molt.agents.harness import Finished, run_harness
from molt.agents.serving import Serving, judge_of
from molt.agents.step_runner import CLOSE_S
from molt.chat.session import Session
from molt.chat.tree import Node
from molt.errors import AgentError, did_you_mean
from molt.process import loopback_without_proxy
from molt.types import PROMPT_TOO_LONG, InfraFailure, Json, Media, PolicyFailure, ReplaceGroup, Turn
from molt.user_module import place_of

API_KEY = "molt"
MODEL = "policy"


@dataclass(frozen=True)
class ChatContext:
    """What one episode of a `ChatAgent` gets."""

    prompt: list[Json] | str
    """The row's messages, or its text; tools are in `tools`."""
    label: Any
    data_source: str
    tools: list[Json] | None
    seed: int
    """An integer that no other rollout has."""
    base_url: str
    """Of the session, for Anthropic clients; every call to it is recorded and trained."""
    judge_url: str
    """The same engines for a reward function, as `base_url`: recorded nowhere."""
    session: Session
    max_len: int
    """Tokens of the context, prompt and answer together: what a harness is to be told."""
    given: Json = field(default_factory=dict)
    """What a scheme passes on (`--rollout.scheme`)."""
    api_key: str = API_KEY
    model: str = MODEL

    @property
    def openai_url(self) -> str:
        """For OpenAI clients."""
        return f"{self.base_url}/v1"

    def train_side(self) -> None:
        """Train side conversations too: those without tools and with another system prompt than the main one."""
        self.session.tree.train_side = True

    def refuse_constraints(self) -> None:
        """Answer structured outputs and forced tools of trained calls with a 400, instead of ignoring them by name."""
        self.session.strict = True

    def exclude(self, what: Node | Callable[[Node], bool]) -> None:
        """Leave branches of the token tree out of training."""
        self.session.tree.exclude(what)

    async def harness(
        self,
        *command: str,
        cwd: str | os.PathLike | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str = "",
        timeout_s: float | None = None,
    ) -> Finished:
        """Run an external program with the session in its environment, and end what it started with it.

        `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `ANTHROPIC_BASE_URL`, `ANTHROPIC_API_KEY` are set. Of the runner's
        variables it gets those of `child_environment.py`, none of which is a secret; `env` is on top. Ended are its
        process group, its descendants, and whoever has its `MOLT_HARNESS` in the environment: all but a process that
        left the group, lost its parents and cleared its environment.
        """
        passed = for_harness(os.environ)
        environment = {**passed, **self._session_environment(), **loopback_without_proxy(passed)}
        if cwd is not None:
            environment["PWD"] = os.path.abspath(cwd)  # some programs look there, and not where they are
        if env is not None:
            environment.update(env)
        return await run_harness(command, environment=environment, cwd=cwd, stdin=stdin, timeout_s=timeout_s)

    def _session_environment(self) -> dict[str, str]:
        """The variables by which clients find the session."""
        return {
            "OPENAI_BASE_URL": self.openai_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.base_url,
            "ANTHROPIC_API_KEY": self.api_key,
        }


class ChatAgent:
    """The contract: one instance serves one episode."""

    async def run(self, ctx: ChatContext) -> Result:
        """Play the episode with any client, and return what it earned. Raise `PolicyFailure` for the model's doing."""
        agent = type(self)
        near = did_you_mean("run", vars(agent))
        raise AgentError(
            f"{agent.__name__}{place_of(agent)} defines no `async def run(self, ctx)`: no reward can arise.{near} "
            "Add it."
        )


class ChatAgentRunner(Serving):
    """The runner of the `ChatAgent` contract. A user's file exports

    class AgentRunner(ChatAgentRunner):
        def __init__(self):
            super().__init__(MyAgent)
    """

    needs_chat = True
    """Its episodes need a chat renderer."""

    def __init__(self, agent_class: type[ChatAgent]):
        self.agent_class = agent_class

    async def run(self, context: EpisodeContext) -> Episode:
        """One episode.

        Raises `InfraFailure` when the engines fail, and `ReplaceGroup` when the agent gave up because its first prompt
        leaves no room for an answer; anything else that the agent raises passes through.
        """
        server = await self.server()
        episode = Episode()

        async def call_model(prompt_ids: list[int], max_tokens: int, *, media: tuple[Media, ...] = ()) -> Turn:
            turn = await context.call_model(prompt_ids, max_tokens, media=media)
            episode.turns.append(replace(turn, prompt_ids=np.empty(0, np.int32)))  # the tree has them, once
            return turn

        session = Session(
            context.chat_renderer,
            call_model,
            call_freely=context.call_freely,
            max_len=context.max_len,
            max_new_tokens=context.max_new_tokens,
        )
        judge = judge_of(context, failed=session.failed)  # the failure of either ends the episode
        base_url = server.open(session)
        judge_url = server.open(judge)
        try:
            ctx = _chat_context(context, session, base_url=base_url, judge_url=judge_url)
            await self._play(ctx, session, judge, episode)
            _add_samples(episode, session)
            return episode
        finally:
            server.close(base_url)
            server.close(judge_url)

    async def _play(self, ctx: ChatContext, session: Session, judge: Session, episode: Episode) -> None:
        """Run the agent until it ends or an engine fails, and set the outcome of the episode."""
        agent = built(self.agent_class)
        methods = AgentMethods(agent)
        work = asyncio.create_task(methods.call("run", ctx))
        failed = asyncio.create_task(session.failed.wait())
        try:
            await asyncio.wait({work, failed}, return_when=asyncio.FIRST_COMPLETED)
            for each in (session, judge):
                if each.failure is not None:
                    raise each.failure
            gave_up = _gave_up(work.exception())
            if gave_up and session.policy_refusal is not None:
                raise PolicyFailure(0.0, session.policy_refusal)
            elif gave_up and session.out_of_context and not session.tree.nodes:
                raise ReplaceGroup(PROMPT_TOO_LONG, session.refusal)
            elif gave_up and session.out_of_context:
                episode.cut = "length"  # what was earned stands, and here that is nothing before the end
            else:
                result = checked(await work, agent)
                episode.add(result)
                episode.cut = result.cut
        except PolicyFailure as failure:
            episode.outcome = outcome_of(failure, agent)
        finally:
            for task in (work, failed):
                task.cancel()
            await asyncio.wait({work, failed}, timeout=CLOSE_S)
            methods.end()
            if work.done() and not work.cancelled():
                work.exception()  # retrieved: what an agent raises after its engine has failed does not matter


def _chat_context(context: EpisodeContext, session: Session, *, base_url: str, judge_url: str) -> ChatContext:
    """What the agent gets. Copies of the row: other rollouts start from the same prompt."""
    prompt = context.prompt
    conversation = prompt.text if prompt.messages is None else prompt.messages
    assert conversation is not None, "a prompt has a text or messages"
    return ChatContext(
        prompt=copy.deepcopy(conversation),
        label=copy.deepcopy(prompt.label),
        data_source=prompt.data_source,
        tools=copy.deepcopy(prompt.tools),
        seed=context.seed,
        base_url=base_url,
        judge_url=judge_url,
        session=session,
        max_len=context.max_len,
        given=copy.deepcopy(context.given),
    )


def _gave_up(error: BaseException | None) -> bool:
    """Whether an agent ended with an error that says nothing of its reason: a refused call may be it."""
    return isinstance(error, Exception) and not isinstance(error, PolicyFailure | InfraFailure | ReplaceGroup)


def _add_samples(episode: Episode, session: Session) -> None:
    """Take the samples and the counters of a session into its episode."""
    tree = session.tree
    episode.tree = tree
    episode.samples = tree.samples()
    leaves = tree.leaves()
    if leaves and session.finishes[leaves[-1].index] == "length":
        episode.cut = "length"
    if episode.cut is None and session.out_of_context:  # a harness ends as if all were well
        episode.cut = "length"
    episode.refusals = dict(session.refusals)

    session.counters["side_calls"] = sum(tree.side(node) for node in tree.nodes)
    for name, count in session.counters.items():
        if count:
            episode.info[f"chat_{name}"] = float(count)
