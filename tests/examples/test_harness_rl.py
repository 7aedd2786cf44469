"""RL whose agent is Claude Code or opencode, unmodified, with a random model behind it: nonsense breaks nothing.

Real Ray, real vLLM; SmolLM2's tokenizer, for a harness's prompts are in any language, and too long in characters.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

from tests.runs import metrics
from tests.tiny import QWEN3, save_tiny, tiny_qwen3

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.full]
ROOT = Path(__file__).resolve().parents[2]
CONTEXT = 32_768
MARK, RUN_S = "MOLT_TEST_RUN", 400


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random Qwen3 of 3M parameters, most of them embeddings, with a context that a harness fits in."""
    path = ROOT / "examples" / "json_extraction" / "convert_smollm2.py"
    spec = importlib.util.spec_from_file_location("convert_smollm2", path)
    convert = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(convert)
    try:
        tokenizer = convert.convert_tokenizer(convert.package_folder())
    except SystemExit as missing:
        pytest.skip(str(missing))
    tokenizer.chat_template = QWEN3  # SmolLM2's own shows no tools
    tiny = tiny_qwen3(vocab_size=len(tokenizer))
    tiny.config.max_position_embeddings = CONTEXT
    return save_tiny(tmp_path_factory.mktemp("smol"), tiny, tokenizer)


def flags(model: Path, output: Path, prompts: Path) -> list[str]:
    """2 steps of 2 prompts x 2 episodes."""
    return [
        "--actor.model_name_or_path", str(model),
        "--actor.adam.lr", "1e-3",
        "--data.prompt_dataset", str(prompts),
        "--data.label_key", "label",
        "--data.apply_chat_template",
        "--data.max_len", str(CONTEXT),
        "--algo.advantage.estimator", "grpo",
        "--rollout.batch_size", "2",
        "--rollout.n_samples_per_prompt", "2",
        "--rollout.max_new_tokens", "16",
        "--rollout.max_failure_rate", "0",
        "--train.agent_path", str(Path(__file__).parent / "harness_reply.py"),
        "--train.async_queue_size", "0",
        "--train.max_steps", "2",
        "--ckpt.output_dir", str(output),
        "--ckpt.save_steps", "-1",
    ]  # fmt: skip


def left_behind(mark: str) -> list[str]:
    """The processes of a run that are still there."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                found.append(process)
        except psutil.Error:
            continue
    _, alive = psutil.wait_procs(found, timeout=15)  # Ray's own may take a moment
    return [" ".join(process.cmdline())[:100] for process in alive]


@pytest.mark.parametrize("name", ["claude", "opencode"])
def test_a_harness_with_a_random_model_is_trained(name, model, tmp_path):
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed: npm install -g @anthropic-ai/claude-code opencode-ai")
    output, prompts = tmp_path / "out", tmp_path / "p.jsonl"
    rows = [{"input": f"Write {n} to answer.txt.", "label": name} for n in range(4)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-m", "molt.cli.train_rl_ray", *flags(model, output, prompts)]
    mark, log = str(tmp_path), tmp_path / "log"
    with log.open("w") as file:  # not a pipe: whoever outlives the run would hold it
        env = {**os.environ, MARK: mark}
        done = subprocess.run(command, cwd=ROOT, timeout=RUN_S, env=env, stdout=file, stderr=file)
    assert done.returncode == 0, log.read_text()[-5000:]
    assert left_behind(mark) == []
    norms = metrics(output, "train/grad_norm")
    assert len(norms) == 2 and min(norms) > 0  # groups of unequal rewards: something was learned from
    assert "faults/" not in (output / "run" / "metrics.jsonl").read_text()
    assert max(metrics(output, "ratio/log_abs_max")) <= 1e-3
    for step in (1, 2):
        trained = 0
        for row in pq.read_table(output / "run" / "rollouts" / f"step_{step:06d}.parquet").to_pylist():
            sampled = [version for version in row["versions"] if version >= 0]
            assert set(sampled) == {step - 1}
            assert len(row["token_ids"]) > len(sampled) + 500  # what the harness says of itself is context
            trained += len(sampled)
        assert trained >= 4
