"""What `molt check` and `molt rl` say on top of what is wrong.

Disk space, prompts that are trained and evaluated, processes against cores or GPUs.
"""

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from molt.algo.plugin import load_estimator
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
    actor, values = config.actor.model_name_or_path, False
    with suppress(MoltError):
        values = "values" in load_estimator(config.algo.advantage.estimator).needs
    critic = (config.critic.model_name_or_path or actor) if values else ""
    disk(found, config.ckpt, actor, best=best, critic=critic)
    with suppress(MoltError):
        if config.data.prompt_dataset and config.eval.dataset:
            overlap(found, first_prompts(config), config)
    with suppress(MoltError):
        _resources(found, config, values=values)
    return found


def disk(found: Findings, ckpt: CkptConfig, model: str, best: bool = False, critic: str = "") -> None:
    """Checkpoints and models against free space. best: the best checkpoint is kept, and its model. critic: or none."""
    stored, parameters = _size(model)
    parameters += _size(critic)[1] if critic else 0
    one = parameters * CHECKPOINT_BYTES + stored * ckpt.save_hf
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


def _size(model: str) -> tuple[int, int]:
    """Bytes of a model on this disk, and its parameters."""
    description = Path(model, "config.json")
    bytes_each = 4 if description.is_file() and '"float32"' in description.read_text() else 2
    stored = sum(file.stat().st_size for file in description.parent.glob("*.safetensors"))
    return stored, stored // bytes_each


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


def _resources(found: Findings, config: RLConfig, *, values: bool) -> None:
    """Processes against cores, or GPUs asked for against GPUs present. values: a critic is built."""
    on_cpu = mesh.resolve_device(config.fsdp.device).type == "cpu"
    apart, engines = not config.train.colocate_fsdp_models, (config.vllm.num_engines, config.vllm.tensor_parallel_size)
    models = {"policy": config.actor} | (
        {"reference": config.ref} if apart and config.algo.reads_reference_model else {}
    )
    models |= {"critic": config.critic} if apart and values else {}
    parts = {name: (model.num_nodes, model.num_gpus_per_node or 1) for name, model in models.items()}
    parts["engines"] = engines
    asked = sum(nodes * each for nodes, each in parts.values())
    present, what = (os.cpu_count() or 1, "cores") if on_cpu else (mesh.device_count(), "GPUs")
    table = " + ".join(f"{name} {nodes} x {each}" for name, (nodes, each) in parts.items())
    text = f"resources: {table} = {asked}, {present} {what} here"
    if asked <= present:
        found.add("ok", text)
    elif on_cpu:
        found.add("warning", f"{text}: they take turns, so steps are slower. Use fewer ranks or engines.")
    elif max(each for _, each in parts.values()) > present:
        found.add("error", f"{text}: no node could hold them. Use fewer GPUs per node.")
    else:
        found.add("warning", f"{text}: the Ray cluster must bring the others. Use fewer, or start Ray on more nodes.")
