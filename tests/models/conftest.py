import pytest
import torch
import torch.distributed as dist

from molt.parallel.mesh import init_distributed
from molt.parallel.shape import MeshShape


@pytest.fixture(scope="module")
def mesh():
    """A process group of this process alone."""
    yield init_distributed(0, MeshShape(), "", 0, torch.device("cpu"))
    dist.destroy_process_group()
