"""The process of a runner."""

import ray

from molt.rollout.agent_host import AgentHost


@ray.remote(max_concurrency=16384)
class RunnerWorker(AgentHost):
    """An `AgentHost` as a Ray actor."""
