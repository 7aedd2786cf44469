"""`molt check`: each wrong input is one message with what is wrong and the fix, and exit code 1."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from molt.cli import advice, check
from molt.cli.args import parse
from molt.cli.main import main
from molt.config import CkptConfig, RLConfig
from molt.errors import CheckpointError, ConfigError, MoltError
from tests.cli.conftest import write_rows

RL = (
    "--actor.model_name_or_path model --data.prompt_dataset prompts.jsonl --data.label_key label "
    "--data.apply_chat_template --data.max_len 64 --train.agent_path agent.py --fsdp.device cpu "
    "--rollout.batch_size 8 --rollout.n_samples_per_prompt 4 --vllm.num_engines 1"
)
SFT = "--model.model_name_or_path model --data.dataset prompts.jsonl --data.output_key label --data.max_len 64"


def _check(capsys, extra: str = "", kind: str = "rl") -> tuple[int, list[str]]:
    """The exit code, and the lines of the report."""
    code = main(["check", kind, *(RL if kind == "rl" else SFT).split(), *extra.split()])
    output = capsys.readouterr()
    assert "Traceback" not in output.err
    return code, output.out.splitlines()


@pytest.mark.parametrize(("kind", "lines"), [("rl", 5), ("sft", 3)])
def test_good_settings(kind, lines, run, capsys):
    code, shown = _check(capsys, kind=kind)
    assert code == 0
    assert len(shown) == lines and all(line.startswith(("ok ", "warning  resources")) for line in shown)
    assert f"{20:,} of the first 20 rows can be used" in "\n".join(shown)
    assert sorted(path.name for path in run.iterdir()) == ["agent.py", "model", "prompts.jsonl"], "it wrote something"


def test_check_means_check_rl(run, capsys):
    assert main(["check", *RL.split()]) == 0
    assert "AgentRunner" in capsys.readouterr().out


WRONG = [
    ("--data.input_key inputs", ["`data.input_key` (=inputs)", "Did you mean 'input'?"]),
    ("--data.label_key lable", ["`data.label_key` (=lable)", "Did you mean 'label'?"]),
    ("--data.prompt_dataset promts.jsonl", ["`data.prompt_dataset` (=promts.jsonl)", "Did you mean 'prompts.jsonl'?"]),
    ("--data.prompt_dataset empty.jsonl", ["`data.prompt_dataset` (=empty.jsonl)", "no rows"]),
    ("--data.prompt_dataset broken.jsonl", ["broken.jsonl, line 2"]),
    ("--eval.dataset nowhere.jsonl", ["`eval.dataset` (=nowhere.jsonl)", "no such file"]),
    ("--train.batch_size 12", ["`train.batch_size` (=12)", "Use --train.batch_size 4 or 8 or 16"]),
    ("--train.agent_path agnt.py", ["train.agent_path (=agnt.py)", "Did you mean 'agent.py'?"]),
    ("--train.agent_path no_runner.py", ["no_runner.py", "no `AgentRunner`", "class AgentRunner(StepEnvRunner)"]),
    ("--train.agent_path raises.py", ["raises.py", "cannot be imported", "ZeroDivisionError"]),
    ("--data.max_len 8", ["no prompt is left", "20 not shorter than `data.max_len` (=8); raise it"]),
    ("--data.max_len 4096", ["`data.max_len` (=4096)", "max_position_embeddings (=2048)", "--data.max_len 2048"]),
    ("--actor.model_name_or_path modle", ["`actor.model_name_or_path` (=modle)", "Did you mean 'model'?"]),
    ("--actor.model_name_or_path head16", ["heads have size 16", "CPU engine would die", "32, 64, 80"]),
    ("--data.chat_template nowhere.jinja", ["`data.chat_template` (=nowhere.jinja)"]),
    ("--data.chat_template fixed.jinja", ["`data.chat_template`", "Pass another template"]),
    (
        "--ckpt.output_dir holds_a_run",
        ["(=holds_a_run) holds a run", "--ckpt.load_enable", "another --ckpt.output_dir"],
    ),
    ("--ckpt.output_dir agent.py/out", ["(=agent.py/out)", "is a file", "Use a directory"]),
]


@pytest.mark.parametrize(("extra", "parts"), WRONG, ids=[extra for extra, _ in WRONG])
def test_a_wrong_input_is_one_error(extra, parts, run, model, capsys):
    (run / "empty.jsonl").write_text("")
    (run / "broken.jsonl").write_text('{"input": "a", "label": "b"}\n{"input": \n')
    (run / "no_runner.py").write_text("x = 1\n")
    (run / "raises.py").write_text("1 / 0\n")
    (run / "fixed.jinja").write_text("{{ 'always the same' }}")
    (run / "holds_a_run" / "run").mkdir(parents=True)
    (run / "holds_a_run" / "run" / "metrics.jsonl").write_text("{}\n")
    (run / "head16").mkdir()
    for file in model.glob("*.j*"):
        (run / "head16" / file.name).write_bytes(file.read_bytes())
    config = json.loads((model / "config.json").read_text())
    (run / "head16" / "config.json").write_text(json.dumps(config | {"head_dim": 16}))
    code, lines = _check(capsys, extra)
    errors = [line for line in lines if line.startswith("error ")]
    assert code == 1 and len(errors) == 1, lines
    for part in parts:
        assert part in errors[0]


@pytest.mark.parametrize("flag", ["data.prompt_dataset", "eval.dataset"])
def test_a_setting_that_spoils_every_row(flag, run, capsys):
    rows = [{"input": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "label": "1"}] * 3
    (run / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, lines = _check(capsys, f"--{flag} chats.jsonl")
    (error,) = (line for line in lines if line.startswith("error "))
    assert code == 1
    for part in (f"`{flag}` (=chats.jsonl): no prompt is left", "(rows 0, 1, 2)", "`data.input_key` (=input)"):
        assert part in error


@pytest.mark.parametrize(
    ("extra", "part"),
    [
        ("--ckpt.save_steps 0", "`ckpt.save_steps` (=0)"),
        ("--rollout.batchsize 4", "Did you mean '--rollout.batch_size'?"),
    ],
)
def test_a_wrong_command_line_exits_with_2(extra, part, run, capsys):
    assert main(["check", *RL.split(), *extra.split()]) == 2
    assert part in capsys.readouterr().err


def test_a_gpu_that_is_not_there(run, capsys, monkeypatch):
    monkeypatch.setattr("molt.parallel.mesh.device_count", lambda: 0)
    code, lines = _check(capsys, "--fsdp.device cuda")
    assert code == 1 and any("`fsdp.device` (=cuda)" in line and "--fsdp.device cpu" in line for line in lines)


@pytest.mark.parametrize(
    ("extra", "level", "part"),
    [
        ("", "ok", "policy 1 x 1 + engines 1 x 1 = 2, 4 GPUs here"),
        ("--vllm.num_engines 4", "warning", "policy 1 x 1 + engines 4 x 1 = 5, 4 GPUs here: the Ray cluster must"),
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


@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_prompts_that_are_trained_and_evaluated(kind, run, capsys):
    write_rows(run / "eval.jsonl", range(17, 27))
    code, lines = _check(capsys, "--eval.dataset eval.jsonl", kind)
    (warning,) = (line for line in lines if "trained on too" in line)
    assert code == 0 and warning.startswith("warning") and "3 of 10 prompts" in warning and "row 0" in warning
    write_rows(run / "eval.jsonl", range(20, 30))
    assert not [line for line in _check(capsys, "--eval.dataset eval.jsonl", kind)[1] if "trained on too" in line]


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


def test_everything_wrong_is_said_at_once_and_raised_as_one(run, capsys):
    code, lines = _check(capsys, "--data.input_key inputs --train.agent_path agnt.py --train.batch_size 12")
    assert code == 1 and sum(line.startswith("error") for line in lines) == 3
    with pytest.raises(MoltError) as refused:
        check.check_or_raise(parse(RLConfig, [*RL.split(), "--data.input_key", "inputs"], prog="x"))
    assert "Did you mean 'input'?" in str(refused.value)
    found = check.check_or_raise(parse(RLConfig, RL.split(), prog="x"))
    assert isinstance(found, list) and not found.errors


def test_output_dir(tmp_path):
    ckpt = CkptConfig(output_dir=tmp_path / "new" / "out")
    check.check_output_dir(ckpt)
    assert not (tmp_path / "new").exists()
    ckpt.run_dir.mkdir(parents=True)
    (ckpt.run_dir / "metrics.jsonl").write_text("")  # a start that failed before its first step
    check.check_output_dir(ckpt)
    (ckpt.checkpoints / "step_000020").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="holds a run"):
        check.check_output_dir(ckpt)
    check.check_output_dir(CkptConfig(output_dir=ckpt.output_dir, load_enable=True))
    elsewhere = CkptConfig(output_dir=tmp_path / "other", path=ckpt.checkpoints)
    with pytest.raises(CheckpointError, match="holds a run"):
        check.check_output_dir(elsewhere)


def test_an_output_dir_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(check.os, "access", lambda path, mode: Path(path) != tmp_path)  # root may write anywhere
    with pytest.raises(ConfigError, match="not writable"):
        check.check_output_dir(CkptConfig(output_dir=tmp_path / "out"))


RUN_AND_LOOK = """
import atexit, runpy, sys
atexit.register(lambda: print([name for name in ("vllm", "ray", "nemo_automodel") if name in sys.modules]))
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
def test_every_entry_checks_within_seconds_before_ray_or_an_engine_is_imported(entry, extra, code, parts, run):
    command = [sys.executable, "-c", RUN_AND_LOOK, *entry, *RL.split(), *extra.split()]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    shown = done.stdout + done.stderr
    assert done.returncode == code, shown
    assert done.stdout.splitlines()[-1] == "[]", shown
    assert all(part in shown for part in parts) and "Traceback" not in shown, shown
    assert not (run / "ckpt").exists(), "it wrote something"
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert seconds < 10, f"{' '.join(entry)} took {seconds:.1f} CPU-seconds"
