"""Libraries of kernels of these sources: the one that the other tests run with, or built once and kept below build/."""

from pathlib import Path

import pytest

from conduit.native.compile import build
from tests import library


@pytest.fixture(scope="session")
def instructions() -> str:
    """The best instruction set of this processor that libraries are made for."""
    best = library.instructions()
    if best is None:
        pytest.skip("libraries of kernels are made for x86-64-v3 and better")
    return best


@pytest.fixture(scope="session")
def made(instructions) -> Path:
    """A library of all kernels: the one that was built for the tests, or with the usual callbacks, since all of them take minutes."""
    return library.found() or _made(instructions, every=False)


@pytest.fixture(scope="session")
def made_usual(instructions) -> Path:
    """A library with the usual callbacks alone."""
    return _made(instructions, every=False)


@pytest.fixture(scope="session")
def made_whole(instructions) -> Path:
    """A library as a wheel has it."""
    return _made(instructions, every=True)


def _made(instructions, *, every):
    try:
        (path,) = build.made((instructions,), library.FOLDER, every=every)
    except build.CannotBuild as error:
        pytest.skip(str(error))
    return path
