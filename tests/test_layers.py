"""The layers of the package: imports go down only, and each layer stays free of what belongs above it."""

import ast
import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
_spec = importlib.util.spec_from_file_location("modules", ROOT / "scripts" / "modules.py")
modules = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(modules)

LAYERS = [
    {
        "types",
        "columns",
        "config",
        "config_sft",
        "setting",
        "errors",
        "user_module",
        "rare_gc",
        "process",
        "hub",
        "config_file",
        "paths",
        "plugins",
        "checkpoint_files",
    },
    {"algo", "batch"},
    {"algorithm", "rules", "rules_sft", "roles"},
    {"agents", "chat", "data", "models", "parallel", "publish", "report"},
    {"rollout", "train"},
    {"cli", "loop", "recovery", "run", "spec", "worker_settings", "cluster", "records", "driver", "guard", "__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
NAMES_CUDA = ("molt/models/backends/", "molt/parallel/", "molt/publish/transfer.py", "molt/config.py")
"""Files and folders; the configuration names it as a choice."""
NAMES_BACKENDS = ("molt/models/backends/", "molt/config.py")
CALLS_RAY = {"handles.py", "engine_pool.py", "engine_group.py", "runner_pool.py", "keepers.py"}
"""Beside the workers, what calls them."""
NOT_IN_RL_PATH = re.compile(
    r"molt/(report/(page|charts|viewer\w*)|cli/(demo\w*|train_sft|eval|main|advice|agent)|agents/adapters|train/sft\w*|config_sft|rules_sft)\.py"
)

MODULES = modules.package_modules()
# The front door may re-export anything, and everything may read its version.
INNER = {name: path for name, path in MODULES.items() if name != "molt"}


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _imports(module: str) -> set[str]:
    """Everything imported anywhere in the module; here `TYPE_CHECKING` counts, for it is knowledge too."""
    return modules.imported_names(module, MODULES[module], ast.walk(_tree(MODULES[module])))


def _part(module: str) -> str:
    return module.split(".")[1]


def _level(module: str) -> int:
    assert _part(module) in LEVEL, f"{module}: give it a layer in AGENTS.md and in this test"
    return LEVEL[_part(module)]


def _code(path: Path) -> str:
    """The source without comments and docstrings."""
    tree = _tree(path)
    for constant in modules.bare_strings(tree):
        constant.value = ""
    return ast.unparse(tree)


def _foreign(module: str) -> set[str]:
    """The packages that it imports beside molt and the standard library."""
    roots = {name.split(".")[0] for name in _imports(module)}
    return roots - sys.stdlib_module_names - {"molt"}


def _relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("module", INNER)
def test_every_module_has_a_layer(module):
    assert _level(module) >= 0


@pytest.mark.parametrize("module", INNER)
def test_imports_go_down_only(module):
    inside = {name for name in _imports(module) if name in INNER}
    up = {name for name in inside if _level(name) > _level(module)}
    assert not up, f"{module} (layer {_level(module)}) imports upwards: {sorted(up)}"
    siblings = {"rollout": "train", "train": "rollout"}
    across = {name for name in inside if siblings.get(_part(module)) == _part(name)}
    assert not across, f"{module} imports {sorted(across)}: rollout and train meet in loop.py only"


@pytest.mark.parametrize("module", INNER)
def test_ray_is_imported_only_where_processes_are_made(module):
    processes, wiring = len(LAYERS) - 2, len(LAYERS) - 1
    level, name = _level(module), INNER[module].name
    makes_processes = name.endswith("_worker.py") or name in CALLS_RAY
    if level == wiring or (level == processes and makes_processes):
        return
    roots = {name.split(".")[0] for name in _imports(module)}
    assert "ray" not in roots, f"{module} imports ray: only *_worker.py, {sorted(CALLS_RAY)}, cli, loop, cluster may"


@pytest.mark.parametrize("module", [name for name in INNER if LEVEL.get(_part(name)) == 1])
def test_pure_layer_imports_torch_and_numpy_only(module):
    foreign = _foreign(module) - {"torch", "numpy"}
    assert not foreign, f"{module} imports {sorted(foreign)}: algo and batch are pure"
    assert "torch.distributed" not in _code(INNER[module]), f"{module} names torch.distributed: algo and batch are pure"


@pytest.mark.parametrize("module", [name for name in INNER if LEVEL.get(_part(name)) == 2])
def test_the_layer_of_tables_and_settings_imports_nothing_but_molt(module):
    foreign = _foreign(module)
    assert not foreign, f"{module} imports {sorted(foreign)}: it says what tables and settings say together"


@pytest.mark.parametrize("module", INNER)
def test_devices_are_named_in_few_places(module):
    if not _relative(INNER[module]).startswith(NAMES_CUDA):
        found = [line for line in _code(INNER[module]).splitlines() if re.search("cuda|CUDA_", line)]
        assert not found, f"{module} names cuda: {found}. Ask parallel/mesh.py for the device instead."


@pytest.mark.parametrize("module", INNER)
def test_collectives_and_rank_numbers_are_the_mesh_s(module):
    """FSDP and torch's checkpoints call their own; those of molt name the axes they run over."""
    if _relative(INNER[module]) == "molt/parallel/mesh.py":
        return
    assert "torch.distributed" not in _imports(module), f"{module} imports torch.distributed: ask parallel/mesh.py"
    found = re.findall(r"(?<!from )torch\.distributed\..*|.*\brank (?:==|!=|>) 0.*|.*get_rank.*", _code(INNER[module]))
    assert not found, f"{module}: {found}. Use `mesh.is_writer`, and a method of the mesh that names its axes."


@pytest.mark.parametrize("module", INNER)
def test_model_back_ends_are_known_to_themselves_alone(module):
    if not _relative(INNER[module]).startswith(NAMES_BACKENDS):
        known = "(?i)automodel|nemo_|PreTrainedModel|_no_split_modules|base_model"
        found = [line for line in _code(INNER[module]).splitlines() if re.search(known, line)]
        assert not found, f"{module} names a library of models: {found}. Ask the `Backend` of the model instead."
        others = {"molt.models.backends.choice", "molt.models.backends.protocol"}
        inside = {name for name in _imports(module) if name in INNER and name.startswith("molt.models.backends.")}
        assert inside <= others, f"{module} imports {sorted(inside - others)}: `choice.load_backend` imports a back end"


def test_the_rl_path_leaves_out_sft_the_demo_and_the_report_page():
    inside = [_relative(MODULES[name]) for name in modules.rl_path(MODULES)]
    assert not [path for path in inside if NOT_IN_RL_PATH.fullmatch(path)]


def test_import_graph_follows_functions_and_strings_but_not_type_checking(tmp_path):
    package = tmp_path / "molt"
    package.mkdir()
    files = {
        "a.py": "if TYPE_CHECKING:\n    import molt.d\ndef f():\n    from molt import b\n",
        "b.py": '"""molt.d"""\nEXTENSION = "molt.c.Worker"\n',
        "c.py": "from . import e\n",
        "d.py": "",
        "e.py": "",
    }
    for name, text in files.items():
        (package / name).write_text(text)
    found = modules.package_modules(tmp_path)
    assert modules.rl_path(found, "molt.a") == {"molt.a", "molt.b", "molt.c", "molt.e"}


def test_there_are_no_circles_between_files():
    found = [" -> ".join(circle) for circle in modules.circles(modules.import_graph(MODULES))]
    assert not found, f"imports form circles: {found}. Move what both need into a file below them."


def test_there_are_no_circles_between_parts():
    parts = modules.part_graph(modules.import_graph(MODULES))
    found = [" -> ".join(circle) for circle in modules.circles(parts)]
    assert not found, f"imports form circles between parts: {found}. Move what both need into a part below them."


def package(root: Path, files: dict[str, str]) -> dict[str, Path]:
    """The modules of a package molt with these files."""
    for name, text in files.items():
        path = root / "molt" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return modules.package_modules(root)


CIRCLES = {
    "files": (
        {"a/x.py": "from molt.a.y import f\n", "a/y.py": "import molt.a.x\n"},
        [["molt.a.x", "molt.a.y", "molt.a.x"]],
        [],
    ),
    "in a function": (
        {"x.py": "import molt.y\n", "y.py": "def f():\n    from molt import x\n"},
        [["molt.x", "molt.y", "molt.x"]],
        [["x", "y", "x"]],
    ),
    "for types alone": (
        {"x.py": "if TYPE_CHECKING:\n    from molt.y import C\n", "y.py": "from . import x\n"},
        [["molt.x", "molt.y", "molt.x"]],
        [["x", "y", "x"]],
    ),
    "of several files": (
        {"a/x.py": "import molt.a.y\n", "a/y.py": "import molt.a.z, molt.a.v", "a/z.py": "import molt.a.x\n",
         "a/v.py": "import molt.a.w\n", "a/w.py": "import molt.a.x\n"},
        [["molt.a.v", "molt.a.w", "molt.a.x", "molt.a.y", "molt.a.v"]],
        [],
    ),
    "parts whose files have none": (
        {"a/x.py": "import molt.b.x\n", "a/y.py": "", "b/x.py": "", "b/y.py": "from molt.a.y import f\n"},
        [],
        [["a", "b", "a"]],
    ),
    "a package that collects its files": (
        {"a/__init__.py": "from molt.a import x, y\n", "a/x.py": "from molt.a.y import f\n", "a/y.py": "",
         "b.py": "from molt.a import x\n"},
        [],
        [],
    ),
    "a file that imports its package back": (
        {"a/__init__.py": "from molt.a import x, y\n", "a/x.py": "from molt.a import y\n", "a/y.py": ""},
        [["molt.a", "molt.a.x", "molt.a"]],
        [],
    ),
    "the front door": ({"__init__.py": "from molt.x import f\n", "x.py": "from molt import VERSION\n"}, [], []),
}  # fmt: skip


@pytest.mark.parametrize("name", CIRCLES)
def test_circles_are_found(tmp_path, name):
    files, between_files, between_parts = CIRCLES[name]
    graph = modules.import_graph(package(tmp_path, files))
    assert modules.circles(graph) == between_files
    assert modules.circles(modules.part_graph(graph)) == between_parts
