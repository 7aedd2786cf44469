"""`ShmSender`: the file that the engines read, in which order, and what is left of it."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from molt.parallel.mesh import init_distributed
from molt.parallel.shape import MeshShape
from molt.publish.proof import checksum
from molt.publish.transfer import ShmSender, build_sender


class Client:
    """The engines: read the file while it is there, or fail at a given call."""

    def __init__(self, fails_at=None):
        self.fails_at, self.calls = fails_at, []
        self.path, self.received = None, {}

    def _call(self, name):
        self.calls.append(name)
        if name == self.fails_at:
            raise RuntimeError(f"{name} failed")

    def init_weight_transfer_engine(self, init_info):
        self._call("init")

    def start_weight_update(self):
        self._call("start")

    def update_weights(self, update_info):
        self.path = Path(update_info["path"])
        self.received = {name: tensor.clone() for name, tensor in load_file(self.path).items()}
        self._call("update")

    def finish_weight_update(self, weight_version=None):
        assert self.path.exists()
        self._call("finish")


@pytest.fixture
def mesh():
    """Of this process alone."""
    yield init_distributed(0, MeshShape(), "", 0, torch.device("cpu"))
    dist.destroy_process_group()


WEIGHTS = {
    "a.weight": torch.arange(6.0).view(2, 3),
    "b.weight": torch.arange(6.0).view(2, 3).t(),  # not contiguous, as some gathers give them
    "c.bias": torch.ones(3, dtype=torch.bfloat16),
    "d.scale": torch.tensor(2.0),
}


def test_engines_read_what_was_sent(mesh):
    client = Client()
    sender = build_sender("shm", client=client, source=WEIGHTS.items, mesh=mesh, engine_workers=1)
    sums = sender.send()
    assert client.calls == ["init", "start", "update", "finish"]
    assert sums == {name: checksum(tensor) for name, tensor in WEIGHTS.items()}
    assert {name: checksum(tensor) for name, tensor in client.received.items()} == sums
    for name, tensor in WEIGHTS.items():
        assert torch.equal(client.received[name], tensor)
    assert client.path.parent.name.startswith(f"molt-weights-{os.getpid()}-")  # what the guard looks for
    assert not client.path.parent.exists()


def test_every_send_takes_the_weights_of_that_moment():
    weight, client = torch.zeros(3), Client()
    sender = ShmSender(client, lambda: [("w", weight)], is_writer=True)
    first = sender.send()
    weight += 1
    assert sender.send() != first
    assert client.received["w"].tolist() == [1, 1, 1]
    assert client.calls.count("init") == 1


def test_the_engines_pause_only_after_the_gather():
    client = Client()

    def source():
        for name, tensor in WEIGHTS.items():
            assert client.calls == ["init"]
            yield name, tensor

    ShmSender(client, source, is_writer=True).send()


@pytest.mark.parametrize("fails_at", ["start", "update", "finish"])
def test_the_file_is_removed_when_an_engine_fails(fails_at, monkeypatch, tmp_path):
    monkeypatch.setattr("molt.publish.transfer.SHARED_MEMORY", tmp_path)
    sender = ShmSender(Client(fails_at), WEIGHTS.items, is_writer=True)
    with pytest.raises(RuntimeError, match=f"{fails_at} failed"):
        sender.send()
    assert not list(tmp_path.iterdir())


def test_other_ranks_only_take_part_in_the_gather():
    client, gathered = Client(), []

    def source():
        for name, tensor in WEIGHTS.items():
            gathered.append(name)
            yield name, tensor

    assert ShmSender(client, source, is_writer=False).send() == {}
    assert gathered == list(WEIGHTS) and client.calls == []
