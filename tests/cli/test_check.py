"""`molt check`: what it says of good and doubtful settings; what it refuses is in `test_wrong_inputs.py`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from molt.cli import advice, check
from molt.cli.args import parse
from molt.cli.main import main
from molt.config import CkptConfig, RLConfig
from molt.errors import CheckpointError, ConfigError, MoltError
from tests.cli.conftest import as_given, write_rows
from tests.tiny import char_tokenizer

RL = (
    "--actor.model_name_or_path model --data.prompt_dataset prompts.jsonl --data.label_key label "
    "--data.apply_chat_template --data.max_len 64 --train.agent_path agent.py --fsdp.device cpu "
    "--rollout.batch_size 8 --rollout.n_samples_per_prompt 4 --vllm.num_engines 1"
)
ALGORITHMS = Path(__file__).resolve().parents[2] / "examples" / "python" / "algorithms"
SFT = (
    "--model.model_name_or_path model --data.dataset prompts.jsonl --data.output_key label --data.max_len 64 "
    "--train.batch_size 8 --train.micro_batch_size 8"
)


def _check(capsys, extra: str = "", kind: str = "rl") -> tuple[int, list[str]]:
    """The exit code, and the lines of the report."""
    code = main(["check", kind, *(RL if kind == "rl" else SFT).split(), *extra.split()])
    output = capsys.readouterr()
    assert "Traceback" not in output.err
    return code, as_given(output.out).splitlines()


@pytest.mark.parametrize(("kind", "lines"), [("rl", 7), ("sft", 4)])
def test_good_settings(kind, lines, run, capsys):
    code, shown = _check(capsys, kind=kind)
    assert code == 0
    assert len(shown) == lines and all(line.startswith(("ok ", "warning  resources")) for line in shown)
    assert f"{20:,} of the first 20 rows can be used" in "\n".join(shown)
    assert sorted(path.name for path in run.iterdir()) == ["agent.py", "model", "prompts.jsonl"], "it wrote something"


def test_check_means_check_rl(run, capsys):
    assert main(["check", *RL.split()]) == 0
    assert "agent.py imports" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["data.prompt_dataset", "eval.dataset"])
def test_a_setting_that_spoils_every_row(flag, run, capsys):
    rows = [{"input": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "label": "1"}] * 3
    (run / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, lines = _check(capsys, f"--{flag} chats.jsonl")
    (error,) = (line for line in lines if line.startswith("error "))
    assert code == 1
    for part in (f"`{flag}` (=chats.jsonl): no prompt is left", "(rows 0, 1, 2)", "`data.input_key` (=input)"):
        assert part in error


def test_a_gpu_that_is_not_there(run, capsys, monkeypatch):
    monkeypatch.setattr("molt.parallel.mesh.device_count", lambda: 0)
    code, lines = _check(capsys, "--fsdp.device cuda")
    assert code == 1 and any("`fsdp.device` (=cuda)" in line and "--fsdp.device cpu" in line for line in lines)


@pytest.mark.parametrize(
    ("extra", "level", "part"),
    [
        ("", "ok", "policy 1 x 1 + engines 1 x 1 = 2, 4 GPUs here"),
        ("--vllm.num_engines 4", "warning", "policy 1 x 1 + engines 4 x 1 = 5, 4 GPUs here: the Ray cluster must"),
        (
            "--algo.kl.init_coef 0.1 --algo.advantage.estimator gae --critic.num_gpus_per_node 2",
            "warning",
            "policy 1 x 1 + reference 1 x 1 + critic 1 x 2 + engines 1 x 1 = 5, 4 GPUs here: the Ray cluster must",
        ),
        (
            "--algo.kl.init_coef 0.1 --algo.advantage.estimator gae --train.colocate_fsdp_models",
            "ok",
            "policy 1 x 1 + engines 1 x 1 = 2, 4 GPUs here",
        ),
        ("--algo.kl.init_coef 0.1 --ref.num_gpus_per_node 8", "error", "reference 1 x 8 + engines 1 x 1 = 10, 4 GPUs"),
        ("--algo.kl.init_coef 0.1 --algo.kl.ref rollout", "ok", "policy 1 x 1 + engines 1 x 1 = 2, 4 GPUs here"),
        ("--actor.num_gpus_per_node 8", "error", "policy 1 x 8 + engines 1 x 1 = 9, 4 GPUs here: no node"),
        ("--vllm.tensor_parallel_size 8", "error", "engines 1 x 8 = 9, 4 GPUs here: no node"),
    ],
)
def test_gpus_asked_for_against_gpus_present(extra, level, part, run, capsys, monkeypatch):
    monkeypatch.setattr("molt.parallel.mesh.device_count", lambda: 4)
    code, lines = _check(capsys, f"--fsdp.device auto {extra}")
    (line,) = (line for line in lines if "resources:" in line)
    assert line.startswith(level) and part in line and code == (level == "error")


def test_many_processes_on_few_cores_is_a_warning(run, capsys):
    code, lines = _check(capsys, "--vllm.num_engines 1000")
    assert code == 0 and any(line.startswith("warning") and "= 1001," in line for line in lines)


def test_rows_that_cannot_be_used_are_counted_and_named(run, capsys):
    with (run / "prompts.jsonl").open("a") as file:
        file.write(
            json.dumps({"input": "x" * 80, "label": "1"}) + "\n" + json.dumps({"input": "", "label": "1"}) + "\n"
        )
    code, lines = _check(capsys)
    (warning,) = (line for line in lines if "dropped" in line)
    assert code == 0 and warning.startswith("warning")
    assert (
        "dropped 2 of 22 rows" in warning
        and "row 20" in warning
        and "row 21" in warning
        and "`data.max_len`" in warning
    )
    code, lines = _check(capsys, kind="sft")
    assert code == 0 and any("row 20" in line and line.startswith("warning") for line in lines)


def test_answers_that_do_not_fit_beside_the_prompt(run, capsys):
    def warnings(extra: str) -> list[str]:
        code, lines = _check(capsys, extra)
        assert code == 0
        return [line for line in lines if "`data.max_len`" in line]

    (run / "prompts.jsonl").write_text(
        "".join(json.dumps({"input": text, "label": "1"}) + "\n" for text in ("x", "x" * 20))
    )
    # A prompt has 4 + 9 characters (user, assistant), 3 line ends and 3 special tokens beside its text: of 64 tokens,
    # 19 + 20 leave 25.
    assert warnings("--rollout.max_new_tokens 25") == [] and warnings("") == []
    (warning,) = warnings("--rollout.max_new_tokens 26")
    assert warning.startswith("warning  prompts of data.prompt_dataset: 1 of the first 2 leave less of")
    for part in ("row 1 has 39 tokens", "leaves 25 for", "`rollout.max_new_tokens` (=26)", "--data.max_len 65 or more"):
        assert part in warning
    held_out = "--eval.dataset prompts.jsonl --eval.max_new_tokens 30"
    (warning,) = warnings(f"{held_out} --rollout.max_new_tokens 25")
    assert "prompts of eval.dataset" in warning and "`eval.max_new_tokens` (=30)" in warning


@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_prompts_that_are_trained_and_evaluated(kind, run, capsys):
    write_rows(run / "eval.jsonl", range(17, 27))
    code, lines = _check(capsys, "--eval.dataset eval.jsonl", kind)
    (warning,) = (line for line in lines if "trained on too" in line)
    assert code == 0 and warning.startswith("warning") and "3 of 10 prompts" in warning and "row 0" in warning
    write_rows(run / "eval.jsonl", range(20, 30))
    assert not [line for line in _check(capsys, "--eval.dataset eval.jsonl", kind)[1] if "trained on too" in line]


@pytest.fixture
def teacher(run) -> Path:
    """Another model with the same tokenizer, for a context of 32 tokens; it has no weights."""
    char_tokenizer().save_pretrained(run / "teacher")
    config = json.loads((run / "model" / "config.json").read_text())
    (run / "teacher" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32}))
    return run / "teacher"


@pytest.mark.parametrize(
    ("section", "used"),
    [
        ("ref", "--algo.kl.init_coef 0.1"),
        ("ref", "--algo.advantage.estimator on_policy_distill"),
        ("critic", "--algo.advantage.estimator gae"),
    ],
)
def test_a_reference_and_a_critic_are_looked_at_where_they_are_used(section, used, run, teacher, capsys):
    flag = f"--{section}.model_name_or_path teacher"
    code, lines = _check(capsys, f"{flag} {used} --data.max_len 32")
    assert code == 0 and "ok       model: qwen3 at teacher" in lines
    code, lines = _check(capsys, f"{flag} {used}")
    (error,) = (line for line in lines if line.startswith("error "))
    assert code == 1 and "`data.max_len` (=64) is above the model's max_position_embeddings (=32)" in error
    code, lines = _check(capsys, f"{flag} --algo.kl.init_coef 0")
    (warning,) = (line for line in lines if "teacher" in line)
    assert code == 0 and warning.startswith(f"warning  `{section}.model_name_or_path` (=teacher)")
    assert _check(capsys, f"{flag} {used} --eval.eval_only --eval.dataset prompts.jsonl")[0] == 0


def test_the_actors_own_model_is_looked_at_once(run, capsys):
    code, lines = _check(
        capsys, "--algo.kl.init_coef 0.1 --algo.advantage.estimator gae --ref.model_name_or_path model"
    )
    assert code == 0 and sum("model: qwen3" in line for line in lines) == 1


def test_functions_of_the_user(run, capsys):
    code, lines = _check(
        capsys,
        f"--algo.advantage.estimator {ALGORITHMS}/group_median.py:group_median "
        f"--algo.loss {ALGORITHMS}/asymmetric_reinforce.py:asymmetric_reinforce",
    )
    assert code == 0 and lines[0] == "ok       settings: all rules hold"
    code, lines = _check(capsys, "--algo.advantage.estimator mine.py:f --eval.eval_only --eval.dataset prompts.jsonl")
    assert code == 0, "an evaluation has no advantages"


@pytest.mark.parametrize("kind", ["rl", "eval"])
def test_a_scorer_is_loaded_in_a_process_of_its_own(kind, run, capsys):
    (run / "scorer.py").write_text("import sys\nMARK = sys.argv\ndef score(trajectory): return 1.0\n")
    arguments = [*RL.split(), "--eval.dataset", "prompts.jsonl", "--reward.scorer", "scorer.py"]
    assert main(["check", kind, *arguments]) == 0
    assert "ok       scorer: scorer.py loads; its reward replaces the agent's" in as_given(capsys.readouterr().out)
    assert not [name for name in sys.modules if name.startswith("molt.plugins.scorer_")]

    (run / "scorer.py").write_text("def scores(trajectory): return 1.0\n")
    assert main(["check", kind, *arguments]) == 1
    assert "exports no function `score`: no reward can arise. Did you mean 'scores'?" in capsys.readouterr().out


def test_a_judge_whose_scores_are_kept_is_a_warning(run, capsys):
    (run / "scorer.py").write_text("def score(trajectory, judge_url): return 1.0\n")
    code, lines = _check(capsys, "--reward.scorer scorer.py --reward.cache_dir scores")
    assert code == 0 and any("what a judge says depends on the weights" in line for line in lines)
    assert not any("scorer" in line for line in _check(capsys)[1])


def test_what_an_estimator_does_not_read_is_a_warning(run, capsys):
    flags = f"--algo.advantage.estimator {ALGORITHMS}/group_median.py:group_median --critic.adam.lr 1e-4"
    code, lines = _check(capsys, f"{flags} --algo.advantage.gamma 0.9")
    assert code == 0 and "all rules hold" in "\n".join(lines)
    for name in ("critic.adam.lr", "algo.advantage.gamma"):
        assert any(line.startswith(f"warning  `{name}`") for line in lines)


def test_sft_names_its_own_flags(run, capsys):
    code, lines = _check(capsys, "--model.model_name_or_path modle --data.dataset nowhere.jsonl", "sft")
    assert code == 1
    assert any("`model.model_name_or_path` (=modle)" in line for line in lines)
    assert any("`data.dataset` (=nowhere.jsonl)" in line for line in lines)


def test_disk_space(run, capsys, monkeypatch):
    monkeypatch.setattr(advice.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 2**20}))
    # 100,800 float32 parameters: a checkpoint has 1.2 MB.
    _, lines = _check(capsys)
    assert any(line.startswith("warning  `ckpt.max_num` (=3)") and "0.0 GiB" in line for line in lines)


@pytest.mark.parametrize(("flags", "models"), [
    ("", 1 + 9 + 3),  # the final model; three checkpoints of three models each; one that is written aside
    ("--ckpt.max_mem {five}", 1 + 5 + 3),
    ("--ckpt.max_mem {one}", 1 + 3 + 3),  # the newest is more, and stays
    ("--ckpt.max_mem {one} --eval.dataset prompts.jsonl", 2 + 6 + 3),  # so does the best, with its model
    ("--ckpt.max_mem {one} --eval.dataset prompts.jsonl --ckpt.best_metric_key none", 1 + 3 + 3),
    ("--ckpt.save_steps -1", 1 + 3),
    ("--ckpt.save_steps -1 --algo.advantage.estimator gae", 1 + 6),  # the critic is as large, and is not exported
    ("--ckpt.save_steps -1 --critic.model_name_or_path model", 1 + 3),  # there is none
])  # fmt: skip
def test_disk_space_in_multiples_of_the_stored_model(run, flags, models):
    """In float32: a master and two moments make a checkpoint three times the model."""
    stored = (run / "model" / "model.safetensors").stat().st_size
    limit = flags.format(one=stored / 2**30, five=5 * stored / 2**30)
    config = parse(RLConfig, [*RL.split(), *limit.split()], prog="test")
    for free, enough in ((models - 0.01) * stored, False), ((models + 0.01) * stored, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(advice.shutil, "disk_usage", lambda path, free=free: type("Usage", (), {"free": free}))
            found = advice.advise(config)
        assert bool([text for _, text in found if "checkpoints may take" in text]) != enough


def test_everything_wrong_is_said_at_once_and_raised_as_one(run, capsys):
    code, lines = _check(capsys, "--data.input_key inputs --train.agent_path agnt.py --train.batch_size 12")
    assert code == 1 and sum(line.startswith("error") for line in lines) == 3
    with pytest.raises(MoltError) as refused:
        check.check_or_raise(
            parse(RLConfig, [*RL.split(), "--data.input_key", "inputs"], prog="x"), check.static_checks
        )
    assert "Did you mean 'input'?" in str(refused.value)
    found = check.check_or_raise(parse(RLConfig, RL.split(), prog="x"), check.static_checks)
    assert isinstance(found, list) and not found.errors


def test_output_dir(tmp_path):
    ckpt = CkptConfig(output_dir=tmp_path / "new" / "out")
    check.check_output_dir(ckpt)
    assert not (tmp_path / "new").exists()
    ckpt.run_dir.mkdir(parents=True)
    (ckpt.run_dir / "metrics.jsonl").write_text("")  # a start that failed before its first step
    check.check_output_dir(ckpt)
    (ckpt.run_dir / "metrics.jsonl").write_text('{"step": 0, "mismatch/abs_max": 0.0}\n')
    (ckpt.checkpoints / "step_000000").mkdir(parents=True)  # the initial weights: no batch was trained
    (ckpt.checkpoints / "best.json").write_text("{}")
    check.check_output_dir(ckpt)
    (ckpt.run_dir / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n')
    with pytest.raises(CheckpointError, match="holds a run"):
        check.check_output_dir(ckpt)
    (ckpt.run_dir / "metrics.jsonl").unlink()
    check.check_output_dir(ckpt)
    (ckpt.checkpoints / "step_000020").mkdir()
    with pytest.raises(CheckpointError, match="holds a run"):
        check.check_output_dir(ckpt)
    check.check_output_dir(CkptConfig(output_dir=ckpt.output_dir, load_enable=True))
    elsewhere = CkptConfig(output_dir=tmp_path / "other", path=ckpt.checkpoints)
    with pytest.raises(CheckpointError, match="holds a run"):
        check.check_output_dir(elsewhere)


def test_an_output_dir_that_cannot_be_written():
    with pytest.raises(ConfigError, match="/proc is not writable"):  # not even by root, whatever the mode says
        check.check_output_dir(CkptConfig(output_dir=Path("/proc/out")))


RUN_AND_LOOK = """
import atexit, runpy, sys
heavy = ("vllm", "ray", "nemo_automodel", "datasets", "tensorboard")
atexit.register(lambda: print([name for name in heavy if name in sys.modules]))
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
CHECK, RUN, MODULE = ["molt", "check", "rl"], ["molt", "rl"], ["molt.cli.train_rl_ray"]
NO_COLUMN = ["`data.label_key` (=lable)", "no row could be used", "Did you mean 'label'?"]
NO_BASELINE = ["(=1)", "every advantage would be 0", "Use --rollout.n_samples_per_prompt 8"]


@pytest.mark.parametrize(
    ("entry", "extra", "code", "parts"),
    [
        (CHECK, "", 0, ["20 of the first 20 rows can be used"]),
        (CHECK, "--data.label_key lable", 1, NO_COLUMN),
        (RUN, "--data.label_key lable", 1, NO_COLUMN),
        (MODULE, "--data.label_key lable", 1, NO_COLUMN),
        (RUN, "--rollout.n_samples_per_prompt 1 --algo.advantage.estimator rloo", 1, NO_BASELINE),
    ],
    ids=["good", "check", "rl", "module", "rl: a rule"],
)
def test_every_entry_checks_before_ray_or_an_engine_is_imported(entry, extra, code, parts, run):
    command = [sys.executable, "-c", RUN_AND_LOOK, *entry, *RL.split(), *extra.split()]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    shown = done.stdout + done.stderr
    assert done.returncode == code, shown
    assert done.stdout.splitlines()[-1] == "[]", shown
    assert all(part in shown for part in parts) and "Traceback" not in shown, shown
    assert not (run / "ckpt").exists(), "it wrote something"


CHAT_AGENT = """
from molt.agents import ChatAgent, ChatAgentRunner, Result


class Silent(ChatAgent):
    async def run(self, ctx):
        return Result(reward=0.0)


class AgentRunner(ChatAgentRunner):
    def __init__(self):
        super().__init__(Silent)
"""


def test_a_scheme_is_loaded(run, capsys):
    code, lines = _check(capsys, f"--rollout.scheme {ALGORITHMS.parent / 'schemes' / 'draft_revise.py'}")
    assert code == 0 and any(line.startswith("ok ") and "draft_revise.py imports" in line for line in lines)


def test_a_chat_agent_talks_in_messages(run, capsys):
    (run / "agent.py").write_text(CHAT_AGENT)
    code, lines = _check(capsys)
    assert code == 0 and any("chat: rendered and parsed as the template says" in line for line in lines)
    code, lines = _check(capsys, "--data.no_apply_chat_template")
    assert code == 1 and any("a ChatAgent talks in messages" in line for line in lines)


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ("", "20 rows / 8 = 3 steps"),
        ("--train.num_episodes 2", "20 rows x 2 passes / 8 = 5 steps"),
        ("--train.max_steps 2", "20 rows / 8 = 3 steps, ended by `train.max_steps` (=2)"),
        ("--train.max_steps 3", "20 rows / 8 = 3 steps"),
    ],
)
def test_rows_are_steps(flags, steps, run, capsys):
    code, lines = _check(capsys, flags)
    assert code == 0 and f"ok       steps: {steps}" in lines


@pytest.mark.parametrize(
    ("kind", "flags", "setting"),
    [("rl", "--rollout.batch_size 32", "rollout.batch_size"), ("sft", "--train.batch_size 32", "train.batch_size")],
)
def test_rows_that_do_not_fill_a_batch_are_a_warning(kind, flags, setting, run, capsys):
    code, lines = _check(capsys, flags, kind)
    (warning,) = [line for line in lines if "do not fill one batch" in line]
    assert code == 0 and warning.startswith(f"warning  `{setting}` (=32): the dataset has 20 rows")
    assert f"Use --{setting} 20 or less" in warning


@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_a_wrong_column_is_reported_once_and_names_the_datasets(kind, run, capsys):
    write_rows(run / "eval.jsonl", range(20, 30))
    code, lines = _check(capsys, "--eval.dataset eval.jsonl --data.input_key inptu", kind)
    (error,) = [line for line in lines if line.startswith("error")]
    flag = "data.prompt_dataset" if kind == "rl" else "data.dataset"
    assert code == 1
    assert f"(=inptu): `{flag}` (=prompts.jsonl) and `eval.dataset` (=eval.jsonl) have no such column" in error
    assert "Did you mean 'input'?" in error
    assert not [line for line in lines if "trained on too" in line]


def test_a_column_that_one_dataset_lacks_names_it(run, capsys):
    (run / "eval.jsonl").write_text(json.dumps({"input": "reverse 1"}) + "\n")
    code, lines = _check(capsys, "--eval.dataset eval.jsonl")
    (error,) = [line for line in lines if line.startswith("error")]
    assert code == 1 and "`data.label_key` (=label): `eval.dataset` (=eval.jsonl) has no such column" in error
