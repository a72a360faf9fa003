"""Building libraries of kernels, one per instruction set: compiled in parts by processes of their own, linked by the system's compiler.

`python -m conduit.native.compile.build [--usual] FOLDER x86-64-v3 x86-64-v4` is the command.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from conduit.native.compile import catalogue, turns, wrappers
from conduit.native.compile.library import INSTRUCTION_SETS, facts_here
from conduit.native.compile.sources import PACKAGE, library_stamp

_LINK = (
    "-shared",
    "-nostartfiles",
    "-Wl,-O1,-z,relro,-z,now,-z,noexecstack,--gc-sections,--build-id=none,-s",
    "-lm",
    "-lc",
)
_PATIENCE = 1800.0
"""Seconds for a build, and to wait for another process's."""
_PARTS = 8
"""Processes at most; each compiles anew what its kernels share with those of others."""
_BATCH = 8
"""Callbacks that a process takes at a time."""


class CannotBuild(Exception):
    """No library can be built here; says why."""


def linker() -> str:
    """The program that links.

    Raises:
        CannotBuild: There is none.
    """
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise CannotBuild("no C compiler (cc, gcc, clang) was found to link the kernels with")


def _versions() -> dict[str, str]:
    try:
        return {name: importlib.metadata.version(name) for name in ("numba", "llvmlite")}
    except importlib.metadata.PackageNotFoundError as error:
        raise CannotBuild(f"{error.name} is not installed, which compiles them") from None


def made(instruction_sets: Sequence[str], folder: Path, *, every: bool = True) -> list[Path]:
    """Libraries of the sources as they are, in a folder that keeps them; those that are not there are built.

    Args:
        instruction_sets: Of the libraries.
        folder: Keeps them.
        every: All callbacks, or the usual ones.

    Raises:
        CannotBuild: As `build`.
    """
    versions = [f"{name}{version}" for name, version in _versions().items()]
    kind = "kernels" if every else "usual"
    paths = {
        name: folder / ("-".join((kind, name, library_stamp()[:16], *versions)) + ".so") for name in instruction_sets
    }
    folder.mkdir(parents=True, exist_ok=True)
    with turns.turn(str(folder), "kernels", _PATIENCE):
        lacking = {name: path for name, path in paths.items() if not path.exists()}
        if lacking:
            build(lacking, every=every)
    return list(paths.values())


def build(paths: dict[str, Path], *, every: bool = True) -> None:
    """Build libraries.

    Args:
        paths: {instruction set: file}; files that are there are replaced.
        every: All callbacks, or the usual ones.

    Raises:
        CannotBuild: There is no linker, another machine, no numba, or what was built cannot be loaded.
    """
    facts = facts_here() | _versions()
    unknown = paths.keys() - INSTRUCTION_SETS.keys()
    if unknown or (facts["machine"], facts["system"]) != ("x86_64", "linux"):
        raise CannotBuild(
            f"libraries are made for {' and '.join(INSTRUCTION_SETS)} on Linux, not for {', '.join(paths)} on "
            f"{facts['system']} on {facts['machine']}"
        )
    program = linker()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _compile(folder, tuple(paths), facts, every)
        for instructions, path in paths.items():
            library = folder / f"{instructions}.so"
            listed = folder / f"{instructions}.objects"
            listed.write_text("\n".join(str(one) for one in sorted((folder / instructions).iterdir())))
            _run([program, "-o", str(library), f"@{listed}", *_LINK], "link the kernels")
            try:
                ctypes.CDLL(str(library), mode=os.RTLD_NOW)
            except OSError as error:
                raise CannotBuild(f"the library of kernels cannot be loaded: {error}") from None
            path.parent.mkdir(parents=True, exist_ok=True)
            beside = path.with_name(path.name + ".new")
            shutil.copyfile(library, beside)
            beside.chmod(0o755)
            beside.replace(path)


def _compile(folder: Path, instruction_sets: Sequence[str], facts: dict[str, str], every: bool) -> None:
    """Compile all objects, by as many processes as there are processors."""
    count = max(1, min(len(os.sched_getaffinity(0)), _PARTS))
    order = json.dumps(
        {"folder": str(folder), "sets": instruction_sets, "facts": facts, "parts": count, "every": every}
    )
    commands = [
        [sys.executable, "-m", "conduit.native.compile.build", "--part", str(part), order] for part in range(count)
    ]
    running = [subprocess.Popen(one, cwd=PACKAGE.parent, stderr=subprocess.PIPE, text=True) for one in commands]
    try:
        for one in running:
            _, said = one.communicate(timeout=_PATIENCE)
            if one.returncode:
                raise CannotBuild(f"the kernels cannot be compiled: {said.strip().rpartition(chr(10))[2]}")
    except subprocess.TimeoutExpired:
        raise CannotBuild(f"the kernels were not compiled within {_PATIENCE:.0f} s") from None
    finally:
        for one in running:
            if one.poll() is None:
                one.kill()
            one.communicate()


def _part(number: int, order: str) -> None:
    """Compile one part: kernels share much of what they call, so the first parts compile them, and callbacks are for whoever is free."""
    from conduit.native.compile.objects import Compiler

    job = json.loads(order)
    folder = Path(job["folder"])
    compiler = Compiler(job["sets"], folder, str(number))
    kernels, callbacks = list(catalogue.kernels()), list(catalogue.callbacks(every=job["every"]))
    with_kernels = max(1, job["parts"] // 2)
    if number < with_kernels:
        each = -(-len(kernels) // with_kernels)
        for declared in kernels[number * each : (number + 1) * each]:
            compiler.kernel(declared)
    for first in range(0, len(callbacks), _BATCH):
        if _taken(folder / f"callbacks-{first}"):
            for function, signature in callbacks[first : first + _BATCH]:
                compiler.callback(function, signature)
    if number == 0:
        for instructions in job["sets"]:
            told = job["facts"] | {"instructions": instructions}
            compiler.text(instructions, wrappers.facts(json.dumps(told, sort_keys=True)))


def _taken(mark: Path) -> bool:
    """Whether this process is the first to ask for the work that a file stands for."""
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_PATIENCE)
    if done.returncode:
        raise CannotBuild(f"{command[0]} could not {what}: {done.stderr.strip()}")


def wheel_tag(paths: Iterable[Path]) -> str:
    """Tag of a wheel with these libraries: any CPython from 3.11 on, and the oldest GNU C library that they load with."""
    found = [match for path in paths for match in re.findall(rb"GLIBC_(\d+)\.(\d+)", path.read_bytes())]
    major, minor = max([(int(major), int(minor)) for major, minor in found], default=(2, 17))
    return f"cp311-abi3-manylinux_{major}_{max(minor, 17)}_{platform.machine()}"


def main() -> int:
    """The command."""
    if len(sys.argv) == 4 and sys.argv[1] == "--part":
        _part(int(sys.argv[2]), sys.argv[3])
        return 0
    asked = [one for one in sys.argv[1:] if one != "--usual"]
    if len(asked) < 2:
        print(
            f"usage: python -m conduit.native.compile.build [--usual] FOLDER {' '.join(INSTRUCTION_SETS)}",
            file=sys.stderr,
        )
        return 2
    began = time.monotonic()
    try:
        paths = made(asked[1:], Path(asked[0]), every="--usual" not in sys.argv)
    except CannotBuild as error:
        print(f"conduit: {error}", file=sys.stderr)
        return 1
    for path in paths:
        print(f"{path} {path.stat().st_size / 1e6:.1f} MB", file=sys.stderr)
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
