"""Checkpoints of an older molt (tests/fixtures/checkpoints/) resume and train what that molt went on to train."""

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from molt.checkpoint_files import FORMAT, KEYS, LISTS, read_json
from molt.cli.args import parse
from molt.config import RLConfig
from molt.config_sft import SftConfig
from molt.errors import CheckpointError
from molt.train.sft import run_sft
from tests.runs import events, run, trained_groups

FIXTURES = Path(__file__).parent / "fixtures" / "checkpoints"
STEP = "step_000003"
LAST_STEP = 6
SPEED = ("time", "perf/", "timing/", "faults/")
REFUSAL = rf"has format {FORMAT + 1}, this molt reads formats up to {FORMAT}: it would misread .* Resume with the molt"


@pytest.fixture
def rl_output(tmp_path):
    return copy_checkpoint("rl_critic", tmp_path)


@pytest.fixture
def sft_output(tmp_path):
    return copy_checkpoint("sft", tmp_path)


def copy_checkpoint(name: str, tmp_path: Path) -> Path:
    """An output directory that has the checkpoint and nothing else."""
    output = tmp_path / "out"
    shutil.copytree(FIXTURES / name / "checkpoints", output / "checkpoints")
    return output


def resume_rl(output: Path, *more: str) -> None:
    folder = FIXTURES / "rl_critic"
    arguments = [
        *json.loads((folder / "flags.json").read_text()),
        "--actor.model_name_or_path", str(folder / "model"),
        "--data.prompt_dataset", str(folder / "prompts.jsonl"),
        "--train.agent_path", str(FIXTURES / "agent.py"),
        "--ckpt.output_dir", str(output),
        "--ckpt.load_enable",
        *more,
    ]  # fmt: skip
    run(parse(RLConfig, arguments, prog="test"))


def resume_sft(output: Path) -> None:
    folder = FIXTURES / "sft"
    arguments = [
        *json.loads((folder / "flags.json").read_text()),
        "--model.model_name_or_path", str(folder / "model"),
        "--data.dataset", str(folder / "rows.jsonl"),
        "--ckpt.output_dir", str(output),
        "--ckpt.load_enable",
    ]  # fmt: skip
    run_sft(parse(SftConfig, arguments, prog="test"))


def metrics_by_step(path: Path) -> dict[int, dict[str, float]]:
    """What was measured after the checkpoint, but for speed."""
    steps = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if record["step"] > 3:
            steps[record["step"]] = {name: record[name] for name in record if not name.startswith(SPEED)}
    return steps


def assert_as_recorded(output: Path, name: str) -> None:
    """The metrics equal those of the run that was not interrupted, up to the arithmetic of another processor."""
    recorded = metrics_by_step(FIXTURES / name / "metrics.jsonl")
    resumed = metrics_by_step(output / "run" / "metrics.jsonl")
    assert sorted(recorded) == [4, 5, 6] == sorted(resumed)
    for step, expected in recorded.items():
        # A metric that did not exist then may be there now, none may be gone.
        measured = {metric: resumed[step][metric] for metric in expected}
        assert measured == pytest.approx(expected, rel=1e-4, abs=1e-5), f"step {step}"


def change_json(path: Path, change: Callable[[dict], object]) -> None:
    """Change the fields of a file, as though it had been written like that."""
    content = json.loads(path.read_text())
    if isinstance(content, list):
        content = {LISTS[path.name]: content}
    change(content)
    path.write_text(json.dumps(content))
    note_size(path)


def note_size(path: Path) -> None:
    """Write the size of a changed file into the manifest."""
    checkpoint = next(parent for parent in path.parents if parent.name == STEP)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"][path.relative_to(checkpoint).as_posix()] = path.stat().st_size
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def make_newer(path: Path) -> None:
    """Give a file the format after the one that this molt knows."""
    if path.name == "manifest.json":
        path.write_text(json.dumps(json.loads(path.read_text()) | {"format": FORMAT + 1}))
        return
    if path.suffix == ".json":
        change_json(path, lambda fields: fields.update(format=FORMAT + 1))
    elif path.suffix == ".npz":
        with np.load(path) as arrays:
            columns = dict(arrays)
        np.savez(path, **columns, format=np.array(FORMAT + 1))
    else:
        content = io.BytesIO()
        torch.save({"format": FORMAT + 1, "state": torch.get_rng_state()}, content)
        path.write_bytes(content.getvalue())
    note_size(path)


@pytest.mark.ray
def test_an_old_rl_run_with_a_critic_goes_on_as_it_did(ray_session, rl_output):
    """Two ranks; two finished groups are in its buffer, of the prompts 13 and 15, while 12 and 14 were in flight."""
    resume_rl(rl_output)
    assert_as_recorded(rl_output, "rl_critic")
    recorded = json.loads((FIXTURES / "rl_critic" / "groups.json").read_text())
    assert sorted(trained_groups(rl_output)) == sorted(recorded[12:])  # 4 groups a step, in the order of the steps
    assert len(set(recorded)) == 24  # so no prompt is lost and none is trained twice
    assert [event["step"] for event in events(rl_output, "resumed")] == [3]
    for name in ("loop.json", "buffer.json", "trainer.json", "critic/breaker.json", "manifest.json"):
        saved = json.loads((rl_output / "checkpoints" / f"step_{LAST_STEP:06d}" / name).read_text())
        assert saved["format"] == FORMAT, name


@pytest.mark.ray
def test_an_old_rl_run_resumes_without_every_key_that_has_a_default(ray_session, rl_output):
    """One rank, too. The position is then 12 trained + 2 buffered + 2 in flight, which is right."""
    checkpoint = rl_output / "checkpoints" / STEP
    for name in ("step", "total_steps", "rollbacks", "best", "kl_coef", "trips", "data"):
        change_json(checkpoint / "loop.json", lambda state, name=name: state.pop(name))
    for name in ("position", "filter"):
        change_json(checkpoint / "loop.json", lambda state, name=name: state["ledger"].pop(name))
    change_json(checkpoint / "trainer.json", lambda fields: fields.clear())
    change_json(checkpoint / "critic" / "breaker.json", lambda fields: fields.clear())
    with pytest.warns(UserWarning) as caught:
        resume_rl(rl_output, "--actor.num_gpus_per_node", "1")
    messages = "\n".join(str(warning.message) for warning in caught)
    for expected in ("which batch, group, replay, rows, seed it was made with", "has no `position`", "has no `trips`"):
        assert expected in messages
    assert_as_recorded(rl_output, "rl_critic")


def test_an_old_sft_run_goes_on_as_it_did(sft_output):
    resume_sft(sft_output)
    assert_as_recorded(sft_output, "sft")
    last = sft_output / "checkpoints" / f"step_{LAST_STEP:06d}"
    for name in ("extra.json", "trainer.json", "manifest.json"):
        assert json.loads((last / name).read_text())["format"] == FORMAT
    assert torch.load(last / "rng_00000.pt", weights_only=True)["format"] == FORMAT


@pytest.mark.parametrize(
    ("file", "key", "warning"),
    [
        ("extra.json", "step", None),
        ("extra.json", "data", "does not say which batch_size, rows, seed it was made with"),
        ("trainer.json", "optimizer_steps", "the schedule continues from the optimizer's count of steps"),
    ],
)
@pytest.mark.filterwarnings("default")
def test_sft_resumes_exactly_without_a_key_and_warns_where_that_matters(sft_output, file, key, warning):
    change_json(sft_output / "checkpoints" / STEP / file, lambda fields: fields.pop(key))
    if warning is None:
        resume_sft(sft_output)
    else:
        with pytest.warns(UserWarning, match=warning):
            resume_sft(sft_output)
    assert_as_recorded(sft_output, "sft")


@pytest.mark.parametrize("file", ["manifest.json", "extra.json", "trainer.json", "rng_00000.pt"])
def test_a_newer_sft_checkpoint_is_refused(sft_output, file):
    path = sft_output / "checkpoints" / STEP / file
    make_newer(path)
    with pytest.raises(CheckpointError, match=f"{file} {REFUSAL}"):
        resume_sft(sft_output)


@pytest.mark.parametrize("file", ["manifest.json", "loop.json", "trainer.json", "breaker.json", "buffer.json"])
def test_every_json_file_of_a_newer_rl_checkpoint_is_refused(rl_output, file):
    path = rl_output / "checkpoints" / STEP / file
    make_newer(path)
    with pytest.raises(CheckpointError, match=f"{file} {REFUSAL}"):
        read_json(path)


@pytest.mark.ray
def test_a_newer_rl_checkpoint_is_refused_before_anything_starts(ray_session, rl_output):
    make_newer(rl_output / "checkpoints" / STEP / "loop.json")
    with pytest.raises(CheckpointError, match=f"loop.json {REFUSAL}"):
        resume_rl(rl_output)
    assert not (rl_output / "run").exists()


def test_the_table_lists_what_the_old_files_hold():
    """Every key of the fixtures is read by the table, or needs no reader."""
    checkpoint = FIXTURES / "rl_critic" / "checkpoints" / STEP
    loop = json.loads((checkpoint / "loop.json").read_text())
    of_loop = set(KEYS["loop.json"]) - {"rows"}  # newer than the fixtures
    assert set(loop) - {"step"} == of_loop  # the step is in the directory's name
    assert set(loop["ledger"]) == set(KEYS["loop.json ledger"])
    (group, _) = json.loads((checkpoint / "buffer.json").read_text())
    assert set(group) == set(KEYS["buffer.json group"])
    # The place of a rollout in its group says its id and its index.
    of_rollout = set(KEYS["buffer.json rollout"]) - {"cut"}  # newer than the fixtures
    assert set(group["rollouts"][0]) - {"group_id", "index"} == of_rollout
    assert set(json.loads((checkpoint / "trainer.json").read_text())) == set(KEYS["trainer.json"])
