"""Every rule: silent on good settings, and value, consequence and fix on bad ones."""

import functools
import inspect
import itertools
import re
from pathlib import Path

import pytest

from molt import rules, rules_sft
from molt.algo.advantage import ADVANTAGES
from molt.algo.loss import LOSSES
from molt.algorithm import Algorithm
from molt.cli.args import flags, parse
from molt.config import RLConfig
from molt.config_sft import SftConfig
from molt.rules import RL, ReadOnlyWhen
from molt.setting import Reference, name_of, single_settings, value_of

CENTERING = "--algo.advantage.score_centering_top_k"

GOOD_RL = (
    "--actor.model_name_or_path m --data.prompt_dataset p.jsonl --train.agent_path a.py "
    "--rollout.batch_size 12 --rollout.n_samples_per_prompt 4"
)
DISTILL = "--algo.advantage.estimator on_policy_distill --ref.model_name_or_path teacher"
GOOD_SFT = "--model.model_name_or_path m --data.dataset d.jsonl"
GOOD_EVAL = "--actor.model_name_or_path m --eval.dataset e.jsonl --train.agent_path a.py --eval.eval_only"
CONFIGS = {"rl": (RLConfig, GOOD_RL), "eval": (RLConfig, GOOD_EVAL), "sft": (SftConfig, GOOD_SFT)}


def row(setting: object) -> ReadOnlyWhen:
    """The row of the table that has this setting."""
    (found,) = (row for row in rules.READ_ONLY_WHEN if setting in row.settings)
    return found


# rule, trainer, flags that break it, values in the message, consequence, a fix
BROKEN = [
    (rules.rl_needs_a_model, "rl", "--actor.model_name_or_path ''", ["not set"], "nothing to train", ""),
    (rules.rl_needs_a_model, "eval", "--actor.model_name_or_path ''", ["not set"], "nothing to evaluate", ""),
    (rules.eval_needs_a_dataset, "eval", "--eval.dataset None", ["not set"], "nothing to evaluate the model on", ""),
    (rules.rl_needs_prompts, "rl", "--data.prompt_dataset ''", ["not set"], "no rollout can start", ""),
    (rules.rl_needs_an_agent, "rl", "--train.agent_path ''", ["not set"], "nothing computes a reward", ""),
    *(
        (
            rules.shares_mix_the_datasets,
            "rl",
            f"--data.prompt_dataset a.jsonl,b.jsonl --data.prompt_probs {shares}",
            [f"(={shares})", "(=a.jsonl,b.jsonl)"],
            consequence,
            "--data.prompt_probs 1,1",
        )
        for shares, consequence in [
            ("1,2,3", "3 shares cannot mix 2 datasets"),
            ("1", "1 shares cannot mix 2 datasets"),
            ("1,x", "'x' is not a share"),
            ("0,1", "'0' is not a share"),
            ("1,-.5", "'-.5' is not a share"),
            ("1,nan", "'nan' is not a share"),
            ("inf,1", "'inf' is not a share"),
            ("1,1/2", "'1/2' is not a share"),
        ]
    ),
    *(
        (rule, trainer, f"--data.{shares} 1", ["(=1)", value], "nothing to be mixed with", f"--data.{shares} None")
        for rule, trainer, shares, value in [
            (rules.shares_mix_the_datasets, "rl", "prompt_probs", "(=p.jsonl)"),
            (rules_sft.sft_shares_mix_the_datasets, "sft", "dataset_probs", "(=d.jsonl)"),
        ]
    ),
    *(
        (row(RL.data.tools_key), trainer, "--data.tools_key tools", ["(=tools)", "(=False)"], "no place", fix)
        for trainer in ("rl", "eval")
        for fix in ("--data.apply_chat_template", "--data.tools_key None")
    ),
    *(
        (
            rules.baseline_needs_a_group,
            "rl",
            f"--rollout.n_samples_per_prompt 1 --algo.advantage.estimator {name}",
            ["(=1)", f"(={name})"],
            "every advantage would be 0",
            fix,
        )
        for name in ("rloo", "grpo", "dr_grpo", "reinforce_baseline")
        for fix in ("--rollout.n_samples_per_prompt 8", "--algo.advantage.estimator reinforce")
    ),
    *(
        (
            rules.baseline_needs_a_group,
            "rl",
            "--rollout.n_samples_per_prompt 1 --rollout.batch_size 1 --algo.advantage.estimator flash_reinforce",
            ["(=1)", "(=flash_reinforce)"],
            "every advantage would be 0",
            fix,
        )
        for fix in ("--rollout.n_samples_per_prompt 8", "--algo.advantage.estimator reinforce")
    ),
    (
        rules.filter_needs_a_group,
        "rl",
        "--algo.dynamic_filtering_enable --rollout.n_samples_per_prompt 1",
        ["(=True)", "(=1)"],
        "would be discarded",
        "--rollout.n_samples_per_prompt 8",
    ),
    (
        rules.scheme_needs_a_group,
        "rl",
        "--rollout.scheme scheme.py --rollout.n_samples_per_prompt 1",
        ["(=scheme.py)", "(=1)"],
        "no other that it could follow",
        "--rollout.n_samples_per_prompt 8",
    ),
    *(
        (
            rules.kl_reaches_the_advantage,
            "rl",
            f"--algo.advantage.estimator {name} --algo.kl.init_coef 0.1",
            ["(=0.1)", f"(={name})", "(=False)"],
            "would never read it",
            fix,
        )
        for name, fix in [
            ("grpo", "--algo.kl.use_loss --algo.kl.estimator k3"),
            ("flash_reinforce", "--algo.advantage.estimator reinforce"),
        ]
    ),
    *(
        (
            rules.reference_reaches_the_advantage,
            "rl",
            f"{DISTILL} {wrong}",
            ["(=on_policy_distill)", value],
            "the KL that this estimator learns from would be 0",
            fix,
        )
        for wrong, value, fix in [
            ("--algo.kl.init_coef 0", "(=0.0)", "--algo.kl.init_coef 1"),
            ("--algo.kl.use_loss", "(=True)", ""),
        ]
    ),
    *(
        (
            rules.distillation_needs_a_teacher,
            "rl",
            f"--algo.advantage.estimator on_policy_distill --ref.model_name_or_path {path}",
            [f"(={path})".replace("''", "")],
            "its own teacher",
            "--ref.model_name_or_path DIR",
        )
        for path in ("''", "m")
    ),
    *(
        (
            rules.distillation_needs_a_teacher,
            "rl",
            f"{DISTILL} --algo.kl.{name} {wrong}",
            [f"(={wrong})", "(=on_policy_distill)"],
            "nothing else leads to the teacher",
            f"--algo.kl.{name} {right}",
        )
        for name, wrong, right in (("ref", "rollout", "model"), ("estimator", "k2", "k1"), ("estimator", "k3", "k1"))
    ),
    *(
        (rules.kl_loss_has_a_gradient, "rl", "--algo.kl.use_loss", ["(=True)", "(=k1)"], "is 0 on average", fix)
        for fix in ("--algo.kl.estimator k2", "--algo.kl.estimator k3")
    ),
    (
        rules.coefficient_can_adapt,
        "rl",
        "--algo.kl.init_coef 0.1 --algo.kl.target 0.05 --algo.kl.horizon 47",  # a batch is 12 x 4 rollouts
        ["(=47)", "(=0.05)"],
        "one batch of 48 rollouts would move it",
        "--algo.kl.horizon 960",
    ),
    *(
        (
            rules.coefficient_can_adapt,
            "rl",
            f"--algo.kl.target 0.05 {wrong}",
            ["(=0.05)", value],
            "0 times it is 0",
            "--algo.kl.init_coef 0.001",
        )
        for wrong, value in (("", "(=None)"), ("--algo.kl.init_coef 0", "(=0.0)"))
    ),
    *(
        (
            row(RL.actor.freezing_steps),
            "rl",
            f"--actor.freezing_steps 5 --algo.advantage.estimator {name}",
            ["(=5)", f"(={name})"],
            "would train nothing",
            fix,
        )
        for name, fix in [("reinforce", "--actor.freezing_steps 0"), ("grpo", "--algo.advantage.estimator gae")]
    ),
    *(
        (
            row(RL.actor.dual_clip),
            "rl",
            f"--actor.dual_clip 3 --actor.loss_mode {mode} --actor.eps_clip_low_high 0.01 5",
            ["(=3.0)", f"(={mode})"],
            "only ppo has that bound",
            "--actor.loss_mode ppo",
        )
        for mode in ("gspo", "cispo", "gmpo")
    ),
    *(
        (
            rules.ceiling_keeps_fresh_tokens,
            "rl",
            "--actor.loss_mode cispo --actor.eps_clip_low_high 0.2 0.2",
            ["(=(0.2, 0.2))", "(=cispo)"],
            "shrink even fresh tokens",
            f"--actor.eps_clip_low_high {bounds}",
        )
        for bounds in ("0.2 5", "None")
    ),
    *(
        (
            rules.band_holds_fresh_tokens,
            "rl",
            f"--algo.advantage.is_correction_threshold {band}",
            ["(=token)"],
            "has ratio 1",
            "--algo.advantage.is_correction_threshold 0.5 5",
        )
        for band in ("2 5", "0.5", "0.2 0.9")
    ),
    (
        rules.coefficient_can_adapt,
        "rl",
        "--algo.kl.init_coef 0.1 --algo.kl.target 0.05 --algo.kl.ref rollout",
        ["(=0.05)", "(=rollout)", "(=k1)"],
        "would only shrink",
        "--algo.kl.estimator k3",
    ),
    (
        rules.one_loss,
        "rl",
        "--algo.loss a.py:f --actor.loss_mode cispo",
        ["(=a.py:f)", "(=cispo)"],
        "only one of the two losses",
        "--actor.loss_mode ppo",
    ),
    (rules.one_loss, "rl", "--algo.loss gspo", ["(=gspo)"], "names no function of yours", "--algo.loss a.py:f"),
    (
        rules.turn_rewards_need_rewards_of_tokens,
        "rl",
        "--algo.advantage.turn_rewards --algo.advantage.estimator grpo",
        ["(=True)", "(=grpo)"],
        "a turn cannot have its own",
        "--algo.advantage.estimator reinforce",
    ),
    (
        rules.turn_rewards_are_the_agents,
        "rl",
        "--algo.advantage.turn_rewards --reward.scorer s.py",
        ["(=True)", "(=s.py)"],
        "takes the place of what the turns gave",
        "--reward.scorer None",
    ),
    (
        rules.centering_is_the_loss,
        "rl",
        f"{CENTERING} 8 --actor.loss_mode gspo",
        ["(=8)", "(=gspo)"],
        "a loss of its own",
        "--actor.loss_mode ppo",
    ),
    (
        rules.centering_is_the_loss,
        "rl",
        f"{CENTERING} 8 --actor.eps_clip_low_high 0.2 0.28",
        ["(=8)", "(=(0.2, 0.28))"],
        "a loss of its own",
        f"{CENTERING} 0",
    ),
    (
        rules.centering_is_the_loss,
        "rl",
        f"{CENTERING} 8 --train.max_epochs 2",
        ["(=8)", "(=2)"],
        "in a second epoch",
        "--train.max_epochs 1",
    ),
    (
        rules.centering_needs_the_whole_distribution,
        "rl",
        f"{CENTERING} 8 --algo.advantage.is_correction_level off --rollout.top_p 0.9",
        ["(=8)", "(=0.9)"],
        "the center would be that of another distribution",
        "--rollout.top_p 1 --rollout.top_k -1",
    ),
    (
        rules.centering_corrects_by_token,
        "rl",
        f"{CENTERING} 8 --algo.advantage.is_correction_level geo",
        ["(=8)", "(=geo)"],
        "each candidate is corrected by its own ratio",
        "--algo.advantage.is_correction_level token",
    ),
    *(
        (
            rules.divergence_gates_a_mask,
            "rl",
            f"--algo.advantage.is_correction_gating {gating} --algo.advantage.is_correction_threshold 0 0.05 "
            f"--algo.advantage.is_correction_{wrong}",
            [f"(={gating})", f"(={wrong.split()[1]})"],
            "can only decide which tokens or samples are dropped",
            fix,
        )
        for gating, wrong, fix in [
            ("tv", "level geo", "--algo.advantage.is_correction_gating ratio"),
            ("tv", "level off", "--algo.advantage.is_correction_level token --algo.advantage.is_correction_mode mask"),
            ("binary_kl", "mode trunc", "--algo.advantage.is_correction_gating ratio"),
            ("binary_kl", "mode clip", "--algo.advantage.is_correction_mode mask"),
        ]
    ),
    (
        rules.divergence_gates_a_mask,
        "rl",
        "--algo.advantage.is_correction_gating tv --algo.advantage.is_correction_level seq",
        ["(=tv)", "(=(0.5, 5.0))"],
        "just those tokens would be dropped",
        "--algo.advantage.is_correction_threshold 0 0.05",
    ),
    (
        rules.one_length_penalty,
        "rl",
        "--reward.overlong_buffer_len 64 --reward.stop_properly_penalty_coef 0",
        ["(=64)", "(=0.0)"],
        "punished twice",
        "--reward.overlong_buffer_len None",
    ),
    *(
        (
            rules.warn_masked_rollouts_escape_the_penalty,
            "rl",
            f"--reward.mask_truncated --reward.{penalty} {value}",
            ["(=True)", f"`reward.{penalty}` (="],
            "the longest answers escape the penalty",
            f"--reward.{penalty} None",
        )
        for penalty, value in (("overlong_buffer_len", "64"), ("stop_properly_penalty_coef", "0.5"))
    ),
    (
        rules.warn_masked_rollouts_could_teach,
        "rl",
        f"{DISTILL} --reward.mask_truncated",
        ["(=True)", "(=on_policy_distill)"],
        "teach as well as any others",
        "",
    ),
    (
        rules.buffer_fits_the_context,
        "rl",
        "--reward.overlong_buffer_len 512 --data.max_len 512",
        ["(=512)"],
        "every answer would be too long",
        "--reward.overlong_buffer_len 128",
    ),
    *(
        (
            rules.stale_tokens_need_correction,
            "rl",
            "--train.async_queue_size 3 --algo.advantage.is_correction_level off",
            ["(=3)", "(=off)"],
            "3 batches old",
            fix,
        )
        for fix in ("--algo.advantage.is_correction_level token", "--train.async_queue_size 1")
    ),
    (
        rules.stale_tokens_need_correction,
        "rl",
        "--train.max_staleness 2 --algo.advantage.is_correction_level off",
        ["(=2)", "(=off)"],
        "2 batches old",
        "--train.max_staleness 1",
    ),
    (
        rules.stale_tokens_need_correction,
        "rl",
        "--train.partial_rollout_enable --algo.advantage.is_correction_level off",
        ["(=True)", "(=off)"],
        "of several policies",
        "--algo.advantage.is_correction_level token",
    ),
    *(
        (row(RL.vllm.partial_kv), "rl", "--vllm.partial_kv keep", ["(=keep)", "(=False)"], "no KV", fix)
        for fix in ("--train.partial_rollout_enable", "--vllm.partial_kv recompute")
    ),
    (
        rules.determinism_needs_one_version,
        "rl",
        "--train.full_determinism_enable",
        ["(=True)", "(=1)"],
        "two runs would differ",
        "--train.async_queue_size 0",
    ),
    *(
        (
            rules.replay_has_no_engines,
            "rl",
            "--train.rollout_replay_dir dump --eval.dataset e.jsonl",
            ["(=dump)", "(=e.jsonl)"],
            "starts no engines",
            fix,
        )
        for fix in ("--train.rollout_replay_dir None", "--eval.dataset None")
    ),
    (
        rules.ratios_need_the_whole_distribution,
        "rl",
        "--rollout.top_p 0.9 --rollout.top_k 50",
        ["(=0.9)", "(=50)", "(=token)"],
        "every ratio would be wrong",
        "--rollout.top_p 1 --rollout.top_k -1",
    ),
    (
        rules.ratios_need_the_whole_distribution,
        "rl",
        "--rollout.top_k 50",
        ["(=50)"],
        "every ratio would be wrong",
        "--algo.advantage.is_correction_level off",
    ),
    *(
        (
            rules.ratios_need_the_whole_distribution,
            "rl",
            f"--rollout.top_p 0.9 --algo.advantage.is_correction_level {level} --algo.kl.ref rollout "
            "--algo.kl.init_coef 0.1",
            ["(=0.9)", "`algo.kl.ref` (=rollout)"],
            "every ratio would be wrong",
            f"--algo.kl.ref model{off}",
        )
        for level, off in (("off", ""), ("token", " --algo.advantage.is_correction_level off"))
    ),
    (
        rules.answer_fits_the_context,
        "rl",
        "--rollout.max_new_tokens 64 --data.max_len 64",
        ["(=64)"],
        "no room for a prompt",
        "--rollout.max_new_tokens 32",
    ),
    (
        rules.answer_fits_the_context,
        "rl",
        "--eval.max_new_tokens 100 --data.max_len 64",
        ["(=100)", "(=64)"],
        "no room for a prompt",
        "--eval.max_new_tokens 32",
    ),
    *(
        (
            rules.whole_samples_are_masked,
            "rl",
            f"--algo.advantage.is_correction_level {level} --algo.advantage.is_correction_mode {mode}",
            [f"(={level})", f"(={mode})"],
            "one number per sample",
            fix,
        )
        for level, mode in (("seq", "clip"), ("geo", "trunc"))
        for fix in ("--algo.advantage.is_correction_mode mask", "--algo.advantage.is_correction_level token")
    ),
    (
        rules.on_policy_is_one_epoch,
        "rl",
        "--train.force_on_policy --train.max_epochs 2",
        ["(=True)", "(=2)"],
        "moved away from its rollouts",
        "--train.max_epochs 1",
    ),
    # 12 groups of 4: steps of 4, 8, 12, 16, 24 or 48 rollouts are whole groups and leave no remainder.
    (
        rules.steps_split_by_groups,
        "rl",
        "--train.batch_size 20",
        ["(=20)", "(=12)", "(=4)"],
        "split",
        "--train.batch_size 16",
    ),
    (rules.steps_split_by_groups, "rl", "--train.batch_size 6", ["(=6)"], "multiple of 4", "--train.batch_size 4"),
    (
        rules.steps_split_by_groups,
        "rl",
        "--train.batch_size 96",
        ["(=96)"],
        "divide 12 * 4 = 48",
        "--train.batch_size 48",
    ),
    *(
        (
            rules.staleness_covers_the_queue,
            "rl",
            "--train.max_staleness 1 --train.async_queue_size 2",
            ["(=1)", "(=2)"],
            "too old",
            fix,
        )
        for fix in ("--train.max_staleness 2", "--train.async_queue_size 1")
    ),
    (
        rules.transfer_fits_the_device,
        "rl",
        "--fsdp.device cpu --vllm.weight_transfer nccl",
        ["(=nccl)", "(=cpu)"],
        "no weights would arrive",
        "--vllm.weight_transfer auto",
    ),
    (
        rules.transfer_fits_the_device,
        "rl",
        "--actor.num_nodes 2 --vllm.weight_transfer shm",
        ["(=shm)", "(=2)"],
        "share no memory",
        "--vllm.weight_transfer nccl",
    ),
    *(
        (rules.warn_uncorrected, "rl", "--algo.advantage.is_correction_level off", ["(=1)", "(=off)"], "fresh", fix)
        for fix in ("--algo.advantage.is_correction_level token", "--train.async_queue_size 0")
    ),
    (
        rules.warn_more_in_flight_than_open,
        "rl",
        "--rollout.vllm_generate_batch_size 25",
        ["(=25)", "(=1)", "(=12)"],
        "24 groups may be open",
        "--rollout.vllm_generate_batch_size 24",
    ),
    (
        row(RL.eval.steps),
        "rl",
        "--eval.steps 5",
        ["(=5)"],
        "nothing is evaluated",
        "--eval.dataset FILE.jsonl",
    ),
    (
        row(RL.eval.eval_at_start),
        "rl",
        "--eval.eval_at_start",
        [],
        "nothing is evaluated",
        "--eval.dataset FILE.jsonl",
    ),
    (
        row(RL.eval.steps),
        "sft",
        "--eval.steps 5",
        ["(=5)"],
        "nothing is evaluated",
        "--eval.dataset FILE.jsonl",
    ),
    (
        row(RL.data.chat_template),
        "rl",
        "--data.chat_template t.jinja",
        ["(=t.jinja)"],
        "no template",
        "--data.apply_chat_template",
    ),
    *(
        (
            row(getattr(RL.algo.advantage, name)),
            "rl",
            f"--algo.advantage.{name} 0.9 --algo.advantage.estimator {estimator}",
            ["(=0.9)", f"(={estimator})"],
            "it is not read",
            fix,
        )
        for name, estimator, other in [
            ("gamma", "grpo", "reinforce"),
            ("gamma", "flash_reinforce", "reinforce"),
            ("lam", "reinforce", "gae"),
            ("lam", "rloo", "gae"),
        ]
        for fix in (f"--algo.advantage.{name} 1", f"--algo.advantage.estimator {other}")
    ),
    *(
        (
            row(RL.critic),
            "rl",
            f"--critic.{name} {value} --algo.advantage.estimator {estimator}",
            [f"`critic.{name}` (={value})", f"(={estimator})"],
            "no critic is built",
            "--algo.advantage.estimator gae",
        )
        for name, value, estimator in [
            ("model_name_or_path", "m", "reinforce"),
            ("adam.lr", "0.1", "grpo"),
            ("max_epochs", "2", "on_policy_distill"),
        ]
    ),
    *(
        (
            row(RL.ref),
            "rl",
            f"--ref.model_name_or_path other {flags}",
            ["`ref.model_name_or_path` (=other)", value],
            "no reference model is built",
            "--algo.kl.init_coef 0.001 --algo.kl.ref model",
        )
        for flags, value in (("", "(=None)"), ("--algo.kl.init_coef 0.1 --algo.kl.ref rollout", "(=rollout)"))
    ),
    *(
        (
            row(RL.algo.kl.horizon),
            "rl",
            f"--algo.kl.{flag}",
            [f"(={value})", "(=None)"],
            "no KL is computed",
            "--algo.kl.init_coef 0.001",
        )
        for flag, value in (
            ("estimator k3", "k3"),
            ("use_loss", "True"),
            ("ref rollout", "rollout"),
            ("horizon 9", "9"),
        )
    ),
    *(
        (
            rules.warn_reward_kl,
            "rl",
            f"--algo.kl.init_coef 0.1 --algo.kl.estimator {name}",
            [f"(={name})", "(=False)"],
            "only k1 has the gradient of the KL",
            fix,
        )
        for name, fix in (("k2", "--algo.kl.estimator k1"), ("k3", "--algo.kl.use_loss"))
    ),
    *(
        (
            rules.warn_sample_ratio_never_clips,
            "rl",
            "--actor.loss_mode gspo --actor.eps_clip_low_high 0.2 0.2",
            ["(=(0.2, 0.2))", "(=gspo)"],
            "nothing would be clipped",
            f"--actor.eps_clip_low_high {bounds}",
        )
        for bounds in ("0.0003 0.0004", "None")
    ),
    *(
        (
            row(RL.reward.cache_dir),
            command,
            f"--reward.{flag}",
            [f"(={value})", "(=None)"],
            "there is no scorer",
            "--reward.scorer FILE.py",
        )
        for command in ("rl", "eval")
        for flag, value in (("num_scorers 3", "3"), ("cache_dir scores", "scores"), ("scorer_timeout_s 5", "5.0"))
    ),
    (
        row(RL.reward.overlong_penalty_factor),
        "rl",
        "--reward.overlong_penalty_factor 0.5",
        ["(=0.5)", "(=None)"],
        "nothing is punished",
        "--reward.overlong_buffer_len 512",
    ),
    (
        row(RL.ckpt.best_metric_key),
        "rl",
        "--ckpt.best_metric_key eval/math/pass1",
        ["(=eval/math/pass1)", "(=None)"],
        "no version is the best",
        "--eval.dataset FILE.jsonl",
    ),
    (
        row(RL.train.max_tokens_per_gpu),
        "rl",
        "--train.max_tokens_per_gpu 4096",
        ["(=4096)", "(=False)"],
        "the budget is not read",
        "--train.dynamic_batch_enable",
    ),
    (
        rules.best_is_of_an_evaluation,
        "rl",
        "--ckpt.best_metric_key pass1 --eval.dataset d.jsonl",
        ["(=pass1)"],
        "no version could be the best",
        "",
    ),
    (
        rules.warn_nothing_saved,
        "rl",
        "--ckpt.disable_final_save --ckpt.save_steps -1",
        ["(=-1)"],
        "nothing is saved",
        "--ckpt.save_steps 20",
    ),
    (
        rules.warn_nothing_saved,
        "sft",
        "--ckpt.disable_final_save",
        ["(=-1)"],
        "nothing is saved",
        "--ckpt.save_steps 20",
    ),
    (rules.rl_needs_an_agent, "eval", "--train.agent_path ''", ["not set"], "nothing computes a reward", ""),
    (
        rules.answer_fits_the_context,
        "eval",
        "--eval.max_new_tokens 64 --data.max_len 64",
        ["(=64)"],
        "no room for a prompt",
        "--eval.max_new_tokens 32",
    ),
    (
        rules.transfer_fits_the_device,
        "eval",
        "--fsdp.device cpu --vllm.weight_transfer nccl",
        ["(=nccl)", "(=cpu)"],
        "no weights would arrive",
        "--vllm.weight_transfer auto",
    ),
    (
        row(RL.data.chat_template),
        "eval",
        "--data.chat_template t.jinja",
        ["(=t.jinja)"],
        "no template",
        "--data.apply_chat_template",
    ),
    (rules_sft.sft_needs_a_model, "sft", "--model.model_name_or_path ''", ["not set"], "nothing to train", ""),
    (rules_sft.sft_needs_a_dataset, "sft", "--data.dataset ''", ["not set"], "nothing to learn from", ""),
    (
        rules_sft.warn_micro_batch_never_full,
        "sft",
        "--train.micro_batch_size 8 --train.batch_size 4",
        ["(=8)", "(=4)"],
        "no forward pass is ever full",
        "--train.micro_batch_size 4",
    ),
]


@functools.cache
def _config(trainer: str, extra: str = ""):
    config_class, good = CONFIGS[trainer]
    return parse(config_class, [token.strip("'") for token in f"{good} {extra}".split()], prog="molt")


def _algorithm(config) -> Algorithm | None:
    """Only RL has one."""
    if not isinstance(config, RLConfig) or config.eval.eval_only:
        return None
    estimator = ADVANTAGES[config.algo.advantage.estimator]
    return Algorithm(estimator, LOSSES[config.actor.loss_mode], config.algo, config.actor)


def _message(rule, config) -> str | None:
    if isinstance(rule, ReadOnlyWhen):
        return rule.message(config, _algorithm(config))
    (registered,) = (registered for registered in rules.REGISTRY if registered.check is rule)
    return rule(config, _algorithm(config)) if registered.reads_algorithm else rule(config)


def _is_error(rule) -> bool:
    if isinstance(rule, ReadOnlyWhen):
        return rule.is_error
    (registered,) = (registered for registered in rules.REGISTRY if registered.check is rule)
    return registered.is_error


def _errors_and_warnings(trainer: str, config) -> tuple[list[str], list[str]]:
    algorithm = _algorithm(config)
    return rules.errors(trainer, config, algorithm), rules.warnings(trainer, config, algorithm)


@pytest.mark.parametrize("trainer", CONFIGS)
def test_good_settings_pass_in_silence(trainer):
    assert _errors_and_warnings(trainer, _config(trainer)) == ([], [])


@pytest.mark.parametrize(("rule", "trainer", "broken", "values", "consequence", "fix"), BROKEN)
def test_a_rule_names_values_consequence_and_a_fix_that_works(rule, trainer, broken, values, consequence, fix):
    config = _config(trainer, broken)
    message = _message(rule, config)
    assert message and consequence in message and message.endswith(".")
    as_given = message.replace(f"{Path.cwd()}/", "")
    for value in values:
        assert value in as_given
    errors, warnings = _errors_and_warnings(trainer, config)
    assert message in (errors if _is_error(rule) else warnings)
    for flag in fix.split(" --"):
        assert flag.removeprefix("--").split(" ")[0] in message
    if (fix and "FILE" not in fix) or fix.endswith(".jsonl"):
        assert _message(rule, _config(trainer, f"{broken} {fix}")) is None


@pytest.mark.parametrize("trainer", CONFIGS)
def test_every_setting_that_a_message_names_exists(trainer):
    known = flags(CONFIGS[trainer][0])
    for _, which, broken, *_ in BROKEN:
        if which == trainer:
            config = _config(trainer, broken)
            for text in itertools.chain(*_errors_and_warnings(trainer, config)):
                named = re.findall(r"(?:--|`)([a-z_]+(?:\.[a-z_]+)+)", text)
                assert named and set(named) <= set(known), text


def test_force_on_policy_is_one_step_per_batch():
    assert _config("rl", "--train.batch_size 16").rollouts_per_step == 16
    assert _config("rl", "--train.batch_size 16 --train.force_on_policy").rollouts_per_step == 48
    # What `batch_size` says is not read, so it may be anything.
    assert rules.steps_split_by_groups(_config("rl", "--train.batch_size 7 --train.force_on_policy")) is None


def test_a_token_budget_takes_the_place_of_the_micro_batch_size():
    config = _config("sft", "--train.micro_batch_size 8 --train.batch_size 4 --train.max_tokens_per_gpu 64")
    assert rules_sft.warn_micro_batch_never_full(config) is None


def test_every_rule_is_registered_and_broken_here():
    functions = {
        name
        for name, function in (vars(rules) | vars(rules_sft)).items()
        if inspect.isfunction(function) and function.__annotations__.get("return") == rules.Message
    } - {"required", "wrong_shares"}
    broken = [rule for rule, *_ in BROKEN]
    assert functions == {registered.check.__name__ for registered in rules.REGISTRY}
    assert functions == {rule.__name__ for rule in broken if not isinstance(rule, ReadOnlyWhen)}
    assert not [row.settings for row in rules.READ_ONLY_WHEN if row not in broken]


@pytest.mark.parametrize("command", CONFIGS)
def test_every_command_keeps_the_rules_that_are_broken_for_it(command):
    """A rule is registered for the commands that it is tested with, and for no other."""
    tested = {_name(rule) for rule, trainer, *_ in BROKEN if trainer == command}
    registered = {_name(registered.check) for registered in rules.REGISTRY if command in registered.commands}
    rows = {_name(row) for row in rules.READ_ONLY_WHEN if command in row.commands}
    assert tested == registered | rows


def _name(rule) -> str:
    return name_of(rule.settings[0]) if isinstance(rule, ReadOnlyWhen) else rule.__name__


def test_all_messages_come_at_once():
    assert sum("is not set" in text for text in rules.errors("rl", RLConfig())) == 3


def test_without_an_algorithm_the_others_are_checked():
    """As when the file of a user's estimator cannot be imported."""
    config = _config("rl", "--rollout.n_samples_per_prompt 1 --algo.dynamic_filtering_enable --critic.max_epochs 2")
    (error,) = rules.errors("rl", config)
    assert "dynamic_filtering_enable" in error and rules.warnings("rl", config) == []


@pytest.mark.parametrize("config", [RLConfig(), SftConfig()], ids=["rl", "sft"])
def test_a_reference_has_the_name_and_the_value_of_its_setting(config):
    references = list(single_settings(Reference("", type(config))))
    assert [name_of(reference) for reference in references] == list(flags(type(config)))
    for reference in references:
        value = functools.reduce(getattr, name_of(reference).split("."), config)
        assert value_of(reference, config) is value


def test_a_reference_to_no_setting_is_an_error():
    with pytest.raises(AttributeError, match="no setting `targett`"):
        RL.algo.kl.targett  # noqa: B018
    with pytest.raises(AttributeError, match="no setting `real`"):
        RL.algo.kl.target.real  # noqa: B018
    with pytest.raises(TypeError, match="is a value, not a reference"):
        rules.message(RLConfig(), [RLConfig().algo.kl.target], "", "")


def test_a_baseline_of_the_batch_needs_two_rollouts_in_it_and_no_group():
    flags = "--algo.advantage.estimator flash_reinforce --rollout.n_samples_per_prompt 1"
    for more, broken in (("", False), (" --rollout.batch_size 1", True)):
        config = _config("rl", flags + more)
        assert (rules.baseline_needs_a_group(config, _algorithm(config)) is not None) == broken


@pytest.mark.parametrize(
    "flags",
    [
        "--algo.kl.init_coef 0.1",
        "--algo.kl.init_coef 0.1 --algo.kl.ref rollout --algo.kl.estimator k3 --algo.kl.use_loss --algo.kl.target 0.05",
        "--algo.kl.init_coef 0.1 --algo.kl.use_loss --algo.kl.estimator k2 --algo.advantage.estimator grpo",
        "--algo.advantage.estimator gae --actor.freezing_steps 2 --algo.advantage.lam 0.95 --algo.advantage.gamma 0.99 "
        "--critic.adam.lr 1e-4 --critic.value_clip 0.5",
        DISTILL,
        "--algo.kl.init_coef 0",
        "--actor.dual_clip 3 --algo.loss a.py:f",
        *(f"--actor.loss_mode {name}" for name in LOSSES),
        "--actor.loss_mode cispo --actor.eps_clip_low_high 0.2 1",
        "--algo.advantage.is_correction_level seq --algo.advantage.is_correction_gating binary_kl "
        "--algo.advantage.is_correction_threshold 0.05",
        "--algo.dynamic_filtering_enable --reward.overlong_buffer_len 64 --reward.overlong_penalty_factor 0.5",
        "--reward.stop_properly_penalty_coef -1",
        "--reward.mask_truncated --algo.dynamic_filtering_enable --algo.advantage.estimator grpo",
    ],
)
def test_algorithms_that_nothing_is_said_of(flags):
    assert _errors_and_warnings("rl", _config("rl", flags)) == ([], [])


def test_a_group_estimator_says_what_its_baseline_is():
    """The rule asks the row; a row that forgot to say would train advantages of 0."""
    for name, estimator in ADVANTAGES.items():
        assert (estimator.baseline != "none") == (estimator.level == "group"), name
