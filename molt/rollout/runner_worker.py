"""The process of a runner."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from molt.agents.loop_lag import Block
from molt.plugins import make_importable
from molt.rollout.agent_host import AgentHost, RunnerSettings
from molt.rollout.group_task import GroupResult, GroupTask
from molt.rollout.handles import EngineHandle
from molt.rollout.watchdog import LoopTimes
from molt.types import Sample

WATCHED = "watched"
"""The concurrency group of methods that answer while the agent blocks its event loop: it has another loop."""


def _actor(host: type[AgentHost]) -> Any:
    """The Ray actor class; `Any`, for Ray types neither its options nor its handles."""
    remote: Any = ray.remote
    return remote(max_concurrency=16384, concurrency_groups={WATCHED: 1})(host)


_watched: Any = ray.method(concurrency_group=WATCHED)


@_actor
class RunnerWorker(AgentHost):
    """An `AgentHost` as a Ray actor."""

    def __init__(self, settings: RunnerSettings, engines: Sequence[EngineHandle], name: str):
        make_importable(Path.cwd())  # Ray puts it first, where its files would hide libraries
        super().__init__(settings, engines, name)

    async def run_group(
        self, task: GroupTask, begun: GroupResult | None = None, samples: Sequence[list[Sample]] = ()
    ) -> tuple[GroupResult, list[list[Sample]]]:
        """As `AgentHost.run_group`, and says where the samples are."""
        result, samples = await super().run_group(task, begun, samples)
        return replace(result, node=ray.get_runtime_context().get_node_id()), samples

    @_watched
    async def blocks(self) -> list[Block]:
        """As `AgentHost.blocks`."""
        return await super().blocks()

    @_watched
    async def loop_times(self) -> LoopTimes:
        """As `AgentHost.loop_times`."""
        return await super().loop_times()
