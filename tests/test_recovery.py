"""What dies is replaced, and what hangs: engines, runners, ranks, publications. Real Ray, `FakeEngine`.

The engines' faults are injected once, at a place of their protocol; processes are killed by SIGKILL between two steps.
"""

import asyncio
import itertools
import os
import re
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pyarrow.parquet as pq
import pytest
import ray

from molt import loop, recovery
from molt.errors import EngineError, LostError, PublicationError, RankLostError
from molt.records import evaluator
from molt.records.steps import StepRecords
from molt.rollout.shutdown import Shutdown
from molt.run import Run
from molt.train.checkpoint import checkpoint_step, latest_checkpoint
from tests.fakes import FakeEngine
from tests.runs import events, metrics, run, settings, trained_groups, write_prompts

pytestmark = pytest.mark.ray
FULL = pytest.mark.full
PROMPTS = 40


def faulty(flag: Path, method: str, fault: str):
    """The actor class of a `FakeEngine` on which, at the third call of `method` by any engine, the fault happens once.

    die: the process is gone; hang: neither this call nor any other one is answered; stuck: this call is not; torn: a
    tensor arrives changed.
    """

    class Faulty(FakeEngine):
        calls = 0
        hung = False

        async def alive(self):
            await self.answer()
            return await super().alive()

        async def answer(self):
            import asyncio

            while self.hung:
                await asyncio.sleep(1)

        async def fail(self, info=None):
            self.calls += 1
            if self.calls < 3 or flag.exists():
                return
            flag.touch()
            if fault == "die":
                os._exit(1)
            self.hung = fault == "hang"
            await self.answer()
            if fault == "stuck":
                import asyncio

                await asyncio.sleep(3600)
            if fault == "torn":
                self.tear(info["path"])

        def tear(self, path):
            from safetensors.torch import load_file, save_file

            tensors = load_file(path)
            tensors["model.norm.weight"][0] += 1
            save_file(tensors, path)

    async def wrapped(self, *args):
        await self.fail(*args[:1])
        return await getattr(FakeEngine, method)(self, *args)

    setattr(Faulty, method, wrapped)
    return ray.remote(max_concurrency=16384)(Faulty)


def workers(kind: str) -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            found += [process] * process.cmdline()[0].startswith(f"ray::{kind}")
        except (psutil.Error, IndexError):
            continue
    return found


def kill_one(kind: str) -> None:
    process = workers(kind)[-1]
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=10)


def kill_after(monkeypatch, kinds: dict[int, str]) -> None:
    """SIGKILL one process of the kind when the step is recorded, once each."""
    write = StepRecords.write
    left = dict(kinds)

    async def then_kill(self, step, *args):
        await write(self, step, *args)
        if kind := left.pop(step, None):
            kill_one(kind)

    monkeypatch.setattr(StepRecords, "write", then_kill)


def kill_before(monkeypatch, owner, name: str, kind: str, *, call: int = 1) -> None:
    """SIGKILL one process of the kind at the first, or a later, call of the coroutine function `owner.name`."""
    function = getattr(owner, name)
    calls = itertools.count(1)

    async def watched(*args, **kwargs):
        if next(calls) == call:
            kill_one(kind)
        return await function(*args, **kwargs)

    monkeypatch.setattr(owner, name, watched)


def config(model_dir, directory, *more):
    prompts = write_prompts(directory / "p.jsonl", PROMPTS)
    return settings(model_dir, directory / "out", prompts, "--train.watchdog_s", "4", *more)


def assert_whole(output: Path, queue: int = 1) -> None:
    """Every prompt trained exactly once, nothing too stale, trainer and engine agree (that it learns: `make chaos`)."""
    assert sorted(trained_groups(output)) == sorted(f"0:{i}" for i in range(PROMPTS))
    assert len(metrics(output, "train/loss")) == PROMPTS // 4
    assert max(metrics(output, "staleness/max")) <= queue
    assert max(metrics(output, "mismatch/abs_max")) <= 1e-4
    assert not any(metrics(output, "faults/discarded_groups"))


def assert_saved(output: Path, at_least: int) -> None:
    """Every step that was trained is recorded, and in the checkpoint."""
    step = checkpoint_step(latest_checkpoint(output / "checkpoints"))
    assert len(metrics(output, "train/loss")) == step >= at_least


def versions(output: Path) -> list[int]:
    return [event["version"] for event in events(output, "publication")]


@pytest.mark.parametrize("engines", [1, pytest.param(2, marks=FULL)])
def test_a_killed_engine_comes_back_with_the_published_weights(ray_session, model_dir, tmp_path, monkeypatch, engines):
    kill_after(monkeypatch, {3: "FakeEngine"})
    run(config(model_dir, tmp_path, "--vllm.num_engines", str(engines)))
    output = tmp_path / "out"
    assert_whole(output)
    assert len(events(output, "engine_lost")) == 1
    assert len(events(output, "engine_restarted")) == 1 or engines == 2  # the other one may finish the run before
    assert versions(output) == list(range(11))


@pytest.mark.parametrize(("engines", "method", "fault"), [
    pytest.param(1, "update_weights", "die", marks=FULL),
    (2, "update_weights", "die"),
    pytest.param(1, "update_weights", "torn", marks=FULL),
    (2, "update_weights", "torn"),
    (1, "start_weight_update", "hang"),
    (1, "update_weights", "stuck"),
    pytest.param(2, "update_weights", "stuck", marks=FULL),
    pytest.param(2, "commit", "stuck", marks=FULL),
    pytest.param(2, "logprobs", "hang", marks=FULL),
])  # fmt: skip
def test_a_publication_that_an_engine_spoils_is_repeated(ray_session, model_dir, tmp_path, engines, method, fault):
    worker = faulty(tmp_path / "flag", method, fault)
    run(config(model_dir, tmp_path, "--vllm.num_engines", str(engines)), worker)
    output = tmp_path / "out"
    assert_whole(output)
    assert not any(metrics(output, "train/skipped_count"))
    failed = events(output, "publication_failed")
    assert len(failed) == 1 and failed[0]["attempt"] == 1
    assert len(events(output, "engine_restarted")) == 1 or engines == 2
    assert versions(output) == list(range(11))
    if fault == "stuck":
        (lost,) = events(output, "engine_lost")
        assert f"`{method}` within" in lost["reason"] and "train.watchdog_s" in lost["reason"]
    if fault == "torn":
        assert "tensor 'model.norm.weight' arrived with other bytes" in failed[0]["error"]


def test_an_engine_that_always_tears_stops_the_run(ray_session, model_dir, tmp_path):
    class Torn(FakeEngine):
        async def update_weights(self, info):
            await super().update_weights(info)
            self.received["model.norm.weight"] ^= 1

    with pytest.raises(PublicationError, match=r"'model.norm.weight' arrived with other bytes"):
        run(config(model_dir, tmp_path), ray.remote(max_concurrency=16384)(Torn))
    assert len(events(tmp_path / "out", "publication_failed")) == 2


def test_the_only_engine_dies_in_an_evaluation_that_waits(ray_session, model_dir, tmp_path, monkeypatch):
    """The trainer is a batch ahead by then, so that nobody has the measured weights: the run goes on without."""
    held_out = write_prompts(tmp_path / "held_out.jsonl", 2, {0: f"hang:{tmp_path / 'flag'}"})
    kill_before(monkeypatch, loop, "finish_evaluation_before_publishing", "FakeEngine")
    run(config(model_dir, tmp_path, "--eval.dataset", held_out, "--eval.eval_at_start", "--eval.steps", "5"))
    output = tmp_path / "out"
    assert_whole(output)
    assert [event["step"] for event in events(output, "evaluation_dropped")] == [0]
    assert len(metrics(output, "eval/held_out/pass1")) == 2


def test_an_engine_that_cannot_start_again_stops_the_run_which_is_saved(ray_session, model_dir, tmp_path, monkeypatch):
    class Fragile(FakeEngine):
        async def start(self):
            if (flag := tmp_path / "flag").exists():
                os._exit(1)
            flag.touch()
            await super().start()

    kill_after(monkeypatch, {3: "Fragile"})
    with pytest.raises(EngineError, match=r"engine 0 was restarted 2 times in a row \(train.max_restarts\)"):
        run(config(model_dir, tmp_path, "--train.max_restarts", "2"), ray.remote(max_concurrency=16384)(Fragile))
    assert_saved(tmp_path / "out", at_least=3)


def test_a_run_that_is_stopped_while_its_only_engine_starts_again_is_saved(
    ray_session, model_dir, tmp_path, monkeypatch
):
    """The engine dies before a publication and its new process takes for ever; SIGTERM waits for neither."""
    output = tmp_path / "out"

    class Slow(FakeEngine):
        async def start(self):
            import asyncio

            if (flag := tmp_path / "flag").exists():
                (tmp_path / "starting").touch()
                await asyncio.sleep(3600)
            flag.touch()
            await super().start()

    def terminate():
        while not (tmp_path / "starting").exists():
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)

    kill_before(monkeypatch, loop, "publish", "Slow", call=2)
    threading.Thread(target=terminate, daemon=True).start()
    run(config(model_dir, tmp_path), ray.remote(max_concurrency=16384)(Slow))
    assert_saved(output, at_least=1)
    assert versions(output) == [0]


def test_a_lost_rank_does_not_hide_that_the_run_is_to_stop(monkeypatch):
    """The watcher of the engines has given up; the ranks' restart would go on without it."""
    shutdown = Shutdown()
    shutdown.fail(EngineError("engine 0 was restarted 3 times"))
    log = SimpleNamespace(event=lambda *args, **fields: None)
    checkpoints = SimpleNamespace(completed=0)
    config = SimpleNamespace(train=SimpleNamespace(max_restarts=3))
    run = SimpleNamespace(shutdown=shutdown, log=log, checkpoints=checkpoints, step=1, config=config)

    async def lose_a_rank(run):
        raise RankLostError("a policy rank died")

    monkeypatch.setattr(recovery, "resume", lose_a_rank)
    with pytest.raises(EngineError, match="restarted 3 times"):
        asyncio.run(recovery.run_to_the_end(run))


def test_what_a_watcher_gives_up_with_while_the_ranks_restart_still_stops_the_run(monkeypatch):
    """The watcher is dead by then: if its error were forgotten, no engine would ever be restarted."""
    shutdown = Shutdown()
    done = []

    async def restart_ranks():
        shutdown.fail(EngineError("engine 0 was restarted 3 times"))

    async def nothing(*args):
        pass

    def note(name):
        return lambda *args, **fields: done.append(name)

    async def load(run):
        done.append("load")

    monkeypatch.setattr(recovery, "load", load)
    run = SimpleNamespace(
        shutdown=shutdown,
        evaluator=SimpleNamespace(drop=note("drop")),
        cluster=SimpleNamespace(restart_ranks=restart_ranks, keepers=SimpleNamespace(release_all=note("release"))),
        publisher=SimpleNamespace(forget=note("forget")),
        checkpoints=SimpleNamespace(settle=nothing, latest=lambda: None),
        records=SimpleNamespace(abandon=note("abandon")),
        log=SimpleNamespace(event=note("event")),
        step=0,
        version=0,
    )
    asyncio.run(recovery.recover(run))
    assert shutdown.failed and shutdown.immediate.is_set()
    assert "load" in done and "engine 0 was restarted 3 times" in str(shutdown.error)


def test_what_stops_an_evaluation_stops_the_run_which_is_saved(ray_session, model_dir, tmp_path, monkeypatch):
    async def lost(*args):
        raise LostError("no runner is left")

    monkeypatch.setattr(evaluator, "evaluate", lost)
    held_out = write_prompts(tmp_path / "held_out.jsonl", 2)
    with pytest.raises(LostError, match="no runner is left"):
        run(config(model_dir, tmp_path, "--eval.dataset", held_out, "--eval.eval_at_start"))
    assert_saved(tmp_path / "out", at_least=1)


def test_a_hung_engine_is_restarted_and_its_rollouts_go_on(ray_session, model_dir, tmp_path):
    class Hung(FakeEngine):
        calls = 0

        async def generate(self, *args):
            import time

            self.calls += 1
            flag = tmp_path / "flag"
            if self.calls == 30 and not flag.exists():
                flag.touch()
                time.sleep(3600)  # blocks its event loop: nothing is answered
            return await super().generate(*args)

    run(config(model_dir, tmp_path), ray.remote(max_concurrency=16384)(Hung))
    output = tmp_path / "out"
    assert_whole(output)
    reason = events(output, "engine_lost")[0]["reason"]  # found by the watcher, or by a weight sync that waits for it
    assert "no answer within train.watchdog_s (=4)" in reason or "within 4 s (train.watchdog_s)" in reason


@pytest.mark.parametrize(("label", "kind", "said"), [
    ("block:", "runner_lost", "is replaced: no answer within train.watchdog_s (=4)"),
    ("hang:", "silence", "no rollout has made progress for train.watchdog_s (=4); "),
    ("deaf:", "begun_again", "no rollout has made progress for train.watchdog_s (=4); "),
])  # fmt: skip
def test_a_hung_env_is_found_shown_and_begun_again(ray_session, model_dir, tmp_path, capfd, label, kind, said):
    prompts = write_prompts(tmp_path / "p.jsonl", PROMPTS, {9: f"{label}{tmp_path / 'flag'}"})
    run(settings(model_dir, tmp_path / "out", prompts, "--train.watchdog_s", "4", "--rollout.timeout_s", "8"))
    output, printed = tmp_path / "out", capfd.readouterr().err
    assert_whole(output)
    assert len(events(output, kind)) == 1 and said in printed
    assert re.search(r"^  0:\d+:\d ", printed, re.M)


def test_a_killed_rank_is_a_resume_inside_the_driver(ray_session, model_dir, tmp_path, monkeypatch):
    kill_after(monkeypatch, {3: "PolicyWorker", 7: "PolicyWorker", 8: "RunnerWorker"})
    run(config(model_dir, tmp_path, "--actor.num_gpus_per_node", "2", "--ckpt.save_steps", "2"))
    output = tmp_path / "out"
    assert_whole(output)
    assert [(e["step"], e["version"]) for e in events(output, "recovered")] == [(2, 4), (6, 10)]
    assert versions(output) == sorted(set(versions(output))), "a version is never used twice"
    assert [e["abandoned_steps"] for e in events(output, "resumed")] == [[3], [7]]
    assert len(list((output / "run" / "abandoned").iterdir())) == 2
    for step, version in (3, 4), (7, 10):
        stored = pq.read_table(output / f"run/rollouts/step_{step:06d}.parquet")
        assert set(stored["version_trained"].to_pylist()) == {version}


@pytest.mark.parametrize(
    ("owner", "name", "call", "published"),
    [
        pytest.param(loop, "publish", 1, [*range(11)], id="first weight sync"),
        pytest.param(loop, "publish", 2, [0, *range(2, 13)], id="second weight sync"),
        pytest.param(Run, "export", 1, [*range(11), 10], id="export"),
    ],
)
def test_a_rank_killed_outside_of_training(ray_session, model_dir, tmp_path, monkeypatch, owner, name, call, published):
    """Before the first publication, in the next, whose version is not used again, and when all is trained: then the
    same weights are published again."""
    kill_before(monkeypatch, owner, name, "PolicyWorker", call=call)
    run(config(model_dir, tmp_path))
    output = tmp_path / "out"
    assert_whole(output)
    assert len(events(output, "rank_lost")) == len(events(output, "recovered")) == 1
    assert versions(output) == published
    assert (output / "model.safetensors").exists()


def test_ranks_that_die_again_and_again_stop_the_run(ray_session, model_dir, tmp_path, monkeypatch):
    write = StepRecords.write

    async def then_kill(self, step, *args):
        await write(self, step, *args)
        os.kill(workers("PolicyWorker")[-1].pid, signal.SIGKILL)

    monkeypatch.setattr(StepRecords, "write", then_kill)
    with pytest.raises(RankLostError, match="a policy rank died"):
        run(config(model_dir, tmp_path, "--train.max_restarts", "1", "--ckpt.save_steps", "-1"))
    assert len(events(tmp_path / "out", "rank_lost")) == 2
