"""Kernels that were compiled ahead of time: the same results, no compiler, and never those of other sources."""

import ctypes
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from conduit.errors import ConfigError
from conduit.field import DTYPES
from conduit.kernels.cpu import augment, gather
from conduit.kernels.spec.transforms import Transform, is_narrow
from conduit.native import memory
from conduit.native.compile import catalogue, library
from conduit.store.ingest import page_writer

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.timeout(1800)  # the first test builds the library

PROGRAM = """
import hashlib, sys
import numpy as np
import conduit

digest = hashlib.sha256()
rng = np.random.default_rng(0)
example = {"obs": np.zeros((8, 8), np.uint8), "state": np.zeros(5), "action": 0, "reward": 0.0}
tables = {
    "replay": conduit.Table(
        conduit.Schema.from_example(example), 4096, max_n_step=3, max_stack=2, max_length=8, priorities=conduit.Priorities()
    ),
    "queue": conduit.Table(conduit.Schema.from_example({"obs": np.zeros(3, np.float32), "reward": 0.0}), 64, kind="queue"),
}
with conduit.Engine.create(sys.argv[1], tables) as engine, conduit.attach(engine.name) as client:
    with client.writer("replay", keep_final=False) as writer:
        for t in range(900):
            end = t % 37 == 36
            values = rng.integers(0, 255, (8, 8), np.uint8), rng.random(5), t, float(rng.random())
            done = {"terminated": end, "truncated": False}
            writer.append(obs=values[0], state=values[1], action=values[2], reward=values[3], **done)
    if len(sys.argv) > 2:
        print(sorted({"numba", "llvmlite", "torch"} & sys.modules.keys()))
        sys.exit()
    for window, sampling, transform in (
        (conduit.Transition(n_step=3, stack=2), conduit.Prioritized(), {"obs": (conduit.random_shift(2), conduit.scale(1 / 255))}),
        (conduit.Transition(), None, {"state": conduit.cast("float32"), "action": conduit.one_hot(1000)}),
        (conduit.Sequence(8), None, {"obs": conduit.scale(1 / 255, dtype="bfloat16"), "state": conduit.clip(0.2, 0.8)}),
    ):
        options = {} if sampling is None else {"sampling": sampling}
        with client.loader("replay", batch_size=64, window=window, transform=transform, format="numpy", seed=5, **options) as loader:
            for _ in range(8):
                batch = loader.next(timeout=30)
                for name in sorted(batch):
                    digest.update(name.encode())
                    digest.update(np.ascontiguousarray(batch[name]).tobytes())
                if sampling is not None:
                    loader.update_priorities(batch.ids, np.abs(np.asarray(batch["reward"], np.float64)))
                batch.release()
print(digest.hexdigest())
"""


def run(program, *arguments, path="", kernels="", cwd=ROOT, code=0):
    environment = os.environ | {library.PATH_VARIABLE: str(path), library.VARIABLE: kernels, "PYTHONPATH": str(cwd)}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment,
        timeout=600,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.mark.long
def test_what_is_written_and_drawn_is_the_same_as_with_kernels_that_numba_compiled_here(made, engine_name):
    ahead = run(PROGRAM, engine_name, path=made).stdout
    assert ahead == run(PROGRAM, engine_name, kernels="compile").stdout
    assert len(ahead) == 65


def test_a_writer_with_a_library_imports_neither_numba_nor_llvmlite_nor_torch(made, engine_name):
    assert run(PROGRAM, engine_name, "light", path=made).stdout == "[]\n"


def test_a_library_holds_every_kernel_and_the_callbacks_that_are_listed_for_it(made):
    check_symbols(made, catalogue.callbacks(every=made.name.startswith("kernels-")))


@pytest.mark.torture
def test_a_library_of_the_usual_holds_the_usual_callbacks_and_a_whole_one_all(made_usual, made_whole):
    check_symbols(made_usual, catalogue.callbacks(every=False))
    check_symbols(made_whole, catalogue.callbacks())


def check_symbols(path, callbacks):
    symbols = ctypes.CDLL(str(path))
    for declared in catalogue.kernels():
        assert ctypes.addressof(ctypes.c_char.in_dll(symbols, f"method {library.name_of(declared)}"))
        assert ctypes.addressof(ctypes.c_char.in_dll(symbols, f"native {library.name_of(declared)}"))
    for function, signature in callbacks:
        assert ctypes.addressof(ctypes.c_char.in_dll(symbols, f"address {library.digest_of(function, signature)}"))


def legal(transform, source):
    try:
        transform.check_source(source, "x")
    except ConfigError:
        return False
    return True


def test_the_listed_callbacks_are_all_conversions_that_a_field_can_have():
    listed = {library.digest_of(*one) for one in catalogue.callbacks()}
    wanted = [Transform(dtype) for dtype in DTYPES]
    wanted += [Transform(dtype, 0.5, offset) for dtype in gather.FLOATS for offset in (0.0, 0.5)]
    for source, transform in itertools.product(DTYPES, wanted):
        same = transform.dtype == source and not transform.is_affine
        if legal(transform, source) and not same:
            narrow = is_narrow(transform, source)
            function = gather.converter(source, transform.dtype, False, transform.is_affine, False, narrow)
            assert library.digest_of(function, gather.SIGNATURE) in listed, (source, transform)
    image = augment.mover("uint8", "float32", False, True, False, True)
    assert library.digest_of(image, gather.SIGNATURE) in listed


def test_rows_of_every_size_are_copied(engine_name):
    for size in (1, 3, 15, 16, 17, 18, 256, 260, 1001):
        table, out = np.random.default_rng(size).integers(0, 255, (5, size), np.uint8), np.zeros((3, size), np.uint8)
        index, slots = np.array([4, -1, 2]), np.arange(3)
        words = np.zeros(gather.OP_WORDS, np.int64)
        values = (0, table.ctypes.data, size, out.ctypes.data, size, size, 0, 0, index.ctypes.data, 1)
        words[:10] = values
        ctypes.CFUNCTYPE(*[ctypes.c_int64] * 5)(gather._copy_address(size))(words.ctypes.data, slots.ctypes.data, 3, 0)
        assert (out[0] == table[4]).all(), size
        assert not out[1].any()
        assert (out[2] == table[2]).all()


CALLS = """
import numpy as np
from conduit.native.jit import entry
from conduit.native import memory

words = np.zeros(64, np.int64)
announce = entry(memory.announce)
assert type(announce) is type(len)
assert announce(words.ctypes.data) == announce(np.int64(words.ctypes.data)) == announce(words.ctypes.data) == 0
for arguments, error, text in (
    ((), TypeError, "Expected 1 arguments of kernel conduit.native.memory.announce, got 0"),
    ((1, 2), TypeError, "Expected 1 arguments of kernel conduit.native.memory.announce, got 2"),
    ((None,), TypeError, "not 'NoneType'"),
    ((1 << 70,), OverflowError, "too big"),
):
    try:
        announce(*arguments)
    except error as raised:
        assert text in str(raised), raised
    else:
        raise AssertionError(arguments)
"""


def test_a_kernel_of_a_library_is_a_function_in_c_that_checks_its_arguments(made):
    run(CALLS, path=made)


CHOICE = "from conduit.native.compile import library; choice = library.chosen(); print(choice.instructions, choice.reason, sep='|')"


def test_a_library_of_other_sources_is_not_used(made, instructions, tmp_path):
    shutil.copytree(ROOT / "conduit", tmp_path / "conduit", ignore=shutil.ignore_patterns("__pycache__"))
    assert run(CHOICE, path=made, cwd=tmp_path).stdout.startswith(f"{instructions}|")
    with (tmp_path / "conduit/store/pages/protocol.py").open("a") as file:
        file.write("# edited\n")
    used, _, reason = run(CHOICE, path=made, cwd=tmp_path).stdout.partition("|")
    assert used == ""
    assert "was made from other sources" in reason
    error = run(CHOICE, path=made, kernels=instructions, cwd=tmp_path, code=1).stderr
    assert f"ConfigError: Expected a library of kernels for CONDUIT_KERNELS={instructions}" in error
    assert "was made from other sources" in error


def test_what_is_asked_for_by_name_is_used_or_refused(made, instructions, monkeypatch):
    assert run(CHOICE, path=made, kernels="compile").stdout == "|CONDUIT_KERNELS=compile\n"
    assert run(CHOICE, path=made, kernels=instructions).stdout.startswith(f"{instructions}|")
    error = run(CHOICE, path=made, kernels="fast", code=1).stderr
    assert "Expected CONDUIT_KERNELS to be one of compile, x86-64-v3, x86-64-v4, got 'fast'" in error
    library.chosen.cache_clear()
    monkeypatch.setattr(library, "host_flags", lambda: library.INSTRUCTION_SETS["x86-64-v3"])
    monkeypatch.setenv(library.VARIABLE, "x86-64-v4")
    with pytest.raises(ConfigError, match="an instruction set of this processor in CONDUIT_KERNELS, got 'x86-64-v4'"):
        library.chosen()
    library.chosen.cache_clear()


def test_a_file_that_is_no_library_or_not_there_leaves_the_kernels_to_the_compiler(tmp_path):
    broken = tmp_path / "kernels.so"
    broken.write_bytes(b"no library")
    assert "cannot be loaded" in run(CHOICE, path=broken).stdout
    assert f"no library of kernels at {tmp_path}/none" in run(CHOICE, path=tmp_path / "none").stdout


def test_a_kernel_that_no_library_holds_is_compiled(made):
    program = "from conduit.native.compile import library; from conduit.testing import stepping; print(library.entry(stepping._steps))"
    assert run(program, path=made).stdout == "None\n"


def test_the_flags_of_this_processor_are_what_linux_says():
    assert library.host_flags() <= set(Path("/proc/cpuinfo").read_text().split())
    assert library.entry.__module__ == "conduit.native.compile.library"
    assert memory.announce.signature == "int64(int64)"
    assert page_writer.end.signature == "int64(object, object, object)"
