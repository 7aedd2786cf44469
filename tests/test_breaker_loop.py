"""The circuit breaker in the loop: a NaN loss and a gradient 100 times too large, injected where tokens get weights."""

import json
from collections.abc import Mapping
from dataclasses import replace
from math import nan
from pathlib import Path

import pytest

from molt import cluster
from molt.errors import BreakerError
from molt.publish.publication import Publisher
from molt.rollout.producer import Producer
from molt.train.policy import Policy
from tests.runs import events, metrics, run, settings, trained_groups, write_prompts

pytestmark = pytest.mark.ray


def inject(monkeypatch, factors: Mapping[int, float]) -> None:
    """The loss of these training batches, counted from 1, is so many times what it should be."""

    class Injured(Policy):
        def prepare(self, plan, samples, scores, step, *more):
            factor = factors.get(step + 1, 1.0)
            wrong = [
                [[replace(task, weight=task.weight * factor) for task in tasks] for tasks in batches]
                for batches in plan
            ]
            return super().prepare(wrong, samples, scores, step, *more)

    monkeypatch.setattr(cluster, "Policy", Injured)


def watch(monkeypatch) -> tuple[list[int], list[tuple[int, list[bool]]]]:
    """The digest of the weights of every version; and the step of every `resume`, with what was in flight then."""
    publish, resume, digests, resumed = Publisher.publish, Producer.resume, [], []

    async def published(self, version):
        proof = await publish(self, version)
        digests.append(self.digests.sent)
        return proof

    def resuming(self):
        resumed.append((self.step, [group for group in self.open.values() if not group.finished]))
        assert self.paused
        resume(self)

    monkeypatch.setattr(Publisher, "publish", published)
    monkeypatch.setattr(Producer, "resume", resuming)
    return digests, resumed


def test_a_run_skips_what_would_destroy_it_and_reaches_the_usual_reward(
    ray_session, model_dir, tmp_path, monkeypatch, capfd
):
    bad = {3: "nonfinite", 11: "spike"}
    inject(monkeypatch, {3: nan, 11: 100.0})
    digests, resumed = watch(monkeypatch)
    output, prompts = tmp_path / "out", write_prompts(tmp_path / "p.jsonl", 80)
    # Without a queue two runs are equal; longer answers and a low rate keep the gradients at one size.
    run(settings(model_dir, output, prompts, "--train.async_queue_size", "0", "--rollout.max_new_tokens", "16",
                 "--actor.adam.lr", "4e-3", "--train.grad_spike_factor", "10", "--train.max_steps", "15"))  # fmt: skip

    tripped, printed, numbers = events(output, "breaker_tripped"), capfd.readouterr().err, []
    for event, (step, reason) in zip(tripped, bad.items(), strict=True):
        evidence = json.loads(Path(event["evidence"]).read_text())
        assert event["step"] == evidence["step"] == step and event["skipped"] == evidence["skipped"]
        (skipped,) = evidence["skipped"]["policy"]
        assert (skipped["reason"], skipped["optimizer_step"], skipped["groups"]) == (reason, step - 1, [0, 1, 2, 3])
        trained = [group["group"] for group in evidence["batch"]]
        assert sorted(trained) == sorted(trained_groups(output)[4 * step - 4 : 4 * step])
        assert all(len(group["rewards"]) == len(group["trained_tokens"]) == 4 for group in evidence["batch"])
        assert f"step {step}: the breaker skipped an optimizer step" in printed
        numbers.append(skipped)
    nonfinite, spike = numbers
    assert nonfinite["loss"] is None and nonfinite["norm"] is None and nonfinite["tensors"]
    assert spike["norm"] > spike["limit"] > 0 and spike["tensors"] == []

    # The weights did not move, and went out again under the next version; nothing began before all in flight had ended.
    assert [event["version"] for event in events(output, "publication")] == list(range(16))
    assert [step for step in range(1, 16) if digests[step] == digests[step - 1]] == list(bad)
    assert resumed == [(step, []) for step in bad]
    assert max(metrics(output, "staleness/max")) == 0 and max(metrics(output, "mismatch/abs_max")) <= 1e-4
    assert sorted(trained_groups(output)) == sorted(f"0:{i}" for i in range(60))
    rewards = metrics(output, "rollout/reward")
    assert len(rewards) == 15 and max(rewards[:3]) < 0.5 < 3 < min(rewards[-3:])


def test_a_run_that_trips_again_and_again_stops_with_the_evidence_and_can_go_on(
    ray_session, model_dir, tmp_path, monkeypatch
):
    output, prompts = tmp_path / "out", write_prompts(tmp_path / "p.jsonl", 32)
    more = ("--train.max_trips", "2", "--ckpt.save_steps", "-1")
    with monkeypatch.context() as injected:
        inject(injected, {2: nan, 4: nan})
        with pytest.raises(BreakerError, match=r"tripped at steps 2, 4, as often as train.max_trips \(=2\)") as raised:
            run(settings(model_dir, output, prompts, *more))
    evidence = [event["evidence"] for event in events(output, "breaker_tripped")]
    assert len(evidence) == 2 and evidence[-1] in str(raised.value) and Path(evidence[-1]).exists()
    assert [event["step"] for event in events(output, "checkpoint")] == [4]

    inject(monkeypatch, {6: nan})  # mended, but for a last one
    run(settings(model_dir, output, prompts, *more, "--ckpt.load_enable"))
    assert events(output, "resumed")[0]["step"] == 4
    assert [event["step"] for event in events(output, "breaker_tripped")] == [2, 4, 6]
    assert [event["version"] for event in events(output, "publication")] == [0, 1, 2, 3, 4, 4, 5, 6, 7, 8]
    assert sorted(trained_groups(output)) == sorted(f"0:{i}" for i in range(32))


@pytest.mark.full
def test_gradients_that_stay_large_do_not_stop_a_run(ray_session, model_dir, tmp_path, monkeypatch):
    """From batch 11 on every gradient is 100 times as large: two are skipped, which max_trips (3) allows."""
    inject(monkeypatch, dict.fromkeys(range(11, 16), 100.0))
    output, prompts = tmp_path / "out", write_prompts(tmp_path / "p.jsonl", 80)
    run(settings(model_dir, output, prompts, "--train.async_queue_size", "0", "--rollout.max_new_tokens", "16",
                 "--actor.adam.lr", "4e-3", "--train.grad_spike_factor", "10", "--train.max_steps", "15"))  # fmt: skip
    assert [event["step"] for event in events(output, "breaker_tripped")] == [11, 12]
    assert len(metrics(output, "rollout/reward")) == 15
