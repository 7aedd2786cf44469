"""`molt check` on attention and model back ends: what could not be trained is refused before any weight is read."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

from molt.cli.main import main
from tests.tiny import char_tokenizer
from tests.tiny_vlm import save_tiny_vlm

COMMANDS = {
    "rl": "rl --actor.model_name_or_path {model} --data.prompt_dataset prompts.jsonl --data.label_key label "
    "--data.apply_chat_template --data.max_len 64 --train.agent_path agent.py --fsdp.device cpu "
    "--rollout.batch_size 8 --rollout.n_samples_per_prompt 4 --vllm.num_engines 1",
    "sft": "sft --model.model_name_or_path {model} --data.dataset prompts.jsonl --data.output_key label "
    "--data.max_len 64 --fsdp.device cpu",
}
SIZES = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 99}


def check(capsys, kind: str, flags: str, model: str = "model") -> tuple[int, list[str]]:
    """The exit code, and the errors."""
    code = main(["check", *COMMANDS[kind].format(model=model).split(), *flags.split()])
    return code, [line for line in capsys.readouterr().out.splitlines() if line.startswith("error")]


def model_of(run, kind: str, **config) -> str:
    """A directory with a tokenizer and a configuration, and no weights."""
    path = run / kind
    char_tokenizer().save_pretrained(path)
    (path / "config.json").write_text(json.dumps({"model_type": kind, **SIZES, **config}))
    return str(path)


@pytest.mark.parametrize("kind", COMMANDS)
@pytest.mark.parametrize(
    ("flag", "why"), [("te", "it needs TransformerEngine"), ("flex_attention", "FlexAttention has no backward pass")]
)
def test_an_attention_of_gpus_is_refused_by_name(run, capsys, kind, flag, why):
    code, errors = check(capsys, kind, f"--fsdp.attn_implementation {flag}")
    assert code == 1 and len(errors) == 1
    assert f"`fsdp.attn_implementation` (={flag}) on cpu: {why}" in errors[0] and "Use auto, or one of" in errors[0]


@pytest.mark.parametrize("kind", COMMANDS)
@pytest.mark.parametrize(
    ("model", "config", "why"),
    [
        ("gemma2", {"architectures": ["Gemma2ForCausalLM"]}, "attn_logit_softcapping 50.0"),
        ("gpt_oss", {"architectures": ["GptOssForCausalLM"]}, "has attention sinks"),
    ],
)
def test_capped_scores_and_sinks_need_eager(run, capsys, kind, model, config, why):
    path = model_of(run, model, **config)
    code, errors = check(capsys, kind, "", path)
    assert code == 1 and len(errors) == 1
    for part in ("`fsdp.attn_implementation` (=auto)", why, "log-probs would be those of another model", "eager."):
        assert part in errors[0]
    assert check(capsys, kind, "--fsdp.attn_implementation eager", path)[1] == []
    packed = check(capsys, kind, "--fsdp.packing_samples", path)[1]
    assert packed[0].endswith("Use --fsdp.attn_implementation eager and leave out --fsdp.packing_samples.")


def test_an_evaluation_trains_nothing_so_any_attention_will_do(run, capsys):
    path = model_of(run, "gemma2", architectures=["Gemma2ForCausalLM"])
    assert check(capsys, "rl", "--eval.eval_only --eval.dataset prompts.jsonl", path)[1] == []


def test_a_vision_language_model_is_evaluated_and_not_trained(run, capsys):
    path = str(save_tiny_vlm(run / "vlm"))
    code, errors = check(capsys, "rl", "", path)
    assert code == 1 and len(errors) == 1
    for part in (f"`actor.model_name_or_path` (={path})", "Idefics3ForConditionalGeneration", "measure this one with"):
        assert part in errors[0]
    assert check(capsys, "rl", "--eval.eval_only --eval.dataset prompts.jsonl", path)[1] == []


JAMBA = {
    "architectures": ["JambaForCausalLM"], "intermediate_size": 96, "num_hidden_layers": 2, "attn_layer_period": 2,
    "attn_layer_offset": 1, "num_experts": 2, "use_mamba_kernels": False,
}  # fmt: skip
GPT_OSS = {"architectures": ["GptOssForCausalLM"]}


@pytest.mark.parametrize("kind", COMMANDS)
@pytest.mark.parametrize(
    ("family", "config", "flags", "why"),
    [
        ("jamba", JAMBA, "", "JambaMambaMixer (layers.0.mamba) of JambaForCausalLM mixes the samples of a pack"),
        ("gpt_oss", GPT_OSS, "--fsdp.attn_implementation eager", "GptOssAttention (layers.0.self_attn)"),
    ],
)
def test_packing_is_refused_where_samples_would_see_each_other(run, capsys, kind, family, config, flags, why):
    path = model_of(run, family, **config)
    setting = {"rl": "actor", "sft": "model"}[kind] + ".model_name_or_path"
    code, errors = check(capsys, kind, f"{flags} --fsdp.packing_samples", path)
    assert code == 1 and len(errors) == 1
    for part in ("`fsdp.packing_samples` (=True)", f"`{setting}` (={path})", why, "Leave out --fsdp.packing_samples"):
        assert part in errors[0]
    assert check(capsys, kind, flags, path)[1] == [], "padded samples are exact"
    assert check(capsys, kind, "--fsdp.packing_samples")[1] == [], "a model of attention alone is packed"


def test_a_teacher_and_a_critic_are_packed_as_the_policy_is(run, capsys):
    path = model_of(run, "jamba", **JAMBA)
    flags = f"--fsdp.packing_samples --algo.advantage.estimator gae --critic.model_name_or_path {path}"
    flags += f" --algo.kl.init_coef 0.1 --ref.model_name_or_path {path}"
    errors = check(capsys, "rl", flags)[1]
    named = [error for error in errors if "mixes the samples of a pack" in error]
    assert len(named) == len(errors) == 2
    assert f"`critic.model_name_or_path` (={path})" in "".join(named)
    assert f"`ref.model_name_or_path` (={path})" in "".join(named)


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512}
MOE = {"architectures": ["Qwen3MoeForCausalLM"]}


@pytest.mark.parametrize("kind", COMMANDS)
@pytest.mark.parametrize(
    ("model", "config", "flags", "why"),
    [
        ("gemma2", {"architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": None}, "", "none of its classes"),
        ("qwen3_moe", MOE, "--fsdp.attn_implementation sdpa", "knows packing without a mask, which sdpa is not"),
        ("qwen3_moe", MOE | {"tie_word_embeddings": True}, "", "ignores {'tie_word_embeddings': True}"),
        ("qwen3_moe", MOE | {"use_sliding_window": True, "sliding_window": 8}, "", "ignores {'sliding_window': 8}"),
        ("qwen3_moe", MOE | {"rope_parameters": YARN}, "", "computes other rotary embeddings than"),
        ("deepseek_v3", {"architectures": ["DeepseekV3ForCausalLM"], "rope_parameters": YARN}, "", "other rotary"),
        (
            "deepseek_v3",
            {"architectures": ["DeepseekV3ForCausalLM"], "attention_bias": True},
            "",
            "ignores {'attention_bias': True}",
        ),
    ],
)
def test_what_automodel_would_train_as_another_model_is_refused(run, capsys, kind, model, config, flags, why):
    if find_spec("nemo_automodel") is None:
        pytest.skip("nemo-automodel is not installed")
    path = model_of(run, model, **config)
    errors = check(capsys, kind, f"--fsdp.backend automodel {flags}", path)[1]
    assert len(errors) == 1 and "`fsdp.backend` (=automodel)" in errors[0]
    assert why in errors[0] and "Use --fsdp.backend auto" in errors[0]
    assert check(capsys, kind, flags, path)[1] == [], "transformers trains it"


@pytest.mark.parametrize(("model", "config", "why"), [("qwen3_moe", MOE, None), ("gemma2", {}, "Gemma2ForCausalLM")])
def test_only_experts_are_balanced(run, capsys, model, config, why):
    path = model_of(run, model, **{"architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": None, **config})
    errors = check(capsys, "rl", "--actor.aux_loss_coef 0.001", path)[1]
    assert len(errors) == (why is not None)
    assert not why or f"`actor.aux_loss_coef` (=0.001): {why} has no experts" in errors[0]
    assert check(capsys, "rl", "", path)[1] == []


def test_automodel_that_is_not_installed(run, capsys, monkeypatch):
    monkeypatch.setattr("molt.models.backends.automodel.find_spec", lambda name: None)
    errors = check(capsys, "sft", "--fsdp.backend automodel")[1]
    assert len(errors) == 1 and "not installed (pip install 'molt[automodel]'; on a CPU" in errors[0]


HEAVY = ("nemo_automodel", "ray", "transformers.modeling_utils", "molt.models.build")
IMPORTED = f"""
import sys
from molt.cli.main import main
code = main(sys.argv[1:])
print("code", code, "imported", [name for name in {HEAVY} if name in sys.modules])
"""


@pytest.mark.processes
@pytest.mark.parametrize("kind", COMMANDS)
def test_a_check_imports_no_model_class(run, kind):
    flags = ["check", *COMMANDS[kind].format(model="model").split()]
    checked = subprocess.run([sys.executable, "-c", IMPORTED, *flags], capture_output=True, text=True, timeout=120)
    assert checked.stdout.splitlines()[-1] == "code 0 imported []", checked.stdout + checked.stderr
