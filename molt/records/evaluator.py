"""The evaluation that runs beside training: when it starts, what it measures, when it is dropped, what it decides."""

import asyncio
import sys
from collections.abc import Sequence

from molt.config import EvalConfig, RolloutConfig
from molt.records.best import BestModel
from molt.report.metrics import values
from molt.report.sinks import RunLog
from molt.rollout.evaluate import Runners, evaluate
from molt.types import Metric, Prompt


class Evaluator:
    """Measures published versions on `eval.dataset`, one at a time. The loop publishes nothing meanwhile."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        runners: Runners,
        config: EvalConfig,
        rollout: RolloutConfig,
        best_model: BestModel,
        log: RunLog,
    ):
        self.prompts = prompts
        self.runners = runners
        self.config = config
        self.rollout = rollout
        self.best_model = best_model
        self.log = log
        self.measured: int | None = None
        """The step whose evaluation was recorded last."""
        self.task: asyncio.Task[dict[str, Metric]] | None = None
        """The evaluation that runs."""
        self._step = 0
        """The step that `task` measures."""
        self._version = 0
        """The policy version that `task` measures."""

    def due(self, step: int) -> bool:
        """Whether the settings ask for an evaluation at this step."""
        if step == 0:
            return self.config.eval_at_start
        return self.config.steps > 0 and step % self.config.steps == 0

    def wants(self, step: int) -> bool:
        """Whether the weights of `step` can be measured now, and have not been yet."""
        return bool(self.prompts) and self.task is None and self.measured != step

    async def begin(self, step: int, version: int) -> None:
        """Start to measure the published version. Raises `CheckpointError` when the candidate cannot be exported."""
        if self.best_model.is_kept:
            await self.best_model.export_candidate()
        self._step = step
        self._version = version
        self.task = asyncio.create_task(evaluate(self.prompts, self.runners, self.rollout, self.config))

    async def conclude(self, *, no_engine_has_it: bool) -> None:
        """Record the evaluation if it has ended, else drop it. Raises what it raised.

        no_engine_has_it: the weights that it measures are on no engine any more.
        """
        if self.task is None:
            return
        if not self.task.done():
            if no_engine_has_it:
                print(
                    f"step {self._step}: its evaluation is dropped, since no engine has its weights any more",
                    file=sys.stderr,
                )
                self.log.event("evaluation_dropped", step=self._step)
            self.drop()
            return
        error = self.task.exception()
        if error is not None:
            self.drop()
            raise error
        metrics = self.task.result()
        self.task = None
        self.measured = self._step
        await self._record(metrics)

    def drop(self) -> None:
        """Stop the evaluation; a resume at the same step starts it again."""
        if self.task is not None:
            self.task.cancel()
            self.task = None
            self.best_model.drop_candidate()

    def resume(self, step: int) -> None:
        """The run continues from `step`."""
        self.measured = None
        if self.log.evaluated(step):
            self.measured = step

    def restart(self) -> None:
        """The run starts at its beginning again."""
        self.measured = None

    async def _record(self, metrics: dict[str, Metric]) -> None:
        if self.best_model.is_kept:
            new_best = await self.best_model.judge(self._step, metrics)
            if new_best is not None:
                self.log.event("best", **new_best)
        numbers = values(metrics)
        self.log.step(self._step, numbers)
        self.log.event("evaluation", version=self._version, **numbers)
