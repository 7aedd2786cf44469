"""What `molt check` and `molt rl` add to what is wrong: what is doubtful.

Disk space, prompts that are trained and evaluated, processes against cores or GPUs.
"""

import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from molt.algorithm import load_algorithm
from molt.cli.check import first_held_out, first_prompts, static_checks
from molt.cli.findings import Findings
from molt.cli.model_size import model_size
from molt.cli.overlap import check_overlap
from molt.cli.places import nearest_existing
from molt.config import CkptConfig, RLConfig
from molt.errors import MoltError
from molt.parallel import mesh
from molt.roles import Role, roles
from molt.spec import resolve

CHECKPOINT_BYTES = 12
"""Per parameter: a float32 master and two moments."""
GIB = 2**30


def all_checks(config: RLConfig) -> Findings:
    """Everything found about an RL run; never raises for what is wrong with the settings."""
    found = static_checks(config)
    if not found.errors and not config.eval.eval_only:
        found.attempt(resolve, config)
    found += advise(config)
    return found


def advise(config: RLConfig) -> Findings:
    """What is doubtful; what `static_checks` refuses is passed over."""
    found = Findings()
    actor = config.actor.model_name_or_path
    models = _models(config)
    critic = next((role.model for role in models if role.name == "critic"), "")
    keeps_best = config.eval.dataset is not None and config.ckpt.best_metric_key != "none"
    check_disk(found, config.ckpt, actor, critic=critic, keeps_best=keeps_best)

    with suppress(MoltError):
        if config.data.prompt_dataset and config.eval.dataset:
            trained = first_prompts(config, most=sys.maxsize)
            held_out = first_held_out(config, most=sys.maxsize)
            check_overlap(found, trained.rows, held_out.rows, held_out.label, config.data.input_key)
    with suppress(MoltError):
        _check_resources(found, config, models)
    return found


def _models(config: RLConfig) -> list[Role]:
    """The models of the run; none where the algorithm cannot be loaded, which `static_checks` reports."""
    try:
        algorithm = load_algorithm(config.algo, config.actor)
    except MoltError:
        return []
    return roles(config, algorithm)


# Disk space.


def check_disk(found: Findings, ckpt: CkptConfig, model: str, *, critic: str = "", keeps_best: bool = False) -> None:
    """Checkpoints and models against free space. critic: its model, or "". keeps_best: the best checkpoint is kept."""
    exported = model_size(model)
    parameters = exported.parameters
    if critic:
        parameters += model_size(critic).parameters
    checkpoint = parameters * CHECKPOINT_BYTES
    if ckpt.save_hf:
        checkpoint += exported.stored_bytes

    never_removed = 2 if keeps_best else 1  # the newest and the best
    limit = min(checkpoint * ckpt.max_num, ckpt.max_mem * GIB)
    kept = max(limit, checkpoint * never_removed)
    if ckpt.save_steps == -1 and not keeps_best:
        checkpoints = checkpoint
    else:
        checkpoints = kept + checkpoint  # a checkpoint is written before the oldest one is removed
    needed = exported.stored_bytes * never_removed + checkpoints

    free = shutil.disk_usage(nearest_existing(ckpt.checkpoints)).free
    if needed > free:
        found.add(
            "warning",
            f"`ckpt.max_num` (={ckpt.max_num}): checkpoints may take {needed / GIB:.1f} GiB, and a save would fail: "
            f"{ckpt.checkpoints} has {free / GIB:.1f} GiB. Keep fewer, or use another --ckpt.output_dir.",
        )


# Processes against cores or GPUs.


@dataclass(frozen=True)
class Demand:
    """What one part of a run asks for."""

    part: str
    groups: int
    """Nodes, or engines."""
    each: int
    """Processes on a node, or ranks of an engine."""

    @property
    def processes(self) -> int:
        return self.groups * self.each


def _demands(config: RLConfig, models: Sequence[Role]) -> list[Demand]:
    if config.train.colocate_fsdp_models:
        models = models[:1]  # the others share the policy's
    demands = [Demand(role.name, role.num_nodes, role.num_gpus_per_node or 1) for role in models]
    demands.append(Demand("engines", config.vllm.num_engines, config.vllm.tensor_parallel_size))
    return demands


def _check_resources(found: Findings, config: RLConfig, models: Sequence[Role]) -> None:
    """Processes against cores, or GPUs asked for against GPUs present."""
    demands = _demands(config, models)
    wanted = sum(demand.processes for demand in demands)
    on_cpu = mesh.resolve_device(config.fsdp.device).type == "cpu"
    if on_cpu:
        present = os.cpu_count() or 1
        unit = "cores"
    else:
        present = mesh.device_count()
        unit = "GPUs"

    table = " + ".join(f"{demand.part} {demand.groups} x {demand.each}" for demand in demands)
    text = f"resources: {table} = {wanted}, {present} {unit} here"
    if wanted <= present:
        found.add("ok", text)
    elif on_cpu:
        found.add("warning", f"{text}: they take turns, so steps are slower. Use fewer ranks or engines.")
    elif max(demand.each for demand in demands) > present:
        found.add("error", f"{text}: no node could hold them. Use fewer GPUs per node.")
    else:
        found.add("warning", f"{text}: the Ray cluster must bring the others. Use fewer, or start Ray on more nodes.")
