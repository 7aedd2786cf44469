"""How many ranks a model has along each named axis, and which rank is where. Arithmetic alone: the driver has it too.

| axis           | its ranks hold                                   | and train on                     |
|----------------|--------------------------------------------------|----------------------------------|
| `dp_replicate` | the same shards                                  | different samples                |
| `dp_shard`     | different shards of every parameter (FSDP)       | different samples                |
| `cp`           | the same shards                                  | different tokens of the samples  |
| `tp`           | different parts of matrices, copies of the rest  | the same tokens                  |

Experts see the ranks of `dp_shard` and `cp` as other axes: those along `ep` hold different experts, those along
`ep_shard` different shards of the same ones.

Ranks are counted along `tp` first, then `cp`, `dp_shard`, `dp_replicate`: neighbours talk most, so they share a node.
Ranks that differ along `cp` and `tp` alone are *peers*, together one data-parallel rank: they get the same plan and the
same samples, draw the same random numbers, and whatever counts samples counts them once.
"""

from dataclasses import dataclass
from math import prod
from typing import Literal

Axis = Literal["dp_replicate", "dp_shard", "cp", "tp", "ep_shard", "ep"]

DATA_AXES: tuple[Axis, ...] = ("dp_replicate", "dp_shard")
"""Their ranks have different samples."""
PEER_AXES: tuple[Axis, ...] = ("cp", "tp")
"""Their ranks are the peers of one data-parallel rank."""
ALL_AXES: tuple[Axis, ...] = DATA_AXES + PEER_AXES
"""Every rank, outermost axis first."""
EXPERT_AXES: tuple[Axis, ...] = ("dp_replicate", "ep_shard", "ep", "tp")
"""Every rank, as experts see them, outermost axis first."""


@dataclass(frozen=True)
class MeshShape:
    """Ranks along each axis. `dp_shard` may be 0: a run that does not have the model."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self):
        if self.dp_shard * self.cp % self.ep:
            raise ValueError(
                f"ep (={self.ep}) must divide dp_shard x cp (={self.dp_shard} x {self.cp}): experts are spread over "
                "these ranks, and some would hold none. Use a divisor."
            )

    @property
    def ep_shard(self) -> int:
        return self.dp_shard * self.cp // self.ep

    def size(self, *axes: Axis) -> int:
        """Ranks along the axes: the product of their sizes."""
        return prod(getattr(self, axis) for axis in axes)

    @property
    def world_size(self) -> int:
        return self.size(*ALL_AXES)

    @property
    def data_ranks(self) -> int:
        """Data-parallel ranks: as many plans a training batch has."""
        return self.size(*DATA_AXES)

    @property
    def peers(self) -> int:
        """Ranks of one data-parallel rank."""
        return self.size(*PEER_AXES)

    def data_rank(self, rank: int) -> int:
        """Which data-parallel rank `rank` belongs to; its peers belong to the same."""
        return rank // self.peers

    def is_first_peer(self, rank: int) -> bool:
        """Whether `rank` answers for its peers, where all of them have the same to say."""
        return rank % self.peers == 0
