"""Which modules molt has, what each imports, and where imports form circles: for the tests of the layers.

The *RL path* is the static import graph of `molt.cli.train_rl_ray` inside the package: imports in
functions count, imports under `TYPE_CHECKING` do not, and a module named in a string does (vLLM
imports the worker extension by name).

The *import graph* of the circles holds every import statement, those in functions and under `TYPE_CHECKING` included:
a file that names another one knows it.

    python scripts/modules.py        prints the circles between files and between parts
"""

import ast
import re
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "molt"
ENTRY = "molt.cli.train_rl_ray"
MODULE_NAME = re.compile(r"molt(\.\w+)+")

Graph = dict[str, set[str]]
"""For each module or part, those that it imports."""


def package_modules(root: Path = ROOT) -> dict[str, Path]:
    """Dotted name to file of every module in molt/."""
    modules: dict[str, Path] = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = list(path.relative_to(root).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        modules[".".join(parts)] = path
    return modules


def bare_strings(tree: ast.AST) -> list[ast.Constant]:
    """Docstrings, and the strings under fields."""
    strings: list[ast.Constant] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Expr):
            continue
        value = node.value
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            strings.append(value)
    return strings


def _is_type_checking(test: ast.expr) -> bool:
    if isinstance(test, ast.Attribute):
        return test.attr == "TYPE_CHECKING"
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


def walk_runtime(node: ast.AST) -> Iterator[ast.AST]:
    """Every node that can execute: bodies of `if TYPE_CHECKING` are left out."""
    yield node
    skipped: list[ast.stmt] = []
    if isinstance(node, ast.If) and _is_type_checking(node.test):
        skipped = node.body
    for child in ast.iter_child_nodes(node):
        if child not in skipped:
            yield from walk_runtime(child)


def imported_names(module: str, path: Path, nodes: Iterable[ast.AST]) -> set[str]:
    """Dotted names that the import statements among `nodes` mention; `from a import b` gives `a` and `a.b`."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                names.add(alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = _base(node, module, path)
            names.add(base)
            for alias in node.names:
                names.add(f"{base}.{alias.name}")
    return names


def _base(node: ast.ImportFrom, module: str, path: Path) -> str:
    """The absolute name of what a `from` statement imports from."""
    if not node.level:
        return node.module or ""
    package = module.split(".")
    if path.name != "__init__.py":
        package.pop()
    for _ in range(node.level - 1):
        package.pop()
    if node.module:
        package.append(node.module)
    return ".".join(package)


def _modules_used(module: str, modules: dict[str, Path]) -> set[str]:
    """The modules that run when `module` does, by imports and by name in a string."""
    tree = ast.parse(modules[module].read_text())
    docs = {id(node) for node in bare_strings(tree)}
    nodes = list(walk_runtime(tree))
    names = imported_names(module, modules[module], nodes)
    for node in nodes:
        if not isinstance(node, ast.Constant) or id(node) in docs:
            continue
        text = node.value
        if isinstance(text, str) and MODULE_NAME.fullmatch(text):
            names.add(text)
            names.add(text.rpartition(".")[0])

    used: set[str] = set()
    for name in names & modules.keys():
        used.add(name)
        used |= _parents(name) & modules.keys()  # importing a.b.c runs a and a.b first
    return used


def _parents(name: str) -> set[str]:
    """`a` and `a.b` of `a.b.c`."""
    parents: set[str] = set()
    parent = name.rpartition(".")[0]
    while parent:
        parents.add(parent)
        parent = parent.rpartition(".")[0]
    return parents


def rl_path(modules: dict[str, Path], entry: str = ENTRY) -> set[str]:
    """Modules that `entry` imports, directly or not, itself included."""
    if entry not in modules:
        raise SystemExit(f"{entry} (=absent): there is no RL path to follow. Write molt/cli/train_rl_ray.py first.")
    seen: set[str] = set()
    todo = {entry, PACKAGE, f"{PACKAGE}.cli"} & modules.keys()
    while todo:
        module = todo.pop()
        seen.add(module)
        todo |= _modules_used(module, modules) - seen
    return seen


def import_graph(modules: dict[str, Path]) -> Graph:
    """For each module the modules that it imports anywhere in the file.

    `from package import module` imports both: inside the package this is a circle if the package's `__init__` imports
    the file that says it; `from package.module import name` is none. The root package is left out: it may import
    anything, and every module may read its version.
    """
    graph: Graph = {}
    for module, path in modules.items():
        if module == PACKAGE:
            continue
        tree = ast.parse(path.read_text())
        names = imported_names(module, path, ast.walk(tree))
        graph[module] = names & modules.keys()
        graph[module] -= {PACKAGE, module}
    return graph


def part(module: str) -> str:
    """The folder or the file directly under molt/ that a module belongs to."""
    return module.split(".")[1]


def part_graph(graph: Graph) -> Graph:
    """The imports between parts, from those between modules."""
    parts: Graph = {}
    for module, imported in graph.items():
        here = part(module)
        others = {part(name) for name in imported}
        others.discard(here)
        parts.setdefault(here, set()).update(others)
    return parts


def circles(graph: Graph) -> list[list[str]]:
    """A shortest circle, `[a, b, a]`, of each set of nodes that reach each other; [] where imports go one way only."""
    reached = {node: _reachable(graph, node) for node in graph}
    found: list[list[str]] = []
    seen: set[str] = set()
    for node in sorted(graph):
        if node in seen or node not in reached[node]:
            continue
        seen.update(other for other in reached[node] if node in reached[other])
        found.append(_shortest_circle(graph, node))
    return found


def _reachable(graph: Graph, start: str) -> set[str]:
    """Every node at the end of at least one edge from `start`."""
    seen: set[str] = set()
    todo = set(graph[start])
    while todo:
        node = todo.pop()
        seen.add(node)
        todo |= graph[node] - seen
    return seen


def _shortest_circle(graph: Graph, start: str) -> list[str]:
    """The nodes from `start` back to itself. There must be such a way."""
    paths = deque([[start]])
    seen: set[str] = set()
    while paths:
        path = paths.popleft()
        for node in sorted(graph[path[-1]]):
            if node == start:
                return [*path, start]
            if node not in seen:
                seen.add(node)
                paths.append([*path, node])
    raise ValueError(f"{start} is in no circle")


if __name__ == "__main__":
    files = import_graph(package_modules())
    for circle in [*circles(files), *circles(part_graph(files))]:
        print(" -> ".join(circle))
