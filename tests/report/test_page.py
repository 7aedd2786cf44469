import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from molt.columns import token_columns
from molt.config import LoggerConfig
from molt.report.charts import Chart, draw, short, smooth, smoothing_radius, thin, ticks
from molt.report.page import build, write_report
from molt.report.rollouts import write_rollouts
from molt.report.sinks import RunLog

ROOT = Path(__file__).parents[2]
EVIL = "<script>alert('x')</script>"


def rollout(reward, text):
    prompt = "ask" + EVIL
    ids = [ord(character) for character in prompt + text]
    versions = [-1] * len(prompt) + [4] * len(text)
    return {
        "group_id": f"0:1{EVIL}",
        "rollout": 0,
        "segment": 0,
        "reward": reward,
        "score": reward,
        "advantage": reward - 0.5,
        "outcome": "scored",
        "truncated": False,
        "version_trained": 5,
        "prompt_tokens": len(prompt),
        "columns": token_columns(ids, versions, [0.0] * len(ids)),
    }


def figures_of(page):
    """The names that a filter searches, of each chart, and the chart."""
    found = {}
    for figure in re.findall(r"<figure.*?</figure>", page):
        (names,) = re.findall(r'data-names="([^"]*)"', figure)
        found[html.unescape(names)] = figure
    return found


@pytest.fixture
def rl_run(tmp_path):
    run = tmp_path / f"my run {EVIL.replace('/', '')}" / "run"
    with RunLog(run, LoggerConfig(logging_steps=100), "", 3) as log:
        log.step(0, {"eval/rev/pass1": 0.25})
        for step in (1, 2, 3):
            log.step(
                step,
                {"rollout/reward": step / 4, "mismatch/abs_max": 1e-5, "timing/step_s": 1.0, f"faults/{EVIL}": 1.0},
            )
            log.event("publication", version=step, seconds=0.5)
        log.step(3, {"eval/rev/pass1": 0.75})
        log.event("rollout_failed", reason="timeout", detail=EVIL)
    write_rollouts(run, 3, [rollout(0.0, "bad" + EVIL), rollout(1.0, "good")], lambda ids: "".join(map(chr, ids)))
    (run / "config.toml").write_text(f'[actor]\nmodel_name_or_path = "{EVIL}"\n')
    return run


def test_the_page_shows_curves_events_rollouts_and_the_configuration(rl_run):
    page = write_report(rl_run).read_text()
    assert page.count("<polyline") == 5  # reward, evaluation, mismatch, timing, faults
    assert "0.250<i>→</i>0.750" in page
    assert "3 times · version 1 … 3 · seconds mean 0.5, max 0.5" in page
    assert '<mark title="sampled by version 4">good</mark>' in page
    assert page.index(">good</mark>") < page.index(">bad")
    assert "config.toml" in page
    assert not list(rl_run.glob("*.new"))


def test_nothing_that_a_model_or_a_dataset_wrote_becomes_markup(rl_run):
    page = build(rl_run)
    assert page.count("<script>") == 1  # the page's own
    assert "alert(&#x27;x&#x27;)" in page
    assert "http" not in page.replace("</html>", "")  # and nothing is fetched


def test_the_page_says_what_was_optimised_and_what_was_filtered(tmp_path):
    (tmp_path / "header.txt").write_text("molt rl  <b>M</b>\n  A = R - mean(group)")
    with RunLog(tmp_path, LoggerConfig(logging_steps=100), "", 3) as log:
        for step in (1, 2, 3):
            metrics = {"rollout/reward": 0.5, "rollout/shaped_reward": 0.25, "rollout/score": 0.5}
            metrics |= {"rollout/unfiltered_score": 0.75, "rollout/filtered": 0.5, "rollout/all_pass": 0.5}
            metrics |= {"rollout/all_fail": 0.0, "ratio/filtered_fraction": 0.995, "train/clip_fraction": 0.1}
            metrics |= {"train/kl": 0.02, "train/kl_coef": 0.01, "train/entropy": 1.5, "train/value_loss": 0.2}
            log.step(step, metrics | {"train/explained_variance": 0.9})
        log.event("filtered", step=3, fraction=0.995, in_a_row=1)
        log.event("small_batch", step=3, groups=2)
    page = build(tmp_path)
    assert "<pre class=card>molt rl  &lt;b&gt;M&lt;/b&gt;\n  A = R - mean(group)</pre>" in page
    drawn = re.findall(r"<figure.*?<h3>(.*?)<.*?</figure>", page)
    lines = [figure.count("<polyline") for figure in re.findall(r"<figure.*?</figure>", page)]
    assert dict(zip(drawn, lines, strict=True)) == {
        "Reward": 2,
        "Score": 2,
        "Filtered groups": 3,
        "KL": 2,
        "Entropy": 1,
        "Value loss": 1,
        "Explained variance": 1,
        "Filtered tokens": 1,
        "Clipped tokens": 1,
    }
    assert re.search(r"<tr class=fault>.{0,40}<td>filtered</td><td>step 3 · fraction 0.995 · in_a_row 1<", page)
    assert re.search(r"<tr>.{0,40}<td>small_batch</td><td>step 3 · groups 2<", page)


CALM = {"publication", "checkpoint", "evaluation", "best", "small_batch", "resumed", "recovered", "rejoined",
        "engine_restarted"}  # fmt: skip


def test_what_went_wrong_stands_out_whatever_it_is(tmp_path):
    """Every kind of event that the source names is listed, and all but the calm ones stand out."""
    source = "".join(path.read_text() for path in (ROOT / "molt").rglob("*.py"))
    kinds = set(re.findall(r'event\(\s*"(\w+)"', source))
    assert kinds > CALM
    with RunLog(tmp_path, LoggerConfig(logging_steps=100), "", 1) as log:
        for kind in kinds:
            log.event(kind, reason=f"because of {kind}")
    rows = re.findall(r"<tr( class=fault)?><td>[^<]*</td><td>(\w+)</td><td>(.*?)</td>", build(tmp_path))
    assert {kind for mark, kind, _ in rows if not mark} == CALM
    assert {kind for mark, kind, _ in rows if mark} == kinds - CALM
    assert all(f"because of {kind}" in text for _, kind, text in rows)


def test_groups_that_belong_to_a_healthy_run_do_not_stand_out(tmp_path):
    with RunLog(tmp_path, LoggerConfig(logging_steps=100), "", 1) as log:
        for reason in ("filtered", "too_few_left", "timeout"):
            log.event("group_discarded", group="0:1", reason=reason, detail="")
    rows = re.findall(r"<tr( class=fault)?><td>[^<]*</td><td>group_discarded</td><td>.*?reason (\w+)", build(tmp_path))
    assert rows == [("", "filtered"), ("", "too_few_left"), (" class=fault", "timeout")]


def test_an_sft_run_has_only_what_it_measured(tmp_path):
    with RunLog(tmp_path, LoggerConfig(logging_steps=100), "", None) as log:
        for step in (1, 2):
            log.step(step, {"train/loss": 2.0 / step, "train/lr": float("nan")})
    page = build(tmp_path)
    assert page.count("<figure") == 1 and "2.000<i>→</i>1.000" in page
    assert "Reward" not in page and "Rollouts" not in page and "Events" not in page and "formula" not in page


NUMBERS = {
    "rollout/reward": 0.5,
    "rollout/turns": 3.0,
    "rollout/policy_failures": 0.25,
    "rollout/mixed_groups": 0.5,
    "rollout/info/acc[0]": 0.125,
    "rollout/info/tool calls": 2.0,
    "rollout/info/softmax": 0.0,
    "eval/math/pass1": 0.5,
    "eval/math/pass1_low": 0.375,
    "train/grad_norm": 0.0,  # its chart has a logarithmic axis
    "perf/runner_lag_max": 0.01,
    EVIL: 1.0,
}


@pytest.fixture
def many_metrics(tmp_path):
    with RunLog(tmp_path, LoggerConfig(logging_steps=100), "", 3) as log:
        for step in (1, 2, 3):
            log.step(step, NUMBERS)
    return tmp_path


def test_every_metric_is_drawn_once(many_metrics):
    drawn = []
    for figure in figures_of(build(many_metrics)).values():
        (hover,) = re.findall(r'data-hover="([^"]*)"', figure)
        drawn += [name for name, points in json.loads(html.unescape(hover))["series"]]
    assert sorted(drawn) == sorted(NUMBERS)


def test_what_has_no_chart_of_its_own_is_named_in_full_and_the_agents_numbers_come_first(many_metrics):
    page = build(many_metrics)
    others = page[page.index("All other metrics") :]
    titles = [html.unescape(title) for title in re.findall(r"<figure.*?<h3>(.*?)<output>", others)]
    assert titles == [
        "rollout/info/acc[0]",
        "rollout/info/softmax",
        "rollout/info/tool calls",
        EVIL,
        "eval/math/pass1_low",
        "perf/runner_lag_max",
        "train/grad_norm",
    ]


def test_a_chart_is_searched_by_its_title_and_its_metrics(many_metrics):
    page = build(many_metrics)
    assert "Policy failures rollout/policy_failures" in figures_of(page)
    assert "rollout/info/acc[0] rollout/info/acc[0]" in figures_of(page)
    # Hidden without scripts, as it could not filter then; page.js shows it.
    assert page.count('<label class="filter" hidden>') == 1
    assert '<h2 data-charts="other-charts">' in page and '<div class="charts" id="other-charts">' in page


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no browser")
@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("TURNS", {"Turns"}),
        ("info/ calls", {"rollout/info/tool calls"}),  # every word of it
        ("mixed groups", {"Mixed groups"}),
        ("no such metric", set()),
    ],
)
def test_the_filter_box_in_a_browser(many_metrics, words, shown):
    typing = f"""
        const box = document.querySelector(".filter input");
        box.value = {json.dumps(words)};
        box.dispatchEvent(new Event("input"));
        const shown = document.querySelectorAll("figure:not([hidden]) h3");
        document.title = JSON.stringify([...shown].map(heading => heading.firstChild.textContent));
    """
    page = many_metrics / "typed.html"
    page.write_text(build(many_metrics).replace("</script></html>", typing + "</script></html>"))
    done = subprocess.run(
        ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    (title,) = re.findall(r"<title>(.*?)</title>", done.stdout)
    assert set(json.loads(html.unescape(title))) == shown


def test_an_empty_run_is_a_page_too(tmp_path):
    assert "No metrics yet." in build(tmp_path)


def test_the_command_line(rl_run):
    done = subprocess.run([sys.executable, "-m", "molt.report.page", rl_run], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() == str(rl_run / "report.html")
    done = subprocess.run([sys.executable, "-m", "molt.report.page", "nowhere"], capture_output=True, text=True)
    assert done.returncode == 1 and "RUN_DIR (=nowhere)" in done.stdout


def test_ticks_are_round_numbers_that_cover_the_range():
    assert ticks(0.0, 1.0) == [0.0, 0.5, 1.0]
    # 0.39 / 4 = 0.0975, so steps of 0.1
    assert ticks(0.57, 0.96) == [0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
    assert ticks(-3.0, 9.0) == [-5.0, 0.0, 5.0, 10.0]


def test_numbers_are_short():
    assert [short(v) for v in (0.0, 0.12345, 12300.0, 439_100.0, 2.5e6, 1e-5)] == [
        "0",
        "0.1235",
        "12.3k",
        "439.1k",
        "2.5M",
        "1.0e-05",
    ]


def test_thinning_keeps_the_ends_and_the_mean():
    points = [(i, float(i % 2)) for i in range(1000)]
    out = thin(points, 100)
    assert len(out) == 100 and out[0][0] == 0 and out[-1][0] == 999
    assert all(value == 0.5 for _, value in out)


def test_smoothing_does_not_lag():
    line = [(i, 2.0 * i) for i in range(48)]
    # 48 points: 2 on each side. First window 0, 2, 4; last 90, 92, 94.
    assert smooth(line) == [(0, 2.0), (1, 3.0), *line[2:-2], (46, 91.0), (47, 92.0)]


@pytest.mark.parametrize(("points", "neighbours"), [(1, 0), (11, 0), (12, 2), (40, 2), (47, 2), (72, 3), (300, 12)])
def test_the_window_of_a_moving_mean_is_5_points_or_a_twelfth(points, neighbours):
    assert smoothing_radius(points) == neighbours


def test_a_run_of_40_steps_has_a_thin_and_a_bold_line():
    zigzag = [(step, float(step % 2)) for step in range(40)]
    figure = draw(Chart("m", ("a",)), {"a": zigzag})
    thin_line, bold_line = re.findall(r'<polyline class="([^"]*)" points="([^"]*)"', figure)
    assert thin_line[0] == "c0 raw" and bold_line[0] == "c0"
    assert thin_line[1] != bold_line[1]
    # 5 neighbours of 0, 1, 0, 1, ... have the mean 2/5 or 3/5.
    assert [value for _, value in smooth(zigzag)[2:4]] == [0.4, 0.6]
    assert draw(Chart("m", ("a",)), {"a": zigzag[:11]}).count("<polyline") == 1
    assert draw(Chart("m", ("a",), noisy=False), {"a": zigzag}).count("<polyline") == 1


@pytest.mark.parametrize(
    ("steps", "sentence"),
    [
        (11, "One point per step."),
        (40, "Thin: single steps. Bold: the mean of 5 neighbouring steps."),
        # 300 points of 2 steps, and 25 of them.
        (600, "Thin: means of about 2 steps. Bold: the mean of 50 neighbouring steps."),
    ],
)
def test_the_page_says_what_thin_and_bold_are(tmp_path, steps, sentence):
    lines = [json.dumps({"step": step, "time": float(step), "train/loss": 1.0}) for step in range(1, steps + 1)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert f'<p class="lead">{sentence}</p>' in build(tmp_path)


def test_a_logarithmic_axis_leaves_out_what_it_cannot_show():
    figure = draw(Chart("m", ("a",), log=True), {"a": [(1, 0.0), (2, 1e-3), (3, 1e-1)]})
    assert figure.count("<circle") == 2 and "log scale" in figure
    assert draw(Chart("m", ("a",), log=True), {"a": [(1, 0.0)]}) == ""


@pytest.mark.parametrize("points", [[(5, 0.0)], [(1, 3.0), (2, 3.0)], [(1, -1.0), (2, 1e9)]])
def test_flat_single_and_huge_series_can_be_drawn(points):
    for log in (False, True):
        figure = draw(Chart("m", ("a",), log=log), {"a": points})
        assert "nan" not in figure and "inf" not in json.dumps(figure)
