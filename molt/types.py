"""The nouns: every arrow of the data flow carries one of these.

**The alignment rule.** Every per-token array (`molt.columns`) has the length of `token_ids`, and entry
*t* describes token *t*. There is no T-1 axis anywhere; the shift between logits and tokens lives in
`molt.models.heads` alone. `versions >= 0` is the loss mask at birth; it can be switched off later,
never on.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypedDict, get_args

import numpy as np

from molt.columns import TokenColumns

EVALUATION_EPOCH = -1
"""The epoch of evaluation prompts: their sampling seeds never meet those of training."""


@dataclass(frozen=True)
class Lineage:
    """Which training batch the weights of a version are from.

    Without a roll-back that is the version itself. A version is never used twice: what is rolled back to is published
    under the next unused one, so versions and batches drift apart by the batches that were abandoned.
    """

    rollbacks: tuple[tuple[int, int], ...] = ()
    """`(version, step)`, ascending: this version has the weights after `step` batches, and counting goes on there."""

    def version(self, step: int) -> int:
        """The version of the weights after `step` batches."""
        if not self.rollbacks:
            return step
        first_version, first_step = self.rollbacks[-1]
        return first_version + step - first_step

    def steps(self, versions: np.ndarray) -> np.ndarray:
        """Batches trained before each version of the lineage, int64 of the same shape as `versions`."""
        first_versions = np.array([0, *(version for version, _ in self.rollbacks)])
        first_steps = np.array([0, *(step for _, step in self.rollbacks)])
        place = np.searchsorted(first_versions, versions, side="right") - 1
        return versions - first_versions[place] + first_steps[place]

    def rolled_back(self, step: int, published: int) -> "Lineage":
        """The lineage that continues from `step`; `published` is the highest version that was ever published."""
        kept = tuple(rollback for rollback in self.rollbacks if rollback[1] <= step)
        lineage = Lineage(kept)
        if lineage.version(step) >= published:
            return lineage
        return Lineage((*kept, (published + 1, step)))


NO_ROLLBACK = Lineage()


Json = dict[str, Any]
"""A JSON object."""


class OnEvent(Protocol):
    """Takes one line of `events.jsonl`."""

    def __call__(self, kind: str, /, **fields: Any) -> None: ...


class Ledger(TypedDict):
    """What a checkpoint holds of the prompts."""

    position: int
    """The next place in the prompt stream."""
    in_flight: list[int]
    """Places of prompts that were started and not finished, or that wait for a slot."""
    filter: list[int]
    """`[judged, filtered]` groups of dynamic filtering."""


EMPTY_LEDGER: Ledger = {"position": 0, "in_flight": [], "filter": [0, 0]}
"""The ledger of a run that has not begun."""


@dataclass(frozen=True)
class Metric:
    """A `(sum, count)` pair from where it arises; its value is `total / count`.

    A metric whose name ends in `max` is a maximum: it merges by the larger `total`.
    """

    total: float
    count: float = 1.0


@dataclass(frozen=True)
class Prompt:
    """One dataset row. `(epoch, position)` is its identity in the run's prompt stream."""

    epoch: int
    position: int
    row: int
    """Index in the dataset."""
    messages: list[dict[str, Any]] | None
    """Chat messages, or None for a plain-text prompt."""
    text: str | None
    """Plain text, or None for chat messages. Exactly one of the two is set."""
    label: Any = None
    data_source: str = ""
    tools: list[dict[str, Any]] | None = None
    """Tool schemas offered by the chat template, or None."""

    @property
    def group_id(self) -> str:
        """Unique in the run: `epoch:position`."""
        return f"{self.epoch}:{self.position}"


@dataclass(frozen=True)
class Media:
    """An image in a token stream: the tokens that stand for it, which nobody sampled, and the image itself."""

    start: int
    """Place of the first of its tokens in the stream."""
    length: int
    token_id: int
    """What stands for all of them in a text that no image has been put into yet."""
    data: bytes
    """The image file, as the client sent it."""


@dataclass(frozen=True)
class Turn:
    """One model call: exactly what the engine returned."""

    prompt_ids: np.ndarray
    """int32 `[P]`, the ids the engine was given."""
    sampled: TokenColumns
    """The tokens it sampled, with the weights and the distribution they are from."""
    finish_reason: str
    """`stop` or `length`."""

    @property
    def token_ids(self) -> np.ndarray:
        """int32 `[T]`, the ids it sampled."""
        return self.sampled.token_ids

    @property
    def logprobs(self) -> np.ndarray:
        """float32 `[T]`, of each sampled token."""
        return self.sampled.logprobs

    @property
    def versions(self) -> np.ndarray:
        """int32 `[T]`, weights that sampled each token."""
        return self.sampled.versions


@dataclass(frozen=True)
class Sample:
    """One segment of a rollout, ready to train on."""

    columns: TokenColumns
    media: tuple[Media, ...] = ()
    """What the context of its generated tokens shows, in order."""

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def token_ids(self) -> np.ndarray:
        """int32 `[T]`."""
        return self.columns.token_ids

    @property
    def versions(self) -> np.ndarray:
        """int32 `[T]`, weights that sampled token t, or `NOT_GENERATED`."""
        return self.columns.versions

    @property
    def logprobs(self) -> np.ndarray:
        """float32 `[T]`, behaviour log-prob of token t, 0 where it was not generated."""
        return self.columns.logprobs

    @property
    def mask(self) -> np.ndarray:
        """bool `[T]`, True where the policy generated the token."""
        return self.columns.mask


@dataclass(frozen=True)
class Scored:
    """The agent returned a finite scalar. Enters loss and baseline."""

    reward: float
    score: float


class PolicyFailure(Exception):
    """Raised by an agent for the *model's* own doing (an unusable answer, a rejected call).

    Trained like a scored rollout, with `reward`, and counted under `reason`.
    """

    def __init__(self, reward: float = 0.0, reason: str = "rejected"):
        super().__init__(reward, reason)
        self.reward = float(reward)
        self.reason = reason

    @property
    def score(self) -> float:
        return self.reward


class InfraFailure(Exception):
    """The infrastructure failed (exception, timeout, dead engine, non-finite reward).

    Leaves loss *and* baseline, is retried within `rollout.max_retries`, and is counted by `reason`.
    """

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class Unscored:
    """The episode has ended, and its scorer has not given a reward yet."""

    trajectory: str
    """What the scorer is given, as JSON (`agents/trajectory.py`)."""


Outcome = Scored | PolicyFailure | InfraFailure | Unscored


@dataclass(frozen=True)
class Scoring:
    """How a rollout got its reward from a scorer."""

    seconds: float
    """From the end of the episode, waiting for a process included."""
    is_cached: bool | None
    """Whether the score came from `reward.cache_dir`; None: there is no cache."""
    failures: tuple[InfraFailure, ...] = ()
    """Scores of the same trajectory that failed before."""


PROMPT_TOO_LONG = "prompt_too_long"
"""The reason of a `ReplaceGroup` whose prompt leaves no room for an answer."""


class ReplaceGroup(Exception):
    """Raised by an agent: the prompt's group is not worth training, and another prompt takes its place.

    It is no failure: nothing is retried, and the group is counted under `reason`.
    """

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


CutReason = Literal["length", "turns", "time", "agent"]
"""Why a rollout ended before its end. length: its last answer was cut (`max_new_tokens`, or the context), or no further
one fits; turns: `rollout.max_turns`; time: a time limit of the agent; agent: another limit of the agent."""
CUT_REASONS: tuple[CutReason, ...] = get_args(CutReason)


@dataclass(frozen=True)
class SampleInfo:
    """What the driver knows of a sample without fetching its arrays."""

    tokens: int
    trained_tokens: int
    oldest_version: int
    media: int = 0
    """How many images its context shows."""


@dataclass(frozen=True)
class RolloutInfo:
    """The light record of one finished rollout; its heavy arrays are `Sample`s elsewhere."""

    group_id: str
    index: int
    """0 .. n_samples_per_prompt - 1."""
    outcome: Outcome
    cut: CutReason | None
    """Why it was cut before its end; None: it was not."""
    turns: int
    samples: tuple[SampleInfo, ...]
    duration_s: float = 0.0
    failures: tuple[InfraFailure, ...] = ()
    """Infrastructure failures of the attempts before this one."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The numbers in `Result.info`."""
    scoring: Scoring | None = None
    """None without a scorer."""

    @property
    def truncated(self) -> bool:
        """Whether it was cut before its end."""
        return self.cut is not None

    @property
    def failed(self) -> bool:
        """Whether the infrastructure failed in every attempt: there is no reward then."""
        return isinstance(self.outcome, InfraFailure)

    @property
    def graded(self) -> Scored | PolicyFailure:
        """The outcome of a rollout that has a reward; raises ValueError for another."""
        if isinstance(self.outcome, InfraFailure | Unscored):
            raise ValueError(f"rollout {self.index} of group {self.group_id} has no reward: {self.outcome!r:.200}")
        return self.outcome

    @property
    def reward(self) -> float:
        return self.graded.reward

    @property
    def score(self) -> float:
        return self.graded.score

    @property
    def generated_tokens(self) -> int:
        return sum(sample.trained_tokens for sample in self.samples)


@dataclass
class Group:
    """The rollouts of one prompt, from its start until it is trained and published, or discarded."""

    prompt: Prompt
    order: int
    """Place of its prompt in the stream, the order of starting; batches take finished groups oldest first."""
    start_step: int
    """Batches trained when the group started: no token of it is of earlier weights."""
    rollouts: list[RolloutInfo] = field(default_factory=list)
    """Empty while running."""
    samples: Any = None
    """Reference (Ray's) to the heavy part, `list[list[Sample]]` by rollout and segment."""
    unscored: list[RolloutInfo] = field(default_factory=list)
    """The rollouts while all are past generation and some wait for their scores; else empty."""

    @property
    def finished(self) -> bool:
        return bool(self.rollouts)

    @property
    def scoring(self) -> bool:
        """Whether it is past generation, and waits for scores."""
        return bool(self.unscored)
