"""Compiled kernels and their cache: a stale kernel would be worse than none."""

import ast
from pathlib import Path

import numpy as np

from conduit.native import jit
from conduit.native.compile import sources
from conduit.native.compile.declare import KERNEL_MODULES
from conduit.store.pages import protocol

ROOT = Path(__file__).resolve().parents[2]


def compiled(path):
    """Whether a module takes part in kernels: it decorates or compiles with conduit.native.jit, or defines intrinsics."""
    tree = ast.parse(path.read_text())
    return any(
        isinstance(node, ast.ImportFrom)
        and (
            node.module == "conduit.native.jit"
            and any(alias.name in ("kernel", "inner", "address", "intrinsic") for alias in node.names)
        )
        for node in ast.walk(tree)
    )


def test_every_module_whose_source_is_compiled_renews_the_cache():
    paths = [path for path in (ROOT / "conduit").rglob("*.py") if "testing" not in path.parts]
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths if compiled(path)}
    assert names <= set(KERNEL_MODULES)
    # and words, whose numbers are constants in all of them
    assert {"conduit.native.compile.declare", "conduit.native.jit", "conduit.store.format.words"} <= set(KERNEL_MODULES)
    for name in KERNEL_MODULES:
        assert ROOT.joinpath(*name.split(".")).with_suffix(".py").exists()


def test_an_entry_is_compiled_once_and_takes_addresses_as_integers():
    word = np.array([7, 0], np.int64)
    assert jit.entry(protocol.load) is jit.entry(protocol.load)
    assert jit.entry(protocol.load)(word.ctypes.data) == 7
    assert jit.entry(protocol.take_ticket)(word.ctypes.data) == 7
    assert word[0] == 8


def test_the_stamp_of_a_kernel_covers_every_module_that_its_imports_reach():
    """The fast reading of imports finds what a parser finds, and an edit far below renews what stands on it."""
    for module in KERNEL_MODULES:
        path = sources.path_of(module)
        names = set()
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        assert names & set(KERNEL_MODULES) == set(sources.source(path)[1]), module
