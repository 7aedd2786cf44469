"""Why a run stops: which reasons the loop acts on at once, and which error it raises."""

from molt.errors import EngineError, FailureRateError
from molt.rollout.shutdown import Shutdown


def test_a_signal_stops_at_once_and_without_an_error():
    shutdown = Shutdown()
    shutdown.request()
    assert shutdown.requested and shutdown.immediate.is_set()
    assert shutdown.error is None and not shutdown.failed


def test_an_end_of_groups_lets_a_learner_that_needs_none_finish():
    shutdown = Shutdown()
    error = FailureRateError("60 of 100 failed")
    shutdown.end_of_groups(error)
    assert shutdown.error is error
    assert not shutdown.failed and not shutdown.requested and not shutdown.immediate.is_set()


def test_a_failure_stops_at_once_with_the_first_error():
    shutdown = Shutdown()
    first = FailureRateError("60 of 100 failed")
    shutdown.end_of_groups(first)
    shutdown.fail(EngineError("engine 0 is gone"))
    assert shutdown.error is first
    assert shutdown.failed and shutdown.immediate.is_set()


def test_only_the_end_of_groups_is_forgotten_when_they_are_generated_anew():
    shutdown = Shutdown()
    shutdown.end_of_groups(FailureRateError("60 of 100 failed"))
    shutdown.generation_restarts()
    assert shutdown.error is None
    lost = EngineError("engine 0 is gone")
    shutdown.fail(lost)
    shutdown.generation_restarts()
    assert shutdown.error is lost


def test_every_reason_is_told_to_whoever_waits():
    shutdown = Shutdown()
    calls = []
    shutdown.call_on_change(lambda: calls.append("told"))
    shutdown.request()
    shutdown.end_of_groups(FailureRateError("60 of 100 failed"))
    shutdown.fail(EngineError("engine 0 is gone"))
    assert len(calls) == 3
