"""`StepEnvRunner`: runs an `Env` turn by turn against the policy.

What a runner knows of the world is `EpisodeContext`: a prompt, a model to call with token ids, a
renderer, limits. It knows nothing of engines, Ray or training.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from molt.agents.env import Env, Result
from molt.chat.render import Renderer
from molt.errors import AgentError
from molt.types import InfraFailure, PolicyFailure, Prompt, Scored, Turn

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


@dataclass
class Episode:
    """Everything one episode gives: its turns exactly as sampled, and how it ended."""

    turns: list[Turn]
    outcome: Scored | PolicyFailure
    truncated: bool
    info: dict[str, float] = field(default_factory=dict)


class StepEnvRunner:
    """The runner of the `Env` contract. A user's file exports

        class AgentRunner(StepEnvRunner):
            def __init__(self):
                super().__init__(MyEnv)
    """

    def __init__(self, env_class: type[Env]):
        self.env_class = env_class

    async def run(self, context: EpisodeContext) -> Episode:
        """One episode. Raises `InfraFailure` for a non-finite reward; anything the env raises passes through."""
        env = self.env_class()
        episode = Episode([], Scored(0.0, 0.0), truncated=False)
        try:
            await self._play(env, context, episode)
        except PolicyFailure as failure:
            episode.outcome = failure
        finally:
            await env.close()
        return episode

    async def _play(self, env: Env, context: EpisodeContext, episode: Episode) -> None:
        prompt = context.prompt
        state: dict[str, Any] = {
            "prompt": prompt.messages if prompt.messages is not None else prompt.text,
            "label": prompt.label,
            "data_source": prompt.data_source,
            "seed": context.seed,
        }
        state = await env.reset(state)
        if not isinstance(state, dict) or "prompt" not in state:
            raise AgentError(
                f"{type(env).__name__}.reset returned {type(state).__name__} without a `prompt`: there is nothing to "
                "show the model. Return the state it was given."
            )
        key = "text" if isinstance(state["prompt"], str) else "messages"
        ids = context.renderer.prompt_ids(replace(prompt, **{"text": None, "messages": None, key: state["prompt"]}))
        reward, score, budget = 0.0, None, None
        while True:
            room = context.max_len - len(ids)
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
            episode.turns.append(turn)
            result = _checked(await env.step(state), env)
            reward += float(result.reward)
            score = score if result.score is None else float(result.score)
            episode.outcome = Scored(reward, reward if score is None else score)
            episode.info |= {k: float(v) for k, v in result.info.items() if isinstance(v, (int, float))}
            episode.truncated = result.truncated or turn.finish_reason == "length"
            if result.terminated or result.truncated or len(episode.turns) == context.max_turns:
                return
            budget = (result.sampling_params or {}).get("max_new_tokens")
            sampled = turn.token_ids.tolist()
            ids = [*ids, *sampled, *context.renderer.continuation_ids(sampled, result.observation)]


def _checked(result: Result, env: Env) -> Result:
    if not isinstance(result, Result):
        raise AgentError(
            f"{type(env).__name__}.step returned a {type(result).__name__}: reward and end of the episode are unknown. "
            "Return molt.agents.Result(reward=...)."
        )
    if not result.finite:
        raise InfraFailure("reward_not_finite", f"{type(env).__name__}.step returned reward {result.reward}")
    return result
