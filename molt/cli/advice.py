"""What `molt check` and `molt rl` say on top of what is wrong.

Disk space, prompts that are trained and evaluated, processes against cores or GPUs.
"""

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from molt.cli.check import Findings, first_held_out, first_prompts, nearest_existing, static_checks
from molt.config import CkptConfig, RLConfig
from molt.data.rows import Rows
from molt.errors import MoltError
from molt.parallel import mesh

CHECKPOINT_BYTES = 12
"""Per parameter: a float32 master and two moments."""


def all_checks(config: RLConfig) -> Findings:
    """Everything found about an RL run; never raises for what is wrong with the settings."""
    found = static_checks(config)
    found += advise(config)
    return found


def advise(config: RLConfig) -> Findings:
    """What `static_checks` has not said; what it has refused is passed over."""
    found = Findings()
    best = config.eval.dataset is not None and config.ckpt.best_metric_key != "none"
    disk(found, config.ckpt, config.actor.model_name_or_path, best=best)
    with suppress(MoltError):
        if config.data.prompt_dataset and config.eval.dataset:
            overlap(found, first_prompts(config), config)
    with suppress(MoltError):
        _resources(found, config)
    return found


def disk(found: Findings, ckpt: CkptConfig, model: str, best: bool = False) -> None:
    """Checkpoints and models against free space. best: the best checkpoint is kept, and its model."""
    description = Path(model, "config.json")
    bytes_each = 4 if description.is_file() and '"float32"' in description.read_text() else 2
    stored = sum(file.stat().st_size for file in description.parent.glob("*.safetensors"))
    one = stored // bytes_each * CHECKPOINT_BYTES + stored * ckpt.save_hf
    kept = max(min(one * ckpt.max_num, ckpt.max_mem * 2**30), one * (1 + best))
    # A checkpoint is written aside before the oldest one is removed.
    need = stored * (1 + best) + (one if ckpt.save_steps == -1 and not best else kept + one)
    free = shutil.disk_usage(nearest_existing(ckpt.checkpoints)).free
    if need > free:
        found.add(
            "warning",
            f"`ckpt.max_num` (={ckpt.max_num}): checkpoints may take {need / 2**30:.1f} GiB, and a save would fail: "
            f"{ckpt.checkpoints} has {free / 2**30:.1f} GiB. Keep fewer, or use another --ckpt.output_dir.",
        )


def overlap(found: Findings, rows: Rows, config: Any) -> None:
    """Prompts that are evaluated and trained on too."""
    held_out, column = first_held_out(config), config.data.input_key
    trained, asked = ([json.dumps(row.get(column), sort_keys=True) for row in some] for some in (rows, held_out))
    seen = set(trained)
    both = [i for i, prompt in enumerate(asked) if prompt in seen]
    if both:
        found.add(
            "warning",
            f"`eval.dataset` (={config.eval.dataset}): {len(both):,} of {len(held_out):,} prompts are trained on too "
            f"(first: row {both[0]}), so it says little about new ones. Remove them from one side.",
        )


def _resources(found: Findings, config: RLConfig) -> None:
    """Processes against cores, or GPUs asked for against GPUs present."""
    on_cpu = mesh.resolve_device(config.fsdp.device).type == "cpu"
    nodes, ranks = config.actor.num_nodes, config.actor.num_gpus_per_node or 1
    engines, tp = config.vllm.num_engines, config.vllm.tensor_parallel_size
    asked = nodes * ranks + engines * tp
    present, what = (os.cpu_count() or 1, "cores") if on_cpu else (mesh.device_count(), "GPUs")
    text = f"resources: policy {nodes} x {ranks} + engines {engines} x {tp} = {asked}, {present} {what} here"
    if asked <= present:
        found.add("ok", text)
    elif on_cpu:
        found.add("warning", f"{text}: they take turns, so steps are slower. Use fewer ranks or engines.")
    elif max(ranks, tp) > present:
        found.add("error", f"{text}: no node could hold them. Use fewer GPUs per node.")
    else:
        found.add("warning", f"{text}: the Ray cluster must bring the others. Use fewer, or start Ray on more nodes.")
