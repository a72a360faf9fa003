"""Control point *ingestion*: how rows enter a table.

A writer fills rows in place in shared memory. Nothing is serialised, no other process is asked, and rows become visible by
one store. The contract that can be swapped is *when* they become visible: `Ingestion.publish_every`. The default makes
each commit visible at once.

A page is claimed only when the last one is full; that is the only place where a writer can wait.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Literal, Self

import numpy as np

from conduit.clock import Deadline
from conduit.errors import Busy, Closed, ConfigError, FieldError, SpaceTimeout
from conduit.field import Field
from conduit.jit import entry
from conduit.plane.append import generate_append
from conduit.plane.placement import Placement, Pool, Stream, place
from conduit.plane.rows import Bare, Slab, Step
from conduit.plane.values import checked, flag, flags
from conduit.schema import Schema
from conduit.store import objects, protocol, writing
from conduit.store.table import TableView
from conduit.store.weights import PolicySlot
from conduit.store.words import (
    STARTING,
    W_BASE,
    W_BUSY,
    W_COUNTER,
    W_ENV_STATE,
    W_ENVS,
    W_FIELD_COUNT,
    W_FIELDS,
    W_LOCAL,
    W_NEXT_STEP,
    W_OBJECTS,
    W_OWNER,
    W_PAGE,
    W_PUBLISH_EVERY,
    W_RESERVE,
    W_STREAM,
    W_STRICT,
    W_TABLE,
    W_VERSION,
    W_WORDS,
)

Autoreset = Literal["next_step", "same_step", "disabled"]
OnFull = Literal["wait", "raise"]


_LARGE = 1 << 16
"""Ticks of more bytes than this are copied without the interpreter lock."""


def _recognise_nothing(*_: Any) -> int:
    return objects.REFUSED


class Ingestion(ABC):
    """Contract of the control point *ingestion*: when committed rows become visible to readers."""

    @abstractmethod
    def publish_every(self, table: str, num_envs: int) -> int:
        """Ticks that are committed before they are published together, at least 1.

        Asked once per writer. A page's turn, `flush` and `close` publish what is pending. Rows that are not published
        when their writer dies are lost, and never half visible.
        """


class CommitPerStep(Ingestion):
    """The default: every commit is visible at once."""

    def publish_every(self, table: str, num_envs: int) -> int:
        """One tick."""
        return 1


class CommitEvery(Ingestion):
    """Publish every `ticks` ticks: fewer cache lines move between writer and readers, rows are seen later.

    Args:
        ticks: At least 1.
    """

    def __init__(self, ticks: int) -> None:
        if ticks < 1:
            raise ConfigError(f"Expected at least 1 tick, got {ticks!r}")
        self._ticks = ticks

    def publish_every(self, table: str, num_envs: int) -> int:
        """The number given."""
        return self._ticks


class WriterState:
    """A writer's private words, by address for kernels and as `words` for Python; kept apart so that others may bind to it."""

    __slots__ = ("__weakref__", "address", "array", "env_states", "words")

    def __init__(self, num_envs: int) -> None:
        self.array = np.zeros(W_WORDS, np.int64)
        self.words = self.array.data
        self.address = self.array.ctypes.data
        self.env_states = np.zeros((num_envs, 3), np.int64)
        self.env_states[:, 0] = STARTING
        self.words[W_ENV_STATE // 8] = self.env_states.ctypes.data


class Writer:
    """Appends the steps of one or more environments to a table. Use it from one thread; open one per thread.

    Attributes:
        num_envs: Environments, or None for a single one without a leading axis.
        autoreset: What follows the end of an episode: "next_step" (Gymnasium's NEXT_STEP: the next row is the final
            observation), "same_step" or "disabled" (the final observation is handed over as `final`).
        stream: Number of this writer's stream in the table.
    """

    def __init__(
        self,
        table: TableView,
        *,
        num_envs: int | None,
        autoreset: Autoreset | None,
        policy: PolicySlot | None,
        timeout: float | None,
        on_full: OnFull,
        keep_final: bool,
        ingestion: Ingestion,
        placement: Placement,
        pools: tuple[Pool, ...],
    ) -> None:
        if num_envs is not None and (not isinstance(num_envs, int) or isinstance(num_envs, bool) or num_envs < 1):
            raise ConfigError(
                f"Expected num_envs of at least 1, or None for one environment without an axis, got {num_envs!r}"
            )
        if autoreset is None:
            autoreset = "disabled" if num_envs is None else "next_step"
        if autoreset not in ("next_step", "same_step", "disabled"):
            raise ConfigError(f"Expected autoreset 'next_step', 'same_step' or 'disabled', got {autoreset!r}")
        if on_full not in ("wait", "raise"):
            raise ConfigError(f"Expected on_full 'wait' or 'raise', got {on_full!r}")
        seat = table.check_open()
        envs = num_envs or 1
        table.layout.table.check_writer(envs)
        schema = table.layout.schema
        self.num_envs = num_envs
        self.autoreset = autoreset
        self.stream = table.new_stream()
        self._table = table
        self._schema = schema
        self._envs = envs
        self._lead = () if num_envs is None else (num_envs,)
        self._timeout = timeout
        self._on_full = on_full
        self._explicit = autoreset != "next_step"
        self._open: str | None = None
        self._closed = False
        self._state = WriterState(envs)
        self._address = self._state.address
        self._words = self._state.array
        place(placement, Stream(table.layout.name, self.stream, envs, schema.row_bytes), pools)
        words = self._state.words
        for offset, value in (
            (W_TABLE, table.address),
            (W_PAGE, -1),
            (W_ENVS, envs),
            (W_RESERVE, envs if self._explicit and schema.observation_names else 0),
            (W_NEXT_STEP, not self._explicit),
            (W_STREAM, self.stream),
            (W_OWNER, seat.number),
            (W_COUNTER, seat.counter),
            (W_PUBLISH_EVERY, max(1, ingestion.publish_every(table.layout.name, envs))),
            (W_STRICT, self._explicit and keep_final and bool(schema.observation_names)),
        ):
            words[offset // 8] = value
        if policy is not None:
            policy.bind(self._state)
        described = [(field, table.columns[field.name]) for field in schema.fields]
        described += [(Field(f"flag_{name}", "bool"), getattr(table, name)) for name in ("terminated", "truncated")]
        self._described, self._dims = objects.describe_fields(described, num_envs)
        objects.mark_flags(self._described)
        words[W_FIELDS // 8] = self._described.ctypes.data
        words[W_FIELD_COUNT // 8] = len(described)
        words[W_OBJECTS // 8] = objects.known_objects().ctypes.data
        large = schema.row_bytes * envs > _LARGE
        self._append: Callable[..., int] = entry(objects.append_large_row if large else objects.append_row)
        self._store_row: Callable[..., int] = entry(objects.store_row)
        if not objects.is_supported():
            self._append = self._store_row = _recognise_nothing

    # -- writing

    def append(self, *, terminated: Any = False, truncated: Any = False, final: Any = None, **fields: Any) -> None:
        """Write and commit one step; the fields of the schema are keyword arguments.

        Args:
            fields: One value per field, [*shape] or [num_envs, *shape]; nested fields as nested values.
            terminated, truncated: bool, or bool [num_envs].
            final: True final observation of environments that ended with this step, structured like the observation:
                arrays [num_envs, ...] that are used where an episode ended, or a list or object array with None elsewhere.

        Raises:
            FieldError: Key, dtype, shape, range or a missing final observation; nothing is written.
            SpaceTimeout, Busy: No page could be claimed; nothing is written, and the call may be repeated.
            Closed: The writer, client or engine has closed, or another form of writing is in progress.
        """
        raise NotImplementedError  # replaced by the generated method of `writer_type`

    @property
    def version(self) -> int:
        """Policy version that rows carry from now on; set it, or bind a PolicySlot."""
        return self._state.words[W_VERSION // 8]

    @version.setter
    def version(self, value: int) -> None:
        if not 0 <= value < 2**31:
            raise ConfigError(f"Expected a version from 0 to {2**31 - 1}, got {value!r}")
        self._state.words[W_VERSION // 8] = value

    def step(self) -> Step:
        """One step whose rows are written in place: `with writer.step() as row: row.obs[:] = ...`.

        Leaving the block commits; an exception discards. Fields that are not assigned keep whatever the memory held.
        """
        return Step(self)

    def rollout(self, ticks: int, *, max_finals: int | None = None) -> Slab:
        """`ticks` consecutive steps of all environments, in place, as [ticks, num_envs, ...] views.

        Args:
            ticks: Steps, at least 1; they must fit into one page.
            max_finals: Kept final observations to make room for ("same_step", "disabled"); default a quarter of the rows.

        Raises:
            ConfigError: It does not fit a page.
        """
        return Slab(self, ticks, max_finals)

    def bare(self) -> Bare:
        """The writer without checks, for hot loops: whole-table columns, a row number, and `commit()`."""
        return Bare(self)

    def flush(self) -> None:
        """Publish committed rows that the ingestion policy still holds back."""
        self._check()
        entry(writing.publish)(self._address)

    def cut(self) -> None:
        """Begin a new episode in every environment with the next step, as after an unforeseen reset.

        The last step of a cut episode has no next observation and is not sampled.
        """
        self._check()
        self._state.env_states[:, 0] = STARTING

    # -- shared with the generated append and the in-place forms

    def _check(self) -> None:
        if self._closed:
            raise Closed("Expected an open writer, this one was closed")
        self._table.check_open()
        if self._open is not None:
            raise Closed(
                f"Expected the {self._open} in progress to be finished first: leave its block, commit or abort it"
            )

    def _set_open(self, what: str | None) -> None:
        self._open = what
        self._state.words[W_BUSY // 8] = what is not None

    def _begin(self, what: str, rows: int, tail: int) -> int:
        """Reserve `rows` rows in the page, and `tail` for finals; returns the first physical row."""
        self._check()
        row = self._here(rows + tail)
        self._set_open(what)
        return row

    def _here(self, need: int | None = None) -> int:
        """Physical row of the next tick; turns the page when it has fewer than `need` rows left (default: one tick)."""
        need = self._envs + self._state.words[W_RESERVE // 8] if need is None else need
        if entry(writing.room)(self._address) < need:
            self._turn()
        return self._state.words[W_BASE // 8] + self._state.words[W_LOCAL // 8]

    def _turn(self) -> None:
        """Take a new page, waiting if it must, and make it the current one."""
        if self._closed:
            raise Closed("Expected an open writer, this one was closed")
        claim = self._table.claim
        page = claim()
        if page < 0 and self._on_full == "wait":
            deadline = Deadline(self._timeout)
            found = self._table.wait(lambda: None if (p := claim()) < 0 else p, for_space=True, deadline=deadline)
            page = -1 if found is None else found
        if page < 0:
            self._explain_full()
        self._table.check_open().look_after_dead()
        entry(writing.turn)(self._address, page)

    def _commit(self, ticks: int) -> int:
        """Commit `ticks` ticks; returns -1, or the row (counted from the first) that lacks its final observation."""
        result = entry(writing.commit)(self._address, ticks)
        return -2 - result if result < -1 else -1

    def _explain_full(self) -> None:
        layout = self._table.layout
        message = (
            f"Expected a free page in table {layout.name!r}, but all {layout.pages} pages of {layout.page_rows} rows are "
            "being written or leased: end leases, use fewer writers, or raise the capacity"
        )
        if self._on_full == "raise":
            raise Busy(message)
        raise SpaceTimeout(f"{message} (waited {self._timeout} s)")

    def _abort(self, rows: int) -> None:
        entry(writing.abort)(self._address, rows)

    def _refuse(self, place: int) -> None:
        """Report a row that ends an episode without its final observation; nothing has been committed."""
        self._abort(self._envs)
        raise FieldError(
            "Expected the final observation of an episode that ends here: pass final=<observation after the last step> "
            f"(autoreset={self.autoreset!r}), or open the writer with keep_final=False - at environment {place % self._envs}",
            at=self._schema.observation_names[0],
        )

    def _append_exactly(self, values: tuple[Any, ...], final: Any) -> None:
        """The path of `append` that turns pages, converts values, keeps final observations and explains."""
        self._check()
        row = self._here()
        if self._store_row(self._words, values) < 0:
            self._store(row, values)
        if final is not None:
            self._stage_finals(row, final)
        place = self._commit(1)
        if place >= 0:
            self._refuse(place)

    def _store(self, row: int, values: tuple[Any, ...]) -> None:
        """Check every value, then store them all."""
        arrays = [checked(field, value, self._lead) for field, value in zip(self._schema.fields, values, strict=False)]
        terminated, truncated = values[-2:]
        if self.num_envs is None:
            ends = [np.full(1, flag(terminated, "terminated")), np.full(1, flag(truncated, "truncated"))]
        else:
            ends = [flags(terminated, self._envs, "terminated"), flags(truncated, self._envs, "truncated")]
        target = row if self.num_envs is None else slice(row, row + self._envs)
        for field, array in zip(self._schema.fields, arrays, strict=True):
            self._table.columns[field.name][target] = array
        self._table.terminated[row : row + self._envs] = ends[0]
        self._table.truncated[row : row + self._envs] = ends[1]

    def _stage_finals(self, row: int, final: Any) -> None:
        """Keep final observations of the environments of the tick at `row` that ended."""
        try:
            if not self._explicit:
                raise FieldError(
                    "Expected no `final` with autoreset='next_step': the row after the end is the final observation"
                )
            if self.num_envs is None:
                if self._table.terminated[row] or self._table.truncated[row]:
                    self._stage_final(row, self._schema.flatten_observation(final), ())
                return
            ended = np.flatnonzero(
                self._table.terminated[row : row + self._envs] | self._table.truncated[row : row + self._envs]
            )
            if isinstance(final, list) or (isinstance(final, np.ndarray) and final.dtype == object):
                if len(final) != self._envs:
                    raise FieldError(f"Expected {self._envs} entries, got {len(final)}", at="final")
                for env in ended.tolist():
                    if final[env] is not None:
                        self._stage_final(row + env, self._schema.flatten_observation(final[env]), ())
                return
            flat = self._schema.flatten_observation(final)
            whole = {name: checked(self._schema[name], value, self._lead) for name, value in flat.items()}
            for env in ended.tolist():
                self._stage_final(row + env, {name: array[env] for name, array in whole.items()}, ())
        except BaseException:
            self._abort(self._envs)
            raise

    def _stage_final(self, row: int, flat: Mapping[str, Any], lead: tuple[int, ...]) -> None:
        arrays = {name: checked(self._schema[name], value, lead) for name, value in flat.items()}
        kept = entry(writing.stage_final)(self._address, row)
        if kept < 0:
            raise FieldError(
                "Expected room for a final observation in this rollout: raise max_finals in writer.rollout", at="final"
            )
        for name, array in arrays.items():
            self._table.columns[name][kept] = array

    # -- life

    def close(self) -> None:
        """Publish, seal the page and end the stream; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._set_open(None)
        page = self._state.words[W_PAGE // 8]
        participants = self._table.participants
        if page < 0 or participants is None or participants.forked:
            return
        entry(writing.publish)(self._address)
        if self._state.words[W_LOCAL // 8] == 0:
            entry(protocol.free)(self._table.address, page)
        else:
            entry(protocol.seal)(self._table.address, page, 1)
        self._state.words[W_PAGE // 8] = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_closed"):
            self.close()


@functools.cache
def writer_type(schema: Schema) -> type[Writer]:
    """Writer with the `append` of a schema."""
    return type("Writer", (Writer,), {"append": generate_append(schema), "__doc__": Writer.__doc__})
