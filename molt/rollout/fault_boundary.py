"""What passes the boundary of a rollout: plain copies of what a user's code raises, and cancellations of molt's."""

import asyncio

from molt.types import InfraFailure, ReplaceGroup


def task_is_cancelled() -> bool:
    """Whether somebody cancelled the current task."""
    current = asyncio.current_task()
    return current is not None and current.cancelling() > 0


def without_user_types(failure: InfraFailure) -> InfraFailure:
    """A plain copy: the driver cannot import a user's subclass, and a traceback keeps its frames alive."""
    return InfraFailure(str(failure.reason), str(failure.detail))


def plain_replacement(replaced: ReplaceGroup) -> ReplaceGroup:
    """As `without_user_types`."""
    return ReplaceGroup(str(replaced.reason), str(replaced.detail))
