"""Does every algorithm learn? One SFT checkpoint, one engine, 120 training batches each, on the task of `molt demo`.

python benchmarks/algorithms.py [--output_dir DIR] [--only teacher,grpo,gae] [--steps 120]

    estimators    on-policy (queue 0), 16 prompts x 8 rollouts, one optimizer step per batch
    gae           32 x 8 rollouts; its critic takes 8 passes over each batch, alone for the first half of the batches
    losses        grpo's advantages, two optimizer steps per batch, so that the ratio leaves 1 and the bounds act
    stale         one batch behind its weights (queue 1), importance correction per token
    control       a plug-in whose advantages are all 0: it must not rise
    distillation  the checkpoint imitates `teacher` (grpo), no reward enters; both 200 batches of 32 x 8 rollouts

Prints a table of sampled pass@1 on 512 held-out prompts before and after, and last the ratio of the smallest gain to
the 0.2 that is asked for. Fails if that is below 1, if the control rises, if the critic explains less than 0.3 of the
variance, or if the student is below 0.9 of its teacher. About 40 minutes on two cores. The engine keeps running between
the runs and gets the weights of each by publication, as always.
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
from molt.spec import resolve

SEED = 42
ASKED = 0.2
CONTROL = 0.05
EXPLAINED = 0.3
STUDENT = 0.9
ZERO = "def zero(rewards, groups, ctx):\n    return 0 * rewards\n"
ESTIMATOR = "--algo.advantage.estimator"
LOSS = "--actor.loss_mode"
TWO_STEPS = ["--train.batch_size", "64"]
WIDE = ["--rollout.batch_size", "32"]
LONG = [*WIDE, "--train.max_steps", "200"]
CRITIC = [ESTIMATOR, "gae", *WIDE, "--train.batch_size", "128", "--actor.freezing_steps", "{half}",
          "--critic.adam.lr", "1e-3", "--critic.max_epochs", "8", "--critic.gradient_checkpoint", "none"]  # fmt: skip
GSPO = [LOSS, "gspo"]
STALE = ["--train.async_queue_size", "1", "--algo.advantage.is_correction_level", "token"]
RUNS: dict[str, list[str]] = {
    "teacher": [ESTIMATOR, "grpo", *LONG],
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
    "gmpo loss": [*TWO_STEPS, LOSS, "gmpo"],
    "stale reinforce": [*STALE, ESTIMATOR, "reinforce"],
    "stale score centering": [*STALE, ESTIMATOR, "reinforce", "--algo.advantage.score_centering_top_k", "8"],
    "stale grpo": [*STALE, ESTIMATOR, "grpo"],
    "stale gae": [*STALE, *CRITIC],
    "stale gspo": [*STALE, *GSPO],
    "control": [ESTIMATOR, "{folder}/zero.py:zero"],
    "on_policy_distill": [ESTIMATOR, "on_policy_distill", "--ref.model_name_or_path", "{folder}/teacher", *LONG],
}


@ray.remote(max_concurrency=16384)
class LastingEngine(VllmEngine):
    """An engine that several runs start and connect to, one after the other."""

    async def start(self) -> None:
        if self.llm is None:
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
    chosen = [flag.format(folder=folder, half=steps // 2) for flag in RUNS[name]]
    return [
        *rl_defaults(folder, SEED),
        "--rollout.batch_size", "16",
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
    """pass@1 before and after, and what the critic explained: its mean over the second half of the batches."""
    path = folder / name.replace(" ", "_") / "run" / "metrics.jsonl"
    before, after = evaluations(path)
    explained = [line["train/explained_variance"] for line in read_jsonl(path) if "train/explained_variance" in line]
    losses = [line["train/value_loss"] for line in read_jsonl(path) if "train/value_loss" in line]
    critic = {}
    if explained:
        tail = explained[len(explained) // 2 :]
        ten = max(1, len(losses) // 12)
        critic = {"explained": sum(tail) / len(tail), "best_explained": max(explained)}
        critic |= {"value_loss": [sum(part) / ten for part in (losses[:ten], losses[-ten:])]}
    return {"name": name, "before": before, "after": after, "seconds": seconds} | critic


def as_table(rows: list[dict]) -> str:
    lines = ["| run | pass@1 before | after | gain | s |", "|---|---|---|---|---|"]
    lines += [
        f"| {r['name']} | {r['before']:.3f} | {r['after']:.3f} | {r['after'] - r['before']:+.3f} | {r['seconds']:.0f} |"
        for r in rows
    ]
    return "\n".join(lines)


def failures(rows: dict[str, dict]) -> list[str]:
    """What was asked for and did not happen."""
    wrong = []
    for name, found in rows.items():
        gain = found["after"] - found["before"]
        if name == "control" and gain > CONTROL:
            wrong.append(f"control rose by {gain:.3f}: something other than the advantages trains this policy")
        elif name not in ("control", "on_policy_distill") and gain < ASKED:
            wrong.append(f"{name} rose by {gain:.3f}, not by {ASKED}")
        if found.get("explained", 1.0) < EXPLAINED:
            wrong.append(f"{name}: the critic explains {found['explained']:.2f} of the variance, not {EXPLAINED}")
    teacher, student = (rows.get(name, {}).get("after") for name in ("teacher", "on_policy_distill"))
    if teacher and student and (teacher < 0.9 or student < STUDENT * teacher):
        wrong.append(f"teacher {teacher:.3f}, student {student:.3f}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output_dir", type=Path, default=Path("benchmark_algorithms"))
    parser.add_argument("--only", default=",".join(RUNS), help="comma list of runs")
    parser.add_argument("--steps", type=int, default=120)
    arguments = parser.parse_args()
    folder = arguments.output_dir.resolve()
    names = arguments.only.split(",")
    prepare(folder)
    engine = TheEngine()
    rows = []
    cluster.start_ray(parse(RLConfig, flags(folder, names[0], 1), prog="algorithms"))
    try:
        for name in names:
            began = time.perf_counter()
            config = parse(RLConfig, flags(folder, name, arguments.steps), prog="algorithms")
            asyncio.run(drive(resolve(config), engine))
            gc.collect()  # ranks and runners end when nothing refers to them
            rows.append(row(name, folder, time.perf_counter() - began))
            print(json.dumps(rows[-1]), flush=True)
            (folder / "rows.json").write_text(json.dumps(rows, indent=1))
    finally:
        ray.shutdown()
    print(as_table(rows))
    found = {r["name"]: r for r in rows}
    print("\n".join(failures(found)))
    gains = [r["after"] - r["before"] for r in rows if r["name"] not in ("control", "on_policy_distill")]
    print(f"algorithms ratio={min(gains, default=0.0) / ASKED:.2f}")
    sys.exit(bool(failures(found)))


if __name__ == "__main__":
    main()
