"""One schedule of `make chaos`: a supervised run that loses all that can be lost, one thing after another."""

import pytest

from tests.chaos import KINDS, run

pytestmark = [pytest.mark.ray, pytest.mark.full]  # one fault at a time: tests/test_recovery.py


@pytest.mark.parametrize("engine", ["fake", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_a_run_that_loses_everything_once_is_whole(model_dir, tmp_path, engine):
    """What `run` asks for: it completes, every prompt is trained exactly once, in whole groups."""
    score, recovery = run(model_dir, tmp_path / "out", engine, steps=16, seed=0)
    assert set(recovery) == set(KINDS)
    assert score > 0.5
