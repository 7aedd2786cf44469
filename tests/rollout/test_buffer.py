"""Finished groups to disk and back: the same records, the same bits, no pickle."""

import json
from dataclasses import replace

import numpy as np

from molt.columns import Column
from molt.rollout.samples import describe
from molt.types import Group, InfraFailure, PolicyFailure, Prompt, RolloutInfo, Scored, Unscored
from tests.streams import load_buffer, sample_from, save_buffer


def prompt(epoch, position):
    return Prompt(epoch, position, row=position, messages=None, text=f"prompt {position}", label=position)


def sample(length, seed):
    rng = np.random.default_rng(seed)
    versions = rng.integers(-1, 3, length).astype(np.int32)
    logprobs = np.where(versions >= 0, -rng.random(length), 0).astype(np.float32)
    return sample_from(rng.integers(0, 99, length).astype(np.int32), versions, logprobs)


PAIRS = Column("pairs", "int16", fill=-1, shape=(2,))


def rollout(group_id, index, outcome, samples, cut=None, **other):
    return RolloutInfo(group_id, index, outcome, cut, 2, tuple(map(describe, samples)), **other)


def groups():
    """Two groups: several segments, a policy failure, and a rollout without any turn."""
    heavy = [[[sample(4, 0), sample(7, 1)], [sample(3, 2)]], [[], [sample(1, 3)]]]
    light = [
        [
            rollout("1:5", 0, Scored(0.1, 1.0), heavy[0][0], duration_s=1.5, metrics={"tries": 2.0}),
            rollout(
                "1:5", 1, PolicyFailure(-1.0, "no json"), heavy[0][1], cut="time", failures=(InfraFailure("engine"),)
            ),
        ],
        [rollout("1:2", 0, Scored(0.0, 0.0), heavy[1][0]), rollout("1:2", 1, Scored(float("inf"), 0.0), heavy[1][1])],
    ]
    return [
        Group(prompt(1, 5), order=8, start_step=3, rollouts=light[0]),
        Group(prompt(1, 2), order=9, start_step=4, rollouts=light[1]),
    ], heavy


def assert_same_samples(got, expected):
    assert [[len(segments) for segments in rollouts] for rollouts in got] == [
        [len(segments) for segments in rollouts] for rollouts in expected
    ]
    flat = [[s for rollouts in side for segments in rollouts for s in segments] for side in (got, expected)]
    for a, b in zip(*flat, strict=True):
        for name in ("token_ids", "versions", "logprobs"):
            x, y = getattr(a, name), getattr(b, name)
            assert x.dtype == y.dtype and np.array_equal(x, y), name


def test_round_trip(tmp_path):
    saved, heavy = groups()
    save_buffer(tmp_path, saved, heavy)
    loaded, samples = load_buffer(tmp_path, prompt)
    assert_same_samples(samples, heavy)
    for a, b in zip(loaded, saved, strict=True):
        assert (a.prompt, a.start_step, a.finished) == (b.prompt, b.start_step, True)
        for x, y in zip(a.rollouts, b.rollouts, strict=True):
            # Attempts that failed before were counted when they failed.
            ignored = {"outcome", "failures"}
            assert {k: v for k, v in vars(x).items() if k not in ignored} == {
                k: v for k, v in vars(y).items() if k not in ignored
            }
            assert type(x.outcome) is type(y.outcome)
            assert (x.outcome.reward, x.outcome.score) == (y.outcome.reward, y.outcome.score)
    assert loaded[0].rollouts[1].outcome.reason == "no json"
    assert [group.order for group in loaded] == [0, 1]  # in the order they started


def test_a_further_column_comes_back_with_its_declaration(tmp_path):
    saved, heavy = groups()
    before = heavy[0][0][1]
    values = np.arange(2 * len(before)).reshape(-1, 2)
    heavy[0][0][1] = replace(before, columns=before.columns.with_column(PAIRS, values))
    save_buffer(tmp_path, saved, heavy)
    _, samples = load_buffer(tmp_path, prompt)
    assert_same_samples(samples, heavy)
    assert samples[0][0][1].columns.further == (PAIRS,)
    assert np.array_equal(samples[0][0][1].columns.values(PAIRS), values)
    # A sample that did not have the column has its fill.
    assert (samples[1][1][0].columns.values(PAIRS) == -1).all()


def test_an_empty_buffer(tmp_path):
    save_buffer(tmp_path, [], [])
    assert load_buffer(tmp_path, prompt) == ([], [])


def test_groups_without_a_single_turn(tmp_path):
    save_buffer(tmp_path, [Group(prompt(0, 0), 0, 0, [rollout("0:0", 0, Scored(0.0, 0.0), [])])], [[[]]])
    loaded, samples = load_buffer(tmp_path, prompt)
    assert samples == [[[]]] and loaded[0].rollouts[0].samples == ()


def test_there_is_no_pickle_in_it(tmp_path):
    saved, heavy = groups()
    save_buffer(tmp_path, saved, heavy)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["buffer.json", "buffer.npz"]
    json.loads((tmp_path / "buffer.json").read_text())
    with np.load(tmp_path / "buffer.npz", allow_pickle=False) as file:
        for name in file.files:
            file[name]  # an array of objects would raise here


def test_a_group_that_waits_for_scores_is_saved_with_its_trajectories(tmp_path):
    heavy = [[[sample(4, 0)], [sample(3, 1)]]]
    waiting = [
        rollout("1:5", 0, Unscored('{"label": "\\ud83d"}'), heavy[0][0]),
        rollout("1:5", 1, Scored(0.5, 1.0), heavy[0][1]),
    ]
    group = Group(prompt(1, 5), order=8, start_step=3, unscored=waiting)
    assert group.scoring and not group.finished
    save_buffer(tmp_path, [group], heavy)
    (loaded,), samples = load_buffer(tmp_path, prompt)
    assert_same_samples(samples, heavy)
    assert [rollout.outcome for rollout in loaded.rollouts] == [rollout.outcome for rollout in waiting]
