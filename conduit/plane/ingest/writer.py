"""A writer appends the steps of one or more environments to a table.

It writes one step per call (`append`), in place (plane.ingest.step, plane.ingest.rollout, plane.ingest.unchecked), or many steps at once
(plane.ingest.extend). A writer can wait in one place only (plane.ingest.writer_pages): for a next page when its page is full, and for
the table's limiter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np

from conduit.contracts.ingestion import Ingestion, ticks_of
from conduit.contracts.placement import Placement, Pool, Request, place
from conduit.errors import ConfigError
from conduit.field import Field
from conduit.forking import StaysHere
from conduit.native import cpython_abi
from conduit.native.descriptors import fill
from conduit.native.jit import entry
from conduit.numbers import whole
from conduit.plane.ingest.append_method import generate_append
from conduit.plane.ingest.exact import ExactAppend
from conduit.plane.ingest.extend import Bulk
from conduit.plane.ingest.field_statistics import Tally
from conduit.plane.ingest.rollout import RolloutView
from conduit.plane.ingest.step import StepBlock
from conduit.plane.ingest.stream import Stream
from conduit.plane.ingest.unchecked import UncheckedView
from conduit.plane.ingest.writer_pages import OnFull
from conduit.schema import Schema
from conduit.store.format import words as w
from conduit.store.ingest import append_objects, field_specs
from conduit.store.tables.appearance import never_raises, place_of, state_of
from conduit.store.tables.policy_weights import PolicySlot, bind
from conduit.store.tables.view import TableView

Array = np.ndarray[Any, Any]

_LARGE = 1 << 16
"""Ticks of more bytes than this are copied without the interpreter lock."""


def _recognize_nothing(*_: Any) -> int:
    return append_objects.REFUSED


class Writer(StaysHere):
    """Appends the steps of one or more environments to a table. Use it from one thread; open one per thread.

    Attributes:
        num_envs: Environments, or None for a single one without a leading axis.
        autoreset: What follows the end of an episode: "next_step" (Gymnasium's NEXT_STEP: the next row is the final
            observation), "same_step" or "disabled" (the caller passes the final observation as `final`).
    """

    _elsewhere = "open a writer there, client.writer(table, ...)"

    def __init__(
        self,
        table: TableView,
        *,
        num_envs: int | None,
        autoreset: object,
        policy: PolicySlot | None,
        timeout: float | None,
        on_full: OnFull,
        keep_final: bool,
        statistics: bool,
        ingestion: Ingestion,
        placement: Placement,
        pools: tuple[Pool, ...],
    ) -> None:
        for what, value, kind in (
            ("policy", policy, PolicySlot),
            ("ingestion", ingestion, Ingestion),
            ("placement", placement, Placement),
        ):
            if value is not None and not isinstance(value, kind):
                raise ConfigError(f"Expected a {kind.__name__} as {what}, got {type(value).__name__}")
        stream = Stream(
            table, num_envs=num_envs, autoreset=autoreset, timeout=timeout, on_full=on_full, keep_final=keep_final
        )
        if statistics:
            stream.tally = Tally(table)
            stream.words[w.WRITER_FINISHES // 8] = 0  # the rows are counted before another process may take their page
        schema = stream.schema
        self.num_envs = num_envs = stream.num_envs
        self.autoreset = stream.autoreset
        self._stream = stream
        self._schema = schema
        self._words = stream.array
        place(placement, Request(table.layout.name, stream.number, stream.envs, schema.row_bytes), pools)
        stream.words[w.WRITER_PUBLISH_EVERY // 8] = ticks_of(ingestion, table.layout.name, stream.envs)
        if policy is not None:
            bind(policy, stream)
        described = [(field, table.columns[field.name]) for field in schema.fields]
        described += [(Field(f"flag_{name}", "bool"), getattr(table, name)) for name in ("terminated", "truncated")]
        self._described, self._dims = field_specs.describe_fields(described, num_envs)
        field_specs.mark_flags(self._described)
        # large ticks are copied without the interpreter lock: another thread could change a list meanwhile
        large = schema.row_bytes * stream.envs > _LARGE and (num_envs is None or not schema.ragged_names)
        lists = num_envs is not None and not large and table.layout.limits is None
        self._final = field_specs.describe_final(schema, self._described, lists=lists)
        fill(
            stream.words,
            {
                w.WRITER_FIELDS: self._described.ctypes.data,
                w.WRITER_FIELD_COUNT: len(described),
                w.WRITER_OBJECTS: field_specs.known_objects().ctypes.data,
                w.WRITER_FINAL: 0 if self._final is None else self._final.ctypes.data,
            },
        )
        kernel = append_objects.append_large_row if large else append_objects.append_row
        self._append: Callable[..., int] = entry(
            kernel if table.layout.limits is None else append_objects.append_limited_row
        )
        store_row: Callable[..., int] = entry(append_objects.store_row)
        if not cpython_abi.is_supported():
            self._append = store_row = _recognize_nothing
        self._exactly = ExactAppend(stream, store_row, lists_finals=self._final is not None)

    # -- writing

    def append(
        self,
        *,
        terminated: Any = False,
        truncated: Any = False,
        final: Any = None,
        priority: Any = None,
        bootstrap: Any = None,
        **fields: Any,
    ) -> None:
        """Write and commit one step; the fields of the schema are keyword arguments.

        Args:
            **fields: One value per field, [*shape] or [num_envs, *shape]; nested fields as nested values. For a ragged field
                [length, *shape[1:]], or a list of num_envs such arrays.
            terminated: Bool, or bool [num_envs].
            truncated: The same.
            priority: Real, or real [num_envs], finite and at least 0: the priority of the new rows, in a table that has
                priorities; default the largest recent one (`Priorities.span`). If the schema has a field named `priority`, the keyword
                is that field. The same holds for `bootstrap`.
            final: True final observation of environments whose episode ended with this step, structured like the observation:
                arrays [num_envs, ...], which are read where an episode ended, or a list or object array with None elsewhere
                (or a tuple, if the observation is one array).
            bootstrap: In a queue of rollouts: the observation after this step, structured like the observation,
                [num_envs, ...]. The rollout ends with this step, even if it is not full (`ticks_left`); episodes do not end.

        Raises:
            FieldError: Wrong key, dtype, shape or range, a missing final observation, or an end of an episode that the autoreset mode
                does not allow; nothing is written.
            SpaceTimeout, Busy: No page could be claimed, or the table's limiter does not let the step in; nothing is written,
                and the call may be repeated.
            Frozen: The table is frozen; nothing is written.
            Closed: The writer, client or engine has closed, or another form of writing is in progress.
            OwnerGone: The engine's owner is gone; raised within a second. Nothing is written.
        """
        raise NotImplementedError  # replaced by the generated method of `writer_type`

    @property
    def stream(self) -> int:
        """Number of this writer's stream in the table; the first row may change it, if the writer fills up an earlier writer's page."""
        return self._stream.number

    @property
    def version(self) -> int:
        """Policy version that rows carry from now on; set it, or bind a PolicySlot."""
        return self._stream.words[w.WRITER_VERSION // 8]

    @version.setter
    def version(self, value: int) -> None:
        version = whole(value)
        if version is None or not 0 <= version < 2**31:
            raise ConfigError(f"Expected a version from 0 to {2**31 - 1}, got {value!r}")
        self._stream.words[w.WRITER_VERSION // 8] = version

    @property
    def ticks_left(self) -> int:
        """Steps that the present rollout of a queue still takes: if 1, the next step is its last, and takes the bootstrap.

        1 comes early if the page keeps so many final observations that there may be no room for two more steps.

        Raises:
            ConfigError: The table has no rollouts.
        """
        if not self._stream.rollout:
            raise ConfigError(
                f"Expected table {self._stream.table.layout.name!r} to have rollouts: create it with kind='queue' and "
                "rollout_length=<ticks>"
            )
        return self._stream.ticks_left

    def step(self) -> StepBlock:
        """One step whose rows are written in place: `with writer.step() as row: row.obs[:] = ...`.

        Leaving the block commits the step; an exception discards it. Fields that are not assigned keep what the memory held; ragged fields
        are then empty. `row.tokens = array` stores a ragged value; `row.reserve("tokens", length)` returns its memory to be filled.
        """
        return StepBlock(self._stream)

    def rollout(self, ticks: int, *, max_finals: int | None = None) -> RolloutView:
        """`ticks` consecutive steps of all environments, in place, as [ticks, num_envs, ...] views.

        Args:
            ticks: Steps, at least 1; they must fit into one page.
            max_finals: Number of final observations to keep room for ("same_step", "disabled"); default a quarter of the rows.

        Raises:
            ConfigError: The rollout does not fit a page.
        """
        return RolloutView(self._stream, ticks, max_finals)

    def extend(
        self,
        columns: Mapping[str, Any],
        *,
        terminated: Any = None,
        truncated: Any = None,
        places: Any = (),
        finals: Any = None,
    ) -> None:
        """Write and commit many steps at once, over as many pages as they need.

        Args:
            columns: {field: [ticks, *shape]}, or [ticks, num_envs, *shape]; nested fields as nested values.
            terminated: Bool [ticks] or [ticks, num_envs]; None for all False.
            truncated: The same.
            places: int64 [k], ascending: the steps, counted row by row (tick * num_envs + environment), that end an episode
                and whose final observation is given.
            finals: Those observations, structured like the observation: arrays [k, *shape].

        Raises:
            FieldError: As `append`; nothing is written.
            ConfigError: The schema has ragged fields.
            SpaceTimeout, Busy: No page could be claimed; the steps that filled earlier pages are committed.
            Closed: The writer, client or engine has closed, or another form of writing is in progress.
        """
        self._stream.check()
        Bulk(self._stream, columns, terminated, truncated, places, finals).write()

    def unchecked(self) -> UncheckedView:
        """The writer without checks, for hot loops: whole-table columns, a row number, and `commit()`.

        Raises:
            ConfigError: The writer adds its rows to the table's statistics, which the handle cannot do.
        """
        if self._stream.tally is not None:
            raise ConfigError(
                "Expected a writer opened with statistics=False for an unchecked handle: update client.table(name).statistics yourself"
            )
        return UncheckedView(self._stream)

    def flush(self) -> None:
        """Publish committed rows that the ingestion policy still holds back."""
        self._stream.check()
        self._stream.publish()

    def cut(self) -> None:
        """Begin a new episode in every environment with the next step, as after an unforeseen reset.

        The last step of a cut episode has no next observation and is not sampled.
        """
        self._stream.check()
        self._stream.cut()

    # -- life

    def close(self) -> None:
        """Publish, seal the page and end the stream; idempotent."""
        self._stream.close()

    @never_raises
    def __repr__(self) -> str:
        stream = self._stream
        envs = "" if self.num_envs is None else f"num_envs={self.num_envs}, "
        return (
            f"Writer({place_of(stream.table)}, {envs}autoreset={self.autoreset!r}, stream {stream.number}, "
            f"{stream.ticks:,} ticks, {state_of(stream.table, closed=stream.closed)})"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@functools.cache
def writer_type(schema: Schema, *, rollouts: bool, vector: bool) -> type[Writer]:
    """The subclass of Writer whose `append` fits a schema.

    Args:
        schema: The table's schema.
        rollouts: Whether the table is a queue of rollouts.
        vector: Whether values have a leading axis of environments.
    """
    append = generate_append(schema, rollouts=rollouts, vector=vector)
    return type("Writer", (Writer,), {"append": append, "__doc__": Writer.__doc__})
