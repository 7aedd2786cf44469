"""A token column that an agent's file declares goes through a whole run, and no driver ever unpickles it."""

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import ray
from ray._private.internal_api import node_stats

from molt.columns import TokenColumns, context
from molt.train.checkpoint import latest_checkpoint
from tests.column_agent import BULK, SURPRISE, BulkEngineWorker, ColumnEngineWorker
from tests.runs import flags, forbid_arrays, run, settings, trained_groups, write_prompts

pytestmark = pytest.mark.ray
ROOT = Path(__file__).parent.parent


@contextmanager
def no_arrays() -> Iterator[None]:
    """This process, which is the driver here, may not unpickle token columns."""
    forbid_arrays()
    try:
        yield
    finally:
        del TokenColumns.__setstate__


def stored(output: Path) -> dict[str, list[dict]]:
    """The rows of each group that was trained."""
    rows: dict[str, list[dict]] = {}
    for path in sorted((output / "run" / "rollouts").glob("step_*.parquet")):
        for row in pq.read_table(path).to_pylist():
            rows.setdefault(row["group_id"], []).append(row)
    return rows


def assert_described(row: dict) -> None:
    """Every sampled token has its own entry, every other one the fill."""
    assert len(row["surprise"]) == len(row["token_ids"])
    for entry, token, version, logprob in zip(
        row["surprise"], row["token_ids"], row["versions"], row["logprobs"], strict=True
    ):
        assert entry == ([-logprob, token] if version >= 0 else [-1.0, -1.0])


def test_it_survives_a_kill_and_arrives_in_the_stored_rollouts(ray_session, model_dir, tmp_path):
    """The killed driver's checkpoint holds finished groups; the run that resumes trains those very tokens."""
    prompts = write_prompts(tmp_path / "p.jsonl", 24)
    output = tmp_path / "out"
    agent = str(ROOT / "tests" / "column_agent.py")
    more = ("--train.agent_path", agent, "--ckpt.save_steps", "1", "--logger.rollouts_per_step", "-1",
            "--train.async_queue_size", "2", "--rollout.vllm_generate_batch_size", "12")  # fmt: skip
    command = [sys.executable, "-m", "tests.killed", "trained", "3", *flags(model_dir, output, prompts, *more)]
    environment = os.environ | ray_session | {"MOLT_TEST_ENGINE": "tests.column_agent:ColumnEngineWorker"}
    killed = subprocess.run(command, cwd=ROOT, timeout=500, env=environment, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]

    checkpoint = latest_checkpoint(output / "checkpoints")
    records = json.loads((checkpoint / "buffer.json").read_text())["groups"]
    assert records, "no finished group was waiting: the test would show nothing"
    with np.load(checkpoint / "buffer.npz") as file:
        buffered = file["surprise"]
        tokens = file["token_ids"]
    assert buffered.shape == (len(tokens), 2) and buffered.dtype == np.float64

    with no_arrays():
        run(settings(model_dir, output, prompts, *more, "--ckpt.load_enable"), ColumnEngineWorker)
    groups = stored(output)
    assert len(groups) == 24
    for rows in groups.values():
        for row in rows:
            assert_described(row)
    waited = [row for record in records for row in groups[f"{record['epoch']}:{record['position']}"]]
    assert [entry for row in waited for entry in row["surprise"]] == buffered.tolist()
    assert SURPRISE.name in pq.read_schema(next((output / "run" / "rollouts").iterdir())).names


def test_the_driver_unpickles_no_array(ray_session, model_dir, tmp_path):
    """Training, evaluation, saving, a dump and its replay; resuming and a lost node: above, and `test_nodes.py`."""
    prompts, held_out = write_prompts(tmp_path / "p.jsonl", 12), write_prompts(tmp_path / "e.jsonl", 4)
    dump = str(tmp_path / "dump")
    more = ("--eval.dataset", held_out, "--eval.steps", "2", "--ckpt.save_steps", "2")
    with no_arrays():
        run(settings(model_dir, tmp_path / "out", prompts, *more, "--train.rollout_dump_dir", dump), ColumnEngineWorker)
        run(settings(model_dir, tmp_path / "again", prompts, "--train.rollout_replay_dir", dump), ColumnEngineWorker)
    assert sorted(trained_groups(tmp_path / "out")) == sorted(trained_groups(tmp_path / "again"))
    assert len(trained_groups(tmp_path / "out")) == 12


def created_bytes() -> int:
    """What has been put into the object store of this node so far."""
    (node,) = (node for node in ray.nodes() if node["Alive"])
    reply = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False)
    return reply.store_stats.cumulative_created_bytes


def test_an_array_crosses_the_object_store_once(ray_session, model_dir, tmp_path):
    """From the runner to the rank. Keeper, checkpoint and stored rollouts read it where it is."""
    prompts, output = write_prompts(tmp_path / "p.jsonl", 8), tmp_path / "out"
    before = created_bytes()
    more = ("--ckpt.save_steps", "1", "--logger.rollouts_per_step", "-1")
    run(settings(model_dir, output, prompts, *more), BulkEngineWorker)
    crossed = created_bytes() - before

    token_bytes = BULK.shape[0] * 4 + 4 + 4 + 4  # and token_ids, versions, logprobs
    arrays = 0
    for path in (output / "run" / "rollouts").glob("step_*.parquet"):
        for length in pc.list_value_length(pq.read_table(path, columns=["token_ids"])["token_ids"]).to_pylist():
            arrays += length * token_bytes
    assert arrays > 2**20
    assert arrays <= crossed <= 1.1 * arrays


def test_the_spy_would_see_it():
    columns = pickle.dumps(context([1, 2]))
    with no_arrays(), pytest.raises(AssertionError, match="unpickled in the driver"):
        pickle.loads(columns)
    assert len(pickle.loads(columns)) == 2
