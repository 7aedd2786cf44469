"""A row of a table in `algo/` is all there is to say: a new one can be chosen, is checked and has its help at once."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest

import molt
from molt import rules
from molt.algo.advantage import ADVANTAGES, Estimator, group_mean
from molt.algo.loss import LOSSES, PolicyLoss, ppo
from molt.algo.reduce import AGGREGATIONS, Aggregation
from molt.algorithm import Algorithm, load_algorithm
from molt.cli.args import parse
from molt.cli.check import Findings
from molt.cli.check import load_algorithm as check_algorithm
from molt.config import RLConfig
from molt.errors import ConfigError
from molt.report.header import header
from molt.roles import roles

PACKAGE = Path(molt.__file__).parent
GOOD = "--actor.model_name_or_path m --data.prompt_dataset p.jsonl --train.agent_path a.py --rollout.batch_size 16"
CHOSEN = f"{GOOD} --algo.advantage.estimator brand_new --actor.loss_mode latest --actor.loss_agg_mode halves"


@pytest.fixture
def rows(monkeypatch):
    """A new estimator, loss and aggregation, made of the functions of old ones."""
    brand_new = Estimator(
        level="group",
        whiten=False,
        fn=group_mean,
        formula="R - new",
        needs=("ref_logprobs", "values"),
        baseline="group",
        kl_coef=0.25,
    )
    monkeypatch.setitem(ADVANTAGES, "brand_new", brand_new)
    monkeypatch.setitem(LOSSES, "latest", PolicyLoss(ppo, "-late({low:g}, {high:g})", (0.125, 9.0), bounds="weight"))
    monkeypatch.setitem(AGGREGATIONS, "halves", Aggregation(AGGREGATIONS["token-mean"].denominators, "1/2N"))


def config_of(flags: str) -> RLConfig:
    return parse(RLConfig, flags.split(), prog="molt rl")


def algorithm_of(config: RLConfig) -> Algorithm:
    found = Findings()
    algorithm = check_algorithm(found, config)
    assert algorithm is not None and not found
    return algorithm


def test_new_rows_can_be_chosen(rows):
    config = config_of(CHOSEN)
    assert algorithm_of(config) == load_algorithm(config.algo, config.actor)
    algorithm = algorithm_of(config)
    assert (algorithm.kl_coef, algorithm.low_high) == (0.25, (0.125, 9.0))
    assert [role.name for role in roles(config, algorithm)] == ["policy", "reference", "critic"]
    lines = header(config, 3).splitlines()
    assert "  A      = R - new    [brand_new]" in lines
    assert "  loss   = sum_t 1/2N * -late(0.125, 9) * c    [latest]" in lines


def test_the_same_names_are_refused_without_their_rows():
    for flag, name, known in [
        ("actor.loss_mode", "latest", LOSSES),
        ("actor.loss_agg_mode", "halves", AGGREGATIONS),
        ("algo.advantage.estimator", "brand_new", ADVANTAGES),
    ]:
        with pytest.raises(ConfigError, match=rf"^`{flag}` \(={name}\) .* Use one of: {', '.join(known)}[.,]"):
            config_of(f"--{flag} {name}")


def test_a_wrong_name_in_a_file_is_refused_too(tmp_path, rows):
    path = tmp_path / "config.toml"
    path.write_text('[actor]\nloss_mode = "lattest"\n')
    with pytest.raises(ConfigError, match=r"`actor.loss_mode` \(=lattest\) .*Did you mean 'latest'\? .*, latest\."):
        config_of(f"--config {path}")
    assert config_of(f"--config {path} --actor.loss_mode latest").actor.loss_mode == "latest"


def test_rules_ask_the_new_rows(rows):
    def errors(flags: str) -> str:
        config = config_of(f"{CHOSEN} {flags}")
        return "\n".join(rules.errors("rl", config, algorithm_of(config)))

    with_group = "--rollout.n_samples_per_prompt 8 --algo.kl.init_coef 0.5"
    assert "every advantage would be 0" in errors("")
    assert "every advantage would be 0" not in errors(with_group)
    assert "`actor.eps_clip_low_high`" not in errors(with_group)
    assert "Use --actor.eps_clip_low_high 0.125 9" in errors(f"{with_group} --actor.eps_clip_low_high 0.2 0.2")
    assert "`actor.dual_clip` (=3.0)" in errors(f"{with_group} --actor.dual_clip 3")
    assert "would never read it" in errors("")  # its own KL, which a group estimator does not get


def help_of(capsys) -> str:
    with pytest.raises(SystemExit):
        config_of("--help")
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_the_help_lists_the_rows_and_their_defaults(capsys):
    shown = help_of(capsys)
    assert f"One of: {', '.join(LOSSES)}." in shown and f"One of: {', '.join(AGGREGATIONS)}." in shown
    assert f"One of: {', '.join(ADVANTAGES)}, FILE.py:function." in shown
    assert "The losses' own: ppo 0.2 0.2, gspo 0.0003 0.0004, cispo 0.2 5, gmpo 0.4 0.4" in shown
    assert "The estimators' own: on_policy_distill 1" in shown
    assert "brand_new" not in shown


def test_the_help_has_the_new_rows(rows, capsys):
    shown = help_of(capsys)
    assert ", latest." in shown and ", brand_new, FILE.py:function." in shown
    assert "latest 0.125 9." in shown and "brand_new 0.25, all others 0." in shown and "sum-norm, halves." in shown


def test_a_row_has_bounds_that_its_own_rules_accept():
    for name, loss in LOSSES.items():
        config = config_of(f"{GOOD} --actor.loss_mode {name}")
        assert replace(config.actor, eps_clip_low_high=loss.low_high).loss_mode == name  # in the range of the setting
        algorithm = algorithm_of(config)
        assert rules.errors("rl", config, algorithm) == rules.warnings("rl", config, algorithm) == []


def names_in_code(path: Path) -> set[str]:
    """The string constants of a file that are the name of an estimator or a loss."""
    constants = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
    return constants & {*ADVANTAGES, *LOSSES}


def test_nothing_but_a_table_knows_the_name_of_a_row():
    """Beside the tables: the default of a setting, and what `molt demo` runs."""
    found = {path.relative_to(PACKAGE).as_posix(): names_in_code(path) for path in PACKAGE.rglob("*.py")}
    assert {path: names for path, names in found.items() if names} == {
        "algo/advantage.py": set(ADVANTAGES),
        "algo/loss.py": set(LOSSES),
        "config.py": {"reinforce", "ppo"},
        "cli/demo.py": {"grpo"},
    }
