"""`StepEnvRunner`: runs an `Env` turn by turn against the policy.

What a runner knows of the world is `EpisodeContext`: a prompt, a model to call with token ids, a
renderer, limits. It knows nothing of engines, Ray or training.
"""

import asyncio
import copy
import inspect
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import TYPE_CHECKING, Any

from molt.agents.env import Env, Result
from molt.chat.chat_renderer import ChatRenderer
from molt.chat.protocol import ToolCall
from molt.chat.render import Renderer
from molt.chat.session import Session
from molt.chat.tree import Tree
from molt.errors import AgentError
from molt.types import InfraFailure, PolicyFailure, Prompt, Sample, Scored, Turn

if TYPE_CHECKING:
    from molt.chat.server import ChatServer

CLOSE_S = 30.0
"""What an environment may take to close."""

CallModel = Callable[[list[int], int], Awaitable[Turn]]
"""`(prompt_ids, max_tokens) -> Turn`, sampled from the current policy."""


@dataclass(frozen=True)
class EpisodeContext:
    """Everything one episode gets."""

    prompt: Prompt
    call_model: CallModel
    renderer: Renderer
    seed: int
    max_len: int
    max_new_tokens: int | None = None
    max_turns: int | None = None
    chat: ChatRenderer | None = None
    """What a `ChatAgent`, or an `Env` with tools or a judge, needs; else None."""
    call_freely: Callable[[list[int], int, dict[str, Any]], Awaitable[Turn]] | None = None
    """As `call_model`, with sampling parameters of the caller's: what it samples is never trained."""


@dataclass
class Episode:
    """Everything one episode gives: its turns exactly as sampled, and how it ended."""

    turns: list[Turn]
    outcome: Scored | PolicyFailure
    truncated: bool
    info: dict[str, float] = field(default_factory=dict)
    samples: list[Sample] | None = None
    """None: the turns are one stream."""
    tree: Tree | None = None
    """Of a `ChatAgent`."""

    def settle(self, result: Any, agent: Any) -> None:
        """End with what an agent returned. Raises as `checked` does."""
        result = checked(result, agent)
        reward = float(result.reward)
        self.outcome = Scored(reward, reward if result.score is None else float(result.score))
        self.truncated |= bool(result.truncated)
        self.note(result)

    def note(self, result: Result) -> None:
        self.info |= {k: float(v) for k, v in result.info.items() if isinstance(v, Real)}


def outcome_of(failure: PolicyFailure, agent: Any) -> PolicyFailure:
    """Only what it says: the user's subclass means nothing to the driver, which lacks the user's file."""
    _require_finite(agent, reward=failure.reward)
    return PolicyFailure(failure.reward, str(failure.reason))


class Serving:
    """A runner with a chat server of its own, one for all its episodes."""

    _server: "asyncio.Task[ChatServer] | None" = None

    async def server(self) -> "ChatServer":
        """Whoever comes first starts it."""
        if self._server is None:
            from molt.chat.server import ChatServer  # an agent file is also loaded where nothing is served

            self._server = asyncio.create_task(ChatServer().__aenter__())
        try:
            return await asyncio.shield(self._server)
        except Exception:
            self._server = None  # the next episode tries again
            raise


def judge_of(context: EpisodeContext) -> Session:
    """A session on the engines of the episode that records nothing."""
    return Session(
        context.chat, context.call_model, call_freely=context.call_freely, record=False,
        max_len=context.max_len, max_new_tokens=context.max_new_tokens,
    )  # fmt: skip


class StepEnvRunner(Serving):
    """The runner of the `Env` contract. A user's file exports

    class AgentRunner(StepEnvRunner):
        def __init__(self):
            super().__init__(MyEnv)
    """

    def __init__(self, env_class: Callable[[], Env], *, judge: bool = False):
        """judge: `state["judge_url"]` is to be there."""
        self.env_class, self.judge = env_class, judge

    async def run(self, context: EpisodeContext) -> Episode:
        """One episode. Raises `InfraFailure` for a non-finite reward; anything the env raises passes through."""
        env = self.env_class()
        episode = Episode([], Scored(0.0, 0.0), truncated=False)
        try:
            async with self._judge(context) as given:
                await self._play(env, context, episode, given)
        except PolicyFailure as failure:
            episode.outcome = outcome_of(failure, env)
        finally:
            async with asyncio.timeout(CLOSE_S):  # it also runs when the rollout's own deadline has passed
                await env.close()
        return episode

    @asynccontextmanager
    async def _judge(self, context: EpisodeContext) -> AsyncIterator[dict[str, str]]:
        """What the state has of a judge while the episode lasts. Raises `InfraFailure` if it could not answer."""
        if not self.judge:
            yield {}
            return
        server, judge = await self.server(), judge_of(context)
        url = server.open(judge)
        try:
            yield {"judge_url": url}
        except PolicyFailure:
            if judge.failure is None:
                raise
        finally:
            server.close(url)
        if judge.failure is not None:
            raise judge.failure

    async def _play(self, env: Env, context: EpisodeContext, episode: Episode, given: dict[str, str]) -> None:
        prompt = context.prompt
        state: dict[str, Any] = {
            # Copies: the other rollouts of the group start from the same prompt.
            "prompt": copy.deepcopy(prompt.text if prompt.messages is None else prompt.messages),
            "label": copy.deepcopy(prompt.label),
            "data_source": prompt.data_source,
            "seed": context.seed,
            **given,
        }
        state = await env.reset(state)
        if not isinstance(state, dict) or "prompt" not in state:
            raise AgentError(
                f"{type(env).__name__}.reset returned {type(state).__name__} without a `prompt`: there is nothing to "
                "show the model. Return the state it was given."
            )
        key, kind = ("text", str) if prompt.messages is None else ("messages", list)
        if not isinstance(state["prompt"], kind):
            raise AgentError(
                f"{type(env).__name__}.reset left a {type(state['prompt']).__name__} as `prompt`: the model cannot be "
                f"shown it. Leave a {kind.__name__}, as it was given (data.apply_chat_template says which)."
            )
        ids = context.renderer.prompt_ids(replace(prompt, **{key: state["prompt"]}))
        reward, score, budget = 0.0, None, None
        while True:
            room = context.max_len - len(ids)
            if room <= 0 and not episode.turns:
                detail = f"reset left a prompt of {len(ids):,} tokens, data.max_len is {context.max_len:,}"
                raise InfraFailure("prompt_too_long", detail)
            if room <= 0:  # out of context: what was earned stands
                episode.truncated = True
                return
            limits = [limit for limit in (room, context.max_new_tokens, budget) if limit is not None]
            turn = await context.call_model(ids, min(limits))
            state |= {
                "turn": len(episode.turns),
                "action": context.renderer.decode(turn.token_ids.tolist()),
                "finish_reason": turn.finish_reason,
            }
            parsed = self._calls(context, turn, state)
            episode.turns.append(turn)
            episode.truncated = turn.finish_reason == "length"  # also if `step` raises PolicyFailure
            result = checked(await env.step(state), env)
            reward += float(result.reward)
            score = score if result.score is None else float(result.score)
            episode.outcome = Scored(reward, reward if score is None else score)
            episode.note(result)
            if result.terminated or result.truncated or len(episode.turns) == context.max_turns:
                episode.truncated |= bool(result.truncated or not result.terminated)
                return
            budget = (result.sampling_params or {}).get("max_new_tokens")
            ids = _continued([*ids, *turn.token_ids.tolist()], turn, parsed, result, context)

    def _calls(self, context: EpisodeContext, turn: Turn, state: dict[str, Any]) -> list[ToolCall]:
        """The tool calls of a turn, which `state` gets as well; none where no tools are offered."""
        if context.chat is None or not context.prompt.tools:
            return []
        parsed = context.chat.parse(turn.token_ids.tolist(), context.prompt.tools, turn.prompt_ids.tolist())
        calls = [{"name": call.name, "arguments": json.loads(call.arguments)} for call in parsed.tool_calls]
        state |= {"content": parsed.content, "tool_calls": calls, "malformed_calls": parsed.malformed}
        return parsed.tool_calls


def _continued(ids: list[int], turn: Turn, calls: list[ToolCall], result: Result, context: EpisodeContext) -> list[int]:
    """The ids so far, and those of the message, or the tool results, that the model sees next."""
    said, sampled = result.observation, turn.token_ids.tolist()
    if not calls:
        if not isinstance(said, str):
            raise AgentError(
                f"`Result.observation` is a list of {len(said)}, but the model called no tool: there is one message. "
                "Return a string."
            )
        return [*ids, *context.renderer.continuation_ids(sampled, said)]
    said = [said] if isinstance(said, str) else said
    if len(said) != len(calls):
        raise AgentError(
            f"`Result.observation` has {len(said)} results for {len(calls)} tool calls: the model would miss some. "
            "Return a list with one for each of `state['tool_calls']`."
        )
    results = [
        {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}
        for call, text in zip(calls, said, strict=True)
    ]
    longer = context.chat.bridge(ids, results, context.prompt.tools, sampled=len(sampled))
    if longer is None:
        raise AgentError(
            "The chat template writes a conversation anew once tool results follow, so an episode cannot go on by "
            "appending to what was sampled. Use --data.chat_template with one that does not, or a ChatAgent."
        )
    return longer


def checked(result: Any, agent: Any) -> Result:
    """What `Env.step` or `ChatAgent.run` returned. Raises `AgentError`, or `InfraFailure` if it is not finite."""
    if not isinstance(result, Result):
        method = "step" if isinstance(agent, Env) else "run"
        raise AgentError(
            f"{type(agent).__name__}.{method} returned a {type(result).__name__}: reward and end of the episode are "
            "unknown. Return molt.agents.Result(reward=...)."
        )
    _require_finite(agent, reward=result.reward, score=result.score)
    return result


def _require_finite(agent: Any, **values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not math.isfinite(value):
            method = "step" if isinstance(agent, Env) else "run"
            code = getattr(inspect.unwrap(getattr(type(agent), method)), "__code__", None)
            where = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
            raise InfraFailure("reward_not_finite", f"{type(agent).__name__}.{method}{where} returned {name} {value}")
