"""The process of a runner."""

from typing import Any

import ray

from molt.rollout.agent_host import AgentHost


def _actor(host: type[AgentHost]) -> Any:
    """The Ray actor class; `Any`, for Ray types neither its options nor its handles."""
    return ray.remote(max_concurrency=16384)(host)  # pyright: ignore[reportCallIssue]


@_actor
class RunnerWorker(AgentHost):
    """An `AgentHost` as a Ray actor."""
