"""What a run is before any process starts: counts, processes, and what is refused then."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from molt.errors import CheckpointError, ConfigError, DataError
from molt.records.state import RunState
from molt.rollout.dump import batch_dir, begin_dump
from molt.spec import resolve, resolve_evaluation
from molt.worker_settings import policy_settings
from tests.runs import settings, write_prompts

GAE = ("--algo.advantage.estimator", "gae")


@pytest.fixture
def prompts(tmp_path):
    return write_prompts(tmp_path / "p.jsonl", 10)


def spec_of(tmp_path, prompts, *flags):
    return resolve(settings("model", tmp_path / "out", prompts, *flags))


def test_the_batches_of_a_run_are_the_prompts_of_all_episodes_rounded_up(tmp_path, prompts):
    assert spec_of(tmp_path, prompts).total_batches == 3  # 10 prompts, 4 a batch
    assert spec_of(tmp_path, prompts, "--train.num_episodes", "2").total_batches == 5
    assert spec_of(tmp_path, prompts, "--train.max_steps", "2").total_batches == 2


def test_a_run_has_the_models_that_its_estimator_needs(tmp_path, prompts):
    def names(*flags):
        return [role.name for role in spec_of(tmp_path, prompts, *flags).processes.roles]

    assert names() == ["policy"]
    assert names(*GAE, "--algo.kl.init_coef", "0.1") == ["policy", "reference", "critic"]


def test_an_evaluation_has_engines_and_no_models(tmp_path, prompts):
    spec = resolve_evaluation(settings("model", tmp_path / "out", "", "--eval.dataset", prompts))
    assert spec.processes.roles == [] and spec.processes.num_engines == 1
    assert len(spec.held_out.prompts) == 10


def test_a_replay_has_no_engines_and_as_many_batches_as_were_dumped(tmp_path, prompts):
    dump = tmp_path / "dump"
    begin_dump(dump, spec_of(tmp_path, prompts).identity, after_step=-1, output_dir=tmp_path / "first")
    for step in (1, 2):
        batch_dir(dump, step).mkdir()
        (batch_dir(dump, step) / "buffer.json").write_text("[]")
    spec = spec_of(tmp_path, prompts, "--train.rollout_replay_dir", str(dump))
    assert spec.processes.num_engines == 0 and spec.total_batches == 2
    begin_dump(dump, spec.dump_identity, after_step=5, output_dir=tmp_path / "first")
    assert spec_of(tmp_path, prompts, "--train.rollout_replay_dir", str(dump)).total_batches == 2


def test_a_replay_with_other_prompts_of_the_same_number_is_refused(tmp_path, prompts):
    dump = tmp_path / "dump"
    begin_dump(dump, spec_of(tmp_path, prompts).dump_identity, after_step=-1, output_dir=tmp_path / "first")
    lines = Path(prompts).read_text().splitlines(keepends=True)
    other = tmp_path / "other.jsonl"
    other.write_text("".join([*lines[1:], lines[0]]))
    with pytest.raises(DataError, match=r"hold other groups\. Use the settings and the prompts of that run"):
        spec_of(tmp_path, str(other), "--train.rollout_replay_dir", str(dump))


@pytest.mark.parametrize("chats", [True, False])
def test_the_policy_knows_whether_prompts_are_chats(tmp_path, prompts, chats):
    spec = spec_of(tmp_path, prompts)
    config = replace(spec.config, data=replace(spec.config.data, apply_chat_template=chats))
    assert policy_settings(replace(spec.processes, config=config)).apply_chat_template is chats


def test_nothing_is_written(tmp_path, prompts):
    dump = tmp_path / "dump"
    spec_of(tmp_path, prompts, "--ckpt.load_enable", "--train.rollout_dump_dir", str(dump))
    assert not (tmp_path / "out").exists() and not dump.exists()


def test_a_policy_that_would_never_be_trained_is_refused(tmp_path, prompts):
    with pytest.raises(ConfigError, match=r"freezing_steps` \(=3\) with 3 steps in all.*Use a value below 3"):
        spec_of(tmp_path, prompts, *GAE, "--actor.freezing_steps", "3")


def test_a_transfer_between_gpus_is_refused_on_a_cpu(tmp_path, prompts):
    with pytest.raises(ConfigError, match=r"weight_transfer` \(=nccl\) copies between GPUs.*Use auto"):
        spec_of(tmp_path, prompts, "--vllm.weight_transfer", "nccl", "--fsdp.device", "cpu")


def test_a_checkpoint_of_another_run_is_refused(tmp_path, prompts):
    checkpoint = tmp_path / "out" / "checkpoints" / "step_000001"
    checkpoint.mkdir(parents=True)
    identity = spec_of(tmp_path, prompts).checkpoint_identity
    state = RunState(step=1, total_batches=3, identity=identity | {"seed": 7})
    (checkpoint / "loop.json").write_text(state.to_json())
    (checkpoint / "manifest.json").write_text('{"files": {}}')
    with pytest.raises(CheckpointError, match=r"'seed': 7.*it would repeat or skip"):
        spec_of(tmp_path, prompts, "--ckpt.load_enable")


def save(tmp_path, spec, **changes):
    """A checkpoint of step 1 of a run."""
    checkpoint = tmp_path / "out" / "checkpoints" / "step_000001"
    checkpoint.mkdir(parents=True, exist_ok=True)
    state = RunState(step=1, total_batches=3, identity=spec.checkpoint_identity, rows=spec.rows)
    (checkpoint / "loop.json").write_text(replace(state, **changes).to_json())
    (checkpoint / "manifest.json").write_text('{"files": {}}')


def test_other_prompts_of_the_same_number_are_refused(tmp_path, prompts):
    save(tmp_path, spec_of(tmp_path, prompts))
    lines = Path(prompts).read_text().splitlines(keepends=True)
    shuffled = tmp_path / "shuffled.jsonl"
    shuffled.write_text("".join([*lines[1:], lines[0]]))
    with pytest.raises(CheckpointError, match=r"other rows than those of `data.prompt_dataset` \(=.*shuffled.jsonl\)"):
        spec_of(tmp_path, str(shuffled), "--ckpt.load_enable")


def test_the_same_prompts_resume_from_another_file_with_more_columns(tmp_path, prompts):
    save(tmp_path, spec_of(tmp_path, prompts))
    moved = tmp_path / "moved.jsonl"
    rows = [json.loads(line) | {"note": "new"} for line in Path(prompts).read_text().splitlines()]
    moved.write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec_of(tmp_path, str(moved), "--ckpt.load_enable")


def test_a_checkpoint_without_fingerprints_resumes(tmp_path, prompts):
    spec = spec_of(tmp_path, prompts)
    save(tmp_path, spec, rows={})
    spec_of(tmp_path, prompts, "--ckpt.load_enable")
    loop = tmp_path / "out" / "checkpoints" / "step_000001" / "loop.json"
    older = json.loads(loop.read_text())
    older.pop("rows")
    loop.write_text(json.dumps(older))
    spec_of(tmp_path, prompts, "--ckpt.load_enable")


def test_a_dump_of_another_run_is_refused(tmp_path, prompts):
    dump = tmp_path / "dump"
    begin_dump(dump, {"seed": 7}, after_step=-1, output_dir=tmp_path / "first")
    batch_dir(dump, 1).mkdir()
    with pytest.raises(DataError, match="has batches of another run"):
        spec_of(tmp_path, prompts, "--train.rollout_dump_dir", str(dump))
