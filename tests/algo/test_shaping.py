from molt.algo.shaping import shape_reward


def test_a_reward_is_clipped_to_its_range():
    assert [shape_reward(r, clip_range=(-1.0, 2.0)) for r in (-7.0, -1.0, 0.5, 2.0, 9.0)] == [-1, -1, 0.5, 2, 2]
