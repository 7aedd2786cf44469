"""`Lineage`: versions are never used twice, and the step behind a version is that which its weights had."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from molt.types import NO_ROLLBACK, Lineage


def test_the_arithmetic_by_hand():
    assert NO_ROLLBACK.version(7) == 7
    assert NO_ROLLBACK.steps(np.array([0, 3, 7])).tolist() == [0, 3, 7]
    # Steps 5 and 6 are abandoned: version 6 was the last, so step 4 goes out again as version 7.
    once = NO_ROLLBACK.rolled_back(4, published=6)
    assert once == Lineage(((7, 4),))
    assert [once.version(step) for step in (4, 5, 6)] == [7, 8, 9]
    assert once.steps(np.array([3, 4, 7, 9])).tolist() == [3, 4, 4, 6]
    # Then steps 3 and later are, those of the first roll-back with them.
    assert once.rolled_back(2, published=9) == Lineage(((10, 2),))
    # Nothing later than the checkpoint was published: its version is not used by anything else.
    assert once.rolled_back(6, published=9) == once and NO_ROLLBACK.rolled_back(0, published=-1) == NO_ROLLBACK


def test_steps_keep_the_shape_and_dtype_of_versions():
    assert Lineage(((7, 4),)).steps(np.zeros((2, 3), np.int64)).shape == (2, 3)
    assert NO_ROLLBACK.steps(np.zeros(0, np.int32)).shape == (0,)


class History:
    """A run as a driver lives it; `publications` is the truth, by version."""

    def __init__(self):
        self.lineage, self.step = NO_ROLLBACK, 0
        self.publications: dict[int, int] = {}
        self.alive: list[int] = []
        """The versions whose tokens may still be trained."""
        self.checkpoints = [(0, NO_ROLLBACK, [])]

    def publish(self):
        version = self.lineage.version(self.step)
        highest = max(self.publications, default=-1)
        assert version > highest or (version == highest and self.publications[version] == self.step)
        self.publications[version] = self.step
        self.alive.append(version)

    def save(self):
        self.checkpoints.append((self.step, self.lineage, list(self.alive)))

    def go_back(self, back: int):
        """To one of the checkpoints that are not abandoned yet; those after it are, from here on."""
        del self.checkpoints[max(1, len(self.checkpoints) - back) :]
        self.step, lineage, alive = self.checkpoints[-1]
        self.alive = list(alive)
        self.lineage = lineage.rolled_back(self.step, max(self.publications, default=-1))


MOVES = st.one_of(
    st.tuples(st.just("train"), st.integers(1, 3)),
    st.tuples(st.just("save"), st.just(0)),
    st.tuples(st.just("die"), st.integers(0, 3)),
    st.tuples(st.just("die in a step"), st.integers(0, 3)),
)


@given(st.lists(MOVES, max_size=25))
def test_after_any_history_no_version_is_reused_and_every_living_one_has_its_step(moves):
    history = History()
    history.publish()
    for move, number in moves:
        if move == "train":
            for _ in range(number):
                history.step += 1
                history.publish()
        elif move == "save":
            history.save()
        else:
            history.step += move == "die in a step"  # trained, and not published
            history.go_back(number)
            history.publish()
        steps = history.lineage.steps(np.array(history.alive))
        assert steps.tolist() == [history.publications[version] for version in history.alive]
