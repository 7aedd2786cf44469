import pytest
import torch
import torch.distributed as dist

from molt.parallel.mesh import init_distributed
from molt.parallel.shape import MeshShape
from tests.tiny import save_tiny

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A tiny model on disk, embeddings tied."""
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def untied(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("untied"), tie=False)


@pytest.fixture(params=["tiny", "untied"])
def either(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def mesh():
    """A process group of this process alone."""
    yield init_distributed(0, MeshShape(), "", 0, torch.device("cpu"))
    dist.destroy_process_group()
