"""How well a run overlaps: seconds per step over `max(generation alone, training alone)`, one core each.

    python benchmarks/loop_efficiency.py [--steps 8] [--hidden 192] [--new-tokens 112]

One real vLLM engine, one runner and one policy rank, wired as `molt rl` wires them, queue of one batch. Engine and
runner are pinned to the first core, the policy rank to the second, in every measurement:

    generation alone   the groups of a batch through the runners at fixed weights, nothing trains
    training alone     `PolicyRanks.prepare` and `train` on samples that were just generated, nothing is generated
    the loop           a run of `--steps` steps: seconds between two publications, without the first two

The two alone are measured before and after the run. They should be within 30 % of each other, and 3 s or more, or the
ratio says little: `--hidden` moves training more than generation, `--new-tokens` moves both.
Last line: `loop_efficiency ratio=STEP/MAX`. 1 would be perfect overlap with free publications.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import threading
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import psutil
import ray
from _common import spread

from molt import cluster
from molt.batch.plan import advantages, plan_batch, shaped_rewards
from molt.cli.args import parse
from molt.config import RLConfig
from molt.data.prompts import PromptDataset
from molt.data.rows import load_rows
from molt.driver import drive
from molt.rollout.group_task import group_task
from molt.rollout.handles import ignore_event
from molt.spec import resolve
from molt.types import NO_ROLLBACK
from tests.tiny import ALPHABET, char_tokenizer, save_tiny, tiny_qwen3

PROMPTS = 16
SAMPLES = 8
ALONE = 3
WARM_UP = 2
# Many words, so that an answer seldom ends by chance and all take about the same time.
WORDS = ALPHABET + "".join(chr(0x4E00 + i) for i in range(1_900))
CORES = {"PolicyWorker": -1, "RolloutEngineWorker": 0, "RunnerWorker": 0, "EngineCore": 0}
AGENT = """
from molt.agents import Env, Result, StepEnvRunner

class Distinct(Env):
    async def step(self, state):
        return Result(reward=sum(ord(letter) % 2 for letter in state["action"]) / 100)

class AgentRunner(StepEnvRunner):
    def __init__(self):
        super().__init__(Distinct)
"""


def pin_forever() -> None:
    """Put every process of this one's family on its core, as soon as it has its name."""
    cores = sorted(os.sched_getaffinity(0))
    while True:
        for process in psutil.Process().children(recursive=True):
            try:
                title = " ".join(process.cmdline())
                for name, core in CORES.items():
                    if name in title and process.cpu_affinity() != [cores[core]]:
                        for thread in process.threads():
                            os.sched_setaffinity(thread.id, {cores[core]})
            except (psutil.Error, OSError):  # it has just ended
                continue
        time.sleep(1)


def prepare(folder: Path, options: argparse.Namespace) -> RLConfig:
    model = tiny_qwen3(
        vocab_size=len(WORDS) + 3, layers=4, hidden=options.hidden, heads=options.hidden // 32, kv_heads=2
    )
    save_tiny(folder / "model", model, char_tokenizer(alphabet=WORDS))
    (folder / "agent.py").write_text(AGENT)
    rows = [json.dumps({"input": f"say {i}", "label": ""}) + "\n" for i in range(PROMPTS * options.steps)]
    (folder / "prompts.jsonl").write_text("".join(rows))
    flags = {
        "actor.model_name_or_path": folder / "model",
        "actor.gradient_checkpoint": "none",
        "actor.adam.lr": 1e-4,
        "data.prompt_dataset": folder / "prompts.jsonl",
        "data.label_key": "label",
        "data.max_len": 512,
        "algo.advantage.estimator": "grpo",
        "rollout.batch_size": PROMPTS,
        "rollout.n_samples_per_prompt": SAMPLES,
        "rollout.max_new_tokens": options.new_tokens,
        "train.agent_path": folder / "agent.py",
        "train.micro_batch_size": 16,
        "ckpt.output_dir": folder / "out",
        "ckpt.save_steps": -1,
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return parse(RLConfig, [*words, "--data.apply_chat_template", "--ckpt.disable_final_save"], prog="loop_efficiency")


async def alone(config: RLConfig) -> tuple[list[float], list[float]]:
    """Seconds per batch of generation and of training, each with the other side idle."""
    spec = resolve(config)
    async with cluster.started(spec.processes, ignore_event) as processes:
        rows = load_rows(config.data.prompt_dataset, flag="data.prompt_dataset")
        dataset = PromptDataset(rows, config.data)
        generation = []
        training = []
        for batch in range(ALONE + 1):
            prompts = [replace(dataset.prompt(i), epoch=batch) for i in range(config.rollout.batch_size)]
            began = time.perf_counter()
            groups = await asyncio.gather(
                *(processes.runners.run_group(group_task(prompt, config.rollout)) for prompt in prompts)
            )
            generation.append(time.perf_counter() - began)
            rollouts = [result.rollouts for result, _ in groups]
            samples = [reference for _, reference in groups]
            rewards = shaped_rewards(rollouts, spec.shaping)
            per_group = advantages(rollouts, rewards, spec.algorithm.estimator)
            began = time.perf_counter()
            split = partial(
                plan_batch,
                rollouts,
                rewards=rewards,
                group_advantages=per_group,
                groups_per_step=config.rollout.batch_size,
                micro_batch_size=config.train.micro_batch_size,
                max_len=config.data.max_len,
            )
            plans = processes.plans(split, aggregation=config.actor.loss_agg_mode)
            lost = await processes.fetch(plans, samples)
            assert not lost, "one node holds everything"
            _, returns = await processes.prepare(plans, {}, 0, 0.0, NO_ROLLBACK)
            await processes.train(returns, freeze_policy=False)
            training.append(time.perf_counter() - began)
        return generation[1:], training[1:]  # the first ones warm up


def in_ray(config: RLConfig, run):
    cluster.start_ray(config)
    try:
        return asyncio.run(run)
    finally:
        ray.shutdown()


def steps_of(output: Path) -> tuple[list[float], list[dict]]:
    """Seconds between publications, and the metrics of the same steps."""
    events = [json.loads(line) for line in (output / "run" / "events.jsonl").read_text().splitlines()]
    times = [event["time"] for event in events if event["kind"] == "publication"][WARM_UP:]
    metrics = [json.loads(line) for line in (output / "run" / "metrics.jsonl").read_text().splitlines()]
    return [b - a for a, b in pairwise(times)], [m for m in metrics if m["step"] > WARM_UP]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=192, help="a multiple of 64")
    parser.add_argument("--new-tokens", type=int, default=112)
    options = parser.parse_args()
    threading.Thread(target=pin_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as name:
        config = prepare(Path(name), options)
        before = in_ray(config, alone(config))
        in_ray(config, drive(resolve(config)))
        after = in_ray(config, alone(config))
        steps, metrics = steps_of(config.ckpt.output_dir)
    generation, training = ([*a, *b] for a, b in zip(before, after, strict=True))
    middle = statistics.median
    print(f"generation alone {spread(generation)} s, training alone {spread(training)} s")
    print(f"a step of the loop {spread(steps)} s, of which (seconds the learner spends):")
    for part in ("wait_s", "train_s", "publish_s"):
        print(f"  {part:10} {spread([m[f'timing/{part}'] for m in metrics])}")
    slower, faster = sorted((middle(generation), middle(training)), reverse=True)
    if slower > 1.3 * faster or faster < 3:
        print("not the setting that is asked for: the two should be within 30 % of each other, and 3 s or more")
    print(f"loop_efficiency ratio={middle(steps) / slower:.2f}")


if __name__ == "__main__":
    main()
