"""Every error Conduit raises, as one tree under :class:`ConduitError`.

::

    ConduitError(Exception)
    ├── SchemaError(ValueError)           a schema cannot be built or read
    │   └── SchemaMismatch                two schemas that must be equal differ
    ├── FieldError(ValueError)            a value does not fit its field: key, dtype, shape
    │   └── UnknownName(KeyError, AttributeError)  no field or part has this name
    ├── ConfigError(ValueError)           an option is wrong, or options contradict each other
    │   └── CapacityError                 a capacity or page size that cannot work
    ├── SourceError(ValueError)           offline data that cannot be read, or do not fit
    ├── NoSpace(OSError)                  too little memory, or a full file system
    ├── EngineExists(FileExistsError)     a live engine already has this name
    │   └── Leftover                      the segment of an engine that died has this name
    ├── EngineNotFound(FileNotFoundError) no engine has this name
    ├── AccessDenied(PermissionError)     this user may not open, map or write the segment
    ├── BadSegment(ValueError)            a segment that is truncated, foreign or of another version
    ├── CheckpointError(ValueError)       a checkpoint that is damaged, foreign, of another version, or none
    ├── Closed(ValueError)                used after close
    │   └── Forked                        used in a child of the process that opened it
    ├── OwnerGone(ConnectionError)        the engine's owner died, and the client was not told to stay
    ├── WaitTimeout(TimeoutError)         a wait reached its deadline
    │   ├── DataTimeout                   rows did not come, or a limiter kept them back
    │   └── SpaceTimeout                  no page became free, or a limiter kept the writer back
    ├── ReadOnly(TypeError)               something was assigned to a batch
    ├── Unsendable(TypeError)             an object that belongs to its process was copied or pickled
    ├── Frozen(PermissionError)           the table takes no rows now
    ├── BuffersBusy(BufferError)          every batch buffer is still held
    ├── Busy(BlockingIOError)             the call would have to wait, and it was told not to
    ├── Exhausted(LookupError)            every requested epoch has been delivered
    ├── Overwritten(LookupError)          the requested rows have been replaced by newer ones
    ├── ParticipantsFull(OSError)         every participant slot of the engine is taken
    ├── ActorError(RuntimeError)          an actor that `launch` started died, or could not be started
    ├── MissingExtra(ImportError)         an optional package is not installed
    └── DeviceError(RuntimeError)         the requested GPU cannot be used
        ├── MissingDevice                 there is no such GPU, or no driver for it
        ├── NoPinnedMemory(MemoryError)   the system cannot lock more host memory for it
        └── LostDevice                    the GPU stopped working while it was in use

Each error is also the builtin that fits, so ``except TimeoutError`` works without this module.
Busy, Closed, OwnerGone, BadSegment and Overwritten are five different facts; none is raised in place of another.

A message says what was expected, what came, where (a field path, at the end as ``- at `obs.camera` ``) and the remedy.
An error leaves everything as it was: nothing has been written or claimed when it is raised. Errors can be pickled,
so they cross process pools unharmed.
"""

from __future__ import annotations

import errno as _errno


class ConduitError(Exception):
    """The root of the tree.

    Args:
        message: What was expected, what came, and the remedy.
        at: The dotted path of the field concerned. It is appended to the message and kept as ``error.at``.

    Attributes:
        at: The dotted field path, or None if the error is not about a single field.
    """

    at: str | None

    def __init__(self, message: str, *, at: str | None = None) -> None:
        super().__init__(message if at is None else f"{message} - at `{at}`")
        self.at = at


class SchemaError(ConduitError, ValueError):
    """A schema cannot be built or read: a space, name, dtype or shape that is not supported, or a bad document."""


class SchemaMismatch(SchemaError):
    """Two schemas that must be equal differ; the message names the first differing field with both sides."""


class FieldError(ConduitError, ValueError):
    """A value does not fit its field: missing or unknown key, wrong dtype, wrong shape.

    Args:
        message: As of all errors.
        at: As of all errors.
        row_id: Kept as ``error.row_id``.
        value: Kept as ``error.value``.

    Attributes:
        row_id: Id of the row at which a refused sample begins, as `TableHandle.delete` takes it; None if no stored row was refused.
        value: The stored value that was refused, or None.
    """

    row_id: int | None
    value: object

    def __init__(self, message: str, *, at: str | None = None, row_id: int | None = None, value: object = None) -> None:
        super().__init__(message, at=at)
        self.row_id, self.value = row_id, value


class UnknownName(FieldError, KeyError, AttributeError):
    """No field or part has this name, as an attribute or in brackets; the message suggests the nearest name."""

    __str__ = Exception.__str__  # a KeyError shows its message as a key


class ConfigError(ConduitError, ValueError):
    """An option is wrong, or options contradict each other; raised when the object is made, with the numbers."""


class CapacityError(ConfigError):
    """A capacity or page size that cannot work, such as fewer rows than the writers need at once."""


class SourceError(ConduitError, ValueError):
    """Offline data cannot be read or written: they are damaged, or have other columns, dtypes or shapes; the message names the file."""


class NoSpace(ConduitError, OSError):
    """The memory file system behind the segment is full; ``errno`` is ENOSPC."""

    errno = _errno.ENOSPC


class EngineExists(ConduitError, FileExistsError):
    """A live engine already has this name; ``errno`` is EEXIST."""

    errno = _errno.EEXIST


class Leftover(EngineExists):
    """The segment under this name belongs to an engine that died: adopt it, or remove it with ``conduit clean``."""


class EngineNotFound(ConduitError, FileNotFoundError):
    """No engine has this name; ``errno`` is ENOENT."""

    errno = _errno.ENOENT


class AccessDenied(ConduitError, PermissionError):
    """This user may not open, map or write the segment, or others may too; ``errno`` is EACCES."""

    errno = _errno.EACCES


class BadSegment(ConduitError, ValueError):
    """The segment is truncated, is not Conduit's, or was made by a version with another layout."""


class CheckpointError(ConduitError, ValueError):
    """The checkpoint is damaged, is not one of Conduit's, or is of another version; the message names the file and the reason."""


class Closed(ConduitError, ValueError):
    """The object was closed and cannot be used any more."""


class Forked(Closed):
    """The object was opened before a fork and used in the child: attach again in the child."""


class OwnerGone(ConduitError, ConnectionError):
    """The process that owned the engine is gone, and did not close it; ``errno`` is EOWNERDEAD.

    Rows that were committed stay. ``conduit.attach(..., on_owner_exit="stay")`` is for clients that wait for another owner.
    """

    errno = _errno.EOWNERDEAD


class WaitTimeout(ConduitError, TimeoutError):
    """A wait reached its deadline; ``errno`` is ETIMEDOUT."""

    errno = _errno.ETIMEDOUT


class DataTimeout(WaitTimeout):
    """The rows a reader waited for did not come in time, or its table's limiter did not let it sample."""


class SpaceTimeout(WaitTimeout):
    """No page became free for a writer in time, or its table's limiter did not let it write."""


class ReadOnly(ConduitError, TypeError):
    """A program assigned to, or deleted, an entry or attribute of a batch; copies (`clone`, `dict`) take assignments."""


class Unsendable(ConduitError, TypeError):
    """An object that belongs to the process that opened it was copied or pickled; the message says what can be sent instead."""


class Frozen(ConduitError, PermissionError):
    """The table is frozen: it can be read, and takes no rows until it is thawed; ``errno`` is EROFS."""

    errno = _errno.EROFS


class BuffersBusy(ConduitError, BufferError):
    """The caller still holds every batch buffer of the loader, and the loader was told not to allocate another one."""


class Busy(ConduitError, BlockingIOError):
    """The call would have to wait, and it was told not to; ``errno`` is EAGAIN."""

    errno = _errno.EAGAIN


class Exhausted(ConduitError, LookupError):
    """A loader of epochs has delivered all its epochs."""


class Overwritten(ConduitError, LookupError):
    """The requested rows have been replaced by newer ones."""


class ParticipantsFull(ConduitError, OSError):
    """Every participant slot of the engine is taken; ``errno`` is EUSERS."""

    errno = _errno.EUSERS


class ActorError(ConduitError, RuntimeError):
    """An actor that `conduit.launch` started died; its own traceback is the error's cause, and is in ``error.traceback``.

    Args:
        message: As of all errors.
        at: As of all errors.
        index: Kept as ``error.index``.
        attempt: Kept as ``error.attempt``.
        pid: Kept as ``error.pid``.
        exitcode: Kept as ``error.exitcode``.
        traceback: Kept as ``error.traceback``.
        restarted: Kept as ``error.restarted``.

    Attributes:
        index: Which actor, from 0.
        attempt: How often it had been started before.
        pid: Process id that it had.
        exitcode: Its exit status, or minus the number of the signal that killed it.
        traceback: The formatted traceback of the exception that ended it; empty if there was none, as after a signal.
        restarted: Whether it was started again; False when it failed for good.
    """

    def __init__(
        self,
        message: str,
        *,
        at: str | None = None,
        index: int = 0,
        attempt: int = 0,
        pid: int = 0,
        exitcode: int = 0,
        traceback: str = "",
        restarted: bool = False,
    ) -> None:
        super().__init__(message, at=at)
        self.index, self.attempt, self.pid, self.exitcode = index, attempt, pid, exitcode
        self.traceback, self.restarted = traceback, restarted


class MissingExtra(ConduitError, ImportError):
    """An optional package is not installed; the message has the ``pip install`` command that installs it."""


class DeviceError(ConduitError, RuntimeError):
    """The requested GPU cannot be used; the message gives the device's own reason."""


class MissingDevice(DeviceError):
    """There is no such GPU, no driver for it, or torch was built without it; the message says what is needed."""


class NoPinnedMemory(DeviceError, MemoryError):
    """The system could not lock host memory for the GPU to copy from; the GPU goes on working."""


class LostDevice(DeviceError):
    """The GPU stopped working while it was in use: do not trust the present batch, and restart the process."""
