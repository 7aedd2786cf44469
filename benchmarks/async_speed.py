"""What asynchronous, partial rollouts save on a long-tailed task: wall-clock over strictly synchronous training.

    python benchmarks/async_speed.py [--seeds 3] [--steps 16] [--hidden 256] [--median 24] [--turns]

Each prompt asks for an answer of its own length, log-normal, so that a synchronous step waits for its longest one. The
same updates twice, one core each for the engine and the trainer, one real vLLM:

    synchronous    queue 0: generate a batch, train on it, publish
    asynchronous   queue 1, publications interrupt running requests, a straggler may be two batches old

Seconds from the first to the last publication. Generation and training alone (`loop_efficiency.py`) should be within
30 % of each other. `--turns`: episodes of 32 turns and more, their number log-normal, instead of long answers; with a
quarter of the prompts, and only reported.
Last line: `async_speed ratio=ASYNCHRONOUS/SYNCHRONOUS`, mean over seeds; 0.65 or less is asked for, with the mean final
pass@1 within 0.05.
"""

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
import threading
from pathlib import Path

from _common import spread
from loop_efficiency import PROMPTS, SAMPLES, WORDS, alone, in_ray, pin_forever

from molt.cli.args import parse
from molt.config import RLConfig
from molt.driver import drive
from molt.report.sinks import read_jsonl
from molt.spec import resolve
from tests.tiny import char_tokenizer, save_tiny, tiny_qwen3

SIGMA = 1.0
LONGEST = 200
HELD_OUT = 64
FEWEST_TURNS = 32
MOST_TURNS = 96
TURN_TOKENS = 4
FEWER = 4
ASKED = 0.65
PASS_AT_1 = 0.05
MODES = {
    "synchronous": ["--train.async_queue_size", "0"],
    "asynchronous": [
        "--train.async_queue_size", "1", "--train.partial_rollout_enable", "--train.max_staleness", "2",
    ],
}  # fmt: skip
AGENT = """
from dataclasses import replace

from molt.agents import Env, Result, StepEnvRunner

class Sevens(Env):
    '''The label says how many turns, and how many tokens in each. The reward is the share of sevens.'''

    async def step(self, state):
        turns, tokens = map(int, state["label"].split())
        self.said = getattr(self, "said", "") + state["action"]
        if state["turn"] + 1 < turns:
            return Result(0.0, "go on", terminated=False)
        return Result(self.said.count("7") / (turns * tokens))

class AgentRunner(StepEnvRunner):
    def __init__(self):
        super().__init__(Sevens)

    async def run(self, context):
        _, tokens = context.prompt.label.split()
        return await super().run(replace(context, max_new_tokens=int(tokens)))
"""


def label(options: argparse.Namespace, numbers: random.Random) -> str:
    """How long an episode is: turns, and tokens of each."""
    if options.turns:
        turns = round(FEWEST_TURNS * math.exp(abs(numbers.gauss(0, SIGMA / 2))))
        return f"{min(turns, MOST_TURNS)} {TURN_TOKENS}"
    return f"1 {min(max(4, round(options.median * math.exp(numbers.gauss(0, SIGMA)))), LONGEST)}"


def write_prompts(path: Path, count: int, options: argparse.Namespace, seed: int) -> Path:
    numbers = random.Random(seed)
    rows = [json.dumps({"input": f"say {i}", "label": label(options, numbers)}) + "\n" for i in range(count)]
    path.write_text("".join(rows))
    return path


def settings(folder: Path, options: argparse.Namespace, mode: str, seed: int) -> RLConfig:
    batch = PROMPTS
    held_out = HELD_OUT
    if options.turns:  # each turn is a call
        batch, held_out = batch // FEWER, held_out // FEWER
    values = {
        "actor.model_name_or_path": folder / "model",
        "actor.gradient_checkpoint": "none",
        "actor.adam.lr": 1e-3,
        "data.prompt_dataset": write_prompts(folder / f"prompts_{seed}.jsonl", batch * options.steps, options, seed),
        "data.label_key": "label",
        "data.max_len": 2048 if options.turns else 512,
        "algo.advantage.estimator": "grpo",
        "rollout.batch_size": batch,
        "rollout.n_samples_per_prompt": SAMPLES,
        "rollout.max_new_tokens": LONGEST,
        "train.agent_path": folder / "agent.py",
        "train.micro_batch_size": 16,
        "train.seed": seed,
        "eval.dataset": write_prompts(folder / "held_out.jsonl", held_out, options, -1),
        "eval.n_samples_per_prompt": 2,
        "ckpt.output_dir": folder / f"{mode}_{seed}",
        "ckpt.save_steps": -1,
        "ckpt.best_metric_key": "none",
        "logger.rollouts_per_step": 0,
        "logger.logging_steps": options.steps,
    }
    words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    more = ["--data.apply_chat_template", "--ckpt.disable_final_save", *MODES[mode]]
    more += ["--rollout.vllm_generate_batch_size", str(2 * batch)] * (mode == "asynchronous")
    return parse(RLConfig, [*words, *more], prog="async_speed")


def measure(config: RLConfig) -> tuple[float, float, float]:
    """Seconds from the first to the last publication, the final pass@1, and the staleness of the oldest token."""
    in_ray(config, drive(resolve(config)))
    run = config.ckpt.run_dir
    times = [event["time"] for event in read_jsonl(run / "events.jsonl") if event["kind"] == "publication"]
    metrics = list(read_jsonl(run / "metrics.jsonl"))
    score = next(line[name] for line in reversed(metrics) for name in line if name.endswith("/pass1"))
    return times[-1] - times[0], score, max(line.get("staleness/max", 0) for line in metrics)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=256, help="a multiple of 64")
    parser.add_argument("--median", type=float, default=24, help="of the tokens of an answer")
    parser.add_argument("--turns", action="store_true")
    options = parser.parse_args()
    threading.Thread(target=pin_forever, daemon=True).start()
    found: dict[str, list[tuple[float, float, float]]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        hidden = options.hidden
        model = tiny_qwen3(vocab_size=len(WORDS) + 3, layers=4, hidden=hidden, heads=hidden // 32, kv_heads=2)
        save_tiny(folder / "model", model, char_tokenizer(alphabet=WORDS))
        (folder / "agent.py").write_text(AGENT)
        first = settings(folder, options, "synchronous", 0)
        generation, training = in_ray(first, alone(first))
        print(f"generation alone {spread(generation)} s, training alone {spread(training)} s", flush=True)
        for seed in range(options.seeds):
            for mode in MODES:
                found[mode].append(measure(settings(folder, options, mode, seed)))
                seconds, score, oldest = found[mode][-1]
                print(f"seed {seed} {mode:12} {seconds:6.1f} s, pass@1 {score:.3f}, oldest token {oldest:.0f} batches",
                      flush=True)  # fmt: skip
    pairs = list(zip(found["asynchronous"], found["synchronous"], strict=True))
    ratios = [fast[0] / slow[0] for fast, slow in pairs]
    gap = statistics.mean(fast[1] - slow[1] for fast, slow in pairs)
    print(f"ratio {spread(ratios)}; mean pass@1 differs by {gap:+.3f}")
    ratio = statistics.mean(ratios)
    missed = []
    slower, faster = sorted(map(statistics.median, (generation, training)), reverse=True)
    if slower > 1.3 * faster:
        missed.append("generation and training alone should be within 30 % of each other")
    if not options.turns and (ratio > ASKED or abs(gap) > PASS_AT_1):
        missed.append(f"asked: ratio <= {ASKED}, pass@1 within {PASS_AT_1}")
    print(*missed, f"async_speed ratio={ratio:.2f}", sep="\n")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
