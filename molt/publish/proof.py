"""The three checks that prove a weight sync (docs/architecture.md, "Publication").

1. transport: checksums of all tensors as received against the sender's, coverage, echoed version;
2. all engines hold the same bytes (digest of what they hold);
3. the log-prob probe: trainer and engine compute the log-probs of the same tokens at the same weights.

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
_WORDS = {1: torch.uint8, 2: torch.int16}
"""By bytes of an element, the integers that its bits are read as; otherwise int32."""


@dataclass(frozen=True)
class Receipt:
    """What one engine worker reports after a publication."""

    version: str
    """The weight version the engine echoes."""
    checksums: Mapping[str, int]
    """Checksum of every tensor it was handed, under its Hugging Face name."""
    digest: int
    """Digest of the parameters it holds and that are not packed."""


@dataclass(frozen=True)
class Digests:
    """What was sent in one publication, and what each engine worker held after it."""

    sent: int
    held: tuple[int, ...]
    """One for each engine worker."""


def checksum(tensor: torch.Tensor) -> int:
    """A 64-bit position-weighted sum of a tensor's bits; runs on the tensor's device.

    `h <- h * MIX + sum_i (i + 1) * word_i (mod 2^64)` over chunks of 2^18 words, from a hash of dtype and
    shape. So it changes when a bit changes, when elements swap places, and when either of these does.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    words = flat.view(_WORDS.get(flat.element_size(), torch.int32))
    positions = torch.arange(1, min(len(words), _CHUNK) + 1, device=flat.device)

    chunk_sums = []
    for chunk in words.split(_CHUNK):
        weighted = chunk.to(torch.int64)
        weighted.mul_(positions[: len(chunk)])  # in place: a chunk takes one temporary
        chunk_sums.append(weighted.sum())

    value = zlib.crc32(f"{tensor.dtype} {list(tensor.shape)}".encode())
    for chunk_sum in torch.stack(chunk_sums).tolist():  # one transfer, so a device is waited for once
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
        _check_receipt(sent, receipt, worker, version)


def _check_receipt(sent: Mapping[str, int], receipt: Receipt, worker: int, version: int) -> None:
    where = f"engine worker {worker}, version {version}"
    if receipt.version != str(version):
        raise PublicationError(
            f"{where}: the engine echoes version {receipt.version!r}. Its tokens would carry a wrong version, "
            "so the run stops. Another process may be publishing to the same engine.",
            worker=worker,
        )

    missing = sorted(set(sent) - set(receipt.checksums))
    if missing:
        raise PublicationError(
            f"{where}: tensor {missing[0]!r} was sent and did not arrive ({len(missing)} missing). The engine "
            "would sample from a mixture of two policies, so the run stops. Check the transfer back end.",
            worker=worker,
        )

    unknown = sorted(set(receipt.checksums) - set(sent))
    if unknown:
        raise PublicationError(
            f"{where}: tensor {unknown[0]!r} arrived and was never sent ({len(unknown)} unknown). A tensor was renamed "
            "in transit, so the run stops. Check the transfer back end.",
            worker=worker,
        )

    for name, value in sent.items():
        received = receipt.checksums[name]
        if received != value:
            raise PublicationError(
                f"{where}: tensor {name!r} arrived with other bytes (checksum {received:016x}, "
                f"sent {value:016x}). The engine would sample from another policy, so the run stops. Check the "
                "transfer back end and the memory of the node.",
                worker=worker,
            )


def check_digests(receipts: Sequence[Receipt], workers_per_engine: int) -> None:
    """Raise `PublicationError` if engines that received the same tensors hold different ones (rank by rank)."""
    for rank in range(workers_per_engine):
        of_rank = receipts[rank::workers_per_engine]
        for engine, receipt in enumerate(of_rank):
            if receipt.digest != of_rank[0].digest:
                raise PublicationError(
                    f"engine {engine} holds other weights than engine 0 (rank {rank}: {receipt.digest:016x} against "
                    f"{of_rank[0].digest:016x}) although both received the same. Their samples would come from two "
                    "policies, so the run stops. Restart the engines.",
                    worker=engine * workers_per_engine + rank,
                )


def check_in_use(before: Digests, now: Digests) -> None:
    """Raise `PublicationError` if the sent weights changed since the publication before and an engine's did not.

    The error names no worker to be replaced: all hold the same by now (`check_digests`), so a new one would fail too.
    """
    if now.sent == before.sent:
        return
    for worker, (held_before, held_now) in enumerate(zip(before.held, now.held, strict=True)):
        if held_before == held_now:
            raise PublicationError(
                f"engine worker {worker}: the weights were received, not in use: the trainer's changed, what it holds "
                f"did not (digest {held_now:016x}). It would sample from the old policy, so the run stops. Check the "
                "transfer back end."
            )


def compare_probe(trainer: Sequence[np.ndarray], engine: Sequence[np.ndarray]) -> dict[str, Metric]:
    """`mismatch/*`: absolute log-prob differences of the probe, per token, float64.

    trainer, engine: float32 `[T]` for each sequence; entry 0 is ignored, since nothing comes before the first token.
    """
    gap = np.abs(_probed_tokens(trainer) - _probed_tokens(engine))
    return {
        "mismatch/abs_max": Metric(float(gap.max())),
        "mismatch/abs_mean": Metric(float(gap.sum()), len(gap)),
    }


def _probed_tokens(sequences: Sequence[np.ndarray]) -> np.ndarray:
    """float64 `[n]`: all log-probs but those of first tokens."""
    without_first = [logprobs[1:] for logprobs in sequences]
    return np.concatenate(without_first).astype(np.float64)


def check_probe(
    engines: Sequence[Mapping[str, Metric]], *, bound: float, use_max: bool, version: int, workers_per_engine: int = 1
) -> None:
    """Raise `PublicationError` if the trainer and any engine disagree by more than `bound` (nats; NaN disagrees).

    engines: `compare_probe` of each. The error names an engine only if another one agrees: what all have in common a
    restart does not fix.
    """
    name = "mismatch/abs_max" if use_max else "mismatch/abs_mean"
    gaps = [values(metrics)[name] for metrics in engines]
    wrong = [engine for engine, gap in enumerate(gaps) if not gap <= bound]
    if not wrong:
        return

    first = wrong[0]
    worker = None
    if len(wrong) < len(gaps):
        worker = first * workers_per_engine
    raise PublicationError(
        f"{name} is {gaps[first]:.3g} at engine {first}, version {version}, above train.parity_bound "
        f"(={bound:g}): the weights were received, not in use, or the two forward passes differ. Every gradient "
        "would be off-policy in a way no ratio corrects, so the run stops. Compare dtypes (vllm.dtype, "
        "fsdp.param_dtype) and the engine's packing.",
        worker=worker,
    )
