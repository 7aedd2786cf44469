"""`StepEnvRunner`: runs an `Env` turn by turn against the policy."""

import asyncio
import copy
import json
from collections.abc import Callable
from dataclasses import replace

from molt.agents.env import Env, Result
from molt.agents.episode import AgentMethods, Episode, EpisodeContext, built, checked, described_method, outcome_of
from molt.agents.serving import Serving
from molt.agents.trajectory import as_messages
from molt.chat.chat_renderer import Parsed
from molt.chat.messages import read_messages
from molt.chat.protocol import ToolCall
from molt.errors import AgentError
from molt.types import PROMPT_TOO_LONG, CutReason, Json, PolicyFailure, ReplaceGroup, Turn

CLOSE_S = 30.0
"""What an environment may take to close."""


class StepEnvRunner(Serving):
    """The runner of the `Env` contract. A user's file exports

    class AgentRunner(StepEnvRunner):
        def __init__(self):
            super().__init__(MyEnv)
    """

    def __init__(self, env_class: Callable[[], Env], *, judge: bool = False):
        """judge: whether the environment needs `state["judge_url"]`."""
        self.env_class = env_class
        self.judge = judge

    @property
    def needs_chat(self) -> bool:
        """Whether its episodes need a chat renderer even without tools."""
        return self.judge

    async def run(self, context: EpisodeContext) -> Episode:
        """One episode.

        Raises `InfraFailure` for a non-finite reward, and `ReplaceGroup` for a first prompt without room for an answer;
        anything the env raises passes through.
        """
        env = built(self.env_class)
        methods = AgentMethods(env)
        episode = Episode()
        try:
            if self.judge:
                async with self.judge_url(context) as judge_url:
                    await self._play(env, methods, context, episode, {"judge_url": judge_url})
            else:
                await self._play(env, methods, context, episode, {})
        except PolicyFailure as failure:
            episode.outcome = outcome_of(failure, env)
        finally:
            try:
                async with asyncio.timeout(CLOSE_S):  # it also runs when the rollout's deadline has passed
                    await methods.call("close")
            finally:
                methods.end()
        episode.turns = episode.with_turn_rewards()
        return episode

    async def _play(
        self, env: Env, methods: AgentMethods, context: EpisodeContext, episode: Episode, judge: dict[str, str]
    ) -> None:
        """Alternate between model and environment until one of them, or a limit, ends the episode.

        methods: of `env`. judge: what the state has of a judge.
        """
        state = await self._reset(env, methods, context, judge)
        ids = _first_ids(env, context, state["prompt"])
        episode.messages = as_messages(state["prompt"])
        turn_limit: int | None = None  # `max_new_tokens` of the next turn, set by the environment

        while True:
            room = context.max_len - len(ids)
            if room <= 0 and not episode.turns:
                detail = f"reset left a prompt of {len(ids):,} tokens, data.max_len is {context.max_len:,}"
                raise ReplaceGroup(PROMPT_TOO_LONG, detail)
            if room <= 0:  # out of context: what was earned stands
                episode.cut = "length"
                return

            turn = await context.call_model(ids, _smallest(room, context.max_new_tokens, turn_limit))
            sampled = turn.token_ids.tolist()
            state["turn"] = len(episode.turns)
            state["action"] = context.renderer.decode(sampled)
            state["finish_reason"] = turn.finish_reason
            calls = _read_tool_calls(context, turn, state, episode)
            episode.turns.append(turn)
            episode.messages.append(_answer(state, calls))
            episode.cut = "length" if turn.finish_reason == "length" else None  # also if `step` raises PolicyFailure

            result = checked(await methods.call("step", state), env)
            episode.add(result)
            last_turn = len(episode.turns) == context.max_turns
            if result.ends or last_turn:
                episode.cut = _cut_at_the_end(episode.cut, result)
                return

            turn_limit = _turn_limit(result)
            if calls:
                results = _tool_results(env, calls, result)
                ids = _with_tool_results([*ids, *sampled], turn, results, context)
                episode.messages.extend(results)
            else:
                ids = _with_message(env, [*ids, *sampled], turn, result, context)
                episode.messages.append({"role": "user", "content": result.observation})

    async def _reset(self, env: Env, methods: AgentMethods, context: EpisodeContext, judge: dict[str, str]) -> Json:
        """The state that the episode starts from."""
        prompt = context.prompt
        first_prompt = prompt.text if prompt.messages is None else prompt.messages
        first_state = {
            # Copies: the other rollouts of the group start from the same prompt.
            "prompt": copy.deepcopy(first_prompt),
            "label": copy.deepcopy(prompt.label),
            "data_source": prompt.data_source,
            "seed": context.seed,
            "given": copy.deepcopy(context.given),
            **judge,
        }
        state = await methods.call("reset", first_state)
        if not isinstance(state, dict) or "prompt" not in state:
            raise AgentError(
                f"{described_method(env, 'reset')} returned {type(state).__name__} without a `prompt`: there is "
                "nothing to show the model. Return the state it was given."
            )
        return state


def _first_ids(env: Env, context: EpisodeContext, prompt: object) -> list[int]:
    """The ids of the prompt that `reset` left. Raises `AgentError` if that is of another kind than the row's."""
    if context.prompt.messages is None:
        if not isinstance(prompt, str):
            raise _wrong_prompt(env, prompt, expected="str")
        shown = replace(context.prompt, text=prompt)
    else:
        if not isinstance(prompt, list):
            raise _wrong_prompt(env, prompt, expected="list")
        shown = replace(context.prompt, messages=read_messages(prompt, "prompt"))
    return context.renderer.prompt_ids(shown)


def _wrong_prompt(env: Env, prompt: object, expected: str) -> AgentError:
    return AgentError(
        f"{described_method(env, 'reset')} left a {type(prompt).__name__} as `prompt`: the model cannot be shown it. "
        f"Leave a {expected}, as it was given (data.apply_chat_template says which)."
    )


def _cut_at_the_end(of_answer: CutReason | None, result: Result) -> CutReason | None:
    """Why the episode was cut, if it was. A last answer that was cut comes first: the environment only reacts to it."""
    if of_answer is not None:
        return of_answer
    if result.cut is None and not result.terminated:
        return "turns"
    return result.cut


def _turn_limit(result: Result) -> int | None:
    """`max_new_tokens` of the next turn, where the environment gave it."""
    limit = (result.sampling_params or {}).get("max_new_tokens")
    if limit is None:
        return None
    return int(limit)


def _smallest(room: int, *limits: int | None) -> int:
    """The tightest of the limits that are set."""
    return min([room, *(limit for limit in limits if limit is not None)])


def _read_tool_calls(context: EpisodeContext, turn: Turn, state: Json, episode: Episode) -> list[ToolCall]:
    """The tool calls of a turn, which are entered in `state` and counted. Nothing is, where no tools are offered."""
    if context.chat is None or not context.prompt.tools:
        return []
    parsed: Parsed = context.chat.parse(turn.token_ids.tolist(), context.prompt.tools, turn.prompt_ids.tolist())
    state["content"] = parsed.content
    state["tool_calls"] = [{"name": call.name, "arguments": json.loads(call.arguments)} for call in parsed.tool_calls]
    state["malformed_calls"] = parsed.malformed
    episode.count("tool_offers", 1)
    episode.count("tool_calls", len(parsed.tool_calls))
    episode.count("malformed_calls", len(parsed.malformed))
    return parsed.tool_calls


def _with_message(env: Env, ids: list[int], turn: Turn, result: Result, context: EpisodeContext) -> list[int]:
    """The ids so far, and those of the observation as the next message."""
    observation = result.observation
    assert observation is not None, "a result that does not end the episode has one"
    if not isinstance(observation, str):
        raise AgentError(
            f"`Result.observation` of {described_method(env, 'step')} is a list of {len(observation)}, but the model "
            "called no tool: there is one message. Return a string."
        )
    return [*ids, *context.renderer.continuation_ids(turn.token_ids.tolist(), observation)]


def _answer(state: Json, calls: list[ToolCall]) -> Json:
    """The turn as an assistant message."""
    if not calls:
        return {"role": "assistant", "content": state["action"]}
    made = [
        {"id": each.id, "type": "function", "function": {"name": each.name, "arguments": each.arguments}}
        for each in calls
    ]
    return {"role": "assistant", "content": state["content"], "tool_calls": made}


def _tool_results(env: Env, calls: list[ToolCall], result: Result) -> list[Json]:
    """The observation as the results of the turn's tool calls, one message each."""
    texts = result.observation
    assert texts is not None, "a result that does not end the episode has one"
    if isinstance(texts, str):
        texts = [texts]
    if len(texts) != len(calls):
        raise AgentError(
            f"`Result.observation` of {described_method(env, 'step')} has {len(texts)} results for {len(calls)} tool "
            "calls: the model would miss some. Return a list with one for each of `state['tool_calls']`."
        )
    return [
        {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}
        for call, text in zip(calls, texts, strict=True)
    ]


def _with_tool_results(ids: list[int], turn: Turn, results: list[Json], context: EpisodeContext) -> list[int]:
    """The ids so far, and those of the results of the turn's tool calls."""
    longer = context.chat_renderer.bridge(ids, results, context.prompt.tools, sampled=len(turn.token_ids))
    if longer is None:
        raise AgentError(
            "The chat template writes a conversation anew once tool results follow, so an episode cannot go on by "
            "appending to what was sampled. Use --data.chat_template with one that does not, or a ChatAgent."
        )
    return longer
