"""Which modules molt has, and what each imports: for the tests of the layers.

The *RL path* is the static import graph of `molt.cli.train_rl_ray` inside the package: imports in
functions count, imports under `TYPE_CHECKING` do not, and a module named in a string does (vLLM
imports the worker extension by name).
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENTRY = "molt.cli.train_rl_ray"


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
