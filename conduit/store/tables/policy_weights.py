"""Versioned weights in shared memory: one publisher, any number of readers, never torn.

A slot has three copies. The publisher fills the copy that is neither current nor previous, then stores the new version (release). A
reader loads the version, copies the arrays of that version, and checks that they still belong to it. Only if two whole publications
happen during its copy does a reader have to read again. If a publisher is killed, at whatever instruction, the last version stays. A
kernel lock allows one publishing process at a time; the threads of that process take turns.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np

from conduit.arrays import as_array, import_torch
from conduit.clock import Deadline
from conduit.errors import Busy, Closed, ConfigError, FieldError, WaitTimeout
from conduit.field import Field, dtype_name
from conduit.forking import StaysHere
from conduit.native.jit import entry
from conduit.native.wait import wait_for
from conduit.nesting import hint
from conduit.store.format import words as w
from conduit.store.format.layout import WEIGHT_COPIES, TensorSpec, WeightsLayout
from conduit.store.format.soundness import LARGEST, damaged
from conduit.store.pages import protocol
from conduit.store.segment.locks import LOCK_PUBLISHERS, try_lock, unlock
from conduit.store.segment.participants import Participants, closed_client
from conduit.store.segment.segment import Segment
from conduit.store.tables.appearance import never_raises, state_in

Array = np.ndarray[Any, Any]
_ATTEMPTS = 1000
_PATIENCE = 10.0
_TURN_SLEEP = 0.0005


def describe(example: Mapping[str, Any]) -> tuple[TensorSpec, ...]:
    """Names, dtypes and shapes of a state dict.

    Raises:
        ConfigError: It is not a mapping, it is empty, or a value is not an array.
    """
    if not isinstance(example, Mapping) or not example:
        raise ConfigError(f"Expected a state dict with at least one array, got {type(example).__name__}")
    specs = []
    for name, value in example.items():
        if not isinstance(name, str):
            raise ConfigError(f"Expected names of type `str` in a state dict, got {name!r} of `{type(name).__name__}`")
        try:
            dtype = dtype_name(value.dtype)
            shape = tuple(int(n) for n in value.shape)
        except (AttributeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"Expected an array or tensor, got {type(value).__name__} - at policy[{name!r}]"
            ) from error
        specs.append(TensorSpec(name, dtype, shape))
    return tuple(specs)


class Weights:
    """One version of the weights, copied out of shared memory.

    Attributes:
        version: Number of the publication, from 1.
        arrays: {name: numpy array}, private to the caller; bfloat16 as uint16 bits.
    """

    __slots__ = ("_specs", "arrays", "version")

    def __init__(self, version: int, arrays: dict[str, Array], specs: tuple[TensorSpec, ...]) -> None:
        self.version = version
        self.arrays = arrays
        self._specs = specs

    def __repr__(self) -> str:
        inner = ", ".join(f"{name}: {array.shape} {array.dtype}" for name, array in self.arrays.items())
        return f"Weights(version {self.version}: {inner})"

    def state_dict(self) -> dict[str, Any]:
        """{name: torch tensor} sharing memory with `arrays`, for `module.load_state_dict`.

        Raises:
            MissingExtra: torch is not installed.
        """
        torch = import_torch("Weights.state_dict()", "read Weights.arrays")
        tensors = {name: torch.from_numpy(array) for name, array in self.arrays.items()}
        for spec in self._specs:
            if spec.dtype == "bfloat16":
                tensors[spec.name] = tensors[spec.name].view(torch.bfloat16)
        return tensors


class PolicySlot(StaysHere):
    """Weights that a learner publishes and actors poll.

    Attributes:
        held: Version of the weights that this object last returned. Writers that were opened with `policy=` this slot store it in
            their rows.
    """

    _elsewhere = "take the slot there, client.policy(name)"

    def __init__(self, segment: Segment, layout: WeightsLayout, index: int, participants: Participants) -> None:
        self._segment = segment
        self._layout = layout
        self._participants = participants
        self._lock_byte = LOCK_PUBLISHERS + index
        self._publishing = False
        self._turn = threading.Lock()
        self._latest = segment.words[layout.control // 8 : layout.control // 8 + 1]
        self._copies = [
            {
                spec.name: segment.array(copy + offset, spec.shape, np.dtype(Field("weights", spec.dtype).numpy_dtype))
                for spec, offset in zip(layout.tensors, layout.offsets, strict=True)
            }
            for copy in layout.copies
        ]
        self._bound: weakref.WeakSet[Any] = weakref.WeakSet()
        self.held = 0

    @property
    def name(self) -> str:
        """Name of the slot."""
        return self._layout.name

    @property
    def version(self) -> int:
        """Latest version published, 0 before the first; costs well under a microsecond."""
        return self._latest[0]

    @never_raises
    def __repr__(self) -> str:
        state = state_in(self._segment, self._participants)
        return (
            f"PolicySlot({self._layout.name!r} of engine {self._segment.name!r}, version {self.version}, held {self.held}, "
            f"{len(self._layout.tensors)} arrays, {state})"
        )

    def _check(self) -> None:
        self._participants.check()
        if self._participants.number < 0:
            raise closed_client(self._segment.name)

    def publish(self, state_dict: Mapping[str, Any]) -> int:
        """Make a state dict the current weights; threads of one process take turns.

        Args:
            state_dict: {name: tensor or array} with the names, dtypes and shapes given at the engine's creation.

        Returns:
            The new version.

        Raises:
            FieldError: A name, dtype or shape differs; nothing is published.
            Busy: Another process, or another client of this process, publishes into this slot; or other threads publish all the time.
            Closed: The client or engine has closed.
        """
        self._check()
        if self._segment.closed:
            raise Closed(f"Expected engine {self._segment.name!r} to be running, it has been closed by its owner")
        arrays = self._validated(state_dict)
        self._await_turn()
        with self._turn:
            self._check()
            return self._publish(arrays)

    def _await_turn(self) -> None:
        """Wait until no thread publishes. Another thread may still be first then, for one publication."""
        deadline = Deadline(_PATIENCE)
        while self._turn.locked():
            if deadline.passed():
                raise Busy(
                    f"Expected a turn to publish policy {self._layout.name!r} within {_PATIENCE:g} s, but other threads of this process "
                    "publish, or this thread was interrupted while it did: publish from one thread"
                )
            time.sleep(_TURN_SLEEP)

    def _publish(self, arrays: Mapping[str, Array]) -> int:
        if not self._publishing:
            if not try_lock(self._segment.lock_fd, self._lock_byte):
                raise Busy(
                    f"Expected to be the only publisher of policy {self._layout.name!r}, but another process, or another client "
                    "of this process, is: publish through one client, or close that one first"
                )
            self._publishing = True
        version = self._sound(self.version) + 1
        copy = version % WEIGHT_COPIES
        words = self._segment.base + self._layout.copies[copy]
        entry(protocol.begin_copy)(words)
        for name, target in self._copies[copy].items():
            target[...] = arrays[name]
        entry(protocol.finish_copy)(words, self._segment.base + self._layout.control, version)
        return version

    def _sound(self, version: int) -> int:
        """Check a version that was read from the segment.

        Raises:
            BadSegment: It cannot be a version.
        """
        if not 0 <= version < LARGEST:
            raise damaged(f"policy {self._layout.name!r}", f"version {version}")
        return version

    def _validated(self, state_dict: Mapping[str, Any]) -> dict[str, Array]:
        if not isinstance(state_dict, Mapping):
            raise FieldError(f"Expected a state dict, got {type(state_dict).__name__}", at=self._layout.name)
        expected = {spec.name for spec in self._layout.tensors}
        if set(state_dict) != expected:
            missing, unknown = sorted(expected - set(state_dict)), [name for name in state_dict if name not in expected]
            near = hint(unknown[0], expected) if unknown else ""
            raise FieldError(
                f"Expected the arrays this policy was created with, missing {missing}, unknown {unknown}{near}",
                at=self._layout.name,
            )
        arrays = {}
        for spec in self._layout.tensors:
            value = state_dict[spec.name]
            try:
                dtype, shape = dtype_name(value.dtype), tuple(value.shape)
                found = f"`{dtype}` of shape {shape}"
            except (AttributeError, TypeError, ValueError):
                dtype, shape, found = "", (), type(value).__name__
            if dtype != spec.dtype or shape != spec.shape:
                raise FieldError(
                    f"Expected `{spec.dtype}` of shape {spec.shape}, got {found}", at=f"{self._layout.name}.{spec.name}"
                )
            arrays[spec.name] = as_array(value)
        return arrays

    def poll(self) -> Weights | None:
        """The newest weights if they are newer than those that this object last returned, else None; never waits.

        Raises:
            Closed: The client has closed.
            OwnerGone: The engine's owner is gone.
            WaitTimeout: A thousand times in a row, the publisher overwrote the copy before it could be read.
        """
        self._check()
        for _ in range(_ATTEMPTS):
            version = self._sound(entry(protocol.load)(self._segment.base + self._layout.control))
            if version <= self.held:
                return None
            copy = version % WEIGHT_COPIES
            arrays = {name: array.copy() for name, array in self._copies[copy].items()}
            if entry(protocol.load_after)(self._segment.base + self._layout.copies[copy]) == version:
                self._hold(version)
                return Weights(version, arrays, self._layout.tensors)
        raise WaitTimeout(f"Expected to read policy {self._layout.name!r} whole, it changed under {_ATTEMPTS} attempts")

    def wait(self, timeout: float | None = 30.0) -> Weights:
        """The newest weights, as soon as they are newer than those that this object last returned.

        Args:
            timeout: Seconds to wait for a publication; None without limit.

        Raises:
            WaitTimeout: No newer weights were published.
            Closed: The client or engine has closed.
            OwnerGone: The engine's owner is gone.
        """
        event = self._layout.control + w.POLICY_EVENT
        weights = wait_for(
            self._poll_open, self._segment.base + event, self._segment.words, event // 8, Deadline(timeout)
        )
        if weights is None:
            raise WaitTimeout(
                f"Expected a version of policy {self._layout.name!r} after {self.held}, none was published within "
                f"{timeout} s: is its publisher alive (`conduit status`)?"
            )
        return weights

    def _poll_open(self) -> Weights | None:
        if self._segment.closed:
            raise Closed(f"Expected engine {self._segment.name!r} to be running, it has been closed by its owner")
        return self.poll()

    def _hold(self, version: int) -> None:
        self.held = version
        for state in self._bound:
            state.words[w.WRITER_VERSION // 8] = min(version, w.LAST_VERSION)

    def close(self) -> None:
        """Stop publishing, so that another process may; idempotent.

        Raises:
            Busy: Another thread is publishing and does not finish.
        """
        if self._participants.forked:
            return
        self._await_turn()
        with self._turn:
            if self._publishing and self._segment.lock_fd >= 0:
                unlock(self._segment.lock_fd, self._lock_byte)
            self._publishing = False


def bind(slot: PolicySlot, state: Any) -> None:
    """Make a writer store the slot's `held` version in its rows; `state.words` are the writer's words (words.WRITER_*)."""
    slot._bound.add(state)  # noqa: SLF001 - a writer's business, hidden from whoever polls
    state.words[w.WRITER_VERSION // 8] = min(slot.held, w.LAST_VERSION)
