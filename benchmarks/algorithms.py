"""Does every algorithm learn? One SFT checkpoint, one engine, 120 training batches each, on the task of `molt demo`.

python benchmarks/algorithms.py [--output_dir DIR] [--only grpo,gae] [--steps 120]

    estimators    on-policy (queue 0), one optimizer step per batch
    losses        grpo's advantages, two optimizer steps per batch, so that the ratio leaves 1 and the bounds act
    stale         one batch behind its weights (queue 1), importance correction per token
    control       a plug-in whose advantages are all 0: it must not rise
    distillation  the checkpoint imitates the model that grpo made; no reward enters

Prints a table of sampled pass@1 on 512 held-out prompts before and after, and last the ratio of the smallest gain to
the 0.2 that is asked for. About 40 minutes on two cores; the engine keeps running between the runs, whose weights it gets
by publication as always.
"""

import argparse
import asyncio
import gc
import json
import subprocess
import sys
import time
from pathlib import Path

import ray
from _common import spread  # noqa: F401  puts the repository on the path

from molt import cluster
from molt.cli.args import parse
from molt.cli.demo import build_data, build_model, evaluations, rl_defaults, sft_flags, start_afresh
from molt.config import RLConfig
from molt.driver import drive
from molt.report.sinks import read_jsonl
from molt.rollout.engine_worker import VllmEngine

SEED, ASKED, CONTROL = 42, 0.2, 0.05
ZERO = "def zero(rewards, groups, ctx):\n    return 0 * rewards\n"
ESTIMATOR, LOSS = "--algo.advantage.estimator", "--actor.loss_mode"
CRITIC = [ESTIMATOR, "gae", "--critic.adam.lr", "2e-3", "--critic.gradient_checkpoint", "none"]
GSPO = [LOSS, "gspo", "--actor.eps_clip_low_high", "3e-4", "4e-4"]
TWO_STEPS = ["--train.batch_size", "128"]
STALE = ["--train.async_queue_size", "1", "--algo.advantage.is_correction_level", "token"]
RUNS: dict[str, list[str]] = {
    "reinforce": [ESTIMATOR, "reinforce"],
    "reinforce_baseline": [ESTIMATOR, "reinforce_baseline"],
    "rloo": [ESTIMATOR, "rloo"],
    "grpo": [ESTIMATOR, "grpo"],
    "dr_grpo": [ESTIMATOR, "dr_grpo"],
    "flash_reinforce": [ESTIMATOR, "flash_reinforce"],
    "gae": CRITIC,
    "ppo loss": [*TWO_STEPS, LOSS, "ppo"],
    "gspo loss": [*TWO_STEPS, *GSPO],
    "cispo loss": [*TWO_STEPS, LOSS, "cispo", "--actor.eps_clip_low_high", "0.2", "2.0"],
    "stale reinforce": [*STALE, ESTIMATOR, "reinforce"],
    "stale grpo": [*STALE, ESTIMATOR, "grpo"],
    "stale gae": [*STALE, *CRITIC],
    "stale gspo": [*STALE, *GSPO],
    "control": [ESTIMATOR, "{folder}/zero.py:zero"],
    "on_policy_distill": [ESTIMATOR, "on_policy_distill", "--ref.model_name_or_path", "{folder}/grpo"],
}


@ray.remote(max_concurrency=16384)
class LastingEngine(VllmEngine):
    """An engine that several runs start and connect to, one after the other."""

    async def start(self) -> None:
        if not hasattr(self, "llm"):
            await super().start()

    async def init_weight_transfer_engine(self, info: dict) -> None:
        if not hasattr(self, "connected"):
            await super().init_weight_transfer_engine(info)
        self.connected = True


class TheEngine:
    """Stands where a run expects the actor class of its engine, and hands out the one there is."""

    def __init__(self):
        self.actor = None

    def options(self, **_):
        return self

    def remote(self, settings):
        self.actor = self.actor or LastingEngine.options(num_cpus=0).remote(settings)
        return self.actor


def flags(folder: Path, name: str, steps: int) -> list[str]:
    chosen = [flag.format(folder=folder) for flag in RUNS[name]]
    return [
        *rl_defaults(folder, SEED),
        "--train.async_queue_size", "0",
        "--train.max_steps", str(steps),
        "--eval.steps", "-1",
        "--ckpt.best_metric_key", "none",
        "--ckpt.save_steps", "-1",
        "--logger.logging_steps", "40",
        "--logger.rollouts_per_step", "0",
        "--ckpt.output_dir", str(folder / name.replace(" ", "_")),
        *chosen,
    ]  # fmt: skip


def prepare(folder: Path) -> None:
    """Data and a mediocre policy, exactly as `molt demo` makes them."""
    start_afresh(folder)
    build_data(folder, SEED)
    build_model(folder / "model", SEED)
    subprocess.run([sys.executable, "-m", "molt.cli.train_sft", *sft_flags(folder, SEED)], check=True)
    (folder / "zero.py").write_text(ZERO)


def row(name: str, folder: Path, seconds: float) -> dict:
    """pass@1 before and after, and the last values of what a critic reports."""
    path = folder / name.replace(" ", "_") / "run" / "metrics.jsonl"
    before, after = evaluations(path)
    last = {key: value for line in read_jsonl(path) for key, value in line.items()}
    shown = ("train/value_loss", "train/explained_variance", "train/clip_fraction", "train/kl")
    return {"name": name, "before": before, "after": after, "seconds": seconds} | {
        key: last[key] for key in shown if key in last
    }


def as_table(rows: list[dict]) -> str:
    lines = ["| run | pass@1 before | after | gain | s |", "|---|---|---|---|---|"]
    lines += [
        f"| {r['name']} | {r['before']:.3f} | {r['after']:.3f} | {r['after'] - r['before']:+.3f} | {r['seconds']:.0f} |"
        for r in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output_dir", type=Path, default=Path("benchmark_algorithms"))
    parser.add_argument("--only", default=",".join(RUNS), help="comma list of runs")
    parser.add_argument("--steps", type=int, default=120)
    arguments = parser.parse_args()
    folder, names = arguments.output_dir.resolve(), arguments.only.split(",")
    prepare(folder)
    engine, rows = TheEngine(), []
    cluster.start_ray(parse(RLConfig, flags(folder, names[0], 1), prog="algorithms"))
    try:
        for name in names:
            began = time.perf_counter()
            config = parse(RLConfig, flags(folder, name, arguments.steps), prog="algorithms")
            asyncio.run(drive(config, engine))
            gc.collect()  # ranks and runners end when nothing refers to them
            rows.append(row(name, folder, time.perf_counter() - began))
            print(json.dumps(rows[-1]), flush=True)
            (folder / "rows.json").write_text(json.dumps(rows, indent=1))
    finally:
        ray.shutdown()
    print(as_table(rows))
    gains = {r["name"]: r["after"] - r["before"] for r in rows}
    rose = gains.pop("control", 0.0)
    if rose > CONTROL:
        raise SystemExit(f"control rose by {rose:.3f}: something other than the advantages trains this policy")
    print(f"algorithms ratio={min(gains.values(), default=0.0) / ASKED:.2f}")


if __name__ == "__main__":
    main()
