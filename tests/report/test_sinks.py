import json
import math

import numpy as np
import pytest

from molt.config import LoggerConfig
from molt.report.console import step_line
from molt.report.rollouts import rollouts_path, write_rollouts
from molt.report.sinks import RunLog, read_jsonl


def open_log(run_dir, resume_step=None, **logger):
    return RunLog(run_dir, LoggerConfig(**logger), "molt rl", 10, resume_step)


def steps(path):
    return [record["step"] for record in read_jsonl(path)]


def strictly(line):
    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return json.loads(line, parse_constant=refuse)


def test_every_step_is_one_object_with_its_time(tmp_path):
    with open_log(tmp_path, logging_steps=5) as log:
        log.step(1, {"train/loss": 0.5})
        # Flushed: a kill after this line loses nothing.
        (record,) = read_jsonl(tmp_path / "metrics.jsonl")
    assert record.keys() == {"step", "time", "train/loss"} and record["train/loss"] == 0.5


def test_non_finite_and_numpy_numbers_are_valid_json(tmp_path):
    with open_log(tmp_path) as log:
        log.step(1, {"a": math.nan, "b": math.inf, "c": np.float32(0.5), "d": np.float32("nan")})
        log.event("fault", detail={"values": [math.nan, np.int64(3)]}, where=tmp_path)
    record = strictly((tmp_path / "metrics.jsonl").read_text())
    assert (record["a"], record["b"], record["c"], record["d"]) == (None, None, 0.5, None)
    event = strictly((tmp_path / "events.jsonl").read_text())
    assert event["detail"] == {"values": [None, 3]} and event["where"] == str(tmp_path)


def test_a_resume_keeps_the_lineage_and_moves_the_rest(tmp_path):
    with open_log(tmp_path) as log:
        for step in range(1, 6):
            log.step(step, {"train/loss": float(step)})
            write_rollouts(tmp_path, step, [], str)
    with open_log(tmp_path, resume_step=3) as log:
        log.step(4, {"train/loss": 40.0})
    assert [(r["step"], r["train/loss"]) for r in read_jsonl(tmp_path / "metrics.jsonl")] == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
        (4, 40.0),
    ]
    assert [rollouts_path(tmp_path, step).exists() for step in range(1, 6)] == [True, True, True, False, False]
    (abandoned,) = (tmp_path / "abandoned").iterdir()
    assert steps(abandoned / "metrics.jsonl") == [4, 5]
    assert [path.name for path in sorted((abandoned / "rollouts").iterdir())] == [
        "step_000004.parquet",
        "step_000005.parquet",
    ]
    (event,) = read_jsonl(tmp_path / "events.jsonl")
    assert (event["kind"], event["step"], event["abandoned_steps"]) == ("resumed", 3, [4, 5])


def test_a_resume_without_later_steps_abandons_nothing(tmp_path):
    with open_log(tmp_path) as log:
        log.step(1, {})
    open_log(tmp_path, resume_step=1).close()
    assert not (tmp_path / "abandoned").exists() and steps(tmp_path / "metrics.jsonl") == [1]


def test_a_torn_line_is_dropped(tmp_path):
    with open_log(tmp_path) as log:
        log.step(1, {})
        log.step(2, {})
        log.event("publication", version=2)
    for name in ("metrics.jsonl", "events.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write('{"step": 3, "ti')
    open_log(tmp_path, resume_step=2).close()
    assert steps(tmp_path / "metrics.jsonl") == [1, 2]
    assert (tmp_path / "metrics.jsonl").read_text().endswith("}\n")
    assert [event["kind"] for event in read_jsonl(tmp_path / "events.jsonl")] == ["publication", "resumed"]


def test_tensorboard_failures_are_counted_and_do_not_end_the_run(tmp_path, capsys):
    with open_log(tmp_path / "run", tensorboard_dir=tmp_path / "tb") as log:
        log.step(1, {"train/loss": 1.0})
        assert list((tmp_path / "tb").iterdir())
        log.step(2, {"rollout/x": "not a number"})
        log.step(3, {"rollout/x": "not a number"})
        assert log.lost_points == 2
    assert steps(tmp_path / "run" / "metrics.jsonl") == [1, 2, 3]
    assert "TensorBoard lost 2 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    "step, metrics, shown",
    [
        (4, {"train/loss": 0.5}, False),
        (5, {"train/loss": 0.5}, True),  # the cadence
        (10, {"train/loss": 0.5}, True),  # the last step
        (7, {"eval/math/pass1": 0.5}, True),  # evaluations always
    ],
)
def test_console_cadence(tmp_path, capsys, step, metrics, shown):
    with open_log(tmp_path, logging_steps=5) as log:
        log.step(step, metrics)
    out = capsys.readouterr().out
    assert out.startswith("molt rl\n") and (f"step {step:>2}/10" in out) is shown


def test_the_line_of_a_step():
    metrics = {
        "rollout/reward": 0.5,
        "train/loss": -0.0123456,
        "mismatch/abs_max": 1.23e-5,
        "staleness/max": 1.0,
        "faults/timeout": 2.0,
        "timing/step_s": 1.26,
    }
    assert step_line(3, 120, metrics).plain == (
        "step   3/120  reward 0.500  loss -0.01235  mismatch 1.2e-05  stale 1  faults 2  1.3 s"
    )
    assert step_line(3, None, {"train/loss": 2.0}).plain == "step 3  loss 2"
