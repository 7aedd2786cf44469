"""Every setting: typed, documented, range-checked. The string under a field is its help.

The command line is generated from these classes (`--actor.adam.lr 1e-6`). A component receives
*its* section, never the root, so a signature says which knobs matter. Nothing mutates a config after
construction; a value that depends on others is a property. Rules across settings are in `rules.py`.
The names of an estimator, a loss and an aggregation are text here: they are the rows of the tables in `algo/`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

from molt.errors import ConfigError
from molt.paths import FUNCTION, PATH, PATHS, TEMPLATE


class Range(NamedTuple):
    """The values that a setting may have, in its annotation; None (unset) always may."""

    holds: Callable[[Any], bool]
    consequence: str
    fix: str


def comma_list(text: str) -> list[str]:
    """The items of a setting such as `a.jsonl, b.jsonl`."""
    items = [item.strip() for item in text.split(",")]
    return [item for item in items if item]


def at_least(low: int, consequence: str, fix: str = "") -> Range:
    def holds(value: float) -> bool:
        return value >= low

    return Range(holds, consequence, fix or f"Use a value >= {low}")


def above_zero(consequence: str, fix: str = "Use a value > 0") -> Range:
    def holds(value: float) -> bool:
        return value > 0

    return Range(holds, consequence, fix)


def above_one(consequence: str, fix: str) -> Range:
    def holds(value: float) -> bool:
        return value > 1

    return Range(holds, consequence, fix)


def at_most_one(consequence: str, fix: str) -> Range:
    def holds(value: float) -> bool:
        return value <= 1

    return Range(holds, consequence, fix)


def fraction(of: str) -> Range:
    def holds(value: float) -> bool:
        return 0 <= value <= 1

    return Range(holds, f"it is a fraction of {of}", "Use a value in [0, 1]")


def share(consequence: str, fix: str = "Use a value in (0, 1]") -> Range:
    def holds(value: float) -> bool:
        return 0 < value <= 1

    return Range(holds, consequence, fix)


def count_or_minus_1(consequence: str, fix: str) -> Range:
    def holds(value: int) -> bool:
        return value == -1 or value > 0

    return Range(holds, consequence, fix)


def ascending(consequence: str, fix: str) -> Range:
    """A pair LOW HIGH with `LOW < HIGH`."""

    def holds(pair: tuple[float, float]) -> bool:
        low, high = pair
        return low < high

    return Range(holds, consequence, fix)


def _are_decays(betas: tuple[float, float]) -> bool:
    return all(0 <= beta < 1 for beta in betas)


def _surround_one(clip: tuple[float, float]) -> bool:
    low, high = clip
    return 0 < low < 1 and high > 0


def _is_band(threshold: tuple[float, ...]) -> bool:
    """LOW HIGH, or HIGH alone."""
    if len(threshold) == 1:
        return threshold[0] > 0
    if len(threshold) == 2:
        return 0 <= threshold[0] < threshold[1]
    return False


NOT_OFFERED = {
    "fsdp.param_dtype": {
        "fp16": (
            "molt does not scale losses, so the small gradients of a batch of many tokens would vanish in fp16. Use "
            "bf16, which has the range of fp32, or fp32"
        )
    },
}
"""By setting, values that other frameworks have and molt refuses, and why."""


def refuse_known(name: str, value: object) -> None:
    """Raise `ConfigError` with the reason for a value of `NOT_OFFERED`."""
    reasons = NOT_OFFERED.get(name, {})
    if isinstance(value, str) and value in reasons:
        raise ConfigError(f"`{name}` (={value}): {reasons[value]}.")


TOP_P = share("it is a share of the probability")
CADENCE = count_or_minus_1("no step is a multiple of it", "Use a positive cadence, or -1")


class Section:
    """Settings under one prefix, checked when they are made."""

    def __init_subclass__(cls, prefix: str = ""):
        cls.prefix = prefix

    def __post_init__(self):
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            value = getattr(self, name)
            for mark in getattr(hint, "__metadata__", ()):
                if isinstance(mark, Range) and value is not None and not mark.holds(value):
                    raise ConfigError(f"`{self.prefix}{name}` (={value}): {mark.consequence}. {mark.fix}.")


@dataclass(frozen=True)
class AdamConfig(Section, prefix="adam."):
    """AdamW."""

    lr: Annotated[float, at_least(0, "a negative rate climbs the loss")] = 1e-6
    """Peak learning rate."""
    betas: Annotated[
        tuple[float, float],
        Range(
            _are_decays,
            "the moments would never forget, or grow",
            "Use two values in [0, 1), such as 0.9 0.95",
        ),
    ] = (0.9, 0.95)
    """Decay of the first and second moment."""
    eps: Annotated[float, above_zero("a gradient of zero would divide by it")] = 1e-8
    """Term added to the denominator."""
    weight_decay: float = 0.0
    """Decoupled weight decay; never applied to vectors (norms, biases)."""


@dataclass(frozen=True)
class OptimizerConfig(Section):
    """Optimizer and learning rate of one trained model."""

    adam: AdamConfig = field(default_factory=AdamConfig)
    lr_scheduler: Literal["constant", "linear", "cosine", "polynomial", "inverse_sqrt", "wsd"] = "constant"
    """Shape of the learning rate after warm-up; constant still warms up."""
    lr_warmup_ratio: Annotated[float, fraction("all steps")] = 0.03
    """Fraction of all optimizer steps spent warming up; never 0 in the first step."""
    min_lr_ratio: Annotated[float, fraction("the peak")] = 0.1
    """The rate ends at this fraction of the peak."""
    max_norm: float = 1.0
    """Gradient-norm clip; <= 0 disables it."""


@dataclass(frozen=True)
class ModelConfig:
    """A model to train."""

    model_name_or_path: Annotated[str, PATH] = ""
    """Hugging Face model directory or hub name. Required."""
    gradient_checkpoint: Literal["full", "none"] = "full"
    """Recompute each layer in the backward pass instead of keeping its activations."""


@dataclass(frozen=True)
class ActorConfig(OptimizerConfig, ModelConfig, prefix="actor."):
    """The policy."""

    eps_clip_low_high: Annotated[
        tuple[float, float] | None,
        Range(
            _surround_one,
            "the clipped ratio would not surround 1",
            "Use two positive numbers, the first below 1, such as 0.2 0.2",
        ),
    ] = None
    """LOW HIGH, how far the ratio may leave 1; docs/losses.md has the formula of each loss. Unset: the loss's own."""
    dual_clip: Annotated[
        float | None,
        above_one("tokens of a negative advantage would lose their gradient at once", "Use 3.0, or unset"),
    ] = None
    """With A < 0 the loss of a token is at most this times |A|, if the loss has such a bound. Unset: not bounded."""
    loss_mode: str = "ppo"
    """The policy loss; see docs/losses.md. `algo.loss` names your own."""
    loss_agg_mode: str = "token-mean"
    """The weight of a token in the loss."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus; negative values punish entropy."""
    aux_loss_coef: Annotated[float, at_least(0, "it would unbalance the experts")] = 0.0
    """Weight of the load-balance loss of a mixture of experts."""
    freezing_steps: Annotated[int, at_least(0, "no step comes before the first")] = 0
    """Training batches at the start in which the critic alone is trained (gae)."""
    num_nodes: Annotated[int, at_least(1, "nothing would train")] = 1
    """Nodes that hold policy ranks."""
    num_gpus_per_node: Annotated[int | None, at_least(1, "nothing would train")] = None
    """Policy ranks per node; unset: what the engines leave free, 1 on a CPU."""


@dataclass(frozen=True)
class RefConfig(Section, prefix="ref."):
    """The reference model of the KL, or the teacher of on_policy_distill. It is frozen."""

    model_name_or_path: Annotated[str, PATH] = ""
    """Hugging Face model directory or hub name. Unset: the actor's."""
    num_nodes: Annotated[int, at_least(1, "nothing would score")] = 1
    """Nodes that hold reference ranks."""
    num_gpus_per_node: Annotated[int | None, at_least(1, "nothing would score")] = None
    """Reference ranks per node; unset: 1."""


def _adam_of_critic() -> AdamConfig:
    return AdamConfig(lr=5e-6)


@dataclass(frozen=True)
class CriticConfig(OptimizerConfig, ModelConfig, prefix="critic."):
    """The value model of gae."""

    model_name_or_path: Annotated[str, PATH] = ""
    """Hugging Face model directory or hub name. Unset: the actor's."""
    adam: AdamConfig = field(default_factory=_adam_of_critic)
    value_clip: Annotated[float, above_zero("no value could move")] = 0.2
    """Largest change of a value from what it was when the batch was scored."""
    max_epochs: Annotated[int, at_least(1, "nothing would be trained")] = 1
    """Passes of the critic over each training batch."""
    num_nodes: Annotated[int, at_least(1, "nothing would train")] = 1
    """Nodes that hold critic ranks."""
    num_gpus_per_node: Annotated[int | None, at_least(1, "nothing would train")] = None
    """Critic ranks per node; unset: 1."""


@dataclass(frozen=True)
class FsdpConfig:
    """How a model is sharded and computed."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if present."""
    param_dtype: Literal["bf16", "fp32"] | None = None
    """Compute dtype; masters and reductions are float32. Unset: bf16, on a CPU fp32."""
    attn_implementation: str = "auto"
    """auto: flash_attention_2 where installed on CUDA, else varlen (exact packed SDPA)."""
    packing_samples: bool = False
    """Concatenate the samples of a micro-batch instead of padding them; refused for a model that would mix them."""
    backend: Literal["automodel", "transformers", "auto"] = "auto"
    """Whose model classes train. auto: on CUDA AutoModel where it has a native class, else transformers."""

    def __post_init__(self):
        refuse_known("fsdp.param_dtype", self.param_dtype)


@dataclass(frozen=True)
class CkptConfig(Section, prefix="ckpt."):
    """What a run leaves behind."""

    output_dir: Path = Path("./ckpt")
    """Final Hugging Face model, `checkpoints/` and `run/`."""
    path: Path | None = None
    """Resumable checkpoints. Unset: OUTPUT_DIR/checkpoints."""
    save_steps: Annotated[
        int,
        count_or_minus_1(
            "no step is a multiple of it, so nothing would ever be saved",
            "Use a positive cadence, or -1 to save only at the end and on SIGTERM",
        ),
    ] = 20
    """Checkpoint cadence in steps; -1: only when the run ends or stops, and when an evaluation may find the best."""
    save_hf: bool = False
    """Also export a Hugging Face model at each checkpoint."""
    disable_final_save: bool = False
    """Do not save when the run ends."""
    max_num: Annotated[int, at_least(1, "every checkpoint would be removed at once", "Keep at least 1")] = 3
    """Checkpoints kept, oldest removed first; the newest and the best are never removed."""
    max_mem: Annotated[float, above_zero("every checkpoint would be removed at once")] = inf
    """GiB that all kept checkpoints may take, oldest removed first; the newest and the best are never removed."""
    async_save: bool = True
    """Write checkpoints while training continues; costs a copy of weights and optimizer state in host memory."""
    load_enable: bool = False
    """Resume if a complete checkpoint exists; without it an output_dir that holds a run is refused."""

    @property
    def checkpoints(self) -> Path:
        return self.path or self.output_dir / "checkpoints"

    @property
    def run_dir(self) -> Path:
        return self.output_dir / "run"


@dataclass(frozen=True)
class RLCkptConfig(CkptConfig, prefix="ckpt."):
    """What an RL run leaves behind."""

    best_metric_key: str = ""
    """The evaluation metric whose highest value makes the best checkpoint. Empty: the first `pass1`; none: off."""


@dataclass(frozen=True)
class LoggerConfig(Section, prefix="logger."):
    """Where numbers and rollouts go."""

    logging_steps: Annotated[int, at_least(1, "it is a cadence in steps")] = 1
    """Console cadence in steps; `metrics.jsonl` has every step."""
    tensorboard_dir: Path | None = None
    """TensorBoard event files."""
    rollouts_per_step: Annotated[
        int, at_least(-1, "a negative number of rollouts cannot be stored", "Use a number of rollouts, or -1 for all")
    ] = 64
    """Rollouts stored per step, token by token; -1: all."""


@dataclass(frozen=True)
class PromptDataConfig(Section, prefix="data."):
    """The prompts of RL."""

    prompt_dataset: Annotated[str, PATHS] = ""
    """Comma list of json, jsonl, csv, parquet or arrow files, saved dataset directories, hub names, each with an
    optional `@data_dir`. Required."""
    prompt_probs: str | None = None
    """Comma list of shares, one per dataset, that mix them. Unset: one after the other."""
    prompt_split: str = "train"
    """The split of saved directories and hub datasets."""
    max_samples: Annotated[int | None, at_least(1, "no row would be left")] = None
    """Use only the first rows; of each dataset, where shares mix them."""
    max_len: Annotated[int, at_least(2, "no prompt and answer fit in it")] = 2048
    """The whole context in tokens: prompt, generations and observations."""
    input_key: str = "input"
    """Column with the prompt."""
    label_key: str | None = None
    """Column with the label handed to the agent."""
    tools_key: str | None = None
    """Column with the tools offered in the conversation; needs `apply_chat_template`."""
    apply_chat_template: bool = False
    """Rows are chat messages (a string becomes one user message), rendered by the model's template."""
    chat_template: Annotated[str | None, TEMPLATE] = None
    """A template file or text that overrides the model's."""


@dataclass(frozen=True)
class AdvantageConfig(Section, prefix="algo.advantage."):
    """How rewards become advantages."""

    estimator: Annotated[str, FUNCTION] = "reinforce"
    """A name, or FILE.py:function. See docs/algorithms.md."""
    gamma: Annotated[
        float, share("a discount outside (0, 1] diverges or erases the reward", "Use 1.0 unless you mean to discount")
    ] = 1.0
    """Discount per generated token (reinforce, gae)."""
    lam: Annotated[float, fraction("the advantages after a token")] = 1.0
    """How far gae looks: 1 to the end of the segment, 0 to the next value."""
    turn_rewards: bool = False
    """Token estimators (reinforce, gae) credit each turn of an Env with its own reward, instead of all turns with
    their sum. See docs/algorithms.md."""
    no_whiten: bool = False
    """Do not whiten the estimators that are whitened by default."""
    is_correction_level: Literal["off", "token", "seq", "geo"] = "token"
    """Importance correction between engine and trainer: what is compared with the band. token: each ratio; seq: their
    product over a sample; geo: their geometric mean."""
    is_correction_mode: Literal["mask", "clip", "trunc"] = "mask"
    """mask: outside the band drops out; clip: clamped to the band; trunc: only the upper bound."""
    is_correction_threshold: Annotated[
        tuple[float, ...],
        Range(
            _is_band,
            "the band is empty and would filter every token",
            "Use LOW HIGH with 0 <= LOW < HIGH, such as 0.5 5.0, or HIGH alone",
        ),
    ] = (0.5, 5.0)
    """The band LOW HIGH of the statistic, or HIGH alone."""
    is_correction_gating: Literal["ratio", "binary_kl", "tv"] = "ratio"
    """The statistic that mode mask compares with the band: the ratio, or the divergence of the two probabilities of the
    sampled token, as a Bernoulli KL (binary_kl) or their difference (tv)."""
    score_centering_top_k: Annotated[
        int, at_least(0, "it is a number of tokens", "Use 0 to train without it, or a number such as 20")
    ] = 0
    """Score centering: REINFORCE on off-policy tokens without a ratio, in the place of the policy loss. The engine
    records the k likeliest tokens at each token. 0: off. See docs/losses.md."""

    @property
    def band(self) -> tuple[float, float]:
        """(LOW, HIGH) of the importance correction."""
        if len(self.is_correction_threshold) == 1:
            return 0.0, self.is_correction_threshold[0]
        low, high = self.is_correction_threshold
        return low, high


@dataclass(frozen=True)
class KlConfig(Section, prefix="algo.kl."):
    """The KL to a reference."""

    init_coef: Annotated[float | None, at_least(0, "it would push the policy away from its reference")] = None
    """Coefficient of the KL; 0: no reference is loaded. Unset: the estimator's own."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """With d = log policy - log reference: k1 d; k2 d²/2; k3 exp(-d) - 1 + d."""
    use_loss: bool = False
    """The KL is part of the loss instead of the reward."""
    ref: Literal["model", "rollout"] = "model"
    """A frozen model (`ref.model_name_or_path`), or the policy as it was when it sampled the tokens."""
    target: Annotated[float | None, above_zero("no KL could be held there")] = None
    """Adapt the coefficient so that the KL comes near this. Unset: the coefficient is constant."""
    horizon: Annotated[int, at_least(1, "it is a number of rollouts")] = 10000
    """Rollouts over which the coefficient adapts."""


@dataclass(frozen=True)
class AlgoConfig(Section, prefix="algo."):
    """The algorithm."""

    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    kl: KlConfig = field(default_factory=KlConfig)
    dynamic_filtering_enable: bool = False
    """Discard groups whose mean score is outside `dynamic_filtering_range`, and start others in their place."""
    dynamic_filtering_range: Annotated[
        tuple[float, float],
        ascending("every group would be discarded", "Use LOW HIGH with LOW < HIGH, such as 0 1"),
    ] = (0.0, 1.0)
    """LOW HIGH; a group is kept when LOW < its mean score < HIGH."""
    loss: Annotated[str | None, FUNCTION] = None
    """FILE.py:function, a policy loss that you wrote. Unset: `actor.loss_mode`."""


@dataclass(frozen=True)
class RewardConfig(Section, prefix="reward."):
    """A scorer, and reward shaping. The raw reward and the score stay untouched for metrics and evaluation."""

    scorer: Annotated[str | None, PATH] = None
    """FILE.py that exports `score`: the reward is computed from the finished trajectory, in processes apart. Unset: the
    agent's reward."""
    scorer_timeout_s: Annotated[float, above_zero("no score would ever be there in time")] = 60.0
    """Deadline of one score; a scorer that misses it is killed."""
    num_scorers: Annotated[int | None, at_least(1, "no rollout would be scored")] = None
    """Scorer processes of each runner at most, started as they are needed. Unset: half the cores, 2 to 16."""
    cache_dir: Path | None = None
    """Directory that keeps scores: an equal trajectory is not scored again by the same scorer file."""
    clip_range: Annotated[
        tuple[float, float],
        ascending("every reward would become the same number", "Use LOW HIGH with LOW < HIGH, such as -10 10"),
    ] = (-10.0, 10.0)
    """Rewards are clipped to this range before advantages are computed."""
    overlong_buffer_len: Annotated[int | None, at_least(1, "it is a number of tokens")] = None
    """The last tokens of the context, in which a penalty grows from 0 to `overlong_penalty_factor`. Unset: none."""
    overlong_penalty_factor: Annotated[float, at_least(0, "long answers would be rewarded")] = 1.0
    """The penalty of a rollout that fills the context."""
    stop_properly_penalty_coef: Annotated[
        float | None,
        at_most_one("a truncated answer would earn more than a complete one", "Use a value in [0, 1], or below 0"),
    ] = None
    """A truncated rollout gets its reward times this, or, where this is below 0, this. Unset: its reward."""
    mask_truncated: bool = False
    """Rollouts that a length limit cut take part neither in the filter, the baseline nor the loss."""


@dataclass(frozen=True)
class RolloutConfig(Section, prefix="rollout."):
    """Generation for training."""

    batch_size: Annotated[int, at_least(1, "there would be nothing to train on")] = 1024
    """Groups (prompts) per training batch."""
    n_samples_per_prompt: Annotated[int, at_least(1, "there would be nothing to train on")] = 1
    """Rollouts per prompt: the group that baselines are computed in."""
    vllm_generate_batch_size: Annotated[int | None, at_least(1, "no rollout would finish")] = None
    """Groups in flight at once. Unset: batch_size."""
    num_runners: Annotated[int | None, at_least(1, "no rollout would finish")] = None
    """Processes that host agents. Unset: 1 on a CPU, else 2."""
    max_new_tokens: Annotated[int | None, at_least(1, "no rollout would finish")] = None
    """Per turn. Unset: what is left of the context."""
    temperature: Annotated[
        float, above_zero("greedy decoding has no log-probs to learn from", "Use 1.0, or another positive temperature")
    ] = 1.0
    """Sampling temperature; the trainer divides its logits by it too."""
    top_p: Annotated[float, TOP_P] = 1.0
    """Nucleus sampling."""
    top_k: Annotated[int, count_or_minus_1("no token is left to sample", "Use a positive number, or -1 for all")] = -1
    """Sample from the k likeliest tokens; -1: all."""
    timeout_s: Annotated[float, above_zero("no rollout would finish")] = 1800.0
    """Deadline of one rollout attempt."""
    max_retries: Annotated[
        int, at_least(0, "not even the first attempt would be made", "Use 0 for a single attempt")
    ] = 2
    """Attempts after an infrastructure failure."""
    max_failure_rate: Annotated[float, fraction("the rollouts")] = 0.2
    """The run stops when more than this fraction of recent rollout attempts failed."""
    max_turns: Annotated[int | None, at_least(1, "no rollout would finish")] = None
    """Model calls per episode of an Env."""
    replicate: bool | None = None
    """Finished groups have a second copy on another node, so that they outlive the loss of theirs. Unset: if there are
    several nodes."""
    scheme: Annotated[str | None, PATH] = None
    """FILE.py that exports `run_group`: which rollout of a group runs when, and what it gets of finished ones. Unset:
    all at once. Evaluations have none. See docs/extending.md."""
    thinking_retention: Literal["all", "tool_cycle", "template"] = "all"
    """Earlier reasoning in a ChatAgent's context. all: it stays, one segment; template: what the chat template does to
    it, a branch where it drops it; tool_cycle: it stays until the next user message."""


@dataclass(frozen=True)
class TrainConfig(Section, prefix="train."):
    """The loop."""

    agent_path: Annotated[str, PATH] = ""
    """FILE.py that exports `AgentRunner`, or an environment of a library: gymnasium:ID, reasoning_gym:NAME,
    verifiers:ID. Required."""
    batch_size: Annotated[int | None, at_least(1, "nothing would be trained")] = None
    """Rollouts per optimizer step. Unset: the whole training batch, one step."""
    micro_batch_size: Annotated[int, at_least(1, "nothing would be trained")] = 1
    """Samples per forward/backward."""
    dynamic_batch_enable: bool = False
    """Fill each forward/backward up to `max_tokens_per_gpu` instead of with `micro_batch_size` samples."""
    max_tokens_per_gpu: Annotated[int, at_least(1, "no sample would fit")] = 16192
    """Tokens per forward/backward and rank with `dynamic_batch_enable`, padding included.
    A longer sample runs alone."""
    force_on_policy: bool = False
    """One optimizer step per training batch, whatever `batch_size` says."""
    max_epochs: Annotated[int, at_least(1, "nothing would be trained")] = 1
    """Passes over each training batch."""
    num_episodes: Annotated[int, at_least(1, "nothing would be trained")] = 1
    """Passes over the prompts."""
    max_steps: Annotated[int | None, at_least(1, "nothing would be trained")] = None
    """Stop after this many training batches."""
    seed: int = 42
    """Controls prompt order and sampling seeds."""
    async_queue_size: Annotated[
        int, at_least(0, "a queue cannot be negative", "Use 0 for strictly on-policy, 1 to overlap")
    ] = 1
    """Training batches that rollouts may run ahead; 0: strictly on-policy."""
    partial_rollout_enable: bool = False
    """A weight sync (publication) interrupts running requests instead of letting them finish; they continue with the
    new weights."""
    max_staleness: int | None = None
    """Largest number of batches trained between sampling a token and training on it. Unset: async_queue_size."""
    rollout_dump_dir: Path | None = None
    """Directory for the complete rollouts of every training batch."""
    rollout_replay_dir: Path | None = None
    """Directory that `rollout_dump_dir` wrote: train on its batches, without engines and agent."""
    full_determinism_enable: bool = False
    """Equal runs give equal bits: deterministic kernels, and an engine whose tokens do not depend on what else it
    generates; slower. Needs async_queue_size 0."""
    watchdog_s: Annotated[float, above_zero("everything would count as hung")] = 600.0
    """Seconds of silence after which an engine or a runner is restarted, and which one call of a weight sync to an
    engine may take. When no rollout makes progress for so long, a table shows who waits for whom; the rollouts are
    restarted after `rollout.timeout_s`."""
    max_restarts: Annotated[int, at_least(0, "it is a number of restarts", "Use 0 to stop at the first loss")] = 3
    """Largest number of consecutive restarts, without progress between them, of an engine, a runner, the ranks, or
    (--supervise) the driver."""
    grad_spike_factor: Annotated[
        float, above_one("steps like those before would be skipped", "Use a value > 1, or inf")
    ] = 20.0
    """An optimizer step is skipped if its gradient norm is not finite, or above this many times the running median;
    inf: no such limit."""
    max_trips: Annotated[int, at_least(1, "the run would stop before its breaker ever tripped")] = 3
    """The run stops when this many of its last 100 batches had a skipped optimizer step."""
    parity_bound: Annotated[float | None, above_zero("no two programs agree so well, so the run would stop")] = None
    """Largest log-prob difference of trainer and engine on the probe. Unset: 1e-3 (maximum) with fp32, else 0.05
    (mean)."""
    colocate_fsdp_models: bool = False
    """Policy, reference and critic share the same GPUs."""

    @property
    def staleness_bound(self) -> int:
        """The bound in batches that is in force."""
        if self.max_staleness is None:
            return self.async_queue_size
        return self.max_staleness


@dataclass(frozen=True)
class VllmConfig(Section, prefix="vllm."):
    """The inference engines."""

    num_engines: Annotated[int, at_least(1, "nothing would generate")] = 1
    """Engine instances."""
    tensor_parallel_size: Annotated[int, at_least(1, "nothing would generate")] = 1
    """Ranks per engine."""
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """auto: fsdp.param_dtype."""
    gpu_memory_utilization: Annotated[float, share("it is a fraction of a GPU")] = 0.9
    """Fraction of a GPU that an engine may use."""
    enforce_eager: bool = False
    """Without CUDA graphs and compilation; always on for a CPU."""
    enable_prefix_caching: bool = True
    """Reuse the KV of shared prefixes (cleared at every weight sync)."""
    partial_kv: Literal["recompute", "keep"] = "recompute"
    """The KV of a request that a weight sync interrupts. recompute: its prefix again, with the new weights; keep: the
    KV it has."""
    weight_transfer: Literal["auto", "nccl", "ipc", "shm"] = "auto"
    """How weights reach the engines. auto: shm on a CPU, else nccl."""


@dataclass(frozen=True)
class EvalConfig(Section, prefix="eval."):
    """Evaluation during RL."""

    dataset: Annotated[str | None, PATHS] = None
    """Comma list of datasets as in --data.prompt_dataset; columns as in --data."""
    split: str = "train"
    """The split of saved directories and hub datasets."""
    steps: Annotated[int, CADENCE] = -1
    """Cadence in steps; -1: only at the start (eval_at_start) and at the end."""
    eval_at_start: bool = False
    """Evaluate version 0 before the first step."""
    eval_only: bool = False
    """Evaluate the model and exit; no trainer is built. `molt eval` is the same."""
    batch_size: Annotated[int | None, at_least(1, "nothing would be evaluated")] = None
    """Prompts in flight at once. Unset: as many rollouts as in training."""
    n_samples_per_prompt: Annotated[int | None, at_least(1, "nothing would be evaluated")] = None
    """Samples per prompt. Unset: rollout's."""
    temperature: Annotated[
        float | None,
        at_least(0, "there is no such distribution", "Use 0 for greedy decoding, or a positive temperature"),
    ] = None
    """Unset: rollout's."""
    top_p: Annotated[float | None, TOP_P] = None
    """Unset: rollout's."""
    max_new_tokens: Annotated[int | None, at_least(1, "nothing would be evaluated")] = None
    """Unset: rollout's."""


@dataclass(frozen=True)
class RLConfig:
    """`molt rl`: asynchronous reinforcement learning."""

    actor: ActorConfig = field(default_factory=ActorConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    data: PromptDataConfig = field(default_factory=PromptDataConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    vllm: VllmConfig = field(default_factory=VllmConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    ckpt: RLCkptConfig = field(default_factory=RLCkptConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)

    @property
    def rollouts_per_batch(self) -> int:
        """Rollouts of one training batch."""
        return self.rollout.batch_size * self.rollout.n_samples_per_prompt

    @property
    def rollouts_per_step(self) -> int:
        """Rollouts of one optimizer step."""
        if self.train.force_on_policy or self.train.batch_size is None:
            return self.rollouts_per_batch
        return self.train.batch_size
