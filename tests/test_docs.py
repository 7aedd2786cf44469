"""The documents say what is: paths, flags, metrics, test files, links and code examples in them are real."""

import ast
import dataclasses
import json
import re
import runpy
from pathlib import Path

import pytest

from molt.agents.load import load_runner
from molt.agents.scorer_process import load_scorer
from molt.algo import advantage, loss
from molt.cli.args import flags
from molt.config import RLConfig
from molt.config_sft import SftConfig

ROOT = Path(__file__).resolve().parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "AGENTS.md", *DOCS, *sorted((ROOT / "examples").rglob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))
SETTINGS = flags(RLConfig) | flags(SftConfig)
SECTIONS = {name.partition(".")[0] for name in SETTINGS if "." in name}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str = "") -> list[str]:
    """The fenced blocks of a page in one language."""
    parts = re.split(r"^```(\w*)\n", page.read_text(), flags=re.M)  # text, language, block, "", text, ...
    return [block for word, block in zip(parts[1::4], parts[2::4], strict=True) if word == language]


def own_words(page: Path) -> str:
    """The text of a page; of tables that compare molt with other systems, the last column, which is molt's."""
    text = page.read_text()
    if page.name != "coming_from_trl_and_verl.md":
        return text
    return re.sub(r"^\|.*\| ([^|]+) \|$", r"\1", text, flags=re.M)


def tree() -> dict[str, str]:
    """Every path in the tree of docs/tree.md, and its comment."""
    (text,) = [block for block in blocks(ROOT / "docs" / "tree.md") if block.startswith("molt/\n")]
    found, folders = {}, []
    for line in text.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name, _, comment = line.strip().partition("  ")
        folders = folders[:depth]
        found["".join(folders) + name] = comment.strip()
        if name.endswith("/"):
            folders.append(name)
    return found


def test_the_tree_names_what_exists_and_says_what_it_is():
    for path, comment in tree().items():
        assert (ROOT / path).is_dir() if path.endswith("/") else (ROOT / path).is_file(), path
        assert comment or path in ("molt/", "scripts/"), f"{path}: say what it is"


def test_every_file_is_in_the_tree():
    files = [*(ROOT / "molt").rglob("*.*"), *EXAMPLES, *(ROOT / "scripts").glob("*.*")]
    # An __init__.py holds its folder's docstring; the folder has a line of its own.
    files = [path for path in files if path.is_file() and "__pycache__" not in path.parts]
    missing = {name_of(path) for path in files if path.name != "__init__.py"} - tree().keys()
    missing |= {f"{name_of(path.parent)}/" for path in files if path.name == "__init__.py"} - tree().keys()
    assert not missing, f"docs/tree.md: add {sorted(missing)}"


@pytest.mark.parametrize("page", [*PAGES, *EXAMPLES], ids=name_of)
def test_every_flag_and_setting_exists(page):
    text = own_words(page)
    switches_off = {re.sub(r"(\w+)$", r"no_\1", name) for name, hint in SETTINGS.items() if hint is bool}
    named = set(re.findall(r"--([a-z]\w*(?:\.\w+)+)", text))
    dotted = set(re.findall(r"`([a-z]+(?:\.\w+)+)`", text))
    settings = {name for name in dotted if name.partition(".")[0] in SECTIONS and not name.endswith(".py")}
    unknown = (named | settings) - SETTINGS.keys() - switches_off
    assert not unknown


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_path_and_make_target_exists(page):
    text = page.read_text()
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)|src(?:set)?=\"([^\"]+)\"", text):
        path = "".join(link)
        assert (page.parent / path).exists(), path
    for path in re.findall(r"`((?:molt|tests|docs|examples|scripts|constraints)/[\w./]*)`", text):
        assert (ROOT / path).exists(), path
    for path, folder in re.findall(r"`((\w+)/\w+\.py)`", text):
        assert not (ROOT / "molt" / folder).is_dir() or (ROOT / "molt" / path).exists(), path
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(re.findall(r"`make (\w+)", text)) <= set(targets)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_into_a_page_names_a_heading(page):
    for path, anchor in re.findall(r"\]\(([^)#]*)#([^)]+)\)", page.read_text()):
        target = page.parent / path if path else page
        assert anchor in anchors(target), f"{path}#{anchor}"


def strings(path: Path) -> set[str]:
    """The string constants of a module; an f-string as its text with `{}` for what is filled in."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    filled = [node.values for node in nodes if isinstance(node, ast.JoinedStr)]
    pieces = {id(part) for parts in filled for part in parts}
    texts = {"".join(part.value if isinstance(part, ast.Constant) else "{}" for part in parts) for parts in filled}
    constants = [node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return texts | {node.value for node in constants if id(node) not in pieces}


METRIC = re.compile(r"(train|rollout|eval|mismatch|ratio|staleness|perf|timing|faults)/[\w<>/{}]+")
READERS = {"page.py", "charts.py", "console.py", "demo.py", "metrics.py"}
"""They show metrics or add them up; what they can show need not exist."""
SOURCES = [path for path in (ROOT / "molt").rglob("*.py") if path.name not in READERS]


def documented() -> set[str]:
    """The names in the first cells of the tables of docs/metrics.md."""
    cells = re.findall(r"^\| (`[^|]+`) \|", (ROOT / "docs" / "metrics.md").read_text(), re.M)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def test_every_metric_in_the_code_is_documented():
    emitted = {text for path in SOURCES for text in strings(path) if METRIC.fullmatch(text)}
    assert len(emitted) > 20
    # A name that is filled in stands for several rows: timing/{} for every timing/...
    patterns = {re.escape(text).replace(r"\{\}", r"[\w<>]+") for text in emitted}
    missing = [pattern for pattern in patterns if not any(re.fullmatch(pattern, name) for name in documented())]
    assert not missing, f"docs/metrics.md: add {missing}"


def test_every_documented_metric_is_in_the_code():
    everything = set().union(*(strings(path) for path in SOURCES))
    for name in documented():
        # The last part is a string of its own where the name is put together: `wait_s`, `pass{}`, `timeout`.
        generic = re.sub(r"<\w+>", "{}", name)
        assert {generic, generic.rpartition("/")[2]} & everything, f"docs/metrics.md: nothing emits {name}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_metric_that_a_page_names_is_documented(page):
    patterns = [re.sub(r"<\w+>", r"[\\w<>]+", name) for name in documented()]
    for text in re.findall(r"`([^`\n]+)`", own_words(page)):
        if METRIC.fullmatch(text) and not (ROOT / "molt" / text).exists():
            assert any(re.fullmatch(pattern, text) for pattern in patterns), text


EXTENDING = blocks(ROOT / "docs" / "extending.md", "python")
AGENT_EXAMPLES = [
    pytest.param(block, id=f"{name_of(page)}-{i}")
    for page in (ROOT / "README.md", *DOCS)
    for i, block in enumerate(blocks(page, "python"))
    if "AgentRunner" in block
]


@pytest.mark.parametrize("source", AGENT_EXAMPLES)
def test_agents_in_the_documents_can_be_loaded(source, tmp_path):
    (tmp_path / "agent.py").write_text(source)
    load_runner(str(tmp_path / "agent.py"))


def test_the_data_script_of_the_first_hour_writes_three_disjoint_sets(tmp_path):
    (source,) = [block for block in blocks(ROOT / "docs" / "first_hour.md", "python") if "held_out.jsonl" in block]
    (tmp_path / "data.py").write_text(source)
    runpy.run_path(str(tmp_path / "data.py"))
    labels: dict[str, str] = {}
    for name, count in (("held_out", 512), ("sft", 4_096), ("rl", 16_384)):
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        assert len(rows) == count
        assert not labels.keys() & {row["input"] for row in rows}
        labels |= {row["input"]: row["label"] for row in rows}
    assert len(labels) == 512 + 4_096 + 16_384
    for number, label in labels.items():
        odd = re.sub("[02468]", "", number)
        assert len(number) == 5 and label == str(5 - len(odd))


def test_scorers_in_the_documents_can_be_loaded(tmp_path):
    sources = [block for page in DOCS for block in blocks(page, "python") if "def score(" in block]
    assert len(sources) == 2
    loaded = []
    for number, source in enumerate(sources):
        path = tmp_path / f"scorer{number}.py"
        path.write_text(source)
        loaded.append(load_scorer(str(path)))
    assert [(scorer.wants_judge, scorer.overlaps) for scorer in loaded] == [(False, False), (True, True)]


def test_the_plug_ins_in_the_documents_are_the_examples():
    written = "".join(path.read_text() for path in EXAMPLES if path.parent.name in ("algorithms", "schemes"))
    others = ("ADVANTAGES", "LOSSES", "Column")
    shown = [block for block in EXTENDING if not any(name in block for name in others)]
    assert len(shown) == 3 and all(block.strip() in written for block in shown)
    assert all(len(block.splitlines()) <= 15 for block in shown)


def test_the_estimator_in_the_documents_runs():
    (source,) = (block for block in EXTENDING if "ADVANTAGES" in block)
    names = {**vars(advantage), "ADVANTAGES": dict(advantage.ADVANTAGES)}
    exec(source, names)
    torch = names["torch"]
    rewards, groups = torch.tensor([1.0, 0.25, 0.0, 0.5], dtype=torch.float64), torch.tensor([7, 7, 3, 3])
    assert names["ADVANTAGES"]["best_of_group"].fn(rewards, groups).tolist() == [0.0, -0.75, -0.5, 0.0]


def test_the_loss_in_the_documents_runs():
    (source,) = (block for block in EXTENDING if "LOSSES" in block)
    names = {**vars(loss), "LOSSES": dict(loss.LOSSES)}
    exec(source, names)
    row, torch = names["LOSSES"]["truncated"], names["torch"]
    low, high = row.low_high
    logprobs = torch.tensor([[3.0, 0.5]]).log()
    old, mask = torch.zeros(1, 2), torch.ones(1, 2).bool()
    found, clipped = row.fn(logprobs, old, torch.full((1, 2), 5.0), mask, mask.long(), low=low, high=high)
    assert found.tolist() == [pytest.approx([-10.0, -2.5])]  # -min(3, 2) * 5 and -0.5 * 5
    assert clipped.tolist() == [[True, False]]


@pytest.mark.parametrize("row", [advantage.Estimator, loss.PolicyLoss])
def test_every_field_of_a_row_is_documented(row):
    text = (ROOT / "docs" / "extending.md").read_text()
    (_, table) = text.split(f"| field of `{row.__name__}` |")
    cells = re.findall(r"^\| (`[^|]+`) \|", table.split("\n\n")[0], re.M)
    documented = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert documented == {field.name for field in dataclasses.fields(row)}


def test_losses_in_the_documents_are_those_of_the_code():
    text = (ROOT / "docs" / "losses.md").read_text()
    table = re.findall(r"^\| `(\w+)`[^|]*\| [^|]+ \| ([\d.]+) ([\d.]+) \| [^|]*arXiv", text, re.M)
    assert {(name, (float(low), float(high))) for name, low, high in table} == {
        (name, row.low_high) for name, row in loss.LOSSES.items()
    }


def test_estimators_in_the_documents_are_those_of_the_code():
    text = (ROOT / "docs" / "algorithms.md").read_text()
    table = re.findall(r"^\| `(\w+)`[^|]*\| [^|]+ \| (group|token) \| (yes|no) \|$", text, re.M)
    code = {(name, e.level, "yes" if e.whiten else "no") for name, e in advantage.ADVANTAGES.items()}
    assert set(table) == code


def test_assistants_are_pointed_to_the_same_page():
    assert "AGENTS.md" in (ROOT / "CLAUDE.md").read_text()
