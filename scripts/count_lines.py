"""Code lines of molt, without blanks, comments and docstrings.

    python scripts/count_lines.py            two totals and a table by folder
    python scripts/count_lines.py --check    exit 1 unless README.md quotes the RL path's total

The *RL path* is the static import graph of `molt.cli.train_rl_ray` inside the package: imports in
functions count, imports under `TYPE_CHECKING` do not, and a module named in a string does (vLLM
imports the worker extension by name).
"""

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENTRY = "molt.cli.train_rl_ray"
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def package_modules(root: Path = ROOT) -> dict[str, Path]:
    """Dotted name to file of every module in molt/."""
    modules = {}
    for path in sorted((root / "molt").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def bare_strings(tree: ast.AST) -> list[ast.Constant]:
    """Docstrings, and the strings under fields."""
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]


def code_lines(source: str) -> int:
    """Lines that hold at least one token of code.

    A blank line inside a multi-line string is blank; docstrings hold no code.
    """
    # Spans in whole lines: ast counts columns in bytes, tokenize in characters.
    docs = {(node.lineno, node.end_lineno) for node in bare_strings(ast.parse(source))}
    text, lines = source.splitlines(), set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        span = (token.start[0], token.end[0])
        if token.type in NOT_CODE or (token.type == tokenize.STRING and span in docs):
            continue
        lines.update(range(span[0], span[1] + 1))
    return sum(1 for line in lines if text[line - 1].strip())


def _is_type_checking(test: ast.expr) -> bool:
    return getattr(test, "id", getattr(test, "attr", None)) == "TYPE_CHECKING"


def walk_runtime(node: ast.AST) -> Iterator[ast.AST]:
    """Every node that can execute: bodies of `if TYPE_CHECKING` are left out."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(node, ast.If) and _is_type_checking(node.test) and child in node.body:
            continue
        yield from walk_runtime(child)


def imported_names(module: str, path: Path, nodes: Iterator[ast.AST]) -> set[str]:
    """Dotted names that the import statements among `nodes` mention; `from a import b` gives `a` and `a.b`."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            names.add(base)
            names.update(f"{base}.{alias.name}" for alias in node.names)
    return names


def _modules_used(module: str, modules: dict[str, Path]) -> set[str]:
    tree = ast.parse(modules[module].read_text())
    docs = {id(node) for node in bare_strings(tree)}
    nodes = list(walk_runtime(tree))
    names = imported_names(module, modules[module], iter(nodes))
    for node in nodes:
        text = node.value if isinstance(node, ast.Constant) and id(node) not in docs else None
        if isinstance(text, str) and re.fullmatch(r"molt(\.\w+)+", text):
            names |= {text, text.rpartition(".")[0]}
    found = {name for name in names if name in modules}
    # Importing a.b.c runs a and a.b first.
    parents = {".".join(name.split(".")[:i]) for name in found for i in range(1, name.count(".") + 1)}
    return found | (parents & modules.keys())


def rl_path(modules: dict[str, Path], entry: str = ENTRY) -> set[str]:
    """Modules that `entry` imports, directly or not, itself included."""
    if entry not in modules:
        raise SystemExit(f"{entry} (=absent): there is no RL path to count. Write molt/cli/train_rl_ray.py first.")
    seen: set[str] = set()
    todo = {entry, "molt", "molt.cli"} & modules.keys()
    while todo:
        module = todo.pop()
        seen.add(module)
        todo |= _modules_used(module, modules) - seen
    return seen


def _folder(path: Path) -> str:
    parts = path.relative_to(ROOT / "molt").parts
    return parts[0] + "/" if len(parts) > 1 else parts[0]


def check(total: int, readme: Path = ROOT / "README.md") -> str | None:
    """What is wrong with the number that the README quotes, or None."""
    text = readme.read_text() if readme.exists() else ""
    quoted = re.search(r"RL path: ([\d,]+) code lines", text)
    if quoted and int(quoted[1].replace(",", "")) == total:
        return None
    value = f"{quoted[0]!r}" if quoted else "no line `RL path: N code lines`"
    return f"README.md (={value}): readers would be told a wrong size. Write `RL path: {total:,} code lines`."


def main() -> int:
    modules = package_modules()
    lines = {name: code_lines(path.read_text()) for name, path in modules.items()}
    path_modules = rl_path(modules)
    total = sum(lines[name] for name in path_modules)
    if "--check" in sys.argv[1:]:
        problem = check(total)
        print(problem or f"README.md quotes the RL path's {total:,} code lines")
        return 1 if problem else 0
    everything, on_path = Counter(), Counter()
    for name, path in modules.items():
        everything[_folder(path)] += lines[name]
        on_path[_folder(path)] += lines[name] if name in path_modules else 0
    print(f"{'':<14}{'RL path':>9}{'molt/':>9}")
    for folder in everything:
        print(f"{folder:<14}{on_path[folder]:>9,}{everything[folder]:>9,}")
    print(f"{'total':<14}{total:>9,}{sum(lines.values()):>9,}")
    print(f"\nRL path: {total:,} code lines in {len(path_modules)} modules; molt/: {sum(lines.values()):,}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
