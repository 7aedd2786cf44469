"""Adapters: what a model is shown and what its answer becomes, with stand-ins of the libraries and, where installed,
with the libraries themselves."""

import asyncio
import json
import random
import runpy
import sys
import warnings
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest

from molt.agents import Trajectory, reasoning_gym_scorer
from molt.agents.load import load_runner, resolved
from molt.agents.step_runner import EpisodeContext
from molt.chat.render import Renderer
from molt.errors import AgentError
from molt.rollout.reward import trajectory_of
from molt.rollout.samples import to_sample
from molt.types import Prompt, Scored
from tests.examples.scripted import TOKENIZER, Script


def play(agent_path: str, *answers: str, label: object = 0, chat: bool = True, **limits):
    """One episode; the model answers what it is told. Returns the episode and the prompts the model saw."""
    script = Script(answers)
    messages = [{"role": "user", "content": "Rules."}] if chat else None
    prompt = Prompt(0, 0, 0, messages, None if chat else "Rules.", label=label)
    context = EpisodeContext(prompt, script, Renderer(TOKENIZER, apply_chat_template=chat), 0, 4096, **limits)
    return asyncio.run(load_runner(agent_path).run(context)), script.prompts


def user(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


class Space:
    def seed(self, seed):
        self.random = random.Random(seed)


class Text(Space):
    def contains(self, action):
        return isinstance(action, str) and 1 <= len(action) <= 4

    def sample(self):
        return "zzzz"


class Discrete(Space):
    def __init__(self, n, start=0):
        self.n, self.start = n, start

    def contains(self, action):
        return isinstance(action, int) and self.start <= action < self.start + self.n

    def sample(self):
        return self.start


class Box(Space):
    def __repr__(self):
        return "Box(4)"


class Board:
    """Adds up its actions: the target is 10 times the seed, the episode is cut after 4 steps."""

    metadata = {"render_modes": ["human", "ansi"]}
    made: list["Board"] = []

    def __init__(self, observation_space, action_space, render_mode=None):
        self.observation_space, self.action_space, self.render_mode = observation_space, action_space, render_mode
        self.actions, self.closed = [], False
        self.made.append(self)

    def reset(self, seed):
        self.seed = seed
        return f"seed {seed}", {"ignored": 1}

    def step(self, action):
        self.actions.append(action)
        at_target = action == self.seed
        return (
            f"after {action}",
            1.0 if at_target else -0.5,
            at_target,
            len(self.actions) == 4,
            {"tries": len(self.actions)},
        )

    def render(self):
        return f"  \x1b[41mS\x1b[0mF {len(self.actions)} \x1b[34;1mG\x1b[0m\n"

    def close(self):
        self.closed = True


@pytest.fixture
def gymnasium(monkeypatch):
    """A library with the environments `text`, `numbers`, `board`, `angles`, `arms`."""
    spaces = {
        "text": (Text(), Text()), "numbers": (Text(), Discrete(5, start=-2)), "board": (Box(), Discrete(4)),
        "angles": (Box(), Text()), "arms": (Text(), Box()),
    }  # fmt: skip

    class Unrendered(Board):
        metadata = {"render_modes": ["human"]}

    def make(name, disable_env_checker=None, **options):
        if name not in spaces:
            raise KeyError(f"no environment {name}")
        return (Unrendered if name == "angles" else Board)(*spaces[name], **options)

    library = ModuleType("gymnasium")
    library.make, library.spaces = make, SimpleNamespace(Text=Text, Discrete=Discrete)
    monkeypatch.setitem(sys.modules, "gymnasium", library)
    monkeypatch.setattr(Board, "made", [])


def test_text_goes_both_ways_and_the_episode_ends_as_the_environment_says(gymnasium):
    episode, prompts = play("gymnasium:text", " up ", "down", "x", "y", label=7)
    assert prompts[0] == user("Rules.\n\nseed 7")
    assert prompts[1].endswith(" up <|im_end|>\n" + user("after up"))
    assert episode.outcome == Scored(-2.0, -2.0) and episode.truncated  # 4 * -0.5; cut by its time limit
    assert episode.info == {"tries": 4.0, "invalid": 0.0}
    checked, played = Board.made
    assert played.actions == ["up", "down", "x", "y"] and checked.closed and played.closed


def test_a_plain_prompt_stays_text(gymnasium):
    _, prompts = play("gymnasium:text", "a", "b", "c", "d", label="3", chat=False)
    assert prompts[0] == "Rules.\n\nseed 3"


def test_the_last_whole_number_is_the_action(gymnasium):
    episode, prompts = play("gymnasium:numbers", "From 1.5 and 40: -2!", "pick-0.", "2", label=2)
    assert prompts[0] == user("Rules.\n\nseed 2\n\nAnswer with the number of your action, -2 to 2.")
    assert Board.made[-1].actions == [-2, 0, 2]
    assert episode.outcome == Scored(0.0, 0.0) and not episode.truncated  # -0.5 - 0.5 + 1


@pytest.mark.parametrize("answer", ["", "none", "3", "-3", "0.5", "9" * 30])
def test_an_answer_that_is_no_action_plays_one_of_the_spaces_own(gymnasium, answer):
    episode, _ = play("gymnasium:numbers", answer, "2", label=2)
    assert Board.made[-1].actions == [-2, 2] and episode.info["invalid"] == 1.0
    episode, _ = play("gymnasium:text", "too long", "b", "c", "d")
    assert Board.made[-1].actions == ["zzzz", "b", "c", "d"] and episode.info["invalid"] == 1.0


def test_other_observations_are_rendered(gymnasium):
    _, prompts = play("gymnasium:board", "1", "3", label=3)
    assert prompts[0] == user("Rules.\n\n[S]F 0 [G]\n\nAnswer with the number of your action, 0 to 3.")
    assert prompts[1].endswith(user("[S]F 1 [G]"))
    assert Board.made[-1].render_mode == "ansi"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("angles", r"its observations are Box\(4\), but the model reads text and there is no `ansi` rendering"),
        ("arms", r"its actions are Box\(4\), but the model can only give a Text or the number of a Discrete"),
        ("tetx", r"`train.agent_path` \(=gymnasium:tetx\): 'no environment tetx'. No episode could start"),
    ],
)
def test_what_cannot_be_played_is_refused_at_the_start(gymnasium, name, message):
    with pytest.raises(AgentError, match=message):
        load_runner(f"gymnasium:{name}")


@pytest.mark.parametrize("label", [None, "seven", [1]])
def test_a_label_that_is_no_number_is_refused(gymnasium, label):
    with pytest.raises(AgentError, match=r"label \(=.*\) is not the number of a task.*Set data.label_key"):
        play("gymnasium:text", "a", label=label)


class Questions:
    """3 tasks per seed, as some datasets have only so many."""

    def __init__(self, seed):
        self.seed = seed

    def __len__(self):
        return 3

    def __getitem__(self, i):
        if i >= 3:
            raise IndexError(i)
        return {"question": f"What is {self.seed + i} + 1?\n", "answer": str(self.seed + i + 1)}

    def score_answer(self, answer, entry):
        return 1.0 if answer == entry["answer"] else 0.25 if answer else 0.0


@pytest.fixture
def reasoning_gym(monkeypatch):
    library = ModuleType("reasoning_gym")
    library.factory = SimpleNamespace(DATASETS={"sums": None})
    library.create_dataset = lambda name, seed: Questions(seed)
    library.utils = SimpleNamespace(
        extract_answer=lambda text: text.split("<answer>")[1].split("</answer>")[0] if "<answer>" in text else None
    )
    monkeypatch.setitem(sys.modules, "reasoning_gym", library)


def scored_by_the_library(episode):
    """The reward as its scorer computes it, which a run does in a process apart (tests/rollout/test_reward.py)."""
    reasoning_gym_scorer.dataset.cache_clear()
    prompt = Prompt(0, 0, 0, None, "Rules.", label=0)
    trajectory = trajectory_of(prompt, episode, [to_sample(episode.turns)])
    return reasoning_gym_scorer.score(Trajectory.from_json(trajectory.to_json()))


@pytest.mark.parametrize("label", [0, 2, 3, 100])
def test_a_question_is_asked_and_the_library_scores_the_answer(reasoning_gym, label):
    answer = f"so it is <answer>{label + 1}</answer>"
    episode, prompts = play("reasoning_gym:sums", answer, label=label)
    how = "Give the final answer between <answer> and </answer>."
    assert prompts == [user(f"Rules.\n\nWhat is {label} + 1?\n\n{how}")]
    assert episode.outcome == Scored(0.0, 0.0) and not episode.truncated and not episode.info
    assert scored_by_the_library(episode) == 1.0
    assert scored_by_the_library(play("reasoning_gym:sums", "<answer>no</answer>", label=label)[0]) == 0.25
    assert scored_by_the_library(play("reasoning_gym:sums", str(label + 1), label=label)[0]) == 0.0


def test_an_unknown_dataset_names_the_nearest(reasoning_gym):
    with pytest.raises(AgentError, match=r"there is no dataset 'sum'. Did you mean 'sums'\?"):
        load_runner("reasoning_gym:sum")


class Record(SimpleNamespace):
    def model_dump(self, exclude_none):
        assert exclude_none
        return {name: value for name, value in vars(self).items() if value is not None}


class Task:
    """Judged by its last reply; the tests give subclasses what does not fit."""

    NEEDS_CONTAINER = False
    config, key, hash = None, "k", "h"

    def __init__(self, number, prompt=None, image=None):
        system = "Be brief." if number == 1 else None
        self.data = SimpleNamespace(
            prompt=prompt or f"task {number}", system_prompt=system, image=image, want=str(number)
        )

    async def setup(self): ...
    async def finalize(self): ...

    @classmethod
    def toolsets(cls, config):
        return []

    def hooks(self, kind):
        return [self.right] if kind == "reward" else []

    def right(self, trace): ...

    async def score(self, trace):
        *context, answer = trace.nodes
        assert [node.parent for node in trace.nodes] == [None, *range(len(context))]
        assert [node.sampled for node in trace.nodes] == [False] * len(context) + [True]
        assert trace.calls[0].node == len(context) and trace.calls[0].finish_reason == "stop"
        assert trace.task.data is self.data and trace.state == "state"
        trace.rewards["right"] = SimpleNamespace(score=float(answer.message.content == self.data.want))
        trace.metrics["reasoned"] = float(answer.message.reasoning_content is not None)
        trace.reward = 2 * trace.rewards["right"].score


class Tasks:
    config = None
    kind: type[Task] = Task

    def __iter__(self):
        return (self.kind(i) for i in range(3))

    @classmethod
    def toolsets(cls, config):
        return []


@pytest.fixture
def verifiers(monkeypatch):
    """`verifiers.v1` with one taskset; returns the namespace, for tests to bend."""
    library = ModuleType("verifiers.v1")
    tasks = Tasks()
    library.taskset_config_type = lambda name: lambda id: id
    library.load_taskset = lambda config: tasks
    library.environment_class = lambda name: library.SingleAgentEnv
    library.SingleAgentEnv, library.Task, library.tasks = object(), Task, tasks
    library.state = SimpleNamespace(state_cls=lambda kind: lambda: "state")
    for role in ("system", "user", "assistant"):
        setattr(library, f"{role.title()}Message", partial(Record, role=role))
    for name in ("TraceTask", "AgentInfo", "AgentConfig", "ModelCall", "MessageNode"):
        setattr(library, name, SimpleNamespace)
    library.Trace = lambda **fields: SimpleNamespace(nodes=[], rewards={}, metrics={"unscored": None}, **fields)
    monkeypatch.setitem(sys.modules, "verifiers", ModuleType("verifiers"))
    monkeypatch.setitem(sys.modules, "verifiers.v1", library)
    return library


def test_a_task_is_shown_as_it_is_and_judged(verifiers):
    episode, prompts = play("verifiers:sums", "<think>hm</think>\n\n1", label=1)
    assert prompts == ["<|im_start|>system\nBe brief.<|im_end|>\n" + user("task 1")]
    assert episode.outcome == Scored(2.0, 2.0) and episode.info == {"right": 1.0, "reasoned": 1.0}
    episode, prompts = play("verifiers:sums", "1", label=2, chat=False)
    assert prompts == ["task 2"]
    assert episode.outcome == Scored(0.0, 0.0) and episode.info == {"right": 0.0, "reasoned": 0.0}


@pytest.mark.parametrize("label", [3, -1])
def test_a_label_beyond_the_tasks_is_refused(verifiers, label):
    with pytest.raises(AgentError, match=rf"label \(={label}\): verifiers:sums has no such task. Use 0 to"):
        play("verifiers:sums", "1", label=label)


class Prepared(Task):
    async def setup(self): ...


class Boxed(Task):
    NEEDS_CONTAINER = True


class Inspected(Task):
    def right(self, trace, runtime): ...


class Armed(Task):
    @classmethod
    def toolsets(cls, config):
        return ["search"]


class Opened(Task):
    def __init__(self, number):
        super().__init__(number)
        self.data.prompt = None


class Seen(Task):
    def __init__(self, number):
        super().__init__(number, prompt=[Record(role="user", content=[Record(type="image_url")])])


@pytest.mark.parametrize(
    ("kind", "needs"),
    [
        (Prepared, "a runtime"),
        (Inspected, "a runtime"),
        (Boxed, "a container"),
        (Armed, "tools"),
        (Opened, "more than a text"),
        (Seen, "more than a text"),
    ],
)
def test_tasks_that_need_more_than_an_answer_are_refused(verifiers, kind, needs):
    verifiers.tasks.kind = kind
    with pytest.raises(AgentError, match=rf"its tasks need {needs}, but here one answer is judged by itself\. No"):
        load_runner("verifiers:sums")


def test_an_environment_of_several_agents_is_refused(verifiers):
    verifiers.environment_class = lambda name: object()
    with pytest.raises(AgentError, match="its tasks need an Env of their own"):
        load_runner("verifiers:sums")


@pytest.mark.parametrize(
    ("module", "path", "command"),
    [
        ("gymnasium", "gymnasium:CartPole-v1", "pip install gymnasium"),
        ("reasoning_gym", "reasoning_gym:leg_counting", "pip install reasoning-gym"),
        ("verifiers", "verifiers:gsm8k", "pip install verifiers"),
    ],
)
def test_a_missing_package_is_named_with_the_command(monkeypatch, module, path, command):
    for name in [name for name in sys.modules if name.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(AgentError, match=rf"`train.agent_path` \(={path}\): {module}.* cannot be imported.*{command}$"):
        load_runner(path)


def test_the_path_of_an_environment_is_not_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolved("gymnasium:ALE/Pong-v5") == "gymnasium:ALE/Pong-v5"
    assert resolved("agent.py") == str(tmp_path / "agent.py")


def test_rows_are_written_for_an_environment_that_exists(reasoning_gym, monkeypatch, capsys):
    def write(*arguments: str):
        monkeypatch.setattr(sys, "argv", ["adapters", *arguments])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the module is imported already
            runpy.run_module("molt.agents.adapters", run_name="__main__")

    write("reasoning_gym:sums", "2", "5")
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows == [{"input": "sums:", "label": 5}, {"input": "sums:", "label": 6}]
    with pytest.raises(AgentError, match="there is no dataset"):
        write("reasoning_gym:nothing", "2")


def test_frozen_lake_of_gymnasium_itself():
    pytest.importorskip("gymnasium")
    path = "gymnasium:FrozenLake-v1"
    episode, prompts = play(path, *["I go right, 2."] * 100, label=1)
    how = "Answer with the number of your action, 0 to 3."
    assert prompts[0] == user(f"Rules.\n\n[S]FFF\nFHFH\nFFFH\nHFFG\n\n{how}") and "(Right)" in prompts[1]
    assert episode.outcome.reward in (0.0, 1.0) and episode.info["invalid"] == 0
    again, prompts_again = play(path, *["I go right, 2."] * 100, label=1)
    assert prompts_again == prompts and again.outcome == episode.outcome  # one label, one lake
    for name, message in (("CartPole-v1", "its observations are Box"), ("FrozenLak-v1", "Did you mean: `FrozenLake`")):
        with pytest.raises(AgentError, match=message):
            load_runner(f"gymnasium:{name}")


def test_leg_counting_of_reasoning_gym_itself():
    library = pytest.importorskip("reasoning_gym")
    entry = library.create_dataset("leg_counting", seed=500)[234]
    episode, prompts = play("reasoning_gym:leg_counting", f"<answer>{entry['answer']}</answer>", label=734)
    assert entry["question"].strip() in prompts[0] and scored_by_the_library(episode) == 1.0
    assert scored_by_the_library(play("reasoning_gym:leg_counting", "many", label=734)[0]) == 0.0
    with pytest.raises(AgentError, match="Did you mean 'leg_counting'"):
        load_runner("reasoning_gym:leg_countin")


TASKSET = """
import verifiers.v1 as vf

class SumData(vf.TaskData):
    answer: int

class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        return float(trace.last_reply == str(self.data.answer))

    @vf.metric
    async def cut(self, trace) -> float:
        return float(trace.is_truncated)

class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for i in range(3):
            data = SumData(idx=i, prompt=f"{i} + {i}?", system_prompt="A number.", answer=2 * i)
            yield SumTask(data, self.config.task)

__all__ = ["Sums"]
"""


def test_a_taskset_of_verifiers_itself(tmp_path, monkeypatch):
    pytest.importorskip("verifiers.v1")
    (tmp_path / "molt_sums.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(tmp_path)
    episode, prompts = play("verifiers:molt-sums", "<think>2 + 2</think>4", label=2)
    assert prompts == ["<|im_start|>system\nA number.<|im_end|>\n" + user("2 + 2?")]
    assert episode.outcome == Scored(2.0, 2.0) and episode.info == {"right": 1.0, "cut": 0.0}
    episode, _ = play("verifiers:molt-sums", "44444", label=2, max_new_tokens=3)
    assert episode.outcome == Scored(0.0, 0.0) and episode.info == {"right": 0.0, "cut": 1.0}
    with pytest.raises(AgentError, match="taskset 'not-there' not found"):
        load_runner("verifiers:not-there")
