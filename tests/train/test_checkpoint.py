"""Checkpoints: bit-identical restarts, torn ones, retention, other rank counts; and the export."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from molt.errors import CheckpointError
from molt.publish.gather import named_full_tensors
from molt.train import checkpoint
from molt.train.checkpoint import (
    begin,
    checkpoint_path,
    checkpoint_step,
    commit,
    export_hf,
    latest_checkpoint,
    load_checkpoint,
    prune,
    removing,
    repair,
    require_same_rows,
    require_same_run,
    temporary,
    write_part,
    written,
)
from molt.train.sft import negative_log_likelihood
from molt.train.step import optimizer_step
from tests.tiny import char_tokenizer, save_tiny
from tests.train.ranks import micro_batches_of, run_ranks, step_batch, trainer, whole


def train(mesh, parts, seeds):
    """Steps whose loss also depends on torch's random state. Returns the loss of each."""

    def noisy(model, m):
        loss, metrics = negative_log_likelihood(model, m)
        return loss * (1 + 0.1 * torch.rand(())), metrics

    losses = []
    for seed in seeds:
        mine = micro_batches_of(mesh, step_batch(seed), 3, True)
        losses.append(optimizer_step(*parts, mine, noisy, mesh=mesh, max_norm=1.0)["train/loss"].total)
    return losses


def save(mesh, directory, step, parts, extra, background=False):
    """A whole checkpoint, by all ranks. Returns the finished directory."""
    tmp, owner = temporary(directory, step), dist.get_rank() == 0
    if owner:
        begin(directory, step)
    dist.barrier()
    written(tmp, write_part(tmp, *parts, mesh=mesh, group=mesh.saving_group(), background=background))
    dist.barrier()
    if owner:
        (tmp / "extra.json").write_text(json.dumps(extra))
        commit(tmp)
    dist.barrier()
    return checkpoint_path(directory, step)


def weights(model):
    return {name: whole(p) for name, p in model.named_parameters()}


def assert_identical(a, b):
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def uninterrupted(mesh, path, directory):
    """Four steps with a checkpoint after two. Returns the last two losses, the final weights and those saved."""
    torch.manual_seed(0)
    parts = trainer(path, mesh)
    train(mesh, parts, [0, 1])
    save(mesh, directory, 2, parts, {"position": 2})
    at_save = weights(parts[0])
    return train(mesh, parts, [2, 3]), weights(parts[0]), at_save


def resumed(mesh, path, directory):
    parts = trainer(path, mesh)
    torch.manual_seed(999)
    load_checkpoint(latest_checkpoint(directory), *parts, mesh=mesh)
    return train(mesh, parts, [2, 3]), weights(parts[0])


def test_resuming_is_bit_identical(tiny, mesh, tmp_path):
    losses, final, _ = uninterrupted(mesh, tiny, tmp_path)
    again, final_again = resumed(mesh, tiny, tmp_path)
    assert again == losses
    assert_identical(final_again, final)


@pytest.mark.processes
def test_resuming_two_ranks_is_bit_identical_and_one_rank_can_take_over(tiny, mesh, tmp_path):
    saved = tmp_path / "checkpoints"
    (losses, final, at_save), _ = run_ranks(uninterrupted, 2, tmp_path / "a", tiny, saved)
    for again, final_again in run_ranks(resumed, 2, tmp_path / "b", tiny, saved):
        assert again == losses
        assert_identical(final_again, final)
    parts = trainer(tiny, mesh)
    load_checkpoint(latest_checkpoint(saved), *parts, mesh=mesh)
    assert_identical(weights(parts[0]), at_save)


def saved_while_training(mesh, path, directory):
    """Steps go on while seven checkpoints are written, one after another. Returns the weights at each save."""
    parts, group, states, part = trainer(path, mesh), mesh.saving_group(), [], None
    for step in range(1, 8):
        train(mesh, parts, [step])
        tmp = temporary(directory, step)
        if part is not None:
            written(temporary(directory, step - 1), part)
        if dist.get_rank() == 0:
            begin(directory, step)
        dist.barrier()
        part = write_part(tmp, *parts, mesh=mesh, group=group, background=True)
        states.append(weights(parts[0]))
    train(mesh, parts, [8])
    written(tmp, part)
    dist.barrier()
    return states


@pytest.mark.processes
def test_background_saves_hold_the_moment_they_began_and_do_not_hang(tiny, mesh, tmp_path):
    directory = tmp_path / "checkpoints"
    states, _ = run_ranks(saved_while_training, 2, tmp_path / "ranks", tiny, directory)
    assert not torch.equal(*(next(iter(states[i].values())) for i in (0, 6)))
    for step in (1, 6, 7):
        parts = trainer(tiny, mesh)
        load_checkpoint(commit(temporary(directory, step)), *parts, mesh=mesh)
        assert_identical(weights(parts[0]), states[step - 1])


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_is_an_error_with_the_space_and_spares_the_checkpoint_before(two_saved, background, mesh):
    parts, directory, paths = two_saved
    tmp = begin(directory, 3)
    (tmp / "model").mkdir()
    (tmp / "model" / "__0_0.distcp").symlink_to("/dev/full")
    with (
        pytest.raises(CheckpointError, match=r"step_000003.*No space left.*GiB are free.*complete checkpoint stays"),
        removing(tmp),
    ):
        written(tmp, write_part(tmp, *parts, mesh=mesh, group=mesh.saving_group(), background=background))
    assert not tmp.exists() and latest_checkpoint(directory) == paths[1]


def test_an_unwritable_directory_says_what_is_needed(two_saved, tmp_path, mesh):
    parts, _, _ = two_saved
    (tmp_path / "file").touch()
    bytes_needed = sum(p.numel() for p in parts[0].parameters()) * 4 * 3
    with pytest.raises(CheckpointError, match=f"Not a directory.*{bytes_needed / 2**30:.2f} GiB are needed"):
        write_part(tmp_path / "file" / "step_000003.tmp", *parts, mesh=mesh, group=mesh.saving_group(), background=True)


def state_after_load(mesh, path, directory):
    """Whole parameters and moments after loading."""
    model, optimizer, scheduler = trainer(path, mesh)
    load_checkpoint(latest_checkpoint(directory), model, optimizer, scheduler, mesh=mesh)
    state = weights(model)
    for name, p in model.named_parameters():
        state |= {f"{name}.{key}": whole(value) for key, value in optimizer.state[p].items()}
    state["lr"] = torch.tensor(optimizer.param_groups[0]["lr"])
    return state


@pytest.mark.processes
def test_one_rank_saves_and_two_resume(tiny, mesh, tmp_path):
    uninterrupted(mesh, tiny, tmp_path)
    alone = state_after_load(mesh, tiny, tmp_path)
    assert alone["lr"] > 0 and any(value.any() for name, value in alone.items() if name.endswith("exp_avg"))
    for state in run_ranks(state_after_load, 2, tmp_path / "ranks", tiny, tmp_path):
        assert_identical(state, alone)


def test_resuming_keeps_the_place_in_the_schedule_and_takes_the_new_rate(tiny, mesh, tmp_path):
    parts = trainer(tiny, mesh, lr=1e-2)
    train(mesh, parts, [0, 1])
    path = save(mesh, tmp_path, 2, parts, {})
    assert json.loads((path / "trainer.json").read_text()) == {"format": 2, "optimizer_steps": 2}
    model, optimizer, scheduler = trainer(tiny, mesh, lr=4e-3)
    load_checkpoint(path, model, optimizer, scheduler, mesh=mesh)
    expected = [4e-3 * scheduler.lr_lambdas[0](step) for step in (2, 3)]
    assert [group["lr"] for group in optimizer.param_groups] == [expected[0]] * 2
    train(mesh, (model, optimizer, scheduler), [2])
    assert [group["lr"] for group in optimizer.param_groups] == [expected[1]] * 2
    assert 0 < expected[1] < expected[0] < 4e-3  # a cosine that goes on


@pytest.fixture
def two_saved(tiny, mesh, tmp_path):
    parts = trainer(tiny, mesh)
    return parts, tmp_path, [save(mesh, tmp_path, step, parts, {"step": step}) for step in (1, 2)]


def test_a_checkpoint_before_the_first_step_can_be_loaded(two_saved, mesh):
    parts, directory, paths = two_saved
    assert latest_checkpoint(directory) == paths[1] == directory / "step_000002"
    load_checkpoint(paths[1], *parts, mesh=mesh)
    assert json.loads((paths[1] / "extra.json").read_text()) == {"step": 2}


def tear(how, path):
    if how == "no manifest":
        (path / "manifest.json").unlink()
    elif how == "half a manifest":
        text = (path / "manifest.json").read_text()
        (path / "manifest.json").write_text(text[: len(text) // 2])
    elif how == "short file":
        (path / "trainer.json").write_bytes(b"{}")
    else:
        (path / "extra.json").unlink()


@pytest.mark.parametrize("how", ["no manifest", "half a manifest", "short file", "missing file"])
def test_a_torn_checkpoint_is_skipped_with_a_warning_that_names_it(two_saved, how, mesh):
    parts, directory, paths = two_saved
    tear(how, paths[1])
    with pytest.warns(UserWarning, match="step_000002 is torn and was skipped"):
        assert latest_checkpoint(directory) == paths[0]
    with pytest.raises(CheckpointError, match="step_000002 is torn"):
        load_checkpoint(paths[1], *parts, mesh=mesh)


@pytest.mark.parametrize("killed_at", [0, 1])
def test_saving_a_step_again_loses_nothing_when_it_is_killed(two_saved, monkeypatch, killed_at, mesh):
    """At either rename of the older one out of the way and of the newer one into its place."""
    parts, directory, paths = two_saved
    rename, left = Path.rename, [killed_at]

    def killed(self, target):
        if self.parent == directory:
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        save(mesh, directory, 2, parts, {"step": 2, "again": True})
    monkeypatch.undo()
    repair(directory)
    assert latest_checkpoint(directory) == paths[1]
    assert "again" in json.loads((paths[1] / "extra.json").read_text()) or killed_at == 0
    load_checkpoint(paths[1], *parts, mesh=mesh)


def test_an_unfinished_checkpoint_does_not_exist(tiny, mesh, tmp_path):
    parts = trainer(tiny, mesh)
    assert latest_checkpoint(tmp_path / "nowhere") is None
    tmp = begin(tmp_path, 5)
    write_part(tmp, *parts, mesh=mesh, group=mesh.saving_group(), background=False)
    assert tmp == temporary(tmp_path, 5) and latest_checkpoint(tmp_path) is None
    (tmp / "prompts.json").write_text("[]")  # the owner adds its files, then commits
    final = commit(tmp)
    assert latest_checkpoint(tmp_path) == final and not tmp.exists()
    assert json.loads((final / "manifest.json").read_text())["files"]["prompts.json"] == 2
    load_checkpoint(final, *parts, mesh=mesh)


def test_saving_a_step_again_replaces_it(two_saved, mesh):
    parts, directory, paths = two_saved
    (paths[1] / "old").touch()
    save(mesh, directory, 2, parts, {"step": 2, "again": True})
    load_checkpoint(paths[1], *parts, mesh=mesh)
    assert json.loads((paths[1] / "extra.json").read_text()) == {"step": 2, "again": True}
    assert not (paths[1] / "old").exists()


def complete(directory, step, size=0):
    """A checkpoint directory of `size` bytes that `_defect` finds nothing wrong with."""
    path = directory / f"step_{step:06d}"
    path.mkdir()
    (path / "data").write_bytes(bytes(size))
    (path / "manifest.json").write_text(json.dumps({"files": {"data": size}}))
    return path


@pytest.mark.parametrize("kept", [1, 3, 9])
def test_retention_removes_the_oldest(tmp_path, kept):
    paths = [complete(tmp_path, step) for step in (2, 10, 100, 1000)]
    prune(tmp_path, kept)
    assert sorted(tmp_path.iterdir()) == paths[-kept:]


@pytest.mark.parametrize(("max_num", "max_bytes", "best", "left"), [
    (9, 100, None, [1, 2, 3, 4]),  # 10 + 20 + 30 + 40 = 100
    (9, 99, None, [2, 3, 4]),
    (9, 99, 1, [1, 3, 4]),  # without 2, 80 are left
    (9, 45, 1, [1, 4]),  # 50, but both stay
    (9, 1, None, [4]),
    (2, 99, 1, [1, 4]),
    (1, 999, 1, [1, 4]),
    (1, 999, 4, [4]),
    (1, 999, 7, [4]),  # a best that is gone protects nothing
])  # fmt: skip
def test_retention_by_size_spares_the_newest_and_the_best(tmp_path, max_num, max_bytes, best, left):
    for step in (1, 2, 3, 4):
        complete(tmp_path, step, size=10 * step)
    prune(tmp_path, max_num, max_bytes, best)
    assert [checkpoint_step(path) for path in sorted(tmp_path.iterdir())] == left


def test_torn_checkpoints_do_not_count_and_stale_temporary_ones_go(tmp_path):
    paths = [complete(tmp_path, step) for step in (1, 2, 3, 4)]
    (paths[3] / "manifest.json").unlink()
    temporary(tmp_path, 5).mkdir()
    (temporary(tmp_path, 5) / "trainer.json").touch()
    prune(tmp_path, 2)
    assert [path for path in sorted(tmp_path.iterdir()) if path != paths[3]] == paths[1:3]
    with pytest.warns(UserWarning, match="step_000004 is torn"):
        assert latest_checkpoint(tmp_path) == paths[2]


def test_a_position_in_other_data_is_refused():
    require_same_run(Path("c/step_000002"), {"rows": 20, "seed": 1}, {"seed": 1, "rows": 20})
    with pytest.raises(CheckpointError) as error:
        require_same_run(Path("c/step_000002"), {"rows": 20, "seed": 1}, {"rows": 21, "seed": 1})
    assert str(error.value) == (
        "checkpoint c/step_000002 was made with {'rows': 20, 'seed': 1}, this run has {'rows': 21, 'seed': 1}: it "
        "would repeat or skip rows. Resume with the settings of that run, or use another --ckpt.output_dir."
    )


def test_what_an_older_checkpoint_did_not_save_is_not_compared_and_warns():
    with pytest.warns(UserWarning, match=r"step_000002 does not say which seed it was made with"):
        require_same_run(Path("c/step_000002"), {"rows": 20}, {"rows": 20, "seed": 1})
    other_data = pytest.raises(CheckpointError, match="repeat or skip rows")
    with pytest.warns(UserWarning, match="does not say which"), other_data:
        require_same_run(Path("c/step_000002"), {"rows": 20}, {"rows": 21, "seed": 1})


def test_other_rows_are_refused_and_other_labels_warn():
    path = Path("c/step_000002")
    rows = {"prompts": "a1", "labels": "b2", "evaluation rows": "c3"}
    for saved in ({}, rows, {"prompts": "a1"}):  # an older checkpoint has none
        require_same_rows(path, saved, rows, "`data.dataset` (=d)")
    require_same_rows(path, rows, {"prompts": "a1", "labels": "b2"}, "`data.dataset` (=d)")  # no evaluation any more
    with pytest.raises(CheckpointError) as error:
        require_same_rows(path, rows, rows | {"prompts": "x", "labels": "x"}, "`data.dataset` (=d)")
    assert str(error.value) == (
        "checkpoint c/step_000002 was made with other rows than those of `data.dataset` (=d), or in another order: it "
        "would repeat or skip rows. Resume with the rows of that run, or use another --ckpt.output_dir."
    )
    with pytest.warns(UserWarning, match="made with other labels: the prompts are the same"):
        require_same_rows(path, rows, rows | {"labels": "x"}, "`data.dataset` (=d)")
    with pytest.warns(UserWarning, match="made with other evaluation rows: scores before and after"):
        require_same_rows(path, rows, rows | {"evaluation rows": "x"}, "`data.dataset` (=d)")


def test_a_checkpoint_of_a_newer_molt_is_refused_not_skipped(two_saved):
    """An older checkpoint is there too: going back to it in silence would lose the newer steps."""
    _, directory, paths = two_saved
    manifest = json.loads((paths[1] / "manifest.json").read_text())
    (paths[1] / "manifest.json").write_text(json.dumps(manifest | {"format": 3}))
    with pytest.raises(CheckpointError, match=r"manifest.json has format 3, this molt reads formats up to 2.*Resume"):
        latest_checkpoint(directory)
    prune(directory, 1)  # a new run in the same directory may save
    assert sorted(directory.iterdir()) == [paths[1]]


def test_a_checkpoint_of_another_model_is_refused(two_saved, mesh, tmp_path_factory):
    other = save_tiny(tmp_path_factory.mktemp("other"), layers=3)
    with pytest.raises(CheckpointError, match="does not fit this model"):
        load_checkpoint(two_saved[2][1], *trainer(other, mesh), mesh=mesh)


def export(mesh, path, directory):
    parts = trainer(path, mesh)
    train(mesh, parts, [0])
    export_hf(parts[0], char_tokenizer(), directory, mesh)
    return weights(parts[0]), {name: t.clone() for name, t in named_full_tensors(parts[0], torch.bfloat16)}


def logits_of(path):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.arange(3, 60)[None]).logits


def test_export_is_what_save_pretrained_writes(either, mesh, tmp_path):
    masters, published = export(mesh, either, tmp_path / "out")
    reference = AutoModelForCausalLM.from_pretrained(either, dtype=torch.float32)
    result = reference.load_state_dict({k.removeprefix("causal_lm."): v for k, v in masters.items()}, strict=False)
    assert set(result.missing_keys) <= {"lm_head.weight"}
    reference.save_pretrained(tmp_path / "reference")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "reference"))
    assert_identical(ours, theirs)
    assert published.keys() == ours.keys() and {t.dtype for t in published.values()} == {torch.bfloat16}
    torch.testing.assert_close(logits_of(tmp_path / "out"), logits_of(tmp_path / "reference"), atol=1e-6, rtol=0)
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("ab").input_ids == char_tokenizer()("ab").input_ids
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"] and config["dtype"] == "float32" and config["use_cache"]


def export_untrained(mesh, path, directory):
    export_hf(trainer(path, mesh)[0], char_tokenizer(), directory, mesh)


@pytest.mark.processes
def test_two_ranks_export_what_they_loaded(either, tmp_path):
    run_ranks(export_untrained, 2, tmp_path / "ranks", either, tmp_path / "out")
    assert_identical(*(load_file(path / "model.safetensors") for path in (tmp_path / "out", either)))


def test_export_in_shards_replaces_an_older_export_and_spares_the_rest(tiny, mesh, tmp_path, monkeypatch):
    parts = trainer(tiny, mesh)
    out = tmp_path / "out"
    export_hf(parts[0], char_tokenizer(), out, mesh)
    (out / "checkpoints").mkdir()
    whole_file = logits_of(out)
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 100_000)
    export_hf(parts[0], char_tokenizer(), out, mesh)
    assert not (out / "model.safetensors").exists() and (out / "checkpoints").is_dir()
    assert len(list(out.glob("model-*.safetensors"))) > 1
    assert not (out / ".export.tmp").exists()
    torch.testing.assert_close(logits_of(out), whole_file, atol=0, rtol=0)
    shutil.rmtree(out)
