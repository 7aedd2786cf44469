"""The line of an evaluation: a score with its interval, and no interval on its own."""

from molt.report.console import step_line


def test_an_evaluation_shows_its_interval():
    metrics = {"eval/m/pass1": 0.5, "eval/m/pass1_low": 0.4, "eval/m/pass1_high": 0.6125, "eval/m/pass8": 0.75}
    assert step_line(3, 12, metrics).plain == "step  3/12  eval/m/pass1 0.500 [0.400, 0.613]  eval/m/pass8 0.750"


def test_an_evaluation_without_an_interval():
    assert step_line(3, None, {"eval/low/pass1": 7.5, "eval/loss": 2.0}).plain == (
        "step 3  eval/loss 2.000  eval/low/pass1 7.500"
    )
