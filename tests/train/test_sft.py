"""SFT end to end on a copy task: it learns, resumes exactly, stops on SIGTERM, and ranks do not matter."""

import json
import os
import random
import shutil
import signal
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

from molt.config import AdamConfig, CkptConfig, FsdpConfig, ModelConfig
from molt.config_sft import SftConfig, SftDataConfig, SftEvalConfig
from molt.config_sft import SftTrainConfig as TrainConfig
from molt.errors import CheckpointError
from molt.parallel.mesh import init_distributed
from molt.parallel.shape import MeshShape
from molt.train import sft
from molt.train.checkpoint import begin, checkpoint_step, latest_checkpoint
from molt.train.sft import SftRun, run_sft
from tests.tiny import CHATML, END_ID, PAD_ID, char_tokenizer, save_tiny
from tests.train.ranks import CONTEXT, free_port


@pytest.fixture(scope="module")
def copy_task(tmp_path_factory):
    """48 rows to learn and 8 held out: say the three letters again."""
    directory = tmp_path_factory.mktemp("copy")
    rng = random.Random(0)
    words = ["".join(rng.choices("abcd", k=3)) for _ in range(56)]
    for name, part in (("train", words[:48]), ("held_out", words[48:])):
        rows = [json.dumps({"input": word, "output": word}) + "\n" for word in part]
        (directory / f"{name}.jsonl").write_text("".join(rows))
    return directory


@pytest.fixture
def config(tiny, copy_task, tmp_path):
    return SftConfig(
        adam=AdamConfig(lr=3e-3),
        model=ModelConfig(str(tiny), "none"),
        fsdp=FsdpConfig(device="cpu", packing_samples=True),
        data=SftDataConfig(dataset=str(copy_task / "train.jsonl"), output_key="output", max_len=64),
        train=TrainConfig(micro_batch_size=8, batch_size=20, max_epochs=4),
        eval=SftEvalConfig(dataset=str(copy_task / "held_out.jsonl")),
        ckpt=CkptConfig(output_dir=tmp_path / "out", save_steps=5),
    )


def records(config):
    return [json.loads(line) for line in (config.ckpt.run_dir / "metrics.jsonl").read_text().splitlines()]


def losses(config):
    return [record["train/loss"] for record in records(config)]


def weights(config):
    model = AutoModelForCausalLM.from_pretrained(config.ckpt.output_dir, dtype=torch.float32)
    return model.state_dict()


def test_the_loss_falls_and_the_result_is_a_model(config):
    run_sft(config)
    log = records(config)
    # 48 conversations in batches of 20: 3 steps an epoch, the last of 8; evaluated after each of 4 epochs.
    assert [record["step"] for record in log] == list(range(1, 13))
    assert [record["step"] for record in log if "eval/loss" in record] == [3, 6, 9, 12]
    assert log[-1]["train/loss"] < 0.7 * log[0]["train/loss"]
    assert log[-1]["eval/loss"] < 0.8 * log[2]["eval/loss"]
    assert {"train/grad_norm", "train/lr", "perf/tokens_per_s"} <= log[0].keys()
    assert checkpoint_step(latest_checkpoint(config.ckpt.checkpoints)) == 12
    assert any(value.any() for value in weights(config).values())


def test_generation_with_the_export_of_a_base_model_stops(config, tmp_path):
    """A base model ends texts with another token than the template ends turns with; and its generation config is one
    that transformers loads but would not save, which must not end the run after its last step."""
    tokenizer = char_tokenizer(None)
    tokenizer.eos_token = "<|pad|>"
    base = save_tiny(tmp_path / "base", tokenizer=tokenizer)
    settings = json.loads((base / "generation_config.json").read_text())
    changed = settings | {"do_sample": False, "temperature": 0.6}
    (base / "generation_config.json").write_text(json.dumps(changed))
    template = tmp_path / "chatml.jinja"
    template.write_text("\ufeff" + CHATML, encoding="utf-8")  # as some editors begin a file

    data = replace(config.data, chat_template=str(template))
    train = replace(config.train, max_epochs=20)
    run_sft(replace(config, model=ModelConfig(str(base), "none"), data=data, train=train))

    exported = AutoTokenizer.from_pretrained(config.ckpt.output_dir)
    model = AutoModelForCausalLM.from_pretrained(config.ckpt.output_dir, dtype=torch.float32)
    assert model.generation_config.eos_token_id == [PAD_ID, END_ID]
    model.generation_config.save_pretrained(tmp_path)
    messages = [{"role": "user", "content": "abc"}]
    text = exported.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nabc<|im_end|>\n<|im_start|>assistant\n"
    ids = exported(text, add_special_tokens=False, return_tensors="pt").input_ids
    answer = model.generate(ids, max_new_tokens=40, do_sample=False)[0, ids.shape[1] :].tolist()
    assert answer[-1] == END_ID and len(answer) < 40


def test_resuming_repeats_the_run_exactly(config):
    run_sft(config)
    expected, final = losses(config), weights(config)
    for path in config.ckpt.checkpoints.iterdir():  # as if killed after step 5
        if checkpoint_step(path) > 5:
            shutil.rmtree(path)
    run_sft(replace(config, ckpt=replace(config.ckpt, load_enable=True)))
    assert losses(config) == expected
    assert all(torch.equal(value, final[name]) for name, value in weights(config).items())


def test_resuming_with_another_order_of_the_data_is_refused(config):
    short = replace(config, train=replace(config.train, max_steps=1))
    run_sft(short, "a = 1\n")
    other = replace(short, train=replace(short.train, seed=1), ckpt=replace(config.ckpt, load_enable=True))
    with pytest.raises(CheckpointError, match="repeat or skip rows"):
        run_sft(other, "a = 2\n")
    assert (config.ckpt.run_dir / "config.toml").read_text() == "a = 1\n"  # the settings to go back to


def test_resuming_with_other_rows_of_the_same_number_is_refused(config, copy_task, tmp_path):
    short = replace(config, train=replace(config.train, max_steps=1))
    run_sft(short)
    rows = (copy_task / "train.jsonl").read_text().splitlines(keepends=True)
    shuffled = tmp_path / "shuffled.jsonl"
    shuffled.write_text("".join(reversed(rows)))
    moved = tmp_path / "moved.json"
    moved.write_text("".join(rows))

    def resumed(file):
        return replace(short, data=replace(short.data, dataset=str(file)), ckpt=replace(config.ckpt, load_enable=True))

    with pytest.raises(CheckpointError, match=r"other rows than those of `data.dataset` \(=.*shuffled.jsonl\)"):
        run_sft(resumed(shuffled))
    run_sft(resumed(moved))


def test_a_mixture_resumes_exactly_and_drops_rows_before_it_counts(config, copy_task, tmp_path):
    """12 rows of 14 are usable and 48: with shares 1,1 an epoch has 12 of each, 4 steps of 6."""
    other = tmp_path / "other.jsonl"
    rows = [{"input": "abc", "output": "abc"}] * 12 + [{"input": "abc", "output": ""}] * 2
    other.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = replace(config.data, dataset=f"{other},{copy_task / 'train.jsonl'}", dataset_probs="1,1")
    mixed = replace(config, data=data, train=replace(config.train, batch_size=6, max_epochs=2), eval=SftEvalConfig())
    run_sft(mixed)
    expected = losses(mixed)
    assert len(expected) == 8
    shutil.rmtree(mixed.ckpt.checkpoints / "step_000008")
    resumed = replace(mixed, ckpt=replace(mixed.ckpt, load_enable=True))
    with pytest.raises(CheckpointError, match="repeat or skip rows"):
        run_sft(replace(resumed, data=replace(data, dataset_probs="1,2")))
    run_sft(resumed)
    assert losses(mixed) == expected


def test_exports_beside_checkpoints_and_no_final_save(config):
    ckpt = replace(config.ckpt, save_steps=1, save_hf=True, max_num=1, disable_final_save=True)
    run_sft(replace(config, train=replace(config.train, max_steps=2), ckpt=ckpt))
    assert [path.name for path in ckpt.checkpoints.iterdir()] == ["step_000002"]
    AutoModelForCausalLM.from_pretrained(ckpt.checkpoints / "step_000002" / "hf")
    assert not (ckpt.output_dir / "config.json").exists()


@pytest.mark.parametrize("packed", [True, False])
def test_micro_batches_hold_a_number_of_tokens(config, packed):
    mesh = init_distributed(0, MeshShape(), "", 0, torch.device("cpu"))
    try:
        train = replace(config.train, micro_batch_size=1, max_tokens_per_gpu=140)
        fsdp = FsdpConfig(device="cpu", packing_samples=packed)
        run = SftRun(replace(config, train=train, fsdp=fsdp), mesh, torch.device("cpu"))
        made = run._micro_batches(run.conversations[:20])
    finally:
        dist.destroy_process_group()
    assert {len(c.token_ids) for c in run.conversations} == {27}  # so 5 fit into 140 tokens, packed or padded
    assert [m.batch.token_ids.numel() for m in made] == [135] * 4
    assert float(sum((m.weights * m.mask).sum() for m in made)) == pytest.approx(1)


def test_saving_in_the_background_changes_nothing_and_old_checkpoints_go_by_size(config):
    run_sft(config)
    (newest, *_) = sorted(config.ckpt.checkpoints.iterdir(), reverse=True)
    two_and_a_half = 2.5 * sum(file.stat().st_size for file in newest.rglob("*") if file.is_file()) / 2**30
    other = config.ckpt.output_dir / "other"
    waiting = replace(config.ckpt, output_dir=other, async_save=False, max_mem=two_and_a_half)
    expected, final = losses(config), weights(config)
    run_sft(replace(config, ckpt=waiting))
    again = replace(config, ckpt=waiting)
    assert losses(again) == expected
    assert all(torch.equal(value, final[name]) for name, value in weights(again).items())
    assert sorted(map(checkpoint_step, config.ckpt.checkpoints.iterdir())) == [5, 10, 12]
    assert sorted(map(checkpoint_step, waiting.checkpoints.iterdir())) == [10, 12]


@pytest.mark.parametrize("background", [True, False])
def test_a_full_disk_ends_the_run_with_the_checkpoint_before(config, monkeypatch, background):
    def begin_on_a_full_disk(directory, step):
        tmp = begin(directory, step)
        if step == 10:
            (tmp / "extra.json").symlink_to("/dev/full")
        return tmp

    config = replace(config, ckpt=replace(config.ckpt, async_save=background))
    monkeypatch.setattr(sft, "begin", begin_on_a_full_disk)
    with pytest.raises(CheckpointError, match=r"step_000010\.tmp could not be written .*No space left.*GiB are free"):
        run_sft(config)
    assert [path.name for path in config.ckpt.checkpoints.iterdir()] == ["step_000005"]


def sft_process(config, **environment):
    os.environ.update(environment)
    run_sft(config)


def test_sigterm_saves_and_exits_with_zero(config):
    endless = replace(config, train=replace(config.train, max_epochs=10_000), eval=SftEvalConfig())
    process = CONTEXT.Process(target=sft_process, args=(endless,))
    process.start()
    metrics = config.ckpt.run_dir / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        assert process.is_alive() and time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGTERM)
    process.join(30)
    assert process.exitcode == 0
    assert checkpoint_step(latest_checkpoint(config.ckpt.checkpoints)) == records(config)[-1]["step"]
    assert not (config.ckpt.output_dir / "config.json").exists()  # it is not finished


def test_two_ranks_train_as_one(config, tmp_path):
    short = replace(config, train=replace(config.train, max_steps=3, micro_batch_size=3))
    run_sft(short)
    two = replace(short, ckpt=replace(config.ckpt, output_dir=tmp_path / "two"), fsdp=FsdpConfig(device="cpu"))
    torchrun = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        CONTEXT.Process(target=sft_process, args=(two,), kwargs={"RANK": str(rank), **torchrun}) for rank in range(2)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0, 0]
    one, both = records(short), records(two)
    assert one[0]["train/loss"] == pytest.approx(both[0]["train/loss"], abs=1e-6)
    assert one[0]["train/grad_norm"] == pytest.approx(both[0]["train/grad_norm"], rel=1e-5)
    assert one[0]["train/entropy"] == pytest.approx(both[0]["train/entropy"], rel=1e-5)  # of all samples
    assert one[2]["eval/loss"] == pytest.approx(both[2]["eval/loss"], rel=1e-3)
    assert weights(two).keys() == weights(short).keys()
