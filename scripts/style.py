"""How dense the code of a tree is, in the numbers of STYLE.md's table; several trees side by side.

    python scripts/style.py molt ../other/package     one table: each tree, its folders and its total
    python scripts/style.py molt --functions 20       the densest functions of the trees

Every file is formatted first, with the same settings, so that a tree's own line breaks do not count. Comments and
docstrings do not count either. Nothing enforces these numbers.
"""

import argparse
import ast
import io
import shutil
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

LONG_FUNCTION = 60
"""Lines, from `def` to the last one; a longer function is counted as long."""
DEEP_NESTING = 3
"""Blocks inside a function; a function with more is counted as deep."""
SHORT_FUNCTION = 5
"""Lines of code; `--functions` leaves out shorter ones, whose density says little."""

NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Counts:
    """What is counted in a file, or added up over files."""

    tokens: int = 0
    lines: int = 0
    """Lines that hold a token of code."""
    tuple_assignments: int = 0
    nested_comprehensions: int = 0
    lambdas: int = 0
    conditional_expressions: int = 0
    long_functions: int = 0
    deep_functions: int = 0
    file_lines: list[int] = field(default_factory=list)
    """`lines` of every file that has any."""

    def add(self, other: "Counts") -> None:
        self.tokens += other.tokens
        self.lines += other.lines
        self.tuple_assignments += other.tuple_assignments
        self.nested_comprehensions += other.nested_comprehensions
        self.lambdas += other.lambdas
        self.conditional_expressions += other.conditional_expressions
        self.long_functions += other.long_functions
        self.deep_functions += other.deep_functions
        self.file_lines += other.file_lines

    @property
    def tokens_per_line(self) -> float:
        return self.tokens / max(1, self.lines)

    def per_thousand_lines(self, count: int) -> float:
        return 1000 * count / max(1, self.lines)


@dataclass(frozen=True)
class DenseFunction:
    """One function of `--functions`."""

    file: str
    line: int
    """In the formatted file."""
    name: str
    tokens: int
    lines: int

    @property
    def tokens_per_line(self) -> float:
        return self.tokens / max(1, self.lines)


def formatted_files(tree: Path) -> dict[str, str]:
    """The source of every Python file of a tree, or of one file, by path below it, as ruff formats it."""
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary)
        if tree.is_dir():
            paths = sorted(tree.rglob("*.py"))
            root = tree
        else:
            paths = [tree]
            root = tree.parent
        for path in paths:
            target = copy / path.relative_to(root)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        _format(copy)
        return {path.relative_to(root).as_posix(): (copy / path.relative_to(root)).read_text() for path in paths}


def _format(folder: Path) -> None:
    command = [
        *_ruff(),
        "format",
        "--isolated",
        "--no-cache",
        "--quiet",
        "--no-respect-gitignore",
        "--line-length=120",
        "--config=format.skip-magic-trailing-comma=true",
        str(folder),
    ]
    subprocess.run(command, check=True)


def _ruff() -> list[str]:
    """The ruff beside this Python, else the one on the path."""
    beside = Path(sys.executable).with_name("ruff")
    if beside.exists():
        return [str(beside)]
    return ["ruff"]


def count(source: str) -> Counts:
    """Count one file."""
    tree = ast.parse(source)
    counts = Counts()
    code = code_tokens(source, tree)
    counts.tokens = len(code)
    counts.lines = len(lines_of(code))
    for node in ast.walk(tree):
        counts.tuple_assignments += is_tuple_assignment(node)
        counts.nested_comprehensions += is_nested_comprehension(node)
        counts.lambdas += isinstance(node, ast.Lambda)
        counts.conditional_expressions += isinstance(node, ast.IfExp)
        if isinstance(node, FUNCTIONS):
            counts.long_functions += length(node) > LONG_FUNCTION
            counts.deep_functions += nesting(node.body) > DEEP_NESTING
    if counts.lines:
        counts.file_lines.append(counts.lines)
    return counts


def code_tokens(source: str, tree: ast.Module) -> list[tokenize.TokenInfo]:
    """The tokens of a file but for comments, line ends, indentation and bare strings."""
    string_lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and is_string(node.value):  # a docstring, or the string under a field
            string_lines.update(range(node.lineno, last_line(node) + 1))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [token for token in tokens if token.type not in NOT_CODE and token.start[0] not in string_lines]


def lines_of(tokens: Sequence[tokenize.TokenInfo]) -> set[int]:
    lines: set[int] = set()
    for token in tokens:
        lines.update(range(token.start[0], token.end[0] + 1))
    return lines


def is_string(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def is_tuple_assignment(node: ast.AST) -> bool:
    """`a, b = x, y`. The result of a call that is unpacked is none."""
    return isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)


def is_nested_comprehension(node: ast.AST) -> bool:
    """A comprehension or generator expression with several `for`, or with another one anywhere inside."""
    if not isinstance(node, COMPREHENSIONS):
        return False
    inside = [child for child in ast.walk(node) if isinstance(child, COMPREHENSIONS)]
    return len(node.generators) > 1 or len(inside) > 1


def length(function: Function) -> int:
    return last_line(function) - function.lineno + 1


def last_line(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


def nesting(body: Sequence[ast.stmt]) -> int:
    """How many blocks the deepest statement is in. An `elif` is as deep as its `if`; inner functions count alone."""
    deepest = 0
    for statement in body:
        for branch in _branches(statement):
            if _is_elif(statement, branch):
                deepest = max(deepest, nesting(branch))
            else:
                deepest = max(deepest, 1 + nesting(branch))
    return deepest


def _branches(statement: ast.stmt) -> list[list[ast.stmt]]:
    """The statements inside a block, by branch; [] for what is no block."""
    if isinstance(statement, ast.If | ast.For | ast.AsyncFor | ast.While):
        branches = [statement.body, statement.orelse]
    elif isinstance(statement, ast.With | ast.AsyncWith):
        branches = [statement.body]
    elif isinstance(statement, ast.Try | ast.TryStar):
        handled = [handler.body for handler in statement.handlers]
        branches = [statement.body, *handled, statement.orelse, statement.finalbody]
    elif isinstance(statement, ast.Match):
        branches = [case.body for case in statement.cases]
    else:
        branches = []
    return [branch for branch in branches if branch]


def _is_elif(statement: ast.stmt, branch: list[ast.stmt]) -> bool:
    return isinstance(statement, ast.If) and branch is statement.orelse and isinstance(branch[0], ast.If)


def functions(file: str, source: str) -> Iterator[DenseFunction]:
    """Every function of a file with its tokens; those of an inner function count for both."""
    tree = ast.parse(source)
    code = code_tokens(source, tree)
    for node in ast.walk(tree):
        if not isinstance(node, FUNCTIONS):
            continue
        tokens = [token for token in code if node.lineno <= token.start[0] <= last_line(node)]
        yield DenseFunction(
            file=file,
            line=node.lineno,
            name=node.name,
            tokens=len(tokens),
            lines=len(lines_of(tokens)),
        )


def densest(files: dict[str, str], number: int) -> list[DenseFunction]:
    """The `number` functions with the most tokens in a line, densest first."""
    found: list[DenseFunction] = []
    for file, source in files.items():
        found += [function for function in functions(file, source) if function.lines >= SHORT_FUNCTION]
    found.sort(key=_density, reverse=True)
    return found[:number]


def _density(function: DenseFunction) -> float:
    return function.tokens_per_line


def by_folder(files: dict[str, str]) -> dict[str, Counts]:
    """Counts of every top folder of a tree; files beside the folders are together under `.`."""
    folders: dict[str, Counts] = {}
    for file, source in files.items():
        top, slash, _ = file.partition("/")
        folder = "."
        if slash:
            folder = f"{top}/"
        folders.setdefault(folder, Counts()).add(count(source))
    return folders


def total(folders: dict[str, Counts]) -> Counts:
    everything = Counts()
    for counts in folders.values():
        everything.add(counts)
    return everything


NAME_WIDTH = 32
COLUMNS = (
    ("tokens", "a line"),
    ("lines", ""),
    ("tuple", "assign"),
    ("nested", "compr."),
    ("", "lambdas"),
    ("condi-", "tional"),
    ("long", "funct."),
    ("deep", "funct."),
    ("median", "file"),
)
"""The two lines of each column's heading."""
NOTE = (
    "Tuple assignments, nested comprehensions, lambdas and conditional expressions: in 1,000 lines of code.",
    f"Long: over {LONG_FUNCTION} lines. Deep: nesting over {DEEP_NESTING}. Median: lines of code of a file.",
)


def row(name: str, counts: Counts) -> str:
    middle = median(counts.file_lines or [0])
    return (
        f"{name:{NAME_WIDTH}}"
        f"{counts.tokens_per_line:8.1f}"
        f"{counts.lines:8}"
        f"{counts.per_thousand_lines(counts.tuple_assignments):8.1f}"
        f"{counts.per_thousand_lines(counts.nested_comprehensions):8.1f}"
        f"{counts.per_thousand_lines(counts.lambdas):8.1f}"
        f"{counts.per_thousand_lines(counts.conditional_expressions):8.1f}"
        f"{counts.long_functions:8}"
        f"{counts.deep_functions:8}"
        f"{middle:8.0f}"
    )


def print_headings() -> None:
    upper = "".join(f"{above:>8}" for above, _ in COLUMNS)
    lower = "".join(f"{below:>8}" for _, below in COLUMNS)
    print(" " * NAME_WIDTH + upper)
    print(" " * NAME_WIDTH + lower)


def print_table(trees: dict[str, dict[str, str]]) -> None:
    """Every folder of each tree, then the totals, one under the other."""
    totals: dict[str, Counts] = {}
    print_headings()
    for name, files in trees.items():
        folders = by_folder(files)
        totals[name] = total(folders)
        print(name)
        for folder, counts in sorted(folders.items()):
            print(row(f"  {folder}", counts))
    print("in total")
    for name, counts in totals.items():
        print(row(f"  {name}", counts))
    print(*NOTE, sep="\n")


def print_functions(trees: dict[str, dict[str, str]], number: int) -> None:
    files: dict[str, str] = {}
    for name, of_tree in trees.items():
        for file, source in of_tree.items():
            files[f"{name}/{file}"] = source
    for function in densest(files, number):
        place = f"{function.file}:{function.line} {function.name}"
        print(f"{function.tokens_per_line:5.1f}  {function.lines:4} lines  {place}")


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="Density of code, in the numbers of STYLE.md's table.")
    parser.add_argument("trees", nargs="+", type=Path, help="folders, or single files")
    parser.add_argument("--functions", type=int, metavar="N", help="print the N densest functions instead")
    options = parser.parse_args(arguments)
    for tree in options.trees:
        if not tree.exists():
            parser.error(f"{tree} does not exist: there is nothing to measure. Name a folder or a Python file.")
    trees = {str(tree): formatted_files(tree) for tree in options.trees}
    if options.functions is None:
        print_table(trees)
    else:
        print_functions(trees, options.functions)


if __name__ == "__main__":
    main(sys.argv[1:])
