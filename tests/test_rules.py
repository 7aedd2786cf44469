"""Every rule: silent on good settings, and value, consequence and fix on bad ones."""

import ast
import inspect
import itertools
import re

import pytest

from molt import rules, rules_sft
from molt.algo.advantage import ADVANTAGES
from molt.cli.args import flags, parse
from molt.config import RLConfig
from molt.config_sft import SftConfig

GOOD_RL = (
    "--actor.model_name_or_path m --data.prompt_dataset p.jsonl --train.agent_path a.py "
    "--rollout.batch_size 12 --rollout.n_samples_per_prompt 4"
)
GOOD_SFT = "--model.model_name_or_path m --data.dataset d.jsonl"
GOOD_EVAL = "--actor.model_name_or_path m --eval.dataset e.jsonl --train.agent_path a.py --eval.eval_only"
CONFIGS = {"rl": (RLConfig, GOOD_RL), "eval": (RLConfig, GOOD_EVAL), "sft": (SftConfig, GOOD_SFT)}
ERRORS = {"rl": rules.RULES, "eval": rules.EVAL_RULES, "sft": rules_sft.RULES}
WARNINGS = {"rl": rules.WARNINGS, "eval": rules.EVAL_WARNINGS, "sft": rules_sft.WARNINGS}

# rule, trainer, flags that break it, values in the message, consequence, a fix
BROKEN = [
    (rules.rl_needs_a_model, "rl", "--actor.model_name_or_path ''", ["not set"], "nothing to train", ""),
    (rules.rl_needs_a_model, "eval", "--actor.model_name_or_path ''", ["not set"], "nothing to evaluate", ""),
    (rules.eval_needs_a_dataset, "eval", "--eval.dataset None", ["not set"], "nothing to evaluate it on", ""),
    (rules.rl_needs_prompts, "rl", "--data.prompt_dataset ''", ["not set"], "no rollout can start", ""),
    (rules.rl_needs_an_agent, "rl", "--train.agent_path ''", ["not set"], "what a reward is", ""),
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
        (rules.tools_need_a_template, trainer, "--data.tools_key tools", ["(=tools)", "(=False)"], "no place", fix)
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
    (rules.no_kl_yet, "rl", "--algo.kl.init_coef 0.1", ["(=0.1)"], "no KL would be computed", "--algo.kl.init_coef 0"),
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
        rules.correction_needs_the_whole_distribution,
        "rl",
        "--rollout.top_p 0.9 --rollout.top_k 50",
        ["(=0.9)", "(=50)", "(=token)"],
        "every ratio would be wrong",
        "--rollout.top_p 1 --rollout.top_k -1",
    ),
    (
        rules.correction_needs_the_whole_distribution,
        "rl",
        "--rollout.top_k 50",
        ["(=50)"],
        "every ratio would be wrong",
        "--algo.advantage.is_correction_level off",
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
        rules.warn_eval_without_dataset,
        "rl",
        "--eval.steps 5",
        ["(=5)"],
        "nothing is evaluated",
        "--eval.dataset FILE.jsonl",
    ),
    (
        rules.warn_eval_without_dataset,
        "rl",
        "--eval.eval_at_start",
        [],
        "nothing is evaluated",
        "--eval.dataset FILE.jsonl",
    ),
    (
        rules.warn_eval_without_dataset,
        "sft",
        "--eval.steps 5",
        ["(=5)"],
        "nothing is evaluated",
        "--eval.dataset FILE.jsonl",
    ),
    (
        rules.warn_template_unused,
        "rl",
        "--data.chat_template t.jinja",
        ["(=t.jinja)"],
        "no template",
        "--data.apply_chat_template",
    ),
    *(
        (
            rules.warn_gamma_unused,
            "rl",
            "--algo.advantage.gamma 0.9 --algo.advantage.estimator grpo",
            ["(=0.9)", "(=grpo)"],
            "no discount",
            fix,
        )
        for fix in ("--algo.advantage.gamma 1", "--algo.advantage.estimator reinforce")
    ),
    (
        rules.warn_no_best,
        "rl",
        "--ckpt.best_metric_key eval/math/pass1",
        ["(=eval/math/pass1)", "(=None)"],
        "no version is the best",
        "--eval.dataset FILE.jsonl",
    ),
    (
        rules.warn_budget_unused,
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


def _config(trainer: str, extra: str = ""):
    config_class, good = CONFIGS[trainer]
    return parse(config_class, [token.strip("'") for token in f"{good} {extra}".split()], prog="molt")


def _errors_and_warnings(trainer: str, config) -> tuple[list[str], list[str]]:
    return rules.broken(ERRORS[trainer], config), rules.broken(WARNINGS[trainer], config)


@pytest.mark.parametrize("trainer", CONFIGS)
def test_good_settings_pass_in_silence(trainer):
    assert _errors_and_warnings(trainer, _config(trainer)) == ([], [])


@pytest.mark.parametrize(("rule", "trainer", "broken", "values", "consequence", "fix"), BROKEN)
def test_a_rule_names_values_consequence_and_a_fix_that_works(rule, trainer, broken, values, consequence, fix):
    config = _config(trainer, broken)
    message = rule(config)
    assert message and consequence in message and message.endswith(".")
    for value in values:
        assert value in message
    assert message in _errors_and_warnings(trainer, config)[rule in WARNINGS[trainer]]
    for flag in fix.split(" --"):
        assert flag.removeprefix("--").split(" ")[0] in message
    if (fix and "FILE" not in fix) or fix.endswith(".jsonl"):
        assert rule(_config(trainer, f"{broken} {fix}")) is None


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


def test_every_rule_is_listed_and_broken_here():
    functions = {
        name
        for name, function in (vars(rules) | vars(rules_sft)).items()
        if inspect.isfunction(function) and function.__annotations__.get("return") == rules.Message
    } - {"required"}
    listed = {rule.__name__ for listed in (ERRORS, WARNINGS) for rules_ in listed.values() for rule in rules_}
    assert functions == listed == {rule.__name__ for rule, *_ in BROKEN}


def test_all_messages_come_at_once():
    assert sum("is not set" in text for text in rules.broken(rules.RULES, RLConfig())) == 3


def test_group_estimators_are_those_of_algo():
    assert set(rules.NEED_A_GROUP) == {name for name, e in ADVANTAGES.items() if e.level == "group"}


def test_rules_import_nothing_heavy():
    imported = {
        node.module.split(".")[0]
        for node in ast.walk(ast.parse(inspect.getsource(rules)))
        if isinstance(node, ast.ImportFrom) and node.module
    }
    assert imported == {"collections", "operator", "typing", "molt"}
