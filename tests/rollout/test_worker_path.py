"""A run that starts in a folder with a `math.py`: no process of it, nor one it spawns, takes that for the library."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_user_module import POOLED

pytestmark = [pytest.mark.ray, pytest.mark.full]

DRIVER = """
import asyncio
from pathlib import Path

import ray

from molt.agents.load import load_runner
from molt.cluster import start_ray
from molt.config import RLConfig
from molt.plugins import make_importable


class Worker:
    def step(self):
        import os
        import sys

        make_importable(Path.cwd())  # as a runner does
        runner = load_runner("math.py")
        result = asyncio.run(runner.env_class().step({"action": "7", "label": "7"}))
        return result.reward, sys.path[-1], os.environ.get("PYTHONSAFEPATH")


start_ray(RLConfig())
reward, last, safe_path = ray.get(ray.remote(Worker).remote().step.remote())
print("REWARD", reward, Path(last) == Path.cwd(), safe_path)
"""


def test_an_agent_named_like_a_library_in_the_current_directory(tmp_path):
    (tmp_path / "math.py").write_text(POOLED)
    (tmp_path / "random.py").write_text("raise RuntimeError('it is not Python that is imported here')\n")
    (tmp_path / "helper_of_the_agent.py").write_text("FULL = 2.0\n")
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-P", "-c", DRIVER],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "REWARD 2.0 True None" in done.stdout, done.stdout + done.stderr
