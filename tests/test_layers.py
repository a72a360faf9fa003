"""The layer order of `conduit/`, read from its source, the habits that keep the tree readable, and what importing it may not do.

The order is the one that `conduit/__init__.py` opens with: a layer imports only what stands above it. `python -m perf.bars house` prints what
the checks here count.
"""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "conduit"

LAYERS: tuple[frozenset[str], ...] = tuple(
    frozenset(rooms.split())
    for rooms in (
        "errors numbers schema field infer_fields arrays nesting clock alarms forking",
        "contracts",
        "native.compile",
        "native",
        "store.format",
        "store.pages",
        "store.segment",
        "store.tables",
        "store.ingest",
        "store.checkpoint",
        "store",
        "kernels.spec",
        "kernels.reference",
        "kernels.cpu",
        "kernels.gpu",
        "kernels.ops",
        "kernels",
        "transport",
        "sampling",
        "schedule",
        "placement",
        "plane.views plane.habits",
        "plane.ingest",
        "plane.deliver",
        "plane.device",
        "plane",
        "plane.observe",
        "cluster integrations offline launching demo cli",
    )
)
"""Rooms, from what everything stands on to what stands on everything; a folder's rooms stand apart from what lies in the folder itself.
Members of one layer may import each other."""

RANK = {member: rank for rank, layer in enumerate(LAYERS) for member in layer}
TOP = LAYERS[-1]

FACADE = "conduit"
"""`conduit/__init__.py`: re-exports the layers, so only the top layer may import from it."""

TYPES = "typing"
"""`conduit/typing.py`: re-exports what calls return, as the façade re-exports what is called."""

HEAVY = frozenset({"torch", "triton", "numba", "llvmlite", "gymnasium", "ray", "ucxx", "pyarrow", "minari", "h5py"})
HEAVY_ALLOWED: frozenset[tuple[str, str]] = frozenset(
    # jit functions are made when their module is imported; whoever needs one imports the module inside a function
    (f"conduit.kernels.gpu{name}", "triton")
    for name in (
        "",
        ".draws",
        ".elements",
        ".augment",
        ".gather",
        ".launch",
        ".philox",
        ".priorities",
        ".prioritized_draw",
        ".ragged",
        ".returns",
        ".transitions",
    )
) | {
    # whoever compiles imports it inside a function
    ("conduit.native.compile.compiler", "numba"),
    ("conduit.native.compile.compiler", "llvmlite"),
    # its class inherits from torch's; Client.dataset imports it
    ("conduit.plane.deliver.dataset", "torch"),
}
"""(module, package) pairs that may import a heavy package at module level. A pair needs a reason beside it."""


LINES = 400
"""Lines of a module at most."""

LONG: Mapping[str, str] = {}
"""Modules that may be longer, each with the reason."""

CIRCLES: Mapping[tuple[str, ...], str] = {}
"""Circles of imports between modules that are left, each with what it is."""

UNTYPED = 20
"""`no-untyped-def` ignores stay under this."""

PUBLIC = 45
"""Names of `conduit.__all__` stay under this."""


class Import(NamedTuple):
    """One import statement's target, seen from the module that holds it."""

    module: str
    target: str
    line: int
    lazy: bool
    typing_only: bool

    def __str__(self) -> str:
        return f"{self.module} line {self.line} imports {self.target}"


def name_of(path: Path, package: Path = PACKAGE) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, package: Path = PACKAGE) -> Iterator[Import]:
    """Every import in a file, each `from` name resolved to the module it reaches."""
    module = name_of(path, package)
    is_package = path.name == "__init__.py"

    def submodule_or_base(base: str, name: str) -> str:
        inside = package.joinpath(*base.split(".")[1:], name)
        exists = base.startswith("conduit") and (inside.with_suffix(".py").exists() or inside.is_dir())
        return f"{base}.{name}" if exists else base

    def walk(node: ast.AST, lazy: bool, typing_only: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(module, alias.name, child.lineno, lazy, typing_only)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    parent = module.split(".")
                    parent = parent[: len(parent) - child.level + is_package]
                    base = ".".join([*parent, base] if base else parent)
                for alias in child.names:
                    yield Import(module, submodule_or_base(base, alias.name), child.lineno, lazy, typing_only)
            elif isinstance(child, ast.If) and ast.unparse(child.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
                for statement in child.body:
                    yield from walk(ast.Module([statement], []), lazy, True)
                for statement in child.orelse:
                    yield from walk(ast.Module([statement], []), lazy, typing_only)
            else:
                inner = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                yield from walk(child, lazy or inner, typing_only)

    yield from walk(ast.parse(path.read_text(), str(path)), False, False)


def member_of(dotted: str) -> str | None:
    """The room of a module: `store.pages` of `conduit.store.pages.protocol`, `plane` of `conduit.plane.client`.

    `conduit` itself is the façade; other packages have none.
    """
    parts = dotted.split(".")
    if parts[0] != "conduit":
        return None
    for length in (3, 2):
        if len(parts) >= length and (room := ".".join(parts[1:length])) in RANK:
            return room
    return parts[1] if len(parts) > 1 else FACADE


def breaches(found: Import) -> str | None:
    """Why an import breaks the order, or None."""
    source, target = member_of(found.module), member_of(found.target)
    if target is None or source is None or source in {target, "testing"}:
        return None
    if target == "testing":
        return f"{found}, and testing is imported by nobody in conduit"
    if source in {FACADE, TYPES, "__main__"}:
        return None
    if target in {FACADE, TYPES}:
        return None if source in TOP else f"{found}: only the top layer imports the façade"
    if source not in RANK or target not in RANK:
        return f"{found}: {source} or {target} has no place in LAYERS"
    if RANK[target] > RANK[source]:
        return f"{found}: {target} stands below {source} in the layer order"
    if target.split(".")[0] == "store" and source in TOP:
        return f"{found}: what stands on top uses the plane's contracts, never the store"
    return None


SOURCES = sorted(PACKAGE.rglob("*.py"))


def circles(graph: Mapping[str, set[str]]) -> list[tuple[str, ...]]:
    """Sets of nodes that all reach each other, by Tarjan's algorithm; each sorted.

    Args:
        graph: {node: what it points to}; nodes that have no entry point to nothing.
    """
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    open_: list[str] = []
    found: list[tuple[str, ...]] = []

    def visit(node: str) -> None:
        order[node] = lowest[node] = len(order)
        open_.append(node)
        for target in sorted(graph.get(node, ())):
            if target not in order:
                visit(target)
                lowest[node] = min(lowest[node], lowest[target])
            elif target in open_:
                lowest[node] = min(lowest[node], order[target])
        if lowest[node] == order[node]:
            at = open_.index(node)
            if len(open_) > at + 1:
                found.append(tuple(sorted(open_[at:])))
            del open_[at:]

    for node in sorted(graph):
        if node not in order:
            visit(node)
    return found


def module_circles(imports: Iterable[Import]) -> list[tuple[str, ...]]:
    """Modules that import each other, inside functions and for typing included."""
    graph: dict[str, set[str]] = {}
    for one in imports:
        if one.target.split(".")[0] == "conduit" and one.target != one.module:
            graph.setdefault(one.module, set()).add(one.target)
    return circles(graph)


def room_circles(imports: Iterable[Import]) -> list[tuple[str, ...]]:
    """Rooms that import each other; what re-exports them imports all and is none."""
    graph: dict[str, set[str]] = {}
    for one in imports:
        source, target = member_of(one.module), member_of(one.target)
        if source and target and source != target and not {source, target} & {FACADE, TYPES}:
            graph.setdefault(source, set()).add(target)
    return circles(graph)


def long_modules() -> dict[str, int]:
    """Modules of more than LINES lines, and how many they have."""
    lines = {name_of(path): len(path.read_text().splitlines()) for path in SOURCES}
    return {name: count for name, count in lines.items() if count > LINES}


def lines_with(pattern: str) -> list[str]:
    """`file:line: text` of the lines of the package in which a regular expression is found."""
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in SOURCES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(pattern, line)
    ]


def untyped() -> list[str]:
    """Functions whose missing types are let pass one by one."""
    return lines_with(r"type: ignore\[[^]]*no-untyped-def")


def letter_families() -> dict[str, list[str]]:
    """Constants of one module that are told apart from others by a letter, J_ROWS and J_PAGES, by `module letter`; a single one is none."""
    found: dict[str, list[str]] = {}
    for path in SOURCES:
        for name in re.findall(r"^([A-Z]_[A-Z]\w*)(?=[ :=,])", path.read_text(), re.MULTILINE):
            found.setdefault(f"{name_of(path)} {name[0]}", []).append(name)
    return {family: names for family, names in found.items() if len(names) > 1}


def test_every_module_has_its_place_in_the_layer_order():
    members = {member_of(name_of(path)) for path in SOURCES} - {FACADE, TYPES, "__main__", "testing"}
    assert members <= RANK.keys(), f"not in LAYERS: {sorted(members - RANK.keys())}"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_layer_imports_only_what_stands_above_it(path):
    found = [reason for one in imports_of(path) if (reason := breaches(one))]
    assert not found, "\n".join(dict.fromkeys(found))


def test_no_modules_import_each_other_in_a_circle():
    found = module_circles(one for path in SOURCES for one in imports_of(path))
    assert set(found) == CIRCLES.keys()


def test_no_rooms_import_each_other_in_a_circle():
    assert room_circles(one for path in SOURCES for one in imports_of(path)) == []


def test_modules_are_short_or_say_why_not():
    long = long_modules()
    assert {name: count for name, count in long.items() if name not in LONG} == {}, (
        f"at most {LINES} lines, or a reason in LONG"
    )
    assert LONG.keys() <= long.keys(), "a reason for a module that is short"


def test_missing_types_and_constants_of_one_letter_are_few():
    assert len(untyped()) < UNTYPED, "\n".join(untyped())
    assert letter_families() == {}


def test_public_names_are_few():
    import conduit

    assert len(conduit.__all__) < PUBLIC


def test_nothing_imports_a_heavy_package_at_module_level():
    found = [
        str(one)
        for path in SOURCES
        for one in imports_of(path)
        if not one.lazy
        and not one.typing_only
        and (package := one.target.split(".")[0]) in HEAVY
        and (one.module, package) not in HEAVY_ALLOWED
    ]
    assert not found, "import it inside the function that needs it:\n" + "\n".join(found)


def test_the_allow_list_of_heavy_imports_names_only_what_is_there():
    there = {(one.module, one.target.split(".")[0]) for path in SOURCES for one in imports_of(path) if not one.lazy}
    assert there >= HEAVY_ALLOWED


PROBE = """
import json, os, sys

before = dict(os.environ)
import conduit

print(json.dumps({
    "heavy": sorted({"torch", "triton", "numba", "llvmlite", "rich", "gymnasium", "ray", "ucxx", "matplotlib", "pyarrow", "minari", "h5py"} & sys.modules.keys()),
    "environment": sorted(key for key, _ in set(os.environ.items()) ^ set(before.items())),
    "threads": len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1,
}))
"""


def test_importing_conduit_loads_nothing_heavy_sets_no_variable_and_starts_no_thread():
    # One BLAS thread, so that numpy starts none of its own and any thread that is left is ours.
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROBE],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert json.loads(done.stdout) == {"heavy": [], "environment": [], "threads": 1}


def test_only_gpu_kernels_import_gpu_kernels_at_module_level():
    found = [
        str(one)
        for path in SOURCES
        for one in imports_of(path)
        if not one.lazy
        and not one.typing_only
        and one.target.startswith("conduit.kernels.gpu")
        and not one.module.startswith("conduit.kernels.gpu")
    ]
    assert not found, "import it inside the function that needs it:\n" + "\n".join(found)


ON_THE_CPU = """
import sys
import tomllib

import numpy as np

import conduit

schema = conduit.Schema.from_example({"obs": np.zeros((8, 8), np.uint8), "reward": 0.0, "value": 0.0})
table = conduit.Table(schema, 200, max_n_step=3, max_stack=2, max_length=8, priorities=conduit.Priorities())
with conduit.Engine.create(sys.argv[1], {"replay": table}) as engine:
    with engine.writer("replay") as writer:
        for t in range(100):
            writer.append(obs=np.full((8, 8), t, np.uint8), reward=1.0, value=0.5)
    loader = engine.loader(
        "replay", batch_size=4, window=conduit.Transition(n_step=3, stack=2), sampling=conduit.Prioritized(),
        transform={"obs": (conduit.random_shift(2), conduit.scale(1 / 255))},
    )
    batch = loader.next()
    loader.update_priorities(batch.ids, batch["reward"])
    steps = engine.loader("replay", batch_size=2, window=conduit.Sequence(8), batch_transforms=(conduit.gae(),))
    assert type(steps.next()["advantages"]).__module__ == "torch"
print(sorted({"triton", "conduit.kernels.gpu"} & sys.modules.keys()))
"""


@pytest.mark.timeout(660)
def test_batches_on_the_cpu_never_import_triton(engine_name):
    done = subprocess.run(
        [sys.executable, "-c", ON_THE_CPU, engine_name],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=600,  # without a library, it compiles
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"


@pytest.fixture
def toy(tmp_path):
    """A package `conduit` in a temporary folder, to show that the checks above can fail."""
    package = tmp_path / "conduit"
    for name in ("store", "plane", "testing"):
        package.joinpath(name).mkdir(parents=True)
        package.joinpath(name, "__init__.py").touch()
    package.joinpath("errors.py").touch()
    package.joinpath("store", "page.py").touch()

    def found(where: str, text: str) -> list[Import]:
        path = package / where
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return list(imports_of(path, package))

    return found


@pytest.mark.parametrize(
    ("where", "text", "target"),
    [
        ("store/a.py", "import conduit.plane.engine", "conduit.plane.engine"),
        ("store/a.py", "from conduit import plane", "conduit.plane"),
        ("store/a.py", "from .. import plane", "conduit.plane"),
        ("store/a.py", "from ..plane import engine", "conduit.plane"),
        ("store/__init__.py", "from ..plane import engine", "conduit.plane"),
        ("store/a.py", "def f():\n    from conduit.plane import engine", "conduit.plane"),
        ("store/a.py", "if TYPE_CHECKING:\n    from conduit.plane import Engine", "conduit.plane"),
        ("store/a.py", "from conduit import Schema", "conduit"),
        ("plane/a.py", "from conduit.testing import twin", "conduit.testing"),
        ("plane/a.py", "from conduit.cli import main", "conduit.cli"),
        ("integrations/a.py", "from conduit.store.page import Page", "conduit.store.page"),
    ],
)
def test_the_check_sees_an_import_against_the_order(toy, where, text, target):
    (one,) = toy(where, text)
    assert one.target == target
    assert breaches(one)


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("store/a.py", "from conduit.errors import Closed"),
        ("store/a.py", "from . import page"),
        ("store/a.py", "from conduit.store.page import Page"),
        ("plane/a.py", "from conduit.store import page"),
        ("cli.py", "import conduit"),
        ("cli.py", "from conduit.demo import run"),
        ("testing/a.py", "from conduit.plane import engine"),
        ("__init__.py", "from conduit.plane.engine import Engine as Engine"),
        ("store/a.py", "import numpy as np"),
    ],
)
def test_the_check_lets_an_import_along_the_order_pass(toy, where, text):
    (one,) = toy(where, text)
    assert breaches(one) is None


@pytest.mark.parametrize(
    ("text", "lazy", "typing_only"),
    [
        ("import torch", False, False),
        ("try:\n    import torch\nexcept ImportError:\n    pass", False, False),
        ("class A:\n    import torch", False, False),
        ("def f():\n    import torch", True, False),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch", False, True),
        ("if not TYPE_CHECKING:\n    import torch", False, False),
    ],
)
def test_the_check_knows_when_an_import_runs(toy, text, lazy, typing_only):
    one = toy("store/a.py", text)[-1]
    assert (one.target, one.lazy, one.typing_only) == ("torch", lazy, typing_only)


@pytest.mark.parametrize(
    ("graph", "found"),
    [
        ({}, []),
        ({"a": {"b"}, "b": {"c"}}, []),
        ({"a": {"b"}, "b": {"a"}}, [("a", "b")]),
        ({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}}, [("d", "e"), ("a", "b", "c")]),
        ({"a": {"b", "c"}, "b": {"d"}, "c": {"d"}}, []),
    ],
)
def test_the_check_sees_circles(graph, found):
    assert circles(graph) == found


def test_the_check_sees_circles_of_modules_and_rooms_through_imports_inside_functions(toy):
    found = toy("store/a.py", "from conduit.plane.b import c") + toy(
        "plane/b.py", "def f():\n    from conduit.store.a import d"
    )
    assert module_circles(found) == [("conduit.plane.b", "conduit.store.a")]
    assert room_circles(found) == [("plane", "store")]


def test_what_actors_install_has_neither_torch_nor_triton():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    base = {re.split(r"[^\w-]", one)[0] for one in project["dependencies"]}
    assert base == {"numpy", "posix-ipc", "numba", "msgspec", "typer", "rich", "xxhash"}
    assert {"torch", "gpu", "gym", "demo", "offline"} <= set(project["optional-dependencies"])
