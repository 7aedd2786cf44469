"""The console script: commands, exit codes, no traceback for a MoltError."""

import os
import subprocess
import sys

import pytest

from molt.cli import main as front
from molt.cli.args import parse, run_command
from molt.cli.main import main
from molt.config import RLConfig
from molt.errors import ConfigError, DataError


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
def test_help_names_every_command(argv, capsys):
    assert main(argv) == 0
    shown = capsys.readouterr().out
    for name in front.COMMANDS:
        assert f"  molt {name}" in shown


def test_an_unknown_command(capsys):
    assert main(["chekc", "--x"]) == 2
    assert "unknown command 'chekc'. Did you mean 'check'?" in capsys.readouterr().err


def test_check_of_what_is_not_a_trainer(capsys):
    assert main(["check", "stf"]) == 2
    assert "`molt check` has no 'stf'. Did you mean 'sft'?" in capsys.readouterr().err


@pytest.mark.parametrize(("error", "code"), [(ConfigError("wrong setting"), 2), (DataError("wrong data"), 1)])
def test_a_molt_error_is_a_line(error, code, capsys):
    def command(argv):
        raise error

    assert run_command(command, []) == code
    assert capsys.readouterr().err == f"error: {error}\n"


def test_another_error_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        run_command(lambda argv: 1 / 0, [])


def test_the_value_of_a_command_is_the_exit_code():
    assert run_command(lambda argv: None, []) == 0
    assert run_command(lambda argv: 3, []) == 3


@pytest.mark.parametrize("inside", [False, True], ids=["output directory", "its run/"])
def test_report(inside, tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "time": 1.0, "rollout/reward": 0.5}\n')
    assert main(["report", str(run if inside else tmp_path)]) == 0
    assert (run / "report.html").is_file() and str(run / "report.html") in capsys.readouterr().out


@pytest.mark.processes
def test_help_whose_reader_has_left_ends_without_a_word():
    reader, writer = os.pipe()
    os.close(reader)  # as `| head` does when it has enough
    done = subprocess.run([sys.executable, "-m", "molt", "rl", "--help"], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


def test_a_switch_named_no_has_no_second_no(capsys):
    with pytest.raises(SystemExit):
        main(["rl", "--help"])
    shown = capsys.readouterr().out
    assert "--algo.advantage.no_whiten " in shown and "no_no_" not in shown
    flags = [line for line in shown.splitlines() if "--algo.advantage" in line]
    assert len({len(line) for line in flags}) == 1, "the right edge of the help is ragged"
    assert parse(RLConfig, ["--algo.advantage.no_whiten"], prog="molt rl").algo.advantage.no_whiten


HEAVY = ("torch", "numpy", "transformers", "ray", "vllm", "datasets")
HELP_OF = """
import sys
from molt.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
print([name for name in {heavy} if name in sys.modules])
"""


@pytest.mark.parametrize(
    ("argv", "heading"),
    [
        (["rl"], "usage: molt rl"),
        (["sft"], "usage: molt sft"),
        (["eval"], "usage: molt eval"),
        (["check"], "usage: molt check [rl|sft|eval]"),
        (["check", "rl"], "usage: molt check rl"),
        (["check", "sft"], "usage: molt check sft"),
        (["check", "eval"], "usage: molt check eval"),
        (["agent"], "usage: molt agent"),
        (["agent", "check"], "usage: molt agent check"),
        (["report"], "usage: molt report"),
        (["demo"], "usage: molt demo"),
    ],
    ids=str,
)
def test_each_command_has_its_help_and_imports_nothing_heavier_than_its_tables(argv, heading):
    command = [sys.executable, "-c", HELP_OF.format(heavy=HEAVY), *argv, "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert lines[0].startswith(heading), done.stdout + done.stderr
    lists_rows = argv[-1] in ("rl", "eval")
    assert lines[-1] == ("['torch', 'numpy']" if lists_rows else "[]"), "heavy imports"
    about = f"`{' '.join(['molt', *argv])}`: "
    if argv[-1] in ("rl", "sft", "eval"):
        assert about in done.stdout


def test_report_of_nothing(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert f"RUN (={tmp_path})" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main(["report"])
    assert stop.value.code == 2 and "required: RUN" in capsys.readouterr().err


def test_sft_refuses_before_anything_is_written(run, capsys):
    assert main(["sft", *["--model.model_name_or_path", "model", "--data.dataset", "nowhere.jsonl"]]) == 1
    assert "`data.dataset` (=nowhere.jsonl)" in capsys.readouterr().err
    assert not (run / "ckpt").exists()


def test_sft_trains_and_hands_over_the_text_of_its_settings(run, monkeypatch, capsys):
    from molt.config_file import load
    from molt.config_sft import SftConfig

    trained = []
    monkeypatch.setattr("molt.train.sft.run_sft", lambda *given: trained.append(given))
    flags = "--model.model_name_or_path model --data.dataset prompts.jsonl --data.output_key label --train.batch_size 4"
    assert main(["sft", *flags.split()]) == 0
    assert "warning  `train.micro_batch_size` (=8)" in capsys.readouterr().out
    ((config, settings),) = trained
    (run / "config.toml").write_text(settings)
    assert load(SftConfig, run / "config.toml") == config and not (run / "ckpt").exists()


def test_the_other_ranks_of_torchrun_leave_the_checks_to_the_first(run, monkeypatch):
    trained = []
    monkeypatch.setattr("molt.train.sft.run_sft", lambda *given: trained.append(given))
    monkeypatch.setenv("RANK", "1")
    assert main(["sft", *["--model.model_name_or_path", "model", "--data.dataset", "nowhere.jsonl"]]) == 0
    assert len(trained) == 1 and not (run / "ckpt").exists()


def test_rl_gives_its_advice_and_then_trains(run, monkeypatch, capsys):
    trained = []
    monkeypatch.setattr("molt.cli.train_rl_ray.main", trained.append)
    flags = ["--fsdp.device", "cpu", "--vllm.num_engines", "999"]
    assert main(["rl", *flags]) == 0
    assert trained == [flags] and "they take turns" in capsys.readouterr().out


def test_rl_refuses_more_gpus_than_a_node_has(run, monkeypatch, capsys):
    trained = []
    monkeypatch.setattr("molt.cli.train_rl_ray.main", trained.append)
    monkeypatch.setattr("molt.parallel.mesh.device_count", lambda: 4)
    assert main(["rl", "--actor.num_gpus_per_node", "8"]) == 1
    assert not trained and "no node could hold them" in capsys.readouterr().err
