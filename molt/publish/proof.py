"""The three checks that make a publication proven (docs/architecture.md, "Publication").

1. transport: checksums of all tensors as received against the sender's, coverage, echoed version;
2. all engines hold the same bytes (digest of what they hold);
3. the log-prob probe: trainer and engine score the same tokens at the same weights.

Only the third sees fusing, packing and kernels. Pure functions over what the two sides report.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from molt.errors import PublicationError
from molt.report.metrics import values
from molt.types import Metric

_CHUNK = 1 << 18  # 2 MiB as int64: on a CPU it stays in the cache
_MIX = 6364136223846793005  # Knuth's MMIX multiplier: odd, so multiplication mod 2^64 loses nothing
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Receipt:
    """What one engine worker reports after a publication."""

    version: str
    """The weight version the engine echoes."""
    checksums: Mapping[str, int]
    """Checksum of every tensor it was handed, under its Hugging Face name."""
    digest: int
    """Digest of the parameters it holds and that are not packed."""


def checksum(tensor: torch.Tensor) -> int:
    """A 64-bit position-weighted sum of a tensor's bits; runs on the tensor's own device.

    `h <- h * MIX + sum_i (i + 1) * word_i (mod 2^64)` over chunks of 2^18 words, from a hash of dtype and
    shape. So it changes when a bit changes, when elements swap places, and when either of these does.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    width = {1: torch.uint8, 2: torch.int16}.get(flat.element_size(), torch.int32)
    words = flat.view(width)
    ramp = torch.arange(1, min(len(words), _CHUNK) + 1, device=flat.device)
    value = zlib.crc32(f"{tensor.dtype} {list(tensor.shape)}".encode())
    # In place, so that a chunk takes one temporary; read once, so that a device is waited for once.
    sums = [chunk.to(torch.int64).mul_(ramp[: len(chunk)]).sum() for chunk in words.split(_CHUNK)]
    for chunk_sum in torch.stack(sums).tolist():
        value = (value * _MIX + chunk_sum) & _MASK
    return value


def combine(checksums: Mapping[str, int]) -> int:
    """One 64-bit digest of named checksums, independent of their order."""
    value = 0
    for name in sorted(checksums):
        value = (value * _MIX + zlib.crc32(name.encode()) + checksums[name]) & _MASK
    return value


def check_transport(sent: Mapping[str, int], receipts: Sequence[Receipt], version: int) -> None:
    """Raise `PublicationError` naming the first tensor that did not arrive as it was sent."""
    for worker, receipt in enumerate(receipts):
        where = f"engine worker {worker}, version {version}"
        if receipt.version != str(version):
            raise PublicationError(
                f"{where}: the engine echoes version {receipt.version!r}. Its tokens would carry a wrong version, "
                "so the run stops. Another process may be publishing to the same engine.",
                worker=worker,
            )
        if missing := sorted(set(sent) - set(receipt.checksums)):
            raise PublicationError(
                f"{where}: tensor {missing[0]!r} was sent and did not arrive ({len(missing)} missing). The engine "
                "would sample from a mixture of two policies, so the run stops. Check the transfer back end.",
                worker=worker,
            )
        if extra := sorted(set(receipt.checksums) - set(sent)):
            raise PublicationError(
                f"{where}: tensor {extra[0]!r} arrived and was never sent ({len(extra)} unknown). A tensor was renamed "
                "in transit, so the run stops. Check the transfer back end.",
                worker=worker,
            )
        for name, value in sent.items():
            if receipt.checksums[name] != value:
                raise PublicationError(
                    f"{where}: tensor {name!r} arrived with other bytes (checksum {receipt.checksums[name]:016x}, "
                    f"sent {value:016x}). The engine would sample from another policy, so the run stops. Check the "
                    "transfer back end and the memory of the node.",
                    worker=worker,
                )


def check_digests(receipts: Sequence[Receipt], workers_per_engine: int) -> None:
    """Raise if engines that received the same tensors hold different ones (rank by rank)."""
    for rank in range(workers_per_engine):
        digests = [r.digest for r in receipts[rank::workers_per_engine]]
        odd = [i for i, digest in enumerate(digests) if digest != digests[0]]
        if odd:
            raise PublicationError(
                f"engine {odd[0]} holds other weights than engine 0 (rank {rank}: {digests[odd[0]]:016x} against "
                f"{digests[0]:016x}) although both received the same. Their samples would come from two policies, so "
                "the run stops. Restart the engines.",
                worker=odd[0] * workers_per_engine + rank,
            )


def check_in_use(sent: tuple[int, int], held: Sequence[tuple[int, int]]) -> None:
    """Raise if the trainer's weights changed since the last publication and an engine's did not: `(before, now)`.

    Names no worker to be replaced: all hold the same by now (`check_digests`), so a new one would do as they do.
    sent: digest of what was sent. held: digest of what each engine worker holds.
    """
    if sent[0] == sent[1]:
        return
    for worker, (before, now) in enumerate(held):
        if before == now:
            raise PublicationError(
                f"engine worker {worker}: the weights were received, not in use: the trainer's changed, what it holds "
                f"did not (digest {now:016x}). It would sample from the old policy, so the run stops. Check the "
                "transfer back end."
            )


def compare_probe(trainer: Sequence[np.ndarray], engine: Sequence[np.ndarray]) -> dict[str, Metric]:
    """`mismatch/*`: absolute log-prob differences of the probe, per token, float64."""
    # The first token of a sequence has no log-prob.
    ours, theirs = (np.concatenate([values[1:] for values in side]).astype(np.float64) for side in (trainer, engine))
    gap = np.abs(ours - theirs)
    return {"mismatch/abs_max": Metric(float(gap.max())), "mismatch/abs_mean": Metric(float(gap.sum()), len(gap))}


def check_probe(
    engines: Sequence[Mapping[str, Metric]], *, bound: float, use_max: bool, version: int, workers_per_engine: int = 1
) -> None:
    """Raise if the trainer and any engine disagree by more than `bound` (nats; NaN disagrees).

    The error names an engine only if another one agrees: what all have in common a restart does not mend.
    """
    name = "mismatch/abs_max" if use_max else "mismatch/abs_mean"
    found = [values(metrics)[name] for metrics in engines]
    wrong = [index for index, value in enumerate(found) if not value <= bound]
    if wrong:
        raise PublicationError(
            f"{name} is {found[wrong[0]]:.3g} at engine {wrong[0]}, version {version}, above train.parity_bound "
            f"(={bound:g}): the weights were received, not in use, or the two forward passes differ. Every gradient "
            "would be off-policy in a way no ratio corrects, so the run stops. Compare dtypes (vllm.dtype, "
            "fsdp.param_dtype) and the engine's packing.",
            worker=wrong[0] * workers_per_engine if len(wrong) < len(found) else None,
        )
