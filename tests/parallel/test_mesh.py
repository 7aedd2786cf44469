"""Named axes: which rank is where, which ranks a collective reaches, and how many copies there are of a parameter."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from molt.parallel.mesh import Mesh, init_distributed
from molt.parallel.shape import ALL_AXES, DATA_AXES, EXPERT_AXES, MeshShape

CPU = torch.device("cpu")
SHAPES = [
    MeshShape(dp_shard=4),
    MeshShape(dp_replicate=2, dp_shard=2),
    MeshShape(dp_replicate=2, tp=2),
    MeshShape(cp=3, tp=2),
    MeshShape(dp_replicate=2, dp_shard=2, tp=2),
    MeshShape(dp_replicate=2, dp_shard=2, cp=2, tp=2, ep=2),
    MeshShape(dp_shard=3, cp=2, ep=6),
]


def places(shape, axes):
    """The coordinates of every rank, in the order of the ranks: the last axis is counted first."""
    return list(itertools.product(*(range(shape.size(axis)) for axis in axes)))


def along(shape, rank, axes):
    """The ranks that differ from `rank` along these axes alone, by comparing coordinates."""
    order = EXPERT_AXES if {"ep", "ep_shard"} & set(axes) else ALL_AXES
    fixed = [i for i, axis in enumerate(order) if axis not in axes]
    found = places(shape, order)
    return [other for other, place in enumerate(found) if all(place[i] == found[rank][i] for i in fixed)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ranks_are_counted_along_tp_first(shape):
    data = places(shape, DATA_AXES)
    found = places(shape, ALL_AXES)
    assert len(found) == shape.world_size and len(data) == shape.data_ranks
    for rank, (replicate, shard, cp, tp) in enumerate(found):
        assert shape.data_rank(rank) == data.index((replicate, shard))
        assert shape.is_first_peer(rank) == (cp == tp == 0)


def test_experts_divide_the_ranks_of_dp_shard_and_cp():
    assert MeshShape(dp_shard=6, cp=2, tp=5, ep=4).ep_shard == 3  # 6 * 2 / 4
    with pytest.raises(ValueError, match=r"ep \(=4\) must divide dp_shard x cp \(=3 x 2\).*Use a divisor"):
        MeshShape(dp_shard=3, cp=2, ep=4)


def test_a_model_may_have_no_rank():
    assert MeshShape(dp_shard=0).world_size == MeshShape(dp_shard=0).data_ranks == 0


@pytest.fixture
def as_rank():
    """Builds the mesh of one rank of a shape, in this process alone: groups exist, and nobody answers."""

    def build(shape, rank):
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=shape.world_size)
        return Mesh(shape, CPU)

    yield build
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def reached(monkeypatch):
    """The ranks of each collective that was called."""
    calls = []

    def all_reduce(values, group):
        calls.append(dist.get_process_group_ranks(group))

    def barrier(group):
        calls.append(dist.get_process_group_ranks(group))

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "barrier", barrier)
    return calls


AXES = [DATA_AXES, ALL_AXES, *((axis,) for axis in ALL_AXES), *((axis,) for axis in EXPERT_AXES)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_collective_reaches_the_ranks_along_its_axes(as_rank, reached, shape):
    for rank in range(shape.world_size):
        mesh = as_rank(shape, rank)
        assert mesh.is_writer == (rank == 0)
        for axes in AXES:
            if shape.ep == 1 and "ep_shard" in axes:
                continue
            expected = along(shape, rank, axes)
            reached.clear()
            mesh.sum(torch.ones(1), *axes)
            mesh.barrier(*axes)
            # With one rank along the axes there is nothing to do.
            assert reached == ([expected] * 2 if len(expected) > 1 else []), (rank, axes)


def test_axes_that_nothing_is_summed_over_are_an_error_and_not_another_sum(as_rank):
    mesh = as_rank(MeshShape(dp_shard=2, cp=2, tp=2), 0)
    with pytest.raises(AssertionError, match="no group for"):
        mesh.sum(torch.ones(1), "dp_shard", "cp")


def test_fsdp_shards_over_dp_shard_and_copies_over_dp_replicate(as_rank):
    for rank in range(8):
        shape = MeshShape(dp_replicate=2, dp_shard=2, tp=2)
        assert as_rank(shape, rank).fsdp.mesh.flatten().tolist() == along(shape, rank, DATA_AXES)
        shape = MeshShape(dp_shard=2, cp=2, tp=2)
        assert as_rank(shape, rank).fsdp.mesh.tolist() == along(shape, rank, ["dp_shard"])


def placed(device_mesh, *placements):
    return DTensor.from_local(torch.zeros(2, 2), device_mesh, placements, run_check=False)


def test_copies_by_hand(as_rank):
    mesh = as_rank(MeshShape(dp_replicate=2, dp_shard=2, tp=2), 5)  # 8 ranks
    assert mesh.copies(torch.zeros(2)) == 8
    assert mesh.copies(placed(mesh.fsdp, Replicate(), Shard(0))) == 4  # 8 / dp_shard
    both = mesh.device_mesh("dp_shard", "tp")
    assert mesh.copies(placed(both, Shard(0), Shard(1))) == 2  # 8 / (dp_shard * tp): one for each dp_replicate
    assert mesh.copies(placed(both, Shard(0), Replicate())) == 4  # a norm that tp does not shard

    mesh = as_rank(MeshShape(dp_replicate=2, dp_shard=2, cp=2, tp=2, ep=2), 0)  # 16 ranks; ep_shard = 2 * 2 / 2
    experts = mesh.device_mesh("ep_shard", "ep")
    assert mesh.copies(placed(experts, Shard(1), Shard(0))) == 4  # 16 / (2 * 2)


def test_one_process_makes_no_group_and_calls_no_collective(monkeypatch, reached):
    def refuse(*args, **kwargs):
        raise AssertionError("a group for one rank")

    monkeypatch.setattr(dist, "new_group", refuse)
    monkeypatch.setattr("torch.distributed.device_mesh.new_group", refuse)
    mesh = init_distributed(0, MeshShape(), "", 0, CPU)
    values = torch.tensor([1.0, 2.0])
    assert mesh.sum(values, *ALL_AXES) is values and values.tolist() == [1, 2]
    mesh.barrier(*ALL_AXES)
    assert not reached and mesh.is_writer and mesh.is_first_peer and mesh.copies(values) == 1
    assert mesh.fsdp.size() == 1
    mesh.close()
    assert not dist.is_initialized()
