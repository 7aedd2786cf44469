"""The scorer of `reasoning_gym:NAME` agents: the library's own, in a process that can be killed.

Some datasets (`countdown`, `n_queens`, ...) `eval` what the model answered, and `88**77**6` never ends.
"""

import importlib
from functools import lru_cache
from typing import Any

from molt.agents.trajectory import Trajectory


def score(trajectory: Trajectory) -> float:
    """The library's score of the answer, for the task that `ReasoningGymEnv` drew."""
    info = trajectory.info
    tasks = dataset(info["reasoning_gym"], int(info["seed"]))
    return tasks.score_answer(info["answer"], tasks[int(info["entry"])])


@lru_cache(64)
def dataset(name: str, seed: int) -> Any:
    """The tasks of a seed."""
    return importlib.import_module("reasoning_gym").create_dataset(name, seed=seed)
