"""Every setting: typed, documented, range-checked. The string under a field is its help.

The command line is generated from these classes (`--actor.adam.lr 1e-6`). A component receives
*its* section, never the root, so a signature says which knobs matter. Nothing mutates a config after
construction; a value that depends on others is a property. Rules across settings are in `rules.py`.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from molt.errors import ConfigError


def _require(ok: bool, name: str, value: object, consequence: str, fix: str) -> None:
    if not ok:
        raise ConfigError(f"`{name}` (={value}): {consequence}. {fix}.")


def _require_positive(section: object, prefix: str, names: str, consequence: str) -> None:
    """Each of the (space-separated) settings is unset or above zero."""
    for name in names.split():
        value = getattr(section, name)
        fix = "Use a value >= 1" if isinstance(value, int) else "Use a value > 0"
        _require(value is None or value > 0, f"{prefix}.{name}", value, consequence, fix)


def _require_cadence(prefix: str, value: int) -> None:
    consequence, fix = "no step is a multiple of it", "Use a positive cadence, or -1"
    _require(value == -1 or value > 0, f"{prefix}.steps", value, consequence, fix)


@dataclass(frozen=True)
class AdamConfig:
    """AdamW."""

    lr: float = 1e-6
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and second moment."""
    eps: float = 1e-8
    """Term added to the denominator."""
    weight_decay: float = 0.0
    """Decoupled weight decay; never applied to vectors (norms, biases)."""

    def __post_init__(self):
        _require(self.lr >= 0, "adam.lr", self.lr, "a negative rate climbs the loss", "Use a value >= 0")
        _require(
            all(0 <= beta < 1 for beta in self.betas),
            "adam.betas",
            self.betas,
            "the moments would never forget, or grow",
            "Use two values in [0, 1), such as 0.9 0.95",
        )
        _require_positive(self, "adam", "eps", "a gradient of zero would divide by it")


@dataclass(frozen=True)
class OptimizerConfig:
    """What every trained model has."""

    adam: AdamConfig = field(default_factory=AdamConfig)
    lr_scheduler: Literal["constant", "linear", "cosine", "polynomial", "inverse_sqrt", "wsd"] = "constant"
    """Shape of the learning rate after warm-up; constant still warms up."""
    lr_warmup_ratio: float = 0.03
    """Fraction of all optimizer steps spent warming up; never 0 in the first step."""
    min_lr_ratio: float = 0.1
    """The rate ends at this fraction of the peak."""
    max_norm: float = 1.0
    """Gradient-norm clip; <= 0 disables it."""

    def __post_init__(self):
        for name in ("lr_warmup_ratio", "min_lr_ratio"):
            value = getattr(self, name)
            _require(0 <= value <= 1, name, value, "it is a fraction of the whole", "Use a value in [0, 1]")


@dataclass(frozen=True)
class ModelConfig:
    """A model to train."""

    model_name_or_path: str = ""
    """Hugging Face model directory or hub name. Required."""
    gradient_checkpoint: Literal["full", "none"] = "full"
    """Recompute each layer in the backward pass instead of keeping its activations."""


@dataclass(frozen=True)
class ActorConfig(OptimizerConfig, ModelConfig):
    """The policy."""

    eps_clip_low_high: tuple[float, float] = (0.2, 0.2)
    """The ppo ratio is clipped to [1 - low, 1 + high]."""
    num_nodes: int = 1
    """Nodes that hold policy ranks."""
    num_gpus_per_node: int | None = None
    """Policy ranks per node; unset: what the engines leave free, 1 on a CPU."""

    def __post_init__(self):
        super().__post_init__()
        _require_positive(self, "actor", "num_nodes num_gpus_per_node", "nothing would train")
        low, high = self.eps_clip_low_high
        _require(
            0 < low < 1 and high > 0,
            "actor.eps_clip_low_high",
            self.eps_clip_low_high,
            "the clipped ratio would not surround 1",
            "Use two positive numbers, the first below 1, such as 0.2 0.2",
        )


@dataclass(frozen=True)
class FsdpConfig:
    """How a model is sharded and computed."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if present."""
    param_dtype: Literal["bf16", "fp16", "fp32"] | None = None
    """Compute dtype; masters and reductions are float32. Unset: bf16, on a CPU fp32."""
    attn_implementation: str = "auto"
    """auto: flash_attention_2 where installed on CUDA, else varlen (exact packed SDPA)."""
    packing_samples: bool = False
    """Concatenate the samples of a micro-batch instead of padding them."""


@dataclass(frozen=True)
class CkptConfig:
    """What a run leaves behind."""

    output_dir: Path = Path("./ckpt")
    """Final Hugging Face model, `checkpoints/` and `run/`."""
    path: Path | None = None
    """Resumable checkpoints. Unset: OUTPUT_DIR/checkpoints."""
    save_steps: int = 20
    """Checkpoint cadence in steps; -1: only at the end and on SIGTERM."""
    save_hf: bool = False
    """Also export a Hugging Face model at each checkpoint."""
    disable_final_save: bool = False
    """Do not save when the run ends."""
    max_num: int = 3
    """Checkpoints kept, oldest removed first; the newest is never removed."""
    load_enable: bool = False
    """Resume if a complete checkpoint exists; without it an output_dir that holds a run is refused."""

    def __post_init__(self):
        _require(
            self.save_steps == -1 or self.save_steps > 0,
            "ckpt.save_steps",
            self.save_steps,
            "no step is a multiple of it, so nothing would ever be saved",
            "Use a positive cadence, or -1 to save only at the end and on SIGTERM",
        )
        _require(
            self.max_num >= 1,
            "ckpt.max_num",
            self.max_num,
            "every checkpoint would be removed at once",
            "Keep at least 1",
        )

    @property
    def checkpoints(self) -> Path:
        return self.path or self.output_dir / "checkpoints"

    @property
    def run_dir(self) -> Path:
        return self.output_dir / "run"


@dataclass(frozen=True)
class LoggerConfig:
    """Where numbers and rollouts go."""

    logging_steps: int = 1
    """Console cadence in steps; `metrics.jsonl` has every step."""
    tensorboard_dir: Path | None = None
    """TensorBoard event files."""
    rollouts_per_step: int = 64
    """Rollouts stored per step, token by token; -1: all."""

    def __post_init__(self):
        _require(
            self.logging_steps >= 1,
            "logger.logging_steps",
            self.logging_steps,
            "it is a cadence in steps",
            "Use a value >= 1",
        )
        _require(
            self.rollouts_per_step >= -1,
            "logger.rollouts_per_step",
            self.rollouts_per_step,
            "a negative number of rollouts cannot be stored",
            "Use a number of rollouts, or -1 for all",
        )


@dataclass(frozen=True)
class PromptDataConfig:
    """The prompts of RL."""

    prompt_dataset: str = ""
    """Comma list of json, jsonl or parquet files. Required."""
    max_samples: int | None = None
    """Use only the first rows."""
    max_len: int = 2048
    """The whole context in tokens: prompt, generations and observations."""
    input_key: str = "input"
    """Column with the prompt."""
    label_key: str | None = None
    """Column with the label handed to the agent."""
    apply_chat_template: bool = False
    """Rows are chat messages (a string becomes one user message), rendered by the model's template."""
    chat_template: str | None = None
    """A template file or text that overrides the model's."""

    def __post_init__(self):
        _require(self.max_len >= 2, "data.max_len", self.max_len, "no prompt and answer fit in it", "Use a value >= 2")
        _require_positive(self, "data", "max_samples", "no row would be left")


@dataclass(frozen=True)
class AdvantageConfig:
    """How rewards become advantages."""

    estimator: Literal["reinforce", "reinforce_baseline", "rloo", "grpo", "dr_grpo"] = "reinforce"
    """See docs/algorithms.md."""
    gamma: float = 1.0
    """Discount per generated token (reinforce)."""
    no_whiten: bool = False
    """Do not whiten the estimators that are whitened by default."""
    is_correction_level: Literal["off", "token"] = "token"
    """Importance correction between engine and trainer, per token or not at all."""
    is_correction_mode: Literal["mask", "clip", "trunc"] = "mask"
    """mask: outside the band drops out; clip: clamped to the band; trunc: only the upper bound."""
    is_correction_threshold: tuple[float, float] = (0.5, 5.0)
    """The band LOW HIGH of the importance ratio."""

    def __post_init__(self):
        low, high = self.is_correction_threshold
        _require(
            0 <= low < high,
            "algo.advantage.is_correction_threshold",
            self.is_correction_threshold,
            "the band is empty and would filter every token",
            "Use 0 <= LOW < HIGH, such as 0.5 5.0",
        )
        _require(
            0 < self.gamma <= 1,
            "algo.advantage.gamma",
            self.gamma,
            "a discount outside (0, 1] diverges or erases the reward",
            "Use 1.0 unless you mean to discount",
        )


@dataclass(frozen=True)
class AlgoConfig:
    """The algorithm."""

    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)


@dataclass(frozen=True)
class RewardConfig:
    """Reward shaping. The raw reward and the score stay untouched for metrics and evaluation."""

    clip_range: tuple[float, float] = (-10.0, 10.0)
    """Rewards are clipped to this range before advantages are computed."""

    def __post_init__(self):
        _require(
            self.clip_range[0] < self.clip_range[1],
            "reward.clip_range",
            self.clip_range,
            "every reward would become the same number",
            "Use LOW HIGH with LOW < HIGH, such as -10 10",
        )


@dataclass(frozen=True)
class RolloutConfig:
    """Generation for training."""

    batch_size: int = 1024
    """Groups (prompts) per training batch."""
    n_samples_per_prompt: int = 1
    """Rollouts per prompt: the group that baselines are computed in."""
    vllm_generate_batch_size: int | None = None
    """Groups in flight at once. Unset: batch_size."""
    num_runners: int | None = None
    """Processes that host agents. Unset: 1 on a CPU, else 2."""
    max_new_tokens: int | None = None
    """Per turn. Unset: what is left of the context."""
    temperature: float = 1.0
    """Sampling temperature; the trainer scales its logits by the same."""
    top_p: float = 1.0
    """Nucleus sampling."""
    top_k: int = -1
    """Sample from the k likeliest tokens; -1: all."""
    timeout_s: float = 1800.0
    """Deadline of one rollout attempt."""
    max_retries: int = 2
    """Attempts after an infrastructure failure."""
    max_failure_rate: float = 0.2
    """The run stops when more than this fraction of recent rollout attempts failed."""
    max_turns: int | None = None
    """Model calls per episode of an Env."""

    def __post_init__(self):
        _require_positive(self, "rollout", "batch_size n_samples_per_prompt", "there would be nothing to train on")
        _require_positive(
            self,
            "rollout",
            "vllm_generate_batch_size num_runners max_new_tokens max_turns timeout_s",
            "no rollout would finish",
        )
        _require(
            self.temperature > 0,
            "rollout.temperature",
            self.temperature,
            "greedy decoding has no log-probs to learn from",
            "Use 1.0, or another positive temperature",
        )
        _require(0 < self.top_p <= 1, "rollout.top_p", self.top_p, "it is a share of the probability", "Use (0, 1]")
        _require(
            self.top_k == -1 or self.top_k > 0,
            "rollout.top_k",
            self.top_k,
            "no token is left to sample",
            "Use a positive number, or -1 for all",
        )
        _require(
            self.max_retries >= 0,
            "rollout.max_retries",
            self.max_retries,
            "not even the first attempt would be made",
            "Use 0 for a single attempt",
        )
        _require(
            0 <= self.max_failure_rate <= 1,
            "rollout.max_failure_rate",
            self.max_failure_rate,
            "it is a fraction of the rollouts",
            "Use a value in [0, 1]",
        )


@dataclass(frozen=True)
class TrainConfig:
    """The loop."""

    agent_path: str = ""
    """FILE.py that exports `AgentRunner`. Required."""
    batch_size: int | None = None
    """Rollouts per optimizer step. Unset: the whole training batch, one step."""
    micro_batch_size: int = 1
    """Samples per forward/backward."""
    max_epochs: int = 1
    """Passes over each training batch."""
    num_episodes: int = 1
    """Passes over the prompts."""
    max_steps: int | None = None
    """Stop after this many training batches."""
    seed: int = 42
    """Controls prompt order and sampling seeds."""
    async_queue_size: int = 1
    """Training batches that rollouts may run ahead; 0: strictly on-policy."""
    max_staleness: int | None = None
    """No token is trained more than this many batches after its weights. Unset: async_queue_size."""
    parity_bound: float | None = None
    """Largest log-prob difference of trainer and engine on the probe. Unset: fp32 1e-3 (max), else 0.05 (mean)."""

    def __post_init__(self):
        names = "micro_batch_size batch_size max_epochs num_episodes max_steps"
        _require_positive(self, "train", names, "nothing would be trained")
        _require_positive(self, "train", "parity_bound", "no two programs agree that well, so the run would stop")
        _require(
            self.async_queue_size >= 0,
            "train.async_queue_size",
            self.async_queue_size,
            "a queue cannot be negative",
            "Use 0 for strictly on-policy, 1 to overlap",
        )

    @property
    def staleness_bound(self) -> int:
        return self.async_queue_size if self.max_staleness is None else self.max_staleness


@dataclass(frozen=True)
class VllmConfig:
    """The inference engines."""

    num_engines: int = 1
    """Engine instances."""
    tensor_parallel_size: int = 1
    """Ranks per engine."""
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """auto: fsdp.param_dtype."""
    gpu_memory_utilization: float = 0.9
    """Fraction of a GPU that an engine may use."""
    enforce_eager: bool = False
    """No graphs and no compilation; always so on a CPU."""
    enable_prefix_caching: bool = True
    """Reuse the KV of shared prefixes (cleared at every publication)."""
    weight_transfer: Literal["auto", "nccl", "ipc", "shm"] = "auto"
    """How weights reach the engines. auto: shm on a CPU, else nccl."""

    def __post_init__(self):
        _require_positive(self, "vllm", "num_engines tensor_parallel_size", "nothing would generate")
        _require(
            0 < self.gpu_memory_utilization <= 1,
            "vllm.gpu_memory_utilization",
            self.gpu_memory_utilization,
            "it is a fraction of a GPU",
            "Use a value in (0, 1]",
        )


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation during RL."""

    dataset: str | None = None
    """Comma list of files; columns as in --data."""
    steps: int = -1
    """Cadence in steps; -1: only at the start (eval_at_start) and at the end."""
    eval_at_start: bool = False
    """Evaluate version 0 before the first step."""
    n_samples_per_prompt: int | None = None
    """Samples per prompt. Unset: rollout's."""
    temperature: float | None = None
    """Unset: rollout's."""
    top_p: float | None = None
    """Unset: rollout's."""
    max_new_tokens: int | None = None
    """Unset: rollout's."""

    def __post_init__(self):
        _require_cadence("eval", self.steps)
        _require_positive(self, "eval", "n_samples_per_prompt max_new_tokens", "nothing would be evaluated")
        _require(
            self.temperature is None or self.temperature >= 0,
            "eval.temperature",
            self.temperature,
            "there is no such distribution",
            "Use 0 for greedy decoding, or a positive temperature",
        )
        _require(
            self.top_p is None or 0 < self.top_p <= 1,
            "eval.top_p",
            self.top_p,
            "it is a share of the probability",
            "Use a value in (0, 1]",
        )


@dataclass(frozen=True)
class RLConfig:
    """`molt rl`: asynchronous reinforcement learning."""

    actor: ActorConfig = field(default_factory=ActorConfig)
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    data: PromptDataConfig = field(default_factory=PromptDataConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    vllm: VllmConfig = field(default_factory=VllmConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    ckpt: CkptConfig = field(default_factory=CkptConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)

    @property
    def rollouts_per_batch(self) -> int:
        return self.rollout.batch_size * self.rollout.n_samples_per_prompt

    @property
    def rollouts_per_step(self) -> int:
        """Rollouts of one optimizer step."""
        return self.train.batch_size or self.rollouts_per_batch


@dataclass(frozen=True)
class SftDataConfig:
    """The conversations of SFT."""

    dataset: str = ""
    """Comma list of json, jsonl or parquet files. Required."""
    max_samples: int | None = None
    """Use only the first rows."""
    max_len: int = 2048
    """Longest conversation in tokens; longer ones are dropped, counted and named."""
    input_key: str = "input"
    """Column with the prompt, or with the whole conversation."""
    output_key: str | None = None
    """Column with the answer. Unset: the input column holds the whole conversation."""
    tools_key: str | None = None
    """Column with the tools offered in the conversation."""
    chat_template: str | None = None
    """A template file or text that overrides the model's."""
    train_on_last_turn_only: bool = False
    """Only the last assistant turn enters the loss."""

    def __post_init__(self):
        _require_positive(self, "data", "max_samples max_len", "no row would be left")


@dataclass(frozen=True)
class SftTrainConfig:
    """The SFT loop."""

    micro_batch_size: int = 8
    """Conversations per forward/backward."""
    batch_size: int = 128
    """Conversations per optimizer step."""
    max_epochs: int = 2
    """Passes over the data."""
    max_steps: int | None = None
    """Stop after this many optimizer steps."""
    seed: int = 42
    """Controls the order of the data."""

    def __post_init__(self):
        names = "micro_batch_size batch_size max_epochs max_steps"
        _require_positive(self, "train", names, "nothing would be trained")


@dataclass(frozen=True)
class SftEvalConfig:
    """Held-out loss during SFT."""

    dataset: str | None = None
    """Comma list of files; columns as in --data."""
    steps: int = -1
    """Cadence in optimizer steps; -1: after each epoch."""

    def __post_init__(self):
        _require_cadence("eval", self.steps)


@dataclass(frozen=True)
class SftConfig(OptimizerConfig):
    """`molt sft`: supervised fine-tuning."""

    adam: AdamConfig = field(default_factory=lambda: AdamConfig(lr=5e-6))
    model: ModelConfig = field(default_factory=ModelConfig)
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    data: SftDataConfig = field(default_factory=SftDataConfig)
    train: SftTrainConfig = field(default_factory=SftTrainConfig)
    eval: SftEvalConfig = field(default_factory=SftEvalConfig)
    ckpt: CkptConfig = field(default_factory=lambda: CkptConfig(save_steps=-1))
    logger: LoggerConfig = field(default_factory=LoggerConfig)
