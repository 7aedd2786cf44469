"""Memory and time of the log-prob head against the naive one: 2,048 tokens x 32,000 words, forward and backward.

    python benchmarks/logprob_head.py [--rounds 5]

Each measurement is a fresh process, since a peak is a peak of a process; rounds alternate between the two heads, so
that a busy machine slows both. Memory is the peak over the loaded inputs. Time is what the one thread computed
(`process_time`): on an idle core that is the time that passes. The gradients of the log-probs' weighted sum are
compared too: largest absolute difference over the largest gradient, and the benchmark fails above 1e-5.
Last line: `logprob_head ratio=MEMORY` of molt's head over the naive one's, 1 being no gain.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# SmolLM2-135M's width
TOKENS = 2_048
HIDDEN = 576
WORDS = 32_000
BOUND = 1e-5


def naive(hidden, weight, token_ids):
    """What everybody writes first: all logits in float32; log-probs, and the entropy for the metrics."""
    logprobs = (hidden[:, :-1] @ weight.t()).float().log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, token_ids[:, 1:, None])[..., 0], entropy


def molt(hidden, weight, token_ids):
    from molt.models.heads import token_logprobs

    logprobs, entropy = token_logprobs(hidden, weight, token_ids[..., None], None, temperature=1.0)
    return logprobs[:, 1:, 0], entropy[:, 1:]


HEADS = {"naive": naive, "molt": molt}


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(name: str, gradients: Path) -> dict[str, float]:
    """In this process: seconds and peak MiB over the inputs. The gradients go to a file."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = torch.randn(1, TOKENS, HIDDEN, requires_grad=True)
    weight = (torch.randn(WORDS, HIDDEN) * HIDDEN**-0.5).requires_grad_()
    token_ids = torch.randint(0, WORDS, (1, TOKENS))
    upstream = torch.randn(1, TOKENS - 1)
    HEADS[name](hidden[:, :8], weight, token_ids[:, :8])[0].sum().backward()  # imports and thread pools
    hidden.grad = weight.grad = None
    before = peak_mib()
    started = time.process_time()
    (HEADS[name](hidden, weight, token_ids)[0] * upstream).sum().backward()
    measured = {"seconds": time.process_time() - started, "mib": peak_mib() - before}
    torch.save([hidden.grad, weight.grad], gradients)
    return measured


def gradient_error(folder: Path) -> float:
    import torch

    ours, theirs = (torch.load(folder / name) for name in ("molt", "naive"))
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--head", choices=HEADS, help="measure one head in this process")
    parser.add_argument("--gradients", type=Path, help="where that goes")
    arguments = parser.parse_args()
    if arguments.head:
        print(json.dumps(measure(arguments.head, arguments.gradients)))
        return
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in HEADS}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(arguments.rounds):
            for name in HEADS:
                command = [sys.executable, __file__, "--head", name, "--gradients", f"{folder}/{name}"]
                runs[name].append(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))
        error = gradient_error(Path(folder))
    for name in HEADS:
        columns = {unit: [run[unit] for run in runs[name]] for unit in ("mib", "seconds")}
        print(f"{name:6}", *(f"{_median(v):8.2f} {u} ({min(v):.2f} to {max(v):.2f})" for u, v in columns.items()))
    times = [ours["seconds"] / theirs["seconds"] for ours, theirs in zip(runs["molt"], runs["naive"], strict=True)]
    print(f"time ratio {_median(times):.2f} ({min(times):.2f} to {max(times):.2f} over {len(times)} rounds)")
    print(f"gradient error {error:.1e} (bound {BOUND:g})")
    ratio = _median([run["mib"] for run in runs["molt"]]) / _median([run["mib"] for run in runs["naive"]])
    print(f"logprob_head ratio={ratio:.2f}")
    if error > BOUND:
        sys.exit(1)


_median = statistics.median

if __name__ == "__main__":
    main()
