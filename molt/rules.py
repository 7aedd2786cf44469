"""Rules across the settings of RL: one small function each, `(config) -> message or None`.

Ranges of a single setting are checked beside it in `config.py`; what needs files, models or the machine
is in `cli/check.py`.
"""

import re
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from molt.config import RLConfig, TrainConfig

Message = str | None
EVALUATED = re.compile(r"eval/.+/(pass\d+|pass1_low|pass1_high|response_length|truncated)")
"""What an evaluation measures."""
NEED_A_GROUP = ("reinforce_baseline", "rloo", "grpo", "dr_grpo")
"""Estimators whose baseline is the other rollouts of the prompt."""


def message(c: Any, names: str, consequence: str, fix: str) -> str:
    """The values of the (space-separated) settings, the consequence, the fix."""
    first, *others = (f"`{name}` (={attrgetter(name)(c)})" for name in names.split())
    return f"{first} with {' and '.join(others)}: {consequence}. {fix}."


def comma_list(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def wrong_shares(shares: str | None, datasets: str) -> tuple[str, str] | None:
    """Consequence and fix, if these are not shares that mix these datasets."""
    if shares is None:
        return None
    items, n = comma_list(shares), len(comma_list(datasets))
    fix = f"Give {n} numbers above 0, such as {','.join(['1'] * n)}"
    if n == 1:
        return "one dataset has nothing to be mixed with", "Drop the shares, or name another dataset"
    if len(items) != n:
        return f"{len(items)} shares cannot mix {n} datasets", fix
    for item in items:
        try:
            usable = 0 < float(item) < float("inf")
        except ValueError:
            usable = False
        if not usable:
            return f"{item!r} is not a share, so no mixture can be drawn", fix
    return None


def required(c: Any, name: str, consequence: str, example: str) -> Message:
    return None if attrgetter(name)(c) else f"`{name}` is not set: {consequence}. Pass --{name} {example}."


def rl_needs_a_model(c: RLConfig) -> Message:
    aim = "evaluate" if c.eval.eval_only else "train"
    return required(c, "actor.model_name_or_path", f"there is nothing to {aim}", "DIR")


def rl_needs_prompts(c: RLConfig) -> Message:
    return required(c, "data.prompt_dataset", "no rollout can start", "FILE.jsonl")


def rl_needs_an_agent(c: RLConfig) -> Message:
    return required(c, "train.agent_path", "nothing says what a reward is", "FILE.py")


def eval_needs_a_dataset(c: RLConfig) -> Message:
    return required(c, "eval.dataset", "there is nothing to evaluate it on", "FILE.jsonl")


def shares_mix_the_datasets(c: RLConfig) -> Message:
    if c.data.prompt_dataset and (wrong := wrong_shares(c.data.prompt_probs, c.data.prompt_dataset)):
        return message(c, "data.prompt_probs data.prompt_dataset", *wrong)


def tools_need_a_template(c: RLConfig) -> Message:
    if c.data.tools_key and not c.data.apply_chat_template:
        consequence = "plain text has no place for tools, so none would be offered"
        fix = "Pass --data.apply_chat_template, or drop --data.tools_key"
        return message(c, "data.tools_key data.apply_chat_template", consequence, fix)


def baseline_needs_a_group(c: RLConfig) -> Message:
    if c.rollout.n_samples_per_prompt == 1 and c.algo.advantage.estimator in NEED_A_GROUP:
        consequence = "a group of one has no baseline, so every advantage would be 0"
        fix = "Use --rollout.n_samples_per_prompt 8, or --algo.advantage.estimator reinforce"
        return message(c, "rollout.n_samples_per_prompt algo.advantage.estimator", consequence, fix)


def no_kl_yet(c: RLConfig) -> Message:
    if c.algo.kl.init_coef != 0:
        consequence = "no reference model is built yet, so no KL would be computed"
        return f"`algo.kl.init_coef` (={c.algo.kl.init_coef}): {consequence}. Use --algo.kl.init_coef 0."


def best_is_of_an_evaluation(c: RLConfig) -> Message:
    key = c.ckpt.best_metric_key
    if key not in ("", "none") and not EVALUATED.fullmatch(key):
        return (
            f"`ckpt.best_metric_key` (={key}): no evaluation measures that, so no version could be the best. "
            "Use eval/<data source>/pass1, or none."
        )


def stale_tokens_need_correction(c: RLConfig) -> Message:
    if c.train.staleness_bound > 1 and c.algo.advantage.is_correction_level == "off":
        name = "train.async_queue_size" if c.train.async_queue_size > 1 else "train.max_staleness"
        consequence = f"tokens up to {c.train.staleness_bound} batches old would be trained as if they were fresh"
        fix = f"Use --algo.advantage.is_correction_level token, or --{name} 1"
        return message(c, f"{name} algo.advantage.is_correction_level", consequence, fix)


def correction_needs_the_whole_distribution(c: RLConfig) -> Message:
    cut = ["rollout.top_p"] * (c.rollout.top_p < 1) + ["rollout.top_k"] * (c.rollout.top_k > 0)
    if cut and c.algo.advantage.is_correction_level != "off":
        consequence = "the engine renormalises what it samples from, the trainer does not: every ratio would be wrong"
        fix = "Use --rollout.top_p 1 --rollout.top_k -1, or --algo.advantage.is_correction_level off"
        return message(c, " ".join([*cut, "algo.advantage.is_correction_level"]), consequence, fix)


def answer_fits_the_context(c: RLConfig) -> Message:
    for name in ("rollout.max_new_tokens", "eval.max_new_tokens"):
        if (attrgetter(name)(c) or 0) >= c.data.max_len:
            fix = f"Use --{name} {max(1, c.data.max_len // 2)}, or raise --data.max_len"
            return message(c, f"{name} data.max_len", "the context has no room for a prompt", fix)


def whole_samples_are_masked(c: RLConfig) -> Message:
    advantage = c.algo.advantage
    if advantage.is_correction_level in ("seq", "geo") and advantage.is_correction_mode != "mask":
        names = "algo.advantage.is_correction_level algo.advantage.is_correction_mode"
        consequence = "one number per sample says whether it is trained, it is not a ratio of a token to be bounded"
        fix = "Use --algo.advantage.is_correction_mode mask, or --algo.advantage.is_correction_level token"
        return message(c, names, consequence, fix)


def on_policy_is_one_epoch(c: RLConfig) -> Message:
    if c.train.force_on_policy and c.train.max_epochs > 1:
        consequence = "every epoch after the first would train a policy that has moved away from its rollouts"
        fix = "Use --train.max_epochs 1, or drop --train.force_on_policy"
        return message(c, "train.force_on_policy train.max_epochs", consequence, fix)


def steps_split_by_groups(c: RLConfig) -> Message:
    size, n, groups = c.rollouts_per_step, c.rollout.n_samples_per_prompt, c.rollout.batch_size
    if size % n or c.rollouts_per_batch % size:
        works = [n * d for d in range(1, groups + 1) if groups % d == 0]
        near = sorted(sorted(works, key=lambda w: abs(w - size))[:3])
        names = "train.batch_size rollout.batch_size rollout.n_samples_per_prompt"
        consequence = (
            f"it must be a multiple of {n} and divide {groups} * {n} = {c.rollouts_per_batch}, "
            "or a group would be split or rollouts dropped"
        )
        return message(c, names, consequence, f"Use --train.batch_size {' or '.join(map(str, near))}")


def staleness_covers_the_queue(c: RLConfig) -> Message:
    bound, queue = c.train.staleness_bound, c.train.async_queue_size
    if bound < queue:
        consequence = "groups that the queue lets start would be too old to be trained"
        fix = f"Use --train.max_staleness {queue}, or --train.async_queue_size {max(bound, 0)}"
        return message(c, "train.max_staleness train.async_queue_size", consequence, fix)


def transfer_fits_the_device(c: RLConfig) -> Message:
    if c.fsdp.device == "cpu" and c.vllm.weight_transfer in ("nccl", "ipc"):
        consequence = "it copies between GPUs, so no weights would arrive"
        return message(c, "vllm.weight_transfer fsdp.device", consequence, "Use --vllm.weight_transfer auto")
    if c.actor.num_nodes > 1 and c.vllm.weight_transfer in ("shm", "ipc"):
        consequence = "nodes share no memory, so no weights would arrive"
        return message(c, "vllm.weight_transfer actor.num_nodes", consequence, "Use --vllm.weight_transfer nccl")


Rule = Callable[..., Message]
RULES: list[Rule] = [
    rl_needs_a_model,
    rl_needs_prompts,
    rl_needs_an_agent,
    shares_mix_the_datasets,
    tools_need_a_template,
    baseline_needs_a_group,
    no_kl_yet,
    best_is_of_an_evaluation,
    stale_tokens_need_correction,
    correction_needs_the_whole_distribution,
    answer_fits_the_context,
    whole_samples_are_masked,
    on_policy_is_one_epoch,
    steps_split_by_groups,
    staleness_covers_the_queue,
    transfer_fits_the_device,
]


EVAL_RULES: list[Rule] = [
    rl_needs_a_model,
    rl_needs_an_agent,
    eval_needs_a_dataset,
    tools_need_a_template,
    answer_fits_the_context,
    transfer_fits_the_device,
]
"""What an evaluation without training (`eval.eval_only`) must keep."""


def broken(rules: list[Rule], config: Any) -> list[str]:
    """The messages of the rules that do not hold."""
    return [text for rule in rules if (text := rule(config))]


def warn_uncorrected(c: RLConfig) -> Message:
    if c.train.staleness_bound == 1 and c.algo.advantage.is_correction_level == "off":
        consequence = "tokens may be one batch old and are trained as if they were fresh"
        fix = "Use --algo.advantage.is_correction_level token, or --train.async_queue_size 0"
        return message(c, "train.async_queue_size algo.advantage.is_correction_level", consequence, fix)


def warn_more_in_flight_than_open(c: RLConfig) -> Message:
    room = (1 + c.train.async_queue_size) * c.rollout.batch_size
    if (c.rollout.vllm_generate_batch_size or 0) > room:
        names = "rollout.vllm_generate_batch_size train.async_queue_size rollout.batch_size"
        fix = f"Use --rollout.vllm_generate_batch_size {room}, or raise --train.async_queue_size"
        return message(c, names, f"at most (1 + queue) * batch = {room} groups may be open", fix)


def warn_eval_without_dataset(c: Any) -> Message:
    asked = "eval.steps" if c.eval.steps > 0 else "eval.eval_at_start" * getattr(c.eval, "eval_at_start", False)
    if c.eval.dataset is None and asked:
        return message(c, f"eval.dataset {asked}", "nothing is evaluated", "Pass --eval.dataset FILE.jsonl")


def warn_no_best(c: RLConfig) -> Message:
    if c.ckpt.best_metric_key not in ("", "none") and c.eval.dataset is None:
        consequence = "nothing is evaluated, so no version is the best"
        return message(c, "ckpt.best_metric_key eval.dataset", consequence, "Pass --eval.dataset FILE.jsonl")


def warn_template_unused(c: RLConfig) -> Message:
    if c.data.chat_template and not c.data.apply_chat_template:
        consequence = "prompts are plain text, so no template is used"
        return message(c, "data.chat_template data.apply_chat_template", consequence, "Pass --data.apply_chat_template")


def warn_gamma_unused(c: RLConfig) -> Message:
    if c.algo.advantage.gamma < 1 and c.algo.advantage.estimator in NEED_A_GROUP:
        fix = "Use --algo.advantage.gamma 1, or --algo.advantage.estimator reinforce"
        return message(
            c, "algo.advantage.gamma algo.advantage.estimator", "one number per rollout has no discount", fix
        )


def warn_budget_unused(c: RLConfig) -> Message:
    if c.train.max_tokens_per_gpu != TrainConfig.max_tokens_per_gpu and not c.train.dynamic_batch_enable:
        consequence = "micro-batches have `train.micro_batch_size` samples, and the budget is not read"
        fix = "Pass --train.dynamic_batch_enable"
        return message(c, "train.max_tokens_per_gpu train.dynamic_batch_enable", consequence, fix)


def warn_nothing_saved(c: Any) -> Message:
    if c.ckpt.disable_final_save and c.ckpt.save_steps == -1:
        consequence = "nothing is saved unless SIGTERM stops the run"
        fix = "Drop --ckpt.disable_final_save, or use --ckpt.save_steps 20"
        return message(c, "ckpt.disable_final_save ckpt.save_steps", consequence, fix)


WARNINGS: list[Rule] = [
    warn_uncorrected,
    warn_more_in_flight_than_open,
    warn_eval_without_dataset,
    warn_no_best,
    warn_template_unused,
    warn_gamma_unused,
    warn_budget_unused,
    warn_nothing_saved,
]
"""What is allowed but probably not meant."""
EVAL_WARNINGS: list[Rule] = [warn_template_unused]
