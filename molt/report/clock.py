"""Where the seconds of a step go."""

import time

from molt.types import Metric


class Clock:
    """Seconds between laps, as `timing/*`."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.last = self.started
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """The seconds since the last lap belong to `name`."""
        now = time.perf_counter()
        self.laps[name] = now - self.last
        self.last = now

    def metrics(self) -> dict[str, Metric]:
        """All laps, and `timing/step_s` from the start until now."""
        metrics = {f"timing/{name}": Metric(seconds) for name, seconds in self.laps.items()}
        metrics["timing/step_s"] = Metric(time.perf_counter() - self.started)
        return metrics
