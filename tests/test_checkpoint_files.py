"""The format number and the defaults of a checkpoint's files: each key removed, a newer number."""

import json

import numpy as np
import pytest

from molt.checkpoint_files import FORMAT, KEYS, read_json, with_defaults, write_json
from molt.errors import CheckpointError
from molt.records.state import complete_best, complete_ledger, read_best
from molt.rollout.dump import begin_dump, check_dump, dumped_batches
from molt.rollout.samples import describe
from molt.types import Group, PolicyFailure, Prompt, RolloutInfo, Scored
from tests.streams import load_buffer, sample_from, save_buffer

FILES = ["loop.json", "extra.json", "trainer.json", "breaker.json", "buffer.json", "best.json", "manifest.json"]
ROWS = [(part, name) for part in KEYS for name in KEYS[part]]


def full(part):
    return {name: "value" for name in KEYS[part]}


@pytest.mark.parametrize(("part", "name"), ROWS)
def test_each_key_removed_gets_its_default_warns_or_is_refused(tmp_path, part, name, recwarn):
    path = tmp_path / part.split()[0]
    fields = full(part)
    del fields[name]
    key = KEYS[part][name]
    if key.required:
        with pytest.raises(CheckpointError, match=rf"{path.name} has no `{name}` .*: molt cannot tell .*Remove this"):
            with_defaults(fields, part, path)
        return
    assert with_defaults(fields, part, path) == full(part) | {name: key.default}
    messages = [str(warning.message) for warning in recwarn]
    assert messages == ([f"{path} has no `{name}`: {key.warning}"] if key.warning else [])


@pytest.mark.parametrize("name", FILES)
def test_what_is_written_carries_the_number_and_is_read_without_it(tmp_path, name):
    write_json(tmp_path / name, full(name))
    assert json.loads((tmp_path / name).read_text()) == {"format": FORMAT} | full(name)
    assert read_json(tmp_path / name) == full(name)


@pytest.mark.parametrize("name", FILES)
def test_a_newer_number_is_refused_with_value_consequence_and_fix(tmp_path, name):
    path = tmp_path / name
    path.write_text(json.dumps(full(name) | {"format": FORMAT + 1}))
    with pytest.raises(CheckpointError) as error:
        read_json(path)
    assert str(error.value) == (
        f"{path} has format 3, this molt reads formats up to 2: it would misread what the newer format added. Resume "
        "with the molt that wrote it or a newer one, or use another --ckpt.output_dir."
    )


def test_a_list_of_format_1_is_read(tmp_path):
    (tmp_path / "breaker.json").write_text("[1.5, 2.0]")
    (tmp_path / "buffer.json").write_text("[]")
    assert read_json(tmp_path / "breaker.json") == {"norms": [1.5, 2.0], "spikes": []}
    assert read_json(tmp_path / "buffer.json") == {"groups": []}


def test_a_lost_position_is_counted_from_trained_buffered_and_in_flight_groups(tmp_path):
    path = tmp_path / "loop.json"
    whole = {"position": 16, "in_flight": [12, 14], "filter": [0, 0]}
    assert complete_ledger(whole, 12, [13, 15], path) == whole
    with pytest.warns(UserWarning, match="has no `position`: the resume counts"):
        ledger = complete_ledger({"in_flight": [12, 14], "filter": [0, 0]}, 12, [13, 15], path)
    assert ledger == whole  # 12 + 2 + 2
    with pytest.warns(UserWarning, match="the prompts in flight at the save are skipped"):
        ledger = complete_ledger({}, 12, [13, 15], path)
    assert ledger == {"position": 16, "in_flight": [], "filter": [0, 0]}  # after the last that is known: 15


def test_a_best_evaluation_without_a_part_of_it_is_forgotten(tmp_path):
    best = {"step": 3, "metric": "eval/p/pass1", "value": 0.5}
    path = tmp_path / "best.json"
    assert read_best(path) is None
    write_json(path, best)
    assert read_best(path) == best
    for name in best:
        with pytest.warns(UserWarning, match=f"has no `{name}`: this best evaluation is forgotten"):
            assert complete_best({key: best[key] for key in best if key != name}, path) is None


def one_sample(oldest):
    versions = np.array([-1, oldest, oldest + 1], np.int32)
    return sample_from(np.array([5, 6, 7], np.int32), versions, np.array([0.0, -1.0, -2.0], np.float32))


def prompt(epoch, position):
    return Prompt(epoch, position, row=position, messages=None, text=f"prompt {position}")


@pytest.fixture
def saved_buffer(tmp_path):
    """Two groups of one rollout: a scored one of two segments and a policy failure of one."""
    samples = [[[one_sample(4), one_sample(5)]], [[one_sample(6)]]]
    outcomes = [Scored(reward=0.5, score=0.25), PolicyFailure(-1.0, "no json")]
    groups = []
    for position, (outcome, rollouts) in enumerate(zip(outcomes, samples, strict=True)):
        infos = tuple(describe(sample) for sample in rollouts[0])
        rollout = RolloutInfo(f"0:{position}", 0, outcome, "turns", 2, infos, 1.5, (), {"tries": 2.0})
        groups.append(Group(prompt(0, position), position, 7, [rollout]))
    save_buffer(tmp_path, groups, samples)
    return tmp_path


def first_of(content, part):
    """The first group, or rollout, outcome or sample in it."""
    group = content["groups"][0]
    rollout = group["rollouts"][0]
    return {"group": group, "rollout": rollout, "outcome": rollout["outcome"], "sample": rollout["samples"][0]}[part]


DEFAULTS_IN_BUFFER = {
    ("group", "start_step"): lambda group: group.start_step == 4,  # its oldest token
    ("rollout", "group_id"): lambda group: group.rollouts[0].group_id == "0:0",
    ("rollout", "index"): lambda group: group.rollouts[0].index == 0,
    ("rollout", "cut"): lambda group: group.rollouts[0].cut == "length",  # of a rollout that was truncated
    ("rollout", "turns"): lambda group: group.rollouts[0].turns == 1,
    ("rollout", "duration_s"): lambda group: group.rollouts[0].duration_s == 0.0,
    ("rollout", "metrics"): lambda group: group.rollouts[0].metrics == {},
    ("outcome", "score"): lambda group: group.rollouts[0].outcome.score == 0.5,  # the reward
    ("sample", "trained_tokens"): lambda group: group.rollouts[0].samples[0].trained_tokens == 2,
    ("sample", "oldest_version"): lambda group: group.rollouts[0].samples[0].oldest_version == 4,
    ("sample", "media"): lambda group: group.rollouts[0].samples[0].media == 0,
}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("missing", "truncated", "cut"),
    [
        ([], True, "turns"),
        (["cut"], True, "length"),
        (["cut"], False, None),
        (["truncated"], None, "turns"),
        (["truncated", "cut"], None, None),
    ],
)
def test_a_buffer_without_cut_reasons_knows_which_rollouts_were_cut(saved_buffer, missing, truncated, cut):
    content = json.loads((saved_buffer / "buffer.json").read_text())
    rollout = first_of(content, "rollout")
    assert (rollout["truncated"], rollout["cut"]) == (True, "turns")
    rollout["truncated"] = truncated
    for name in missing:
        del rollout[name]
    (saved_buffer / "buffer.json").write_text(json.dumps(content))
    groups, _ = load_buffer(saved_buffer, prompt)
    assert groups[0].rollouts[0].cut == cut and groups[0].rollouts[0].truncated is (cut is not None)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("part", "name"), DEFAULTS_IN_BUFFER)
def test_a_buffer_is_read_without_each_key_that_has_a_default(saved_buffer, part, name):
    content = json.loads((saved_buffer / "buffer.json").read_text())
    del first_of(content, part)[name]
    (saved_buffer / "buffer.json").write_text(json.dumps(content))
    groups, samples = load_buffer(saved_buffer, prompt)
    assert DEFAULTS_IN_BUFFER[part, name](groups[0])
    assert groups[1].rollouts[0].outcome.reason == "no json"
    assert np.array_equal(samples[1][0][0].versions, one_sample(6).versions)


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("group", "epoch"),
        ("group", "position"),
        ("group", "rollouts"),
        ("rollout", "outcome"),
        ("rollout", "samples"),
        ("outcome", "reward"),
        ("sample", "tokens"),
    ],
)
def test_a_group_that_cannot_be_trained_is_refused_and_not_guessed(saved_buffer, part, name):
    content = json.loads((saved_buffer / "buffer.json").read_text())
    del first_of(content, part)[name]
    (saved_buffer / "buffer.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=rf"buffer.json has no `{name}` \(buffer.json {part}\): molt cannot tell"):
        load_buffer(saved_buffer, prompt)


def test_arrays_of_a_newer_format_or_without_a_column_are_refused(saved_buffer):
    with np.load(saved_buffer / "buffer.npz") as file:
        arrays = dict(file)
    assert arrays["format"] == FORMAT
    np.savez(saved_buffer / "buffer.npz", **arrays | {"format": np.array(FORMAT + 1)})
    with pytest.raises(CheckpointError, match=r"buffer.npz has format 3, this molt reads formats up to 2"):
        load_buffer(saved_buffer, prompt)
    del arrays["versions"]
    np.savez(saved_buffer / "buffer.npz", **arrays)
    with pytest.raises(CheckpointError, match=r"buffer.npz has no versions: its groups cannot be trained. Remove"):
        load_buffer(saved_buffer, prompt)


def test_a_dump_carries_the_number_too(tmp_path):
    begin_dump(tmp_path, {"seed": 1}, after_step=-1, output_dir=tmp_path / "out")
    content = json.loads((tmp_path / "dump.json").read_text())
    assert content == {"format": FORMAT, "seed": 1, "output_dir": str(tmp_path / "out")}
    check_dump(
        tmp_path, {"seed": 1}, resumes=True, output_dir=tmp_path / "out"
    )  # the number is no setting that must be the same
    (tmp_path / "dump.json").write_text(json.dumps(content | {"format": FORMAT + 1}))
    with pytest.raises(CheckpointError, match=r"dump.json has format 3"):
        dumped_batches(tmp_path, {"seed": 1})
