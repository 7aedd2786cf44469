"""The driver process: Ray's session and one asyncio loop around a run (`loop.py`) or an evaluation."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import ray
from ray.exceptions import RayTaskError

from molt import cluster
from molt.cluster import ActorClass
from molt.config import RLConfig
from molt.errors import MoltError
from molt.recovery import run_to_the_end
from molt.rollout.engine_worker import RolloutEngineWorker
from molt.rollout.evaluate import Answers, answer
from molt.rollout.handles import ignore_event
from molt.run import print_dropped, started, watchdog
from molt.spec import EvaluationSpec, RunSpec

T = TypeVar("T")
REPORT_S = 300
"""For drawing the report page."""


def run_rl(spec: RunSpec, engine_worker: ActorClass = RolloutEngineWorker) -> None:
    """One whole run. Raises a `MoltError` when it cannot go on; what was trained is saved by then, if ranks are left.

    engine_worker: the Ray actor class of an `Engine`; the tests have one without vLLM.
    """
    _in_ray(spec.config, partial(drive, spec, engine_worker))
    # Failing to draw the page does not fail the run.
    with suppress(subprocess.TimeoutExpired):
        command = [sys.executable, "-m", "molt", "report", str(spec.config.ckpt.output_dir)]
        subprocess.run(command, check=False, timeout=REPORT_S)


def run_evaluation(spec: EvaluationSpec, engine_worker: ActorClass = RolloutEngineWorker) -> tuple[Answers, float]:
    """`molt eval`: the model's answers to `eval.dataset`, and the seconds they took. No trainer is built."""
    return _in_ray(spec.config, partial(drive_evaluation, spec, engine_worker))


async def drive(spec: RunSpec, engine_worker: ActorClass = RolloutEngineWorker) -> None:
    """One run inside a Ray session."""
    async with started(spec, engine_worker) as run:
        await run_to_the_end(run)


async def drive_evaluation(
    spec: EvaluationSpec, engine_worker: ActorClass = RolloutEngineWorker
) -> tuple[Answers, float]:
    """One evaluation inside a Ray session: the answers and the seconds they took."""
    config = spec.config
    print_dropped(spec.held_out)
    async with cluster.started(spec.processes, ignore_event, engine_worker) as processes, asyncio.TaskGroup() as tasks:
        start = time.perf_counter()
        engines = processes.engines
        watchers = [
            tasks.create_task(engines.watch()),
            tasks.create_task(engines.serve()),
            tasks.create_task(watchdog(config, processes, ignore_event).run()),
        ]
        answers = await answer(spec.held_out.prompts, processes.runners, config.rollout, config.eval)
        for watcher in watchers:
            watcher.cancel()
        return answers, time.perf_counter() - start


def _in_ray(config: RLConfig, main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """The value of the coroutine `main()` in a Ray session; of the errors it raises, the `MoltError` inside."""
    cluster.start_ray(config)
    try:
        return asyncio.run(main())
    except Exception as error:  # no fault boundary: everything is raised again
        cause = _cause(error)
        if isinstance(cause, MoltError):
            raise cause from None
        raise
    finally:
        ray.shutdown()


def _cause(error: BaseException) -> BaseException:
    """The error itself, out of task groups and out of the process that raised it."""
    while True:
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        elif isinstance(error, RayTaskError):
            error = error.cause
        else:
            return error
