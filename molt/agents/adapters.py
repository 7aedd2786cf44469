"""Environments of other libraries as agents: `--train.agent_path gymnasium:ID`, `reasoning_gym:NAME`, `verifiers:ID`.

    python -m molt.agents.adapters reasoning_gym:leg_counting 1000 > rows.jsonl

writes a dataset for any of them (`--data.input_key input --data.label_key label`). The label of a row is the number
of a task, which all rollouts of its group share; a third argument starts elsewhere, for held-out rows.

* gymnasium: the row's prompt (say there what the actions do), then the first observation: of a `Text` space, or
  rendered as `ansi`. The action is the answer (`Text`) or its last whole number (`Discrete`). An answer that is
  neither plays a random action, for any fixed reward might pay better than playing; `info/invalid` counts them.
* reasoning_gym: the row's prompt, then a question; the library scores what is between <answer> and </answer>.
* verifiers: a taskset of `verifiers.v1` whose tasks take one answer and are judged without tools or a container.
"""

import asyncio
import importlib
import inspect
import itertools
import json
import re
import sys
import threading
from collections.abc import Callable
from functools import lru_cache, partial
from types import ModuleType
from typing import Any

from molt.agents.env import Env, Result
from molt.errors import AgentError, did_you_mean

INTEGER = re.compile(r"(?<![\d.])(?:(?<!\w)-)?\d{1,18}(?!\.?\d)")
COLOUR = re.compile(r"\x1b\[([\d;]*)m")
HOW = "Give the final answer between <answer> and </answer>."


def adapter(agent_path: str) -> Callable[[], Env]:
    """What makes the `Env` of `KIND:NAME`. Raises AgentError: no package, no such name, or it does not fit."""
    kind, _, name = agent_path.partition(":")
    module, make = ADAPTERS[kind]
    try:
        package = importlib.import_module(module)
    except ImportError as error:
        raise AgentError(
            f"`train.agent_path` (={agent_path}): {module} cannot be imported ({error}), so no episode could start. "
            f"Run: pip install {kind.replace('_', '-')}"
        ) from error
    try:
        return make(package, name)
    except Exception as error:  # the library may raise anything
        raise AgentError(
            f"`train.agent_path` (={agent_path}): {str(error).rstrip('.')}. No episode could start. Give another name."
        ) from error


def _number(state: dict[str, Any]) -> int:
    """The label: the number of the task."""
    try:
        return int(state["label"])
    except (TypeError, ValueError):
        raise AgentError(
            f"label (={state['label']!r}) is not the number of a task: a group's rollouts would get different tasks. "
            "Set data.label_key to a column of numbers >= 0; python -m molt.agents.adapters KIND:NAME COUNT writes one."
        ) from None


def _with(state: dict[str, Any], text: str) -> dict[str, Any]:
    """The state with `text` after the row's prompt."""
    prompt = state["prompt"]
    if isinstance(prompt, str):
        return state | {"prompt": f"{prompt}\n\n{text}"}
    last = prompt[-1]
    return state | {"prompt": [*prompt[:-1], last | {"content": f"{last['content']}\n\n{text}"}]}


class GymnasiumEnv(Env):
    def __init__(self, make: Callable[[], Any], discrete: type):
        self._make, self._discrete = make, discrete
        self._env, self._invalid = None, 0

    async def reset(self, state):
        seed = _number(state)
        self._env = await asyncio.to_thread(self._make)
        space = self._env.action_space
        space.seed(seed)
        text = self._text((await asyncio.to_thread(self._env.reset, seed=seed))[0])
        if isinstance(space, self._discrete):
            text += f"\n\nAnswer with the number of your action, {space.start} to {space.start + space.n - 1}."
        return _with(state, text)

    async def step(self, state):
        action = self._action(state["action"])
        observation, reward, terminated, truncated, info = await asyncio.to_thread(self._env.step, action)
        info = {**info, "invalid": self._invalid}
        return Result(reward, self._text(observation), bool(terminated), bool(truncated), info)

    async def close(self):
        if self._env is not None:
            await asyncio.to_thread(self._env.close)

    def _text(self, observation: Any) -> str:
        """A highlighted part of a rendering (`ESC[41m` ... `ESC[0m`) comes in brackets."""
        if self._env.render_mode != "ansi":
            return observation
        return COLOUR.sub(lambda code: "[" if code[1].strip("0") else "]", self._env.render()).strip()

    def _action(self, answer: str) -> Any:
        space, action = self._env.action_space, answer.strip()
        if isinstance(space, self._discrete):
            numbers = INTEGER.findall(answer)
            action = int(numbers[-1]) if numbers else None
        if action is not None and space.contains(action):
            return action
        self._invalid += 1
        return space.sample()


def _gymnasium(gymnasium: ModuleType, name: str) -> Callable[[], Env]:
    spaces, env = gymnasium.spaces, gymnasium.make(name)
    seen, done, modes = env.observation_space, env.action_space, env.metadata.get("render_modes") or []
    env.close()
    if not isinstance(seen, spaces.Text) and "ansi" not in modes:
        raise ValueError(f"its observations are {seen}, but the model reads text and there is no `ansi` rendering")
    if not isinstance(done, spaces.Text | spaces.Discrete):
        raise ValueError(f"its actions are {done}, but the model can only give a Text or the number of a Discrete one")
    rendered = {} if isinstance(seen, spaces.Text) else {"render_mode": "ansi"}
    make = partial(gymnasium.make, name, disable_env_checker=True, **rendered)
    return partial(GymnasiumEnv, make, spaces.Discrete)


class ReasoningGymEnv(Env):
    lock = threading.Lock()
    """The library promises nothing about threads."""

    def __init__(self, dataset: Callable[[int], Any], extract: Callable[[str], str | None]):
        self._dataset, self._extract = dataset, extract

    async def reset(self, state):
        self._entry = await asyncio.to_thread(self._draw, _number(state))
        return _with(state, f"{self._entry['question'].strip()}\n\n{HOW}")

    def _draw(self, number: int) -> dict[str, Any]:
        """Datasets draw entry i from seed + i, and some have only so many: entry `number` of a seed of 0."""
        with self.lock:
            size = len(self._dataset(0))
            self._tasks = self._dataset(number // size * size)
            return self._tasks[number % size]

    async def step(self, state):
        return Result(await asyncio.to_thread(self._score, self._extract(state["action"])))

    def _score(self, answer: str | None) -> float:
        with self.lock:
            return self._tasks.score_answer(answer, self._entry)


def _reasoning_gym(library: ModuleType, name: str) -> Callable[[], Env]:
    known = library.factory.DATASETS
    if name not in known:
        raise ValueError(f"there is no dataset {name!r}.{did_you_mean(name, known)}")
    dataset = lru_cache(64)(lambda seed: library.create_dataset(name, seed=seed))
    dataset(0)
    return partial(ReasoningGymEnv, dataset, library.utils.extract_answer)


class VerifiersEnv(Env):
    def __init__(self, vf: ModuleType, task: Callable[[int], Any]):
        self._vf, self._draw = vf, task

    async def reset(self, state):
        self._task = self._draw(_number(state))
        data, vf = self._task.data, self._vf
        prompt = [vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else data.prompt
        system = [vf.SystemMessage(content=data.system_prompt)] if data.system_prompt else []
        self._messages = [*system, *prompt]
        shown = [message.model_dump(exclude_none=True) for message in self._messages]
        if isinstance(state["prompt"], str):
            return state | {"prompt": "\n\n".join(message["content"] for message in shown)}
        return state | {"prompt": shown}

    async def step(self, state):
        vf, task = self._vf, self._task
        reasoning, _, content = state["action"].rpartition("</think>")
        reasoning = reasoning.removeprefix("<think>").strip() or None
        answer = vf.AssistantMessage(content=content.strip(), reasoning_content=reasoning)
        trace = vf.Trace(
            task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
            agent=vf.AgentInfo(config=vf.AgentConfig()),
            state=vf.state.state_cls(type(task))(),
            calls=[vf.ModelCall(node=len(self._messages), finish_reason=state["finish_reason"])],
        )
        for i, message in enumerate([*self._messages, answer]):
            trace.nodes.append(vf.MessageNode(parent=i - 1 if i else None, message=message, sampled=message is answer))
        trace.ok = trace.is_completed = True
        await task.score(trace)
        info = {name: value for name, value in trace.metrics.items() if value is not None}
        return Result(trace.reward, info={**info, **{name: reward.score for name, reward in trace.rewards.items()}})


def _verifiers(vf: ModuleType, name: str) -> Callable[[], Env]:
    taskset = vf.load_taskset(vf.taskset_config_type(name)(id=name))
    source, tasks = iter(taskset), []

    def task(number: int) -> Any:
        tasks.extend(itertools.islice(source, max(0, number + 1 - len(tasks))))
        if not 0 <= number < len(tasks):
            raise AgentError(f"label (={number}): verifiers:{name} has no such task. Use 0 to {len(tasks) - 1}.")
        return tasks[number]

    if unfit := _unfit(vf, name, taskset, task(0)):
        raise ValueError(f"its tasks need {unfit}, but here one answer is judged by itself")
    return partial(VerifiersEnv, vf, task)


def _unfit(vf: ModuleType, name: str, taskset: Any, task: Any) -> str:
    """What a task needs besides one answer, or nothing."""
    kind, prompt = type(task), task.data.prompt
    hooks = [*task.hooks("reward"), *task.hooks("metric")]
    own = kind.setup is not vf.Task.setup or kind.finalize is not vf.Task.finalize
    needs = {
        "an Env of their own": vf.environment_class(name) is not vf.SingleAgentEnv,
        "tools": kind.toolsets(task.config) or type(taskset).toolsets(taskset.config),
        "a container": kind.NEEDS_CONTAINER or task.data.image,
        "a runtime": own or any("runtime" in inspect.signature(hook).parameters for hook in hooks),
        "more than a text": not isinstance(prompt, str)
        and not (prompt and all(type(m.content) is str for m in prompt)),
    }
    return ", ".join(what for what, needed in needs.items() if needed)


ADAPTERS: dict[str, tuple[str, Callable[[ModuleType, str], Callable[[], Env]]]] = {
    "gymnasium": ("gymnasium", _gymnasium),
    "reasoning_gym": ("reasoning_gym", _reasoning_gym),
    "verifiers": ("verifiers.v1", _verifiers),
}


if __name__ == "__main__":
    path, count, first = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0
    adapter(path)
    for number in range(first, first + count):
        print(json.dumps({"input": f"{path.partition(':')[2]}:", "label": number}))
