"""`Publisher` over a fake trainer and fake engines: the order of a publication, and what it remembers."""

import asyncio

import numpy as np
import pytest

from molt.errors import EngineError, PublicationError, SilentEngineError
from molt.publish.proof import Receipt
from molt.publish.publication import Publisher
from molt.report.metrics import values

PROBE = [[5, 6, 7], [8, 9]]


class World:
    """A trainer of one weight, and two engines that hold what they are sent unless told otherwise."""

    def __init__(self):
        self.weight, self.sent, self.held = 1, 0, [0, 0]
        self.lives = {0: 0, 1: 0}
        self.deaf: set[int] = set()
        self.calls: list[str] = []
        self.dying: list[int] = []
        """Engines that die at the next commits."""
        self.ill: set[int] = set()
        self.given_up: list[tuple[int, str]] = []
        self.gaps = [0.0, 0.0]
        """Between what the trainer and each engine say of the probe."""

    async def send_weights(self):
        self.calls.append("send")
        self.sent = self.weight
        return {"w": self.sent}

    async def connect(self, engines):
        self.calls.append(f"connect {engines}")

    async def commit(self, version, engines):
        self.calls.append("commit")
        if self.dying:
            self.ill |= {self.dying.pop()}
            raise EngineError("an engine is dead")
        self.held = [held if i in self.deaf else self.sent for i, held in enumerate(self.held)]
        return [Receipt(str(version), {"w": self.sent}, 1000 + self.held[index]) for index in engines]

    async def resume(self, engines):
        self.calls.append(f"resume {engines}")


class Trainer:
    def __init__(self, world):
        self.world, self.send_weights, self.connect = world, world.send_weights, world.connect

    async def probe(self, sequences):
        assert sequences == PROBE and self.world.calls[-3:-1] == ["send", "commit"]
        return [np.zeros(len(ids), np.float32) for ids in sequences]


class Engines:
    def __init__(self, world):
        self.world, self.commit, self.resume = world, world.commit, world.resume

    @property
    def present(self):
        return {index: life for index, life in self.world.lives.items() if index not in self.world.ill}

    async def some(self):
        return self.present

    def give_up(self, engine, reason):
        self.world.given_up.append((engine, reason))
        self.world.ill.add(engine)

    async def examine(self, suspects=()):
        self.world.ill |= set(suspects)
        return bool(self.world.ill)

    async def logprobs(self, sequences, engines):
        gaps = [self.world.gaps[index] for index in engines]
        return [[np.full(len(ids), gap, np.float32) for ids in sequences] for gap in gaps]


@pytest.fixture
def world():
    return World()


@pytest.fixture
def publisher(world):
    return Publisher(Trainer(world), Engines(world), PROBE, bound=0.1, use_max=True, workers_per_engine=1)


def test_digests_are_kept_from_one_publication_to_the_next(world, publisher):
    assert publisher.digests is None
    seen = []
    for version, weight in enumerate([1, 2, 2, 3]):
        world.weight = weight
        asyncio.run(publisher.publish(version))
        seen.append(publisher.digests)
    assert [digests.held for digests in seen] == [(1001, 1001), (1002, 1002), (1002, 1002), (1003, 1003)]
    first, second, same, third = (digests.sent for digests in seen)
    assert second == same and len({first, second, third}) == 3


def test_weights_that_were_received_and_are_not_in_use_stop_the_run(world, publisher):
    asyncio.run(publisher.publish(0))
    world.deaf = {0, 1}  # all of them: their digests agree, and the probe of so small a step would too
    asyncio.run(publisher.publish(1))  # the same weights again
    world.weight = 2
    with pytest.raises(PublicationError, match="engine worker 0: the weights were received, not in use"):
        asyncio.run(publisher._publish(2))


def test_one_engine_of_two_that_does_not_take_them_is_named_and_given_up(world, publisher):
    asyncio.run(publisher.publish(0))
    world.weight, world.deaf = 2, {1}
    with pytest.raises(PublicationError, match="engine 1 holds other weights than engine 0"):
        asyncio.run(publisher._publish(1))
    asyncio.run(publisher.publish(1))
    assert world.ill == {1} and world.calls[-4:] == ["connect [0]", "send", "commit", "resume [0]"]
    world.ill, world.deaf, world.weight = set(), set(), 3
    asyncio.run(publisher.publish(2))  # it is back
    assert world.calls[-4:] == ["connect [0, 1]", "send", "commit", "resume [0, 1]"]


def test_an_engine_that_dies_in_it_is_left_out_and_the_whole_is_repeated(world, publisher):
    failures = []
    publisher.on_event = lambda kind, **fields: failures.append((kind, fields["attempt"], fields["error"]))
    asyncio.run(publisher.publish(0))
    world.weight, world.dying = 2, [1]
    asyncio.run(publisher.publish(1))
    assert world.calls[-6:] == ["send", "commit", "connect [0]", "send", "commit", "resume [0]"]
    assert failures == [("publication_failed", 1, "an engine is dead")]


def test_an_engine_that_hangs_while_it_takes_the_weights_is_given_up_by_name(world, publisher, capsys):
    """It answers when it is examined: the trainer alone knows."""
    asyncio.run(publisher.publish(0))
    send = publisher.policy.send_weights
    reason = "engine 1 did not answer `update_weights` within 600 s"

    async def hang_once():
        publisher.policy.send_weights = send
        await send()
        raise SilentEngineError(reason, worker=1)

    publisher.policy.send_weights = hang_once
    publisher.engines.examine = lambda suspects=(): asyncio.sleep(0, False)
    world.weight = 2
    asyncio.run(publisher.publish(1))
    assert world.given_up == [(1, reason)]
    assert world.calls[-4:] == ["connect [0]", "send", "commit", "resume [0]"]
    assert f"weight sync of version 1 is repeated: {reason}" in capsys.readouterr().err


def test_an_engine_that_was_restarted_before_its_silence_is_known_is_not_given_up_again(world, publisher):
    """The watcher found the hung process first; the trainer's call to it fails once there is a new one."""
    send = publisher.policy.send_weights

    async def hang_once():
        publisher.policy.send_weights = send
        world.lives[1] += 1
        raise SilentEngineError("engine 1 died in `start_weight_update`", worker=1)

    publisher.policy.send_weights = hang_once
    asyncio.run(publisher.publish(1))
    assert world.given_up == []
    assert world.calls[-4:] == ["connect [0, 1]", "send", "commit", "resume [0, 1]"]


def test_a_failure_that_no_engine_explains_is_raised_at_once(world, publisher):
    async def fail(version, engines):
        raise EngineError("the bus is full")

    publisher.engines.commit = fail
    with pytest.raises(EngineError):
        asyncio.run(publisher.publish(0))
    assert world.calls.count("send") == 1


def test_the_mismatch_is_that_of_all_engines(world, publisher):
    world.gaps = [0.0, 0.05]
    metrics = values(asyncio.run(publisher.publish(0)))
    # 2 engines, 3 tokens with a log-prob: 3 x 0 and 3 x 0.05
    assert metrics == pytest.approx({"mismatch/abs_max": 0.05, "mismatch/abs_mean": 0.15 / 6})
    world.gaps = [0.2, 0.2]
    with pytest.raises(PublicationError, match=r"mismatch/abs_max is 0.2 at engine 0, version 1, above"):
        asyncio.run(publisher.publish(1))
    assert not world.ill, "what all engines have in common no restart mends"
    world.gaps = [0.0, 0.2]
    asyncio.run(publisher.publish(2))
    assert world.ill == {1} and world.calls[-1] == "resume [0]"
