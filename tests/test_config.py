"""Every setting is documented, range-checked beside its definition, and read somewhere."""

import ast
import dataclasses
import math
from pathlib import Path

import pytest

from molt import config, config_sft
from molt.errors import ConfigError

PACKAGE = Path(config.__file__).parent
SECTIONS = {name: item for name, item in (vars(config) | vars(config_sft)).items() if dataclasses.is_dataclass(item)}
CLASSES = [
    node
    for module in (config, config_sft)
    for node in ast.parse(Path(module.__file__).read_text()).body
    if isinstance(node, ast.ClassDef) and node.name in SECTIONS
]


def _fields() -> list[tuple[str, str]]:
    return [
        (node.name, statement.target.id)
        for node in CLASSES
        for statement in node.body
        if isinstance(statement, ast.AnnAssign)
    ]


def _is_section(class_name: str, field: str) -> bool:
    (found,) = (f for f in dataclasses.fields(SECTIONS[class_name]) if f.name == field)
    return dataclasses.is_dataclass(found.type)


@pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS)
def test_defaults_are_valid_frozen_and_unset_means_none(section):
    made = section()
    for field in dataclasses.fields(section):
        # A config.toml leaves out what is None, so None has to be what is left out.
        if "None" in str(field.type):
            assert field.default is None, f"{section.__name__}.{field.name}"
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, dataclasses.fields(section)[0].name, None)


def test_every_field_has_its_help():
    for node in CLASSES:
        assert ast.get_docstring(node), node.name
        for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
            if isinstance(statement, ast.AnnAssign) and not _is_section(node.name, statement.target.id):
                assert isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant), (
                    f"{node.name}.{statement.target.id} has no string under it"
                )


def _read_names() -> set[str]:
    """Attributes read in the package; what only checks settings does not count as reading them."""
    checks = {*PACKAGE.glob("config*.py"), *PACKAGE.glob("rules*.py"), PACKAGE / "cli" / "check.py"}
    trees = [ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py") if path not in checks]
    # A property of the settings counts for the fields it reads, if it is read itself.
    properties = {
        function.name: function
        for node in CLASSES
        for function in node.body
        if isinstance(function, ast.FunctionDef) and function.decorator_list
    }
    names = {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for _ in properties:
        used = [function for name, function in properties.items() if name in names]
        names |= {node.attr for function in used for node in ast.walk(function) if isinstance(node, ast.Attribute)}
    return names


def test_every_field_is_read_somewhere():
    names = _read_names()
    dead = [f"{section}.{field}" for section, field in _fields() if field not in names]
    assert not dead, f"settings that nothing reads: {dead}. Use them or remove them."


WRONG = [
    (config.AdamConfig, "lr", -1.0),
    (config.AdamConfig, "lr", math.nan),
    (config.AdamConfig, "betas", (0.9, 1.0)),
    (config.AdamConfig, "eps", 0.0),
    (config.OptimizerConfig, "lr_warmup_ratio", 1.5),
    (config.OptimizerConfig, "min_lr_ratio", -0.1),
    (config.ActorConfig, "eps_clip_low_high", (0.0, 0.2)),
    (config.ActorConfig, "eps_clip_low_high", (1.0, 0.2)),
    (config.ActorConfig, "dual_clip", 1.0),
    (config.ActorConfig, "aux_loss_coef", -0.1),
    (config.ActorConfig, "freezing_steps", -1),
    (config.ActorConfig, "num_nodes", 0),
    (config.ActorConfig, "num_gpus_per_node", 0),
    (config.ActorConfig, "lr_warmup_ratio", 2.0),
    (config.RefConfig, "num_nodes", 0),
    (config.RefConfig, "num_gpus_per_node", 0),
    (config.CriticConfig, "value_clip", 0.0),
    (config.CriticConfig, "max_epochs", 0),
    (config.CriticConfig, "num_nodes", 0),
    (config.CriticConfig, "num_gpus_per_node", 0),
    (config.CkptConfig, "save_steps", 0),
    (config.CkptConfig, "save_steps", -2),
    (config.CkptConfig, "max_num", 0),
    (config.LoggerConfig, "logging_steps", 0),
    (config.LoggerConfig, "rollouts_per_step", -2),
    (config.PromptDataConfig, "max_len", 1),
    (config.PromptDataConfig, "max_samples", 0),
    (config.AdvantageConfig, "is_correction_threshold", (5.0, 0.5)),
    (config.AdvantageConfig, "is_correction_threshold", (0.0,)),
    (config.AdvantageConfig, "is_correction_threshold", (0.1, 0.5, 5.0)),
    (config.AdvantageConfig, "lam", 1.1),
    (config.AdvantageConfig, "gamma", 0.0),
    (config.AdvantageConfig, "gamma", 1.1),
    (config.KlConfig, "init_coef", -0.1),
    (config.KlConfig, "target", 0.0),
    (config.KlConfig, "horizon", 0),
    (config.AlgoConfig, "dynamic_filtering_range", (1.0, 1.0)),
    (config.RewardConfig, "scorer_timeout_s", 0.0),
    (config.RewardConfig, "num_scorers", 0),
    (config.RewardConfig, "clip_range", (1.0, 1.0)),
    (config.RewardConfig, "overlong_buffer_len", 0),
    (config.RewardConfig, "overlong_penalty_factor", -1.0),
    (config.RewardConfig, "stop_properly_penalty_coef", 1.5),
    (config.RolloutConfig, "batch_size", 0),
    (config.RolloutConfig, "n_samples_per_prompt", 0),
    (config.RolloutConfig, "vllm_generate_batch_size", 0),
    (config.RolloutConfig, "num_runners", 0),
    (config.RolloutConfig, "max_new_tokens", 0),
    (config.RolloutConfig, "max_turns", 0),
    (config.RolloutConfig, "timeout_s", 0.0),
    (config.RolloutConfig, "temperature", 0.0),
    (config.RolloutConfig, "top_p", 0.0),
    (config.RolloutConfig, "top_p", 1.5),
    (config.RolloutConfig, "top_k", 0),
    (config.RolloutConfig, "max_retries", -1),
    (config.RolloutConfig, "max_failure_rate", 1.1),
    (config.TrainConfig, "batch_size", 0),
    (config.TrainConfig, "micro_batch_size", 0),
    (config.TrainConfig, "max_epochs", 0),
    (config.TrainConfig, "num_episodes", 0),
    (config.TrainConfig, "max_steps", 0),
    (config.TrainConfig, "async_queue_size", -1),
    (config.TrainConfig, "parity_bound", 0.0),
    (config.TrainConfig, "grad_spike_factor", 1.0),
    (config.TrainConfig, "grad_spike_factor", math.nan),
    (config.TrainConfig, "max_trips", 0),
    (config.VllmConfig, "num_engines", 0),
    (config.VllmConfig, "tensor_parallel_size", 0),
    (config.VllmConfig, "gpu_memory_utilization", 1.2),
    (config.EvalConfig, "steps", 0),
    (config.EvalConfig, "n_samples_per_prompt", 0),
    (config.EvalConfig, "max_new_tokens", 0),
    (config.EvalConfig, "temperature", -1.0),
    (config.EvalConfig, "top_p", 0.0),
    (config_sft.SftDataConfig, "max_len", 0),
    (config_sft.SftDataConfig, "max_samples", 0),
    (config_sft.SftTrainConfig, "micro_batch_size", 0),
    (config_sft.SftTrainConfig, "batch_size", 0),
    (config_sft.SftTrainConfig, "max_steps", 0),
    (config_sft.SftEvalConfig, "steps", 0),
]


def test_a_message_names_the_flag():
    with pytest.raises(ConfigError, match=r"^`rollout.top_p` \(=0.0\): it is a share"):
        config.RolloutConfig(top_p=0.0)
    with pytest.raises(ConfigError, match=r"^`actor.min_lr_ratio` "):
        config.ActorConfig(min_lr_ratio=2.0)
    with pytest.raises(ConfigError, match=r"^`critic.min_lr_ratio` "):
        config.CriticConfig(min_lr_ratio=2.0)
    with pytest.raises(ConfigError, match=r"^`algo.kl.horizon` "):
        config.KlConfig(horizon=0)
    with pytest.raises(ConfigError, match=r"^`min_lr_ratio` "):
        config_sft.SftConfig(min_lr_ratio=2.0)


@pytest.mark.parametrize(("section", "name", "value"), WRONG, ids=lambda x: getattr(x, "__name__", str(x)))
def test_a_wrong_value_is_refused_with_value_consequence_and_fix(section, name, value):
    with pytest.raises(ConfigError) as refused:
        section(**{name: value})
    # `section.name` (=value): consequence. Fix.
    setting, _, rest = str(refused.value).partition(f" (={value}): ")
    assert setting.rpartition(".")[2].strip("`") == name
    consequence, _, fix = rest.partition(". ")
    assert len(consequence) > 10 and fix.split()[0] in ("Use", "Keep") and fix.endswith(".")


def test_derived_values():
    rl = config.RLConfig(rollout=config.RolloutConfig(batch_size=4, n_samples_per_prompt=8))
    assert rl.rollouts_per_batch == 32 and rl.rollouts_per_step == 32
    assert config.TrainConfig(async_queue_size=2).staleness_bound == 2
    assert config.TrainConfig(async_queue_size=0, max_staleness=3).staleness_bound == 3
    assert rl.algo.advantage.band == (0.5, 5.0)
    assert config.AdvantageConfig(is_correction_threshold=(3.0,)).band == (0.0, 3.0)
    assert config.CriticConfig().adam.lr == 5e-6
    ckpt = config.CkptConfig(output_dir=Path("out"))
    assert (ckpt.checkpoints, ckpt.run_dir) == (Path("out/checkpoints"), Path("out/run"))
    assert config.CkptConfig(path=Path("elsewhere")).checkpoints == Path("elsewhere")
    sft = config_sft.SftConfig()
    assert sft.adam.lr == 5e-6 and sft.ckpt.save_steps == -1
