"""Two nodes of a Ray cluster, both on this machine: the command joins it, spreads over it and survives one's loss."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import ray
from ray._private.ray_constants import PROCESS_TYPE_RAYLET
from ray.cluster_utils import Cluster

from tests.runs import events, flags, metrics, trained_groups, write_prompts

pytestmark = pytest.mark.ray
ROOT = Path(__file__).parent.parent
PROMPTS = 48


@pytest.fixture
def cluster(monkeypatch):
    """One node so far. It is not noted for the whole machine, where any other driver would join it."""
    monkeypatch.setattr(ray._private.utils, "write_ray_address", lambda *_: None)
    monkeypatch.setattr(ray._common.utils, "reset_ray_address", lambda *_: None)
    config = {
        # A dead node is known in seconds.
        "health_check_period_ms": 500,
        "health_check_timeout_ms": 2000,
        "health_check_failure_threshold": 4,
        # The samples are kept in the shared memory of the runner's node, as larger ones always are.
        "max_direct_call_object_size": 1000,
    }
    head = {"num_cpus": 1, "include_dashboard": False, "_system_config": config}
    made = Cluster(initialize_head=True, head_node_args=head)
    yield made
    made.shutdown()


def hosted(node) -> list[str]:
    """What a node runs, of what a run starts."""
    raylet = psutil.Process(node.all_processes[PROCESS_TYPE_RAYLET][0].process.pid)
    names = [process.cmdline()[:1] for process in raylet.children(recursive=True)]
    kinds = ("FakeEngine", "RunnerWorker", "PolicyWorker")
    return sorted(kind for kind in kinds for name in names if name and name[0].startswith(f"ray::{kind}"))


def until(happened: Callable[[], object], driver: subprocess.Popen, log: Path) -> None:
    """Returns once it did; fails with what the driver said when that ends before, or after four minutes."""
    deadline = time.monotonic() + 240
    while not happened():
        assert time.monotonic() < deadline and (driver.poll() is None or happened()), log.read_text()[-3000:]
        time.sleep(0.05)


def test_a_run_joins_the_cluster_and_survives_the_loss_of_a_node(cluster, model_dir, tmp_path):
    other = cluster.add_node(num_cpus=1)
    output, log = tmp_path / "out", tmp_path / "log"
    # One group is held, on either node, so that others wait for it in the buffer while theirs goes.
    hold = tmp_path / "hold"
    hold.touch()
    prompts = write_prompts(tmp_path / "p.jsonl", PROMPTS, {20: f"hold:{hold}"})
    arguments = flags(model_dir, output, prompts, "--vllm.num_engines", "2", "--rollout.num_runners", "2")
    environment = os.environ | {"RAY_ADDRESS": cluster.address}
    with log.open("w") as file:
        driver = subprocess.Popen(
            [sys.executable, "-m", "tests.runs", *arguments], cwd=ROOT, env=environment, stdout=file, stderr=file
        )
    try:
        until(Path(f"{hold}.held").exists, driver, log)
        time.sleep(4)  # the others finish
        assert [hosted(node) for node in (cluster.head_node, other)] == [
            ["FakeEngine", "PolicyWorker", "RunnerWorker"],
            ["FakeEngine", "RunnerWorker"],
        ]
        cluster.remove_node(other, allow_graceful=False)
        until(lambda: events(output, "runner_lost"), driver, log)
        hold.unlink()
        until(lambda: driver.poll() == 0, driver, log)
    finally:
        driver.kill()
    # One of each; Ray may place its replacement before it knows that the node is gone.
    for kind in ("runner", "engine"):
        assert len({event[kind] for event in events(output, f"{kind}_lost")}) == 1
    assert not events(output, "rank_lost")
    assert sorted(trained_groups(output)) == sorted(f"0:{i}" for i in range(PROMPTS))
    assert max(metrics(output, "staleness/max")) <= 1 and max(metrics(output, "mismatch/abs_max")) <= 1e-4
