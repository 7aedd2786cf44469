"""The line of a step: what it measured and nothing else; a score with its interval, which is no column of its own."""

from molt.report.console import step_line


def test_an_evaluation_shows_its_interval():
    metrics = {"eval/m/pass1": 0.5, "eval/m/pass1_low": 0.4, "eval/m/pass1_high": 0.6125, "eval/m/pass8": 0.75}
    assert step_line(3, 12, metrics).plain == "step  3/12  eval/m/pass1 0.500 [0.400, 0.613]  eval/m/pass8 0.750"


def test_an_evaluation_without_an_interval():
    assert step_line(3, None, {"eval/low/pass1": 7.5, "eval/loss": 2.0}).plain == (
        "step 3  eval/loss 2.000  eval/low/pass1 7.500"
    )


def test_a_step_shows_what_was_filtered_and_what_the_critic_explains():
    metrics = {"rollout/reward": 0.5, "train/kl": 0.0125, "train/explained_variance": 0.876, "rollout/filtered": 0.25}
    assert step_line(3, 12, metrics).plain == ("step  3/12  reward 0.500  kl 1.25e-02  explained 0.88  filtered 25.0%")
