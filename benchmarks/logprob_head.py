"""Memory and time of the log-prob head against the naive one: 2,048 tokens x 32,000 words, forward and backward.

    python benchmarks/logprob_head.py [--rounds 3]

Each measurement is a fresh process, since a peak is a peak of a process; rounds alternate between the two heads, so
that a busy machine slows both. Memory is the peak over the loaded inputs. Last line: `logprob_head ratio=MEMORY`.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

TOKENS, HIDDEN, WORDS = 2_048, 576, 32_000


def naive(hidden, weight, token_ids):
    """What everybody writes first: all logits in float32; log-probs, and the entropy for the metrics."""
    logprobs = (hidden[:, :-1] @ weight.t()).float().log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, token_ids[:, 1:, None])[..., 0], entropy


def chunked(hidden, weight, token_ids):
    from molt.models.heads import token_logprobs

    return token_logprobs(hidden, weight, token_ids, None, temperature=1.0)


HEADS = {"naive": naive, "chunked": chunked}


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(name: str) -> dict[str, float]:
    """In this process: seconds, peak MiB over the inputs, and a number that depends on every gradient."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = torch.randn(1, TOKENS, HIDDEN, requires_grad=True)
    weight = (torch.randn(WORDS, HIDDEN) * HIDDEN**-0.5).requires_grad_()
    token_ids = torch.randint(0, WORDS, (1, TOKENS))
    HEADS[name](hidden[:, :8], weight, token_ids[:, :8])[0].sum().backward()  # imports and thread pools
    hidden.grad = weight.grad = None
    before, started = peak_mib(), time.perf_counter()
    HEADS[name](hidden, weight, token_ids)[0].sum().backward()
    seconds = time.perf_counter() - started
    return {
        "seconds": seconds,
        "mib": peak_mib() - before,
        "gradients": float(hidden.grad.norm()) + float(weight.grad.norm()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--head", choices=HEADS)
    arguments = parser.parse_args()
    if arguments.head:
        print(json.dumps(measure(arguments.head)))
        return
    results: dict[str, list[dict[str, float]]] = {name: [] for name in HEADS}
    for _ in range(arguments.rounds):
        for name, runs in results.items():
            command = [sys.executable, __file__, "--head", name]
            runs.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    middle = {}
    for name, runs in results.items():
        columns = []
        for unit in ("mib", "seconds"):
            values = [run[unit] for run in runs]
            middle[name, unit] = statistics.median(values)
            columns.append(f"{middle[name, unit]:8.2f} {unit} ({min(values):.2f} to {max(values):.2f})")
        print(f"{name:8}", *columns, f" gradient norms {runs[0]['gradients']:.6g}")
    print(f"time ratio {middle['chunked', 'seconds'] / middle['naive', 'seconds']:.2f}")
    print(f"logprob_head ratio={middle['chunked', 'mib'] / middle['naive', 'mib']:.2f}")


if __name__ == "__main__":
    main()
