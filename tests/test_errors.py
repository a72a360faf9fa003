"""The tree of errors: its text, its builtins, its messages."""

import errno
import inspect
import pickle
import re

import pytest

from conduit import errors

ALL = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, errors.ConduitError)]
LINE = re.compile(r"^(?P<depth>(?:│   |    )*)(?:├── |└── )?(?P<name>\w+)(?:\((?P<builtin>[\w, ]+)\))?(?: |$)")

BUILTINS = {
    "SchemaError": ValueError,
    "FieldError": ValueError,
    "UnknownName": KeyError,
    "ConfigError": ValueError,
    "CapacityError": ValueError,
    "SourceError": ValueError,
    "NoSpace": OSError,
    "EngineExists": FileExistsError,
    "Leftover": FileExistsError,
    "EngineNotFound": FileNotFoundError,
    "AccessDenied": PermissionError,
    "BadSegment": ValueError,
    "CheckpointError": ValueError,
    "Closed": ValueError,
    "Forked": ValueError,
    "OwnerGone": ConnectionError,
    "WaitTimeout": TimeoutError,
    "DataTimeout": TimeoutError,
    "SpaceTimeout": TimeoutError,
    "BuffersBusy": BufferError,
    "Busy": BlockingIOError,
    "Exhausted": LookupError,
    "ReadOnly": TypeError,
    "Unsendable": TypeError,
    "Overwritten": LookupError,
    "ParticipantsFull": OSError,
    "ActorError": RuntimeError,
    "MissingExtra": ImportError,
    "DeviceError": RuntimeError,
    "MissingDevice": RuntimeError,
    "NoPinnedMemory": MemoryError,
    "LostDevice": RuntimeError,
}


def tree_in_the_docstring():
    """Name to (parent, builtin), read from the module's docstring."""
    found, above = {}, []
    for line in (errors.__doc__ or "").split("::", 1)[1].splitlines():
        match = LINE.match(line.removeprefix("    "))
        if not match or not hasattr(errors, match["name"]):
            continue
        branch = re.search(r"[├└]", line)
        depth = 0 if branch is None else (branch.start() - 4) // 4 + 1
        del above[depth:]
        found[match["name"]] = (above[-1] if above else None, match["builtin"])
        above.append(match["name"])
    return found


def test_the_docstring_shows_the_whole_tree_as_it_is():
    shown = tree_in_the_docstring()
    assert shown.keys() == {error.__name__ for error in ALL}
    for name, (parent, builtin) in shown.items():
        bases = {base.__name__ for base in getattr(errors, name).__bases__}
        assert bases == {part for part in (parent, *(builtin or "").split(", ")) if part}, name


@pytest.mark.parametrize("error", ALL, ids=lambda error: error.__name__)
def test_each_error_is_a_conduit_error_with_a_docstring(error):
    assert issubclass(error, errors.ConduitError)
    assert error.__doc__


@pytest.mark.parametrize(("name", "builtin"), BUILTINS.items())
def test_each_error_is_caught_as_its_builtin(name, builtin):
    with pytest.raises(builtin, match="what happened"):
        raise getattr(errors, name)("what happened")


@pytest.mark.parametrize("error", ALL, ids=lambda error: error.__name__)
def test_the_field_path_ends_the_message_and_is_kept(error):
    raised = error("Expected `float32`, got `float64`", at="obs.camera")
    assert str(raised) == "Expected `float32`, got `float64` - at `obs.camera`"
    assert raised.at == "obs.camera"
    assert error("no field").at is None
    assert str(error("no field")) == "no field"


@pytest.mark.parametrize("error", ALL, ids=lambda error: error.__name__)
def test_an_error_crosses_a_pickle_unharmed(error):
    sent = error("Expected 3, got 4", at="obs")
    got = pickle.loads(pickle.dumps(sent))
    assert type(got) is error
    assert (str(got), got.at, got.args) == (str(sent), sent.at, sent.args)


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (errors.NoSpace, errno.ENOSPC),
        (errors.EngineExists, errno.EEXIST),
        (errors.Leftover, errno.EEXIST),
        (errors.EngineNotFound, errno.ENOENT),
        (errors.AccessDenied, errno.EACCES),
        (errors.DataTimeout, errno.ETIMEDOUT),
        (errors.Busy, errno.EAGAIN),
        (errors.ParticipantsFull, errno.EUSERS),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_an_operating_system_error_has_its_number(error, number):
    assert error("message").errno == number


def test_busy_closed_bad_segment_and_overwritten_are_four_facts():
    facts = [errors.Busy, errors.Closed, errors.BadSegment, errors.Overwritten]
    assert not [(a, b) for a in facts for b in facts if a is not b and issubclass(a, b)]
