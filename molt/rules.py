"""Rules across the settings of RL: one small function each, `(config) -> message or None`.

Those of `ESTIMATOR_RULES` and `ESTIMATOR_WARNINGS` are given the estimator too, an `Estimator` of `algo/advantage.py`:
what it reads decides, not its name, so that they hold for a user's as well.

Ranges of a single setting are checked beside it in `config.py`; what needs files, models or the machine
is in `cli/check.py`.
"""

import re
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from molt.config import CriticConfig, KlConfig, RefConfig, RewardConfig, RLConfig, Section, TrainConfig, comma_list

Message = str | None
EVALUATED = re.compile(r"eval/.+/(pass\d+|pass1_low|pass1_high|response_length|truncated)")
"""What an evaluation measures."""
NEED_A_GROUP = ("reinforce_baseline", "rloo", "grpo", "dr_grpo")
"""Estimators whose baseline is the other rollouts of the prompt. That of flash_reinforce is the whole batch."""


def message(c: Any, names: str, consequence: str, fix: str) -> str:
    """The values of the (space-separated) settings, the consequence, the fix."""
    first, *others = (f"`{name}` (={attrgetter(name)(c)})" for name in names.split())
    return f"{first}{' with ' * bool(others)}{' and '.join(others)}: {consequence}. {fix}."


def first_change(section: Section, default: Section) -> str:
    """The first setting of `section` that is not its default, dotted if it is in a section of its own; or ""."""
    for name, value in vars(section).items():
        usual = getattr(default, name)
        if value != usual:
            return f"{name}.{first_change(value, usual)}" if isinstance(value, Section) else name
    return ""


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


def replay_has_no_engines(c: RLConfig) -> Message:
    if c.train.rollout_replay_dir and c.eval.dataset:
        consequence = "a replay starts no engines, so nothing could answer the evaluation"
        fix = "Drop one of them; `molt eval` measures the model that a replay leaves"
        return message(c, "train.rollout_replay_dir eval.dataset", consequence, fix)


def determinism_needs_one_version(c: RLConfig) -> Message:
    if c.train.full_determinism_enable and c.train.async_queue_size:
        consequence = "which rollouts meet which publication is a matter of time, so two runs would differ"
        fix = "Use --train.async_queue_size 0, or drop --train.full_determinism_enable"
        return message(c, "train.full_determinism_enable train.async_queue_size", consequence, fix)


def kept_kv_needs_partial_rollouts(c: RLConfig) -> Message:
    if c.vllm.partial_kv == "keep" and not c.train.partial_rollout_enable:
        consequence = "no request is ever interrupted, so there is no KV to keep"
        fix = "Pass --train.partial_rollout_enable, or drop --vllm.partial_kv"
        return message(c, "vllm.partial_kv train.partial_rollout_enable", consequence, fix)


def shares_mix_the_datasets(c: RLConfig) -> Message:
    if c.data.prompt_dataset and (wrong := wrong_shares(c.data.prompt_probs, c.data.prompt_dataset)):
        return message(c, "data.prompt_probs data.prompt_dataset", *wrong)


def tools_need_a_template(c: RLConfig) -> Message:
    if c.data.tools_key and not c.data.apply_chat_template:
        consequence = "plain text has no place for tools, so none would be offered"
        fix = "Pass --data.apply_chat_template, or drop --data.tools_key"
        return message(c, "data.tools_key data.apply_chat_template", consequence, fix)


def baseline_needs_a_group(c: RLConfig) -> Message:
    alone = (*NEED_A_GROUP, *["flash_reinforce"] * (c.rollout.batch_size == 1))
    if c.rollout.n_samples_per_prompt == 1 and c.algo.advantage.estimator in alone:
        consequence = "a rollout alone has no baseline, so every advantage would be 0"
        fix = "Use --rollout.n_samples_per_prompt 8, or --algo.advantage.estimator reinforce"
        return message(c, "rollout.n_samples_per_prompt algo.advantage.estimator", consequence, fix)


def filter_needs_a_group(c: RLConfig) -> Message:
    if c.algo.dynamic_filtering_enable and c.rollout.n_samples_per_prompt == 1:
        consequence = "the mean of one score is that score, so every right and every wrong answer would be discarded"
        fix = "Use --rollout.n_samples_per_prompt 8, or drop --algo.dynamic_filtering_enable"
        return message(c, "algo.dynamic_filtering_enable rollout.n_samples_per_prompt", consequence, fix)


def kl_reaches_the_advantage(c: RLConfig, estimator: Any) -> Message:
    if c.algo.kl_in_reward and estimator.level == "group":
        consequence = "the KL of a token is no reward of its rollout, so this estimator would never read it"
        fix = "Use --algo.kl.use_loss --algo.kl.estimator k3, or --algo.advantage.estimator reinforce"
        return message(c, "algo.kl.init_coef algo.advantage.estimator algo.kl.use_loss", consequence, fix)


def reference_reaches_the_advantage(c: RLConfig, estimator: Any) -> Message:
    if "ref_logprobs" in estimator.needs and not c.algo.kl_in_reward:
        fix = "Use --algo.kl.init_coef 1, and not --algo.kl.use_loss"
        names = "algo.advantage.estimator algo.kl.init_coef algo.kl.use_loss"
        return message(c, names, "the KL that it learns from would be 0 for it", fix)


def distillation_needs_a_teacher(c: RLConfig) -> Message:
    if c.algo.advantage.estimator != "on_policy_distill":
        return None
    if c.ref.model_name_or_path in ("", c.actor.model_name_or_path):
        consequence = "the student would be its own teacher, so there would be nothing to learn"
        fix = "Pass --ref.model_name_or_path DIR"
        return message(c, "ref.model_name_or_path algo.advantage.estimator", consequence, fix)
    for name, wanted in (("algo.kl.ref", "model"), ("algo.kl.estimator", "k1")):
        if attrgetter(name)(c) != wanted:
            consequence = "the advantage is log teacher - log student, and nothing else leads to the teacher"
            return message(c, f"{name} algo.advantage.estimator", consequence, f"Use --{name} {wanted}")


def kl_loss_has_a_gradient(c: RLConfig) -> Message:
    if c.algo.kl.use_loss and c.algo.kl.estimator == "k1":
        consequence = "the gradient of k1 is 0 on average, so the loss would not hold the policy"
        fix = "Use --algo.kl.estimator k2 or --algo.kl.estimator k3, or drop --algo.kl.use_loss"
        return message(c, "algo.kl.use_loss algo.kl.estimator", consequence, fix)


def coefficient_can_adapt(c: RLConfig) -> Message:
    if c.algo.kl.target is not None and c.algo.kl_coef == 0:
        fix = "Use --algo.kl.init_coef 0.001, or drop --algo.kl.target"
        return message(c, "algo.kl.target algo.kl.init_coef", "it is adapted by a factor, and 0 times it is 0", fix)
    if c.algo.kl.target is not None and (c.algo.kl.ref, c.algo.kl.estimator) == ("rollout", "k1"):
        consequence = "over tokens of the reference the mean of k1 is minus a KL, so the coefficient would only shrink"
        names = "algo.kl.target algo.kl.ref algo.kl.estimator"
        return message(c, names, consequence, "Use --algo.kl.estimator k3, or --algo.kl.ref model")
    if c.algo.kl.target is not None and c.algo.kl.horizon < c.rollouts_per_batch:
        consequence = f"one batch of {c.rollouts_per_batch} rollouts would move it by more than a fifth, or below 0"
        fix = f"Use --algo.kl.horizon {20 * c.rollouts_per_batch}"
        return message(c, "algo.kl.horizon algo.kl.target", consequence, fix)


def freezing_needs_a_critic(c: RLConfig, estimator: Any) -> Message:
    if c.actor.freezing_steps > 0 and "values" not in estimator.needs:
        fix = "Use --actor.freezing_steps 0, or --algo.advantage.estimator gae"
        names = "actor.freezing_steps algo.advantage.estimator"
        return message(c, names, "there is no critic, so these steps would train nothing", fix)


def dual_clip_needs_ppo(c: RLConfig) -> Message:
    if c.actor.dual_clip is not None and c.actor.loss_mode != "ppo":
        fix = "Use --actor.loss_mode ppo, or drop --actor.dual_clip"
        return message(c, "actor.dual_clip actor.loss_mode", "only ppo has that bound", fix)


def cispo_has_a_ceiling(c: RLConfig) -> Message:
    if c.actor.loss_mode == "cispo" and c.actor.eps_clip_low_high[1] < 1:
        consequence = "its high is the ceiling of the ratio itself, and below 1 it would shrink even fresh tokens"
        fix = "Use --actor.eps_clip_low_high 0.2 5"
        return message(c, "actor.eps_clip_low_high actor.loss_mode", consequence, fix)


def band_holds_fresh_tokens(c: RLConfig) -> Message:
    advantage = c.algo.advantage
    low, high = advantage.band
    if advantage.is_correction_level != "off" and advantage.is_correction_gating == "ratio" and not low <= 1 <= high:
        consequence = "a token that trainer and engine agree on has ratio 1, so all would be dropped or rescaled"
        names = "algo.advantage.is_correction_threshold algo.advantage.is_correction_level"
        return message(c, names, consequence, "Use --algo.advantage.is_correction_threshold 0.5 5")


def one_loss(c: RLConfig) -> Message:
    if c.algo.loss and ":" not in c.algo.loss:
        fix = "Use FILE.py:function, or --actor.loss_mode for one of molt's"
        return message(c, "algo.loss", "it names no function of yours", fix)
    if c.algo.loss and c.actor.loss_mode != "ppo":
        fix = "Drop --actor.loss_mode, or --algo.loss"
        return message(c, "algo.loss actor.loss_mode", "only one of the two losses would be used", fix)


def divergence_gates_a_mask(c: RLConfig) -> Message:
    advantage, prefix = c.algo.advantage, "algo.advantage.is_correction_"
    if advantage.is_correction_gating == "ratio":
        return None
    if advantage.is_correction_mode != "mask" or advantage.is_correction_level not in ("token", "seq"):
        fix = f"Use --{prefix}level token --{prefix}mode mask, or --{prefix}gating ratio"
        names = " ".join(prefix + name for name in ("gating", "level", "mode"))
        return message(c, names, "a divergence only says which tokens or samples drop out", fix)
    if advantage.band[0] > 0:
        consequence = "where trainer and engine agree the divergence is 0, so just those tokens would drop out"
        return message(c, f"{prefix}gating {prefix}threshold", consequence, f"Use --{prefix}threshold 0 0.05")


def one_length_penalty(c: RLConfig) -> Message:
    if c.reward.overlong_buffer_len is not None and c.reward.stop_properly_penalty_coef is not None:
        fix = "Drop --reward.overlong_buffer_len, or --reward.stop_properly_penalty_coef"
        names = "reward.overlong_buffer_len reward.stop_properly_penalty_coef"
        return message(c, names, "an answer that was cut would be punished twice", fix)


def buffer_fits_the_context(c: RLConfig) -> Message:
    if (c.reward.overlong_buffer_len or 0) >= c.data.max_len:
        fix = f"Use --reward.overlong_buffer_len {max(1, c.data.max_len // 4)}, or raise --data.max_len"
        return message(c, "reward.overlong_buffer_len data.max_len", "every answer would be too long", fix)


def best_is_of_an_evaluation(c: RLConfig) -> Message:
    key = c.ckpt.best_metric_key
    if key not in ("", "none") and not EVALUATED.fullmatch(key):
        return (
            f"`ckpt.best_metric_key` (={key}): no evaluation measures that, so no version could be the best. "
            "Use eval/<data source>/pass1, or none."
        )


def stale_tokens_need_correction(c: RLConfig) -> Message:
    if c.algo.advantage.is_correction_level != "off":
        return None
    if c.train.partial_rollout_enable and c.train.async_queue_size:
        consequence = "tokens of one rollout are of several policies and would be trained as if they were of one"
        fix = "Use --algo.advantage.is_correction_level token, or drop --train.partial_rollout_enable"
        return message(c, "train.partial_rollout_enable algo.advantage.is_correction_level", consequence, fix)
    if c.train.staleness_bound > 1:
        name = "train.async_queue_size" if c.train.async_queue_size > 1 else "train.max_staleness"
        consequence = f"tokens up to {c.train.staleness_bound} batches old would be trained as if they were fresh"
        fix = f"Use --algo.advantage.is_correction_level token, or --{name} 1"
        return message(c, f"{name} algo.advantage.is_correction_level", consequence, fix)


def ratios_need_the_whole_distribution(c: RLConfig) -> Message:
    cut = ["rollout.top_p"] * (c.rollout.top_p < 1) + ["rollout.top_k"] * (c.rollout.top_k > 0)
    to_rollout = c.algo.kl_coef > 0 and c.algo.kl.ref == "rollout"
    off = {"algo.kl.ref": "model"} if to_rollout else {}
    if c.algo.advantage.is_correction_level != "off":
        off["algo.advantage.is_correction_level"] = "off"
    if cut and off:
        consequence = "the engine renormalises what it samples from, the trainer does not: every ratio would be wrong"
        instead = " ".join(f"--{name} {value}" for name, value in off.items())
        fix = f"Use --rollout.top_p 1 --rollout.top_k -1, or {instead}"
        return message(c, " ".join([*cut, *off]), consequence, fix)


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
    replay_has_no_engines,
    determinism_needs_one_version,
    kept_kv_needs_partial_rollouts,
    shares_mix_the_datasets,
    tools_need_a_template,
    baseline_needs_a_group,
    filter_needs_a_group,
    distillation_needs_a_teacher,
    kl_loss_has_a_gradient,
    coefficient_can_adapt,
    dual_clip_needs_ppo,
    cispo_has_a_ceiling,
    band_holds_fresh_tokens,
    one_loss,
    divergence_gates_a_mask,
    one_length_penalty,
    buffer_fits_the_context,
    best_is_of_an_evaluation,
    stale_tokens_need_correction,
    ratios_need_the_whole_distribution,
    answer_fits_the_context,
    whole_samples_are_masked,
    on_policy_is_one_epoch,
    steps_split_by_groups,
    staleness_covers_the_queue,
    transfer_fits_the_device,
]
ESTIMATOR_RULES: list[Rule] = [kl_reaches_the_advantage, reference_reaches_the_advantage, freezing_needs_a_critic]


EVAL_RULES: list[Rule] = [
    rl_needs_a_model,
    rl_needs_an_agent,
    eval_needs_a_dataset,
    tools_need_a_template,
    answer_fits_the_context,
    transfer_fits_the_device,
]
"""What an evaluation without training (`eval.eval_only`) must keep."""


def broken(rules: list[Rule], *given: Any) -> list[str]:
    """The messages of the rules that do not hold. given: the config, and for estimator rules the estimator."""
    return [text for rule in rules if (text := rule(*given))]


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


def warn_discount_unused(c: RLConfig, estimator: Any) -> Message:
    gamma, lam = estimator.level == "group", "values" not in estimator.needs
    for name, unread, fix in (("gamma", gamma, "reinforce"), ("lam", lam, "gae")):
        if unread and getattr(c.algo.advantage, name) < 1:
            fix = f"Use --algo.advantage.{name} 1, or --algo.advantage.estimator {fix}"
            names = f"algo.advantage.{name} algo.advantage.estimator"
            return message(c, names, "this estimator has no such discount, and it is not read", fix)


def warn_critic_unused(c: RLConfig, estimator: Any) -> Message:
    name = first_change(c.critic, CriticConfig())
    if name and "values" not in estimator.needs:
        fix = f"Use --algo.advantage.estimator gae, or drop --critic.{name}"
        return message(c, f"critic.{name} algo.advantage.estimator", "no critic is built", fix)


def warn_reference_unused(c: RLConfig) -> Message:
    name = first_change(c.ref, RefConfig())
    if name and not c.algo.reads_reference_model:
        fix = f"Use --algo.kl.init_coef 0.001 --algo.kl.ref model, or drop --ref.{name}"
        return message(c, f"ref.{name} algo.kl.init_coef algo.kl.ref", "no reference model is built", fix)


def warn_kl_unused(c: RLConfig) -> Message:
    kl = c.algo.kl
    name = first_change(kl, KlConfig(kl.init_coef, target=kl.target))
    if name and c.algo.kl_coef == 0:
        fix = f"Use --algo.kl.init_coef 0.001, or drop --algo.kl.{name}"
        return message(c, f"algo.kl.{name} algo.kl.init_coef", "no KL is computed", fix)


def warn_reward_kl(c: RLConfig) -> Message:
    if c.algo.kl_in_reward and c.algo.kl.estimator != "k1":
        consequence = "in the reward only k1 has the gradient of the KL"
        fix = "Use --algo.kl.estimator k1, or --algo.kl.use_loss"
        return message(c, "algo.kl.estimator algo.kl.use_loss", consequence, fix)


def warn_gspo_never_clips(c: RLConfig) -> Message:
    if c.actor.loss_mode == "gspo" and max(c.actor.eps_clip_low_high) > 0.05:
        consequence = "the mean over a sample hardly leaves 1, so nothing would be clipped"
        fix = "Use --actor.eps_clip_low_high 3e-4 4e-4"
        return message(c, "actor.eps_clip_low_high actor.loss_mode", consequence, fix)


def warn_penalty_unused(c: RLConfig) -> Message:
    changed = c.reward.overlong_penalty_factor != RewardConfig.overlong_penalty_factor
    if changed and c.reward.overlong_buffer_len is None:
        names = "reward.overlong_penalty_factor reward.overlong_buffer_len"
        fix = f"Use --reward.overlong_buffer_len {max(1, c.data.max_len // 4)}"
        return message(c, names, "no answer is too long, so nothing is punished", fix)


def warn_budget_unused(c: RLConfig) -> Message:
    if c.train.max_tokens_per_gpu != TrainConfig.max_tokens_per_gpu and not c.train.dynamic_batch_enable:
        consequence = "micro-batches have `train.micro_batch_size` samples, and the budget is not read"
        fix = "Pass --train.dynamic_batch_enable"
        return message(c, "train.max_tokens_per_gpu train.dynamic_batch_enable", consequence, fix)


def warn_nothing_saved(c: Any) -> Message:
    if c.ckpt.disable_final_save and c.ckpt.save_steps == -1:
        consequence = "nothing is saved unless something stops the run, or an evaluation may find the best"
        fix = "Drop --ckpt.disable_final_save, or use --ckpt.save_steps 20"
        return message(c, "ckpt.disable_final_save ckpt.save_steps", consequence, fix)


WARNINGS: list[Rule] = [
    warn_uncorrected,
    warn_more_in_flight_than_open,
    warn_eval_without_dataset,
    warn_no_best,
    warn_template_unused,
    warn_reference_unused,
    warn_kl_unused,
    warn_reward_kl,
    warn_gspo_never_clips,
    warn_penalty_unused,
    warn_budget_unused,
    warn_nothing_saved,
]
"""What is allowed but probably not meant."""
ESTIMATOR_WARNINGS: list[Rule] = [warn_discount_unused, warn_critic_unused]
EVAL_WARNINGS: list[Rule] = [warn_template_unused]
