"""The flag that a user meant: by the words of other frameworks, or by letters where they are near."""

import difflib
from collections.abc import Iterable

from molt.config import NOT_OFFERED

NEAR = 0.75
"""Least similarity of the last words; below it a hint would be of another setting."""

# The words of TRL, verl, OpenRLHF and transformers, without their sections. Of the flags behind a word the first that
# the command has is the hint: those of RL first, then those of SFT.
_MODEL = ("actor.model_name_or_path", "model.model_name_or_path")
_DATASET = ("data.prompt_dataset", "data.dataset")
_LR = ("actor.adam.lr", "adam.lr")
_SAMPLES = ("rollout.n_samples_per_prompt",)
_BATCH = ("rollout.batch_size", "train.batch_size")
_MICRO_BATCH = ("train.micro_batch_size",)
_PASSES = ("train.num_episodes", "train.max_epochs")
_NEW_TOKENS = ("rollout.max_new_tokens", "data.max_len")
_KL = ("algo.kl.init_coef",)
_CLIP = ("actor.eps_clip_low_high",)
_AGENT = ("train.agent_path",)
ALIASES: dict[str, tuple[str, ...]] = {
    "model": _MODEL,
    "model_name": _MODEL,
    "model_path": _MODEL,
    "pretrain": _MODEL,
    "ref_model": ("ref.model_name_or_path",),
    "ref_model_path": ("ref.model_name_or_path",),
    "teacher_model": ("ref.model_name_or_path",),
    "dataset_name": _DATASET,
    "prompt_data": _DATASET,
    "train_file": _DATASET,
    "train_files": _DATASET,
    "train_dataset": _DATASET,
    "val_files": ("eval.dataset",),
    "eval_dataset": ("eval.dataset",),
    "test_file": ("eval.dataset",),
    "prompt_key": ("data.input_key",),
    "prompt_column": ("data.input_key",),
    "learning_rate": _LR,
    "lr": _LR,
    "actor_learning_rate": _LR,
    "optim_lr": _LR,
    "critic_learning_rate": ("critic.adam.lr",),
    "max_grad_norm": ("actor.max_norm", "max_norm"),
    "grad_clip": ("actor.max_norm", "max_norm"),
    "warmup_ratio": ("actor.lr_warmup_ratio", "lr_warmup_ratio"),
    "warmup_steps": ("actor.lr_warmup_ratio", "lr_warmup_ratio"),
    "lr_warmup_steps": ("actor.lr_warmup_ratio", "lr_warmup_ratio"),
    "lr_scheduler_type": ("actor.lr_scheduler", "lr_scheduler"),
    "gradient_checkpointing": ("actor.gradient_checkpoint", "model.gradient_checkpoint"),
    "enable_gradient_checkpointing": ("actor.gradient_checkpoint", "model.gradient_checkpoint"),
    "num_generations": _SAMPLES,
    "num_return_sequences": _SAMPLES,
    "group_size": _SAMPLES,
    "n": _SAMPLES,
    "train_batch_size": _BATCH,
    "rollout_batch_size": _BATCH,
    "ppo_mini_batch_size": ("train.batch_size",),
    "gradient_accumulation_steps": ("train.batch_size",),
    "per_device_train_batch_size": _MICRO_BATCH,
    "micro_train_batch_size": _MICRO_BATCH,
    "ppo_micro_batch_size": _MICRO_BATCH,
    "ppo_micro_batch_size_per_gpu": _MICRO_BATCH,
    "per_device_eval_batch_size": ("eval.batch_size",),
    "ppo_max_token_len_per_gpu": ("train.max_tokens_per_gpu",),
    "use_dynamic_bsz": ("train.dynamic_batch_enable", "train.max_tokens_per_gpu"),
    "num_train_epochs": _PASSES,
    "total_epochs": _PASSES,
    "ppo_epochs": ("train.max_epochs",),
    "num_iterations": ("train.max_epochs",),
    "total_training_steps": ("train.max_steps",),
    "steps": ("train.max_steps",),
    "max_completion_length": _NEW_TOKENS,
    "max_response_length": _NEW_TOKENS,
    "generate_max_len": _NEW_TOKENS,
    "max_prompt_length": ("data.max_len",),
    "max_length": ("data.max_len",),
    "max_seq_len": ("data.max_len",),
    "max_seq_length": ("data.max_len",),
    "max_model_len": ("data.max_len",),
    "kl_coef": _KL,
    "init_kl_coef": _KL,
    "kl_loss_coef": _KL,
    "kl_beta": _KL,
    "beta": _KL,
    "use_kl_loss": ("algo.kl.use_loss",),
    "kl_loss_type": ("algo.kl.estimator",),
    "kl_target": ("algo.kl.target",),
    "target_kl": ("algo.kl.target",),
    "adv_estimator": ("algo.advantage.estimator",),
    "advantage_estimator": ("algo.advantage.estimator",),
    "clip_ratio": _CLIP,
    "clip_ratio_low": _CLIP,
    "clip_ratio_high": _CLIP,
    "cliprange": _CLIP,
    "epsilon": _CLIP,
    "epsilon_high": _CLIP,
    "eps_clip": _CLIP,
    "loss_aggregation": ("actor.loss_agg_mode",),
    "entropy_coeff": ("actor.entropy_coef",),
    "ent_coef": ("actor.entropy_coef",),
    "mask_truncated_completions": ("reward.mask_truncated",),
    "reward_funcs": _AGENT,
    "reward_function": _AGENT,
    "reward_fn": _AGENT,
    "agent_func_path": _AGENT,
    "tensor_model_parallel_size": ("vllm.tensor_parallel_size",),
    "vllm_tensor_parallel_size": ("vllm.tensor_parallel_size",),
    "vllm_gpu_memory_utilization": ("vllm.gpu_memory_utilization",),
    "vllm_num_engines": ("vllm.num_engines",),
    "torch_dtype": ("fsdp.param_dtype",),
    "bf16": ("fsdp.param_dtype",),
    "save_freq": ("ckpt.save_steps",),
    "save_path": ("ckpt.output_dir",),
    "save_total_limit": ("ckpt.max_num",),
    "resume_mode": ("ckpt.load_enable",),
    "resume_from_checkpoint": ("ckpt.load_enable",),
    "test_freq": ("eval.steps",),
    "eval_steps": ("eval.steps",),
    "val_before_train": ("eval.eval_at_start",),
}


NOT_BUILT = {
    "lora": "LoRA",
    "peft": "LoRA",
    "muon": "Muon",
    "routing_replay": "routing replay",
    "router_replay": "routing replay",
}
"""What unknown flags begin with that ask for something molt does not have; a flag that exists never gets here."""
FIRST = ("actor.", "rollout.", "train.")
"""Sections that a word without one means where several have it."""


def flag_hint(name: str, known: Iterable[str]) -> str:
    """What to say about the unknown flag `name` (dotted, without dashes), or an empty string."""
    flags = sorted(known)
    for part in name.split("."):
        for beginning, feature in NOT_BUILT.items():
            if part.startswith(beginning):
                return f" molt has no {feature} yet."
    if _last_word(name) in ("fp16", "half"):
        return f" {NOT_OFFERED['fsdp.param_dtype']['fp16']}."
    meant = _same_section(name, flags) or _alias(name, flags) or _same_word(name, flags) or _near(name, flags)
    if meant is None:
        return ""
    return f" Did you mean '--{meant}'?"


def _last_word(flag: str) -> str:
    return flag.rpartition(".")[2]


def _similarity(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()


def _most_similar(name: str, flags: list[str]) -> str | None:
    def similarity(flag: str) -> float:
        return _similarity(name, flag)

    return max(flags, key=similarity, default=None)


def _same_section(name: str, flags: list[str]) -> str | None:
    """The flag of the same section with all the words: `train.steps` is `train.max_steps`, not `eval.steps`."""
    section, dot, _ = name.partition(".")
    if not dot:
        return None
    siblings = [flag for flag in flags if flag.startswith(f"{section}.")]
    last = _last_word(name)
    same = [flag for flag in siblings if _last_word(flag) == last]
    if same:
        return _most_similar(name, same)
    words = set(last.split("_"))
    longer = [flag for flag in siblings if words <= set(_last_word(flag).split("_"))]
    return _most_similar(name, longer)


def _same_word(name: str, flags: list[str]) -> str | None:
    """The flag in another section: `--lr` is far from `--actor.adam.lr` by letters."""
    word = _last_word(name)
    same = [flag for flag in flags if _last_word(flag) == word]
    usual = [flag for flag in same if flag.startswith(FIRST)]
    return _most_similar(name, usual or same)


def _alias(name: str, flags: list[str]) -> str | None:
    """By the words of another framework: `kl.coef` and `trainer.kl_coef` are both `kl_coef`."""
    parts = name.split(".")
    for first in range(len(parts)):
        word = "_".join(parts[first:])
        for flag in ALIASES.get(word, ()):
            if flag in flags:
                return flag
    return None


def _near(name: str, flags: list[str]) -> str | None:
    """By letters, if the last words are near; a common section alone says nothing."""
    word = _last_word(name)
    near = [flag for flag in flags if _similarity(word, _last_word(flag)) >= NEAR]
    own_section = [flag for flag in near if flag.startswith(f"{name.partition('.')[0]}.")]
    usual = [flag for flag in near if flag.startswith(FIRST)]
    return _most_similar(name, own_section or usual or near)
