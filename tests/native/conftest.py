"""Libraries of kernels of these sources: built once for them, and kept below build/."""

from pathlib import Path

import pytest

from conduit.native.compile import build, library

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def instructions() -> str:
    """The best instruction set of this processor that is in every library's reach."""
    if "x86-64-v3" not in library.supported():
        pytest.skip("libraries of kernels are made for x86-64-v3 and better")
    return "x86-64-v3"


@pytest.fixture(scope="session")
def made(instructions) -> Path:
    """A library of all kernels and the usual callbacks; all of them take minutes."""
    return _made(instructions, every=False)


@pytest.fixture(scope="session")
def made_whole(instructions) -> Path:
    """A library as a wheel has it."""
    return _made(instructions, every=True)


def _made(instructions, *, every):
    try:
        (path,) = build.made((instructions,), ROOT / "build", every=every)
    except build.CannotBuild as error:
        pytest.skip(str(error))
    return path
