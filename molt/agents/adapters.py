"""Environments of other libraries as agents: `--train.agent_path gymnasium:ID`, `reasoning_gym:NAME`, `verifiers:ID`.

    python -m molt.agents.adapters reasoning_gym:leg_counting 1000 > rows.jsonl

writes a dataset for any of them (`--data.input_key input --data.label_key label`). The label of a row is the number
of a task, which all rollouts of its group share; a third argument starts elsewhere, for held-out rows.

* gymnasium: the row's prompt (say there what the actions do), then the first observation: of a `Text` space, or
  rendered as `ansi`. The action is the answer (`Text`) or its last whole number (`Discrete`). An answer that is
  neither plays a random action, for any fixed reward might pay better than playing; `info/invalid` counts them.
* reasoning_gym: the row's prompt, then a question; the library scores what is between <answer> and </answer>, in the
  process of a scorer (`reasoning_gym_scorer.py`): some of its scorers `eval` the answer.
* verifiers: a taskset of `verifiers.v1` whose tasks take one answer and are judged without tools or a container.
"""

import argparse
import asyncio
import importlib
import inspect
import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from types import ModuleType
from typing import Any

from molt.agents.env import Env, Result
from molt.errors import AgentError, did_you_mean

INTEGER = re.compile(r"(?<![\d.])(?:(?<!\w)-)?\d{1,18}(?!\.?\d)")
COLOUR = re.compile(r"\x1b\[([\d;]*)m")
ANSWER_FORMAT = "Give the final answer between <answer> and </answer>."


def adapter(agent_path: str) -> Callable[[], Env]:
    """What makes the `Env` of `KIND:NAME`. Raises AgentError: no package, no such name, or it does not fit."""
    kind, _, name = agent_path.partition(":")
    library = ADAPTERS[kind]
    try:
        package = importlib.import_module(library.module)
    except ImportError as error:
        raise AgentError(
            f"`train.agent_path` (={agent_path}): {library.module} cannot be imported ({error}), so no episode could "
            f"start. Run: pip install {kind.replace('_', '-')}"
        ) from error
    try:
        return library.adapt(package, name)
    except Exception as error:  # the library may raise anything
        raise AgentError(
            f"`train.agent_path` (={agent_path}): {str(error).rstrip('.')}. No episode could start. Give another name."
        ) from error


def _task_number(state: dict[str, Any]) -> int:
    """The label: the number of the task."""
    try:
        return int(state["label"])
    except (TypeError, ValueError):
        raise AgentError(
            f"label (={state['label']!r}) is not the number of a task: a group's rollouts would get different tasks. "
            "Set data.label_key to a column of numbers >= 0; python -m molt.agents.adapters KIND:NAME COUNT writes one."
        ) from None


def _with_text(state: dict[str, Any], text: str) -> dict[str, Any]:
    """The state with `text` after the row's prompt."""
    prompt = state["prompt"]
    if isinstance(prompt, str):
        return {**state, "prompt": f"{prompt}\n\n{text}"}
    last = {**prompt[-1], "content": f"{prompt[-1]['content']}\n\n{text}"}
    return {**state, "prompt": [*prompt[:-1], last]}


class GymnasiumEnv(Env):
    """One episode of a Gymnasium environment."""

    def __init__(self, make: Callable[[], Any], discrete: type):
        """make: builds the environment. discrete: the library's class of spaces of numbers."""
        self._make = make
        self._discrete = discrete
        self._env: Any = None
        """The environment, from `reset` on."""
        self._invalid = 0
        """Answers that were not an action."""

    async def reset(self, state: dict[str, Any]) -> dict[str, Any]:
        seed = _task_number(state)
        self._env = await asyncio.to_thread(self._make)
        space = self._env.action_space
        space.seed(seed)
        observation, _ = await asyncio.to_thread(self._env.reset, seed=seed)
        text = self._text(observation)
        if isinstance(space, self._discrete):
            text += f"\n\nAnswer with the number of your action, {space.start} to {space.start + space.n - 1}."
        return _with_text(state, text)

    async def step(self, state: dict[str, Any]) -> Result:
        action = self._action(state["action"])
        observation, reward, terminated, truncated, info = await asyncio.to_thread(self._env.step, action)
        return Result(
            reward=reward,
            observation=self._text(observation),
            terminated=bool(terminated),
            truncated=bool(truncated),
            info={**info, "invalid": self._invalid},
        )

    async def close(self) -> None:
        if self._env is not None:
            await asyncio.to_thread(self._env.close)

    def _text(self, observation: Any) -> str:
        """The observation as text. A highlighted part of a rendering (`ESC[41m` ... `ESC[0m`) comes in brackets."""
        if self._env.render_mode != "ansi":
            return observation
        return COLOUR.sub(_bracket, self._env.render()).strip()

    def _action(self, answer: str) -> Any:
        """The action that the answer names, or a random one."""
        space = self._env.action_space
        action = answer.strip()
        if isinstance(space, self._discrete):
            numbers = INTEGER.findall(answer)
            action = int(numbers[-1]) if numbers else None
        if action is not None and space.contains(action):
            return action
        self._invalid += 1
        return space.sample()


def _bracket(code: re.Match[str]) -> str:
    """An opening bracket for an escape sequence that sets a colour, a closing one for a reset."""
    sets_colour = code[1].strip("0") != ""
    return "[" if sets_colour else "]"


def _gymnasium(gymnasium: ModuleType, name: str) -> Callable[[], Env]:
    spaces = gymnasium.spaces
    env = gymnasium.make(name)
    observations = env.observation_space
    actions = env.action_space
    render_modes = env.metadata.get("render_modes") or []
    env.close()

    reads_text = isinstance(observations, spaces.Text)
    if not reads_text and "ansi" not in render_modes:
        raise ValueError(
            f"its observations are {observations}, but the model reads text and there is no `ansi` rendering"
        )
    if not isinstance(actions, spaces.Text | spaces.Discrete):
        raise ValueError(
            f"its actions are {actions}, but the model can only give a Text or the number of a Discrete one"
        )
    make = partial(gymnasium.make, name, disable_env_checker=True)
    if not reads_text:
        make = partial(make, render_mode="ansi")
    return partial(GymnasiumEnv, make, spaces.Discrete)


class ReasoningGymEnv(Env):
    """One task of a reasoning_gym dataset. It gives no reward: its scorer does."""

    lock = threading.Lock()
    """The library promises nothing about threads."""

    def __init__(self, name: str, dataset: Callable[[int], Any], extract: Callable[[str], str | None]):
        """name: of the dataset. dataset: the tasks of a seed. extract: the answer in a text."""
        self._name = name
        self._dataset = dataset
        self._extract = extract

    async def reset(self, state: dict[str, Any]) -> dict[str, Any]:
        entry = await asyncio.to_thread(self._draw, _task_number(state))
        return _with_text(state, f"{entry['question'].strip()}\n\n{ANSWER_FORMAT}")

    async def step(self, state: dict[str, Any]) -> Result:
        info = {
            "reasoning_gym": self._name,
            "answer": self._extract(state["action"]),
            "seed": str(self._seed),  # as text: a number would be a metric
            "entry": str(self._index),
        }
        return Result(0.0, info=info)

    def _draw(self, number: int) -> dict[str, Any]:
        """Task `number` of seed 0, in datasets that draw entry i from seed + i and may have only so many entries."""
        with self.lock:
            self._index = number % len(self._dataset(0))
            self._seed = number - self._index
            return self._dataset(self._seed)[self._index]


def _reasoning_gym(library: ModuleType, name: str) -> Callable[[], Env]:
    known = library.factory.DATASETS
    if name not in known:
        raise ValueError(f"there is no dataset {name!r}.{did_you_mean(name, known)}")

    @lru_cache(64)
    def dataset(seed: int) -> Any:
        return library.create_dataset(name, seed=seed)

    dataset(0)
    return partial(ReasoningGymEnv, name, dataset, library.utils.extract_answer)


class VerifiersEnv(Env):
    """One task of a verifiers taskset."""

    def __init__(self, vf: ModuleType, draw: Callable[[int], Any]):
        """draw: the task of a number."""
        self._vf = vf
        self._draw = draw

    async def reset(self, state: dict[str, Any]) -> dict[str, Any]:
        self._task = self._draw(_task_number(state))
        self._messages = self._first_messages()
        shown = [message.model_dump(exclude_none=True) for message in self._messages]
        if isinstance(state["prompt"], str):
            return {**state, "prompt": "\n\n".join(message["content"] for message in shown)}
        return {**state, "prompt": shown}

    async def step(self, state: dict[str, Any]) -> Result:
        trace = self._trace(state["action"], state["finish_reason"])
        await self._task.score(trace)

        info = {}
        for name, value in trace.metrics.items():
            if value is not None:
                info[name] = value
        for name, reward in trace.rewards.items():
            info[name] = reward.score
        return Result(trace.reward, info=info)

    def _first_messages(self) -> list[Any]:
        data = self._task.data
        messages = []
        if data.system_prompt:
            messages.append(self._vf.SystemMessage(content=data.system_prompt))
        if isinstance(data.prompt, str):
            messages.append(self._vf.UserMessage(content=data.prompt))
        else:
            messages.extend(data.prompt)
        return messages

    def _trace(self, action: str, finish_reason: str) -> Any:
        """The finished conversation as the library's judges read it."""
        vf = self._vf
        task = self._task
        reasoning, _, content = action.rpartition("</think>")
        answer = vf.AssistantMessage(
            content=content.strip(),
            reasoning_content=reasoning.removeprefix("<think>").strip() or None,
        )
        trace = vf.Trace(
            task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
            agent=vf.AgentInfo(config=vf.AgentConfig()),
            state=vf.state.state_cls(type(task))(),
            calls=[vf.ModelCall(node=len(self._messages), finish_reason=finish_reason)],
        )
        parent = None
        for index, message in enumerate([*self._messages, answer]):
            trace.nodes.append(vf.MessageNode(parent=parent, message=message, sampled=message is answer))
            parent = index
        trace.is_completed = True
        trace.ok = True
        return trace


class VerifiersTasks:
    """The tasks of a taskset, read as far as they were needed."""

    def __init__(self, name: str, taskset: Any):
        self._name = name
        self._source: Iterator[Any] = iter(taskset)
        self._tasks: list[Any] = []

    def __call__(self, number: int) -> Any:
        """Raises `AgentError` if there are not so many."""
        while len(self._tasks) <= number:
            try:
                self._tasks.append(next(self._source))
            except StopIteration:
                break
        if not 0 <= number < len(self._tasks):
            last = len(self._tasks) - 1
            raise AgentError(f"label (={number}): verifiers:{self._name} has no such task. Use 0 to {last}.")
        return self._tasks[number]


def _verifiers(vf: ModuleType, name: str) -> Callable[[], Env]:
    taskset = vf.load_taskset(vf.taskset_config_type(name)(id=name))
    tasks = VerifiersTasks(name, taskset)
    unmet = _unmet_needs(vf, name, taskset, tasks(0))
    if unmet:
        raise ValueError(f"its tasks need {', '.join(unmet)}, but here one answer is judged by itself")
    return partial(VerifiersEnv, vf, tasks)


def _unmet_needs(vf: ModuleType, name: str, taskset: Any, task: Any) -> list[str]:
    """What a task needs besides one answer."""
    kind = type(task)
    unmet = []
    if vf.environment_class(name) is not vf.SingleAgentEnv:
        unmet.append("an Env of their own")
    if kind.toolsets(task.config) or type(taskset).toolsets(taskset.config):
        unmet.append("tools")
    if kind.NEEDS_CONTAINER or task.data.image:
        unmet.append("a container")
    if _needs_runtime(vf, task):
        unmet.append("a runtime")
    if not _is_text(task.data.prompt):
        unmet.append("more than a text")
    return unmet


def _needs_runtime(vf: ModuleType, task: Any) -> bool:
    kind = type(task)
    if kind.setup is not vf.Task.setup or kind.finalize is not vf.Task.finalize:
        return True
    hooks = [*task.hooks("reward"), *task.hooks("metric")]
    return any("runtime" in inspect.signature(hook).parameters for hook in hooks)


def _is_text(prompt: Any) -> bool:
    """Whether a prompt is a string, or messages with a string each."""
    if isinstance(prompt, str):
        return True
    return bool(prompt) and all(type(message.content) is str for message in prompt)


@dataclass(frozen=True)
class Library:
    """A library of environments."""

    module: str
    adapt: Callable[[ModuleType, str], Callable[[], Env]]
    """`(module, name)`: what makes the `Env`. Raises anything if the name is unknown or does not fit."""


ADAPTERS = {
    "gymnasium": Library("gymnasium", _gymnasium),
    "reasoning_gym": Library("reasoning_gym", _reasoning_gym),
    "verifiers": Library("verifiers.v1", _verifiers),
}


def write_rows(agent_path: str, count: int, first: int) -> None:
    """Print the rows of tasks `first` to `first + count - 1`, a JSON object a line. Raises as `adapter` does."""
    adapter(agent_path)
    name = agent_path.partition(":")[2]
    for number in range(first, first + count):
        print(json.dumps({"input": f"{name}:", "label": number}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="molt.agents.adapters", description="Write a dataset of numbered tasks.")
    parser.add_argument("agent_path", help="KIND:NAME, as --train.agent_path takes it")
    parser.add_argument("count", type=int, help="how many tasks")
    parser.add_argument("first", type=int, nargs="?", default=0, help="the number of the first one")
    arguments = parser.parse_args()
    write_rows(arguments.agent_path, arguments.count, arguments.first)
