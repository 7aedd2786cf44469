"""The watchdog: when silence is silence, and what its table says."""

import asyncio
import time

from molt.agents.loop_lag import Block
from molt.rollout.watchdog import LoopTimes, RolloutState, Watchdog, table


def state(group: str, silent_s: float, doing: str = "agent") -> RolloutState:
    return RolloutState(group, 0, "runner0", doing, 2, age_s=silent_s + 1, silent_s=silent_s)


class Runners:
    def __init__(self):
        self.begun_again: list[set[str]] = []

    def again(self, group_ids):
        self.begun_again.append(group_ids)

    async def states(self):
        return []

    async def loop_times(self):
        return LoopTimes(lag_s=11.9, blocked_s=11.8)

    async def blocks(self):
        return [("runner1", Block("/agent.py:7", 6.04))]


def watchdog(repairing=lambda: False, patience_s=0.0):
    runners, events = Runners(), []
    on_event = lambda kind, **fields: events.append((kind, fields))  # noqa: E731
    return Watchdog(runners, 5.0, on_event, repairing, patience_s), runners, events


def test_only_when_all_are_silent_are_they_begun_again(capsys):
    dog, runners, events = watchdog()
    dog.look([])
    dog.look([state("0:1", 9), state("0:2", 4)])
    assert runners.begun_again == events == []
    dog.look([state("0:1", 9), state("0:2", 6, "engine")])
    assert runners.begun_again == [{"0:1", "0:2"}]
    assert events[0][0] == "silence" and events[0][1]["groups"] == ["0:1", "0:2"]
    printed = capsys.readouterr().err
    assert "train.watchdog_s (=5); 2 are in flight" in printed
    assert printed.index("0:1:0") < printed.index("0:2:0"), "the most silent one first"


def test_a_rollout_within_its_own_deadline_is_shown_once_and_left_alone(capsys):
    dog, runners, events = watchdog(patience_s=20.0)
    for silent_s in (6, 12, 19):
        dog.look([state("0:1", silent_s, "engine")])
    assert [kind for kind, _ in events] == ["silence"] and runners.begun_again == []
    assert capsys.readouterr().err.count("restart after 20 s") == 1
    dog.look([state("0:1", 21, "engine")])
    assert runners.begun_again == [{"0:1"}]


def test_waiting_for_an_engine_that_is_restarted_is_no_silence():
    repairing = True
    dog, runners, _ = watchdog(lambda: repairing)
    dog.look([state("0:1", 100)])
    repairing = False
    dog.look([state("0:1", 101)])  # it has just come back
    assert runners.begun_again == []
    dog.last_repair = time.monotonic() - 6
    dog.look([state("0:1", 107)])
    assert runners.begun_again == [{"0:1"}]


def test_a_long_table_says_how_many_it_leaves_out():
    rows = table([state(f"0:{i}", i) for i in range(23)]).splitlines()
    assert len(rows) == 22 and "0:22:0" in rows[1] and rows[-1] == "  and 3 more"


def test_a_line_that_blocks_a_runner_is_an_event(monkeypatch):
    monkeypatch.setattr("molt.rollout.watchdog.BLOCKS_S", 0.01)
    dog, _, events = watchdog()

    async def main():
        running = asyncio.create_task(dog.run())
        while not events:
            await asyncio.sleep(0.005)
        running.cancel()

    asyncio.run(asyncio.wait_for(main(), 10))
    assert events[0] == ("runner_blocked", {"runner": "runner1", "at": "/agent.py:7", "seconds": 6.0})


def test_the_metrics_of_a_step_ask_the_runners_now():
    """A block is over before the next look at the rollouts, or lasts beyond the step."""
    dog, _, _ = watchdog()
    found = asyncio.run(dog.take_metrics())
    assert found["perf/runner_lag_max"].total == 11.9 and found["perf/runner_blocked_max"].total == 11.8
