"""Draws made by the device itself from the pool: one graph from the random numbers to the batch's arrays.

The host only updates the pool and the list of its rows (`refresh`); it does not learn which rows are drawn. As long as the pool holds
the whole table, the device draws the same rows as a loader on the CPU with the same seed. Otherwise draws are uniform over the rows in
the pool. Rows that were removed by a delete or a reset before the last `refresh` are not drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from conduit.contracts.device import Device, Event, Tensor
from conduit.errors import Closed, ConfigError
from conduit.kernels.spec.plan import INTERNAL, KEYS, Plan
from conduit.kernels.spec.windows import Transition
from conduit.native.jit import entry
from conduit.plane.deliver.buffers import offsets_of, spans_of
from conduit.plane.device.buffers import Spans, check_plan, stack_pairs, view_of
from conduit.plane.device.mirror import Mirror
from conduit.plane.device.row_sources import BASE, GENERATION, ROWS
from conduit.store.format import words as w
from conduit.store.format.table_spec import future_ticks
from conduit.store.pages import deletion, settling
from conduit.store.tables.view import TableView

Array = np.ndarray[Any, Any]

_ROWS, _FOLLOWING, _USED, _DISCOUNTS, _ENDED, _CUT, _GIVEN_UP, _STACK, _FOLLOWING_STACK, _SHIFT = (
    INTERNAL + name
    for name in (
        *("rows", "following", "used", "discounts", "ended", "cut"),
        *("given up", "stack", "following stack", "shift"),
    )
)
_INT64 = np.dtype(np.int64)
_RING = 3
_LACKS = "draws of the device are of transitions without random_shift, use the loader's next()"


class Draws:
    """Batches drawn by the device, in tensors at fixed addresses: each draw overwrites the previous one.

    Use `replay`, or put `launch` into a graph of your own and call `launched` after each launch of that graph. All work is in the order
    of the current stream, and no call waits for it. Once the loader is closed, the pool is gone and these calls raise Closed; a graph of
    your own must not be launched any more.

    Attributes:
        outputs: {name: tensor} of the batch; a sample for which no row was drawn has zeros, and the id -1.
        ids, versions, episodes, steps: int64 [B].
        given_up: int64 [1], number of samples so far for which no row was drawn, because the pool had no row, or very few rows, that
            begin a window.
    """

    def __init__(self, device: Device, table: TableView, plan: Plan, mirror: Mirror, seed: int, number: int) -> None:
        self._mirror = mirror
        self._check_open()
        check_plan(plan, table.layout.schema)
        window = plan.window
        if not isinstance(window, Transition) or any(output.shift is not None for output in plan.outputs):
            raise ConfigError(f"Expected a plan that the device can draw for, got {window}: {_LACKS}")
        self._device, self._table, self._plan, self._window = device, table, plan, window
        size, slots = plan.batch_size, mirror.slots
        heads: Spans = dict.fromkeys(("firsts", "committed", "over", "envs", "names", "streams"), (_INT64, (slots,)))
        heads["gone"] = np.dtype(np.int32), (slots, -(-table.layout.page_rows // 32))
        heads |= {"starts": (_INT64, (slots + 1,)), "listed": (_INT64, (1,)), "state": (_INT64, (2,))}
        self._heads_at, self._heads_bytes = offsets_of(heads)
        self._ring = [device.pinned(self._heads_bytes) for _ in range(_RING)]
        self._events: list[Event | None] = [None] * _RING
        self._turn = 0
        # the state lies after the part of the memory that `refresh` overwrites
        self._listed_bytes = self._heads_at["state"]
        memory = device.empty(self._heads_bytes)
        self._heads = {
            name: view_of(memory, self._heads_at[name], dtype.name, shape) for name, (dtype, shape) in heads.items()
        }
        self._head_memory = memory
        self._spans = heads
        self._shown: bytes = b""
        self._begun = -1
        # for each page: generation and number of rows at the last look, and a bit for each deleted row
        self._looked = np.full((table.layout.pages, 2), -1, np.int64)
        self._gone = np.zeros((table.layout.pages, heads["gone"][1][1]), np.int32)
        # internal arrays have names that no field can have
        made: Spans = {
            **spans_of(plan),
            **dict.fromkeys((_ROWS, _FOLLOWING, _USED), (_INT64, (size,))),
            _DISCOUNTS: (np.dtype(np.float32), (size,)),
            _ENDED: (np.dtype(bool), (size,)),
            _CUT: (np.dtype(bool), (size,)),
            _GIVEN_UP: (_INT64, (1,)),
            _STACK: (_INT64, (size, window.stack)),
            _FOLLOWING_STACK: (_INT64, (size, window.stack)),
            _SHIFT: (np.dtype(np.int32), (size,)),
        }
        at, end = offsets_of(made)
        memory = device.empty(end)
        memory.zero_()
        types = {output.name: output.transform.dtype for output in plan.outputs}
        self._made = {
            name: view_of(memory, at[name], types.get(name, dtype.name), shape) for name, (dtype, shape) in made.items()
        }
        # a transition's columns are written directly into the batch
        for name, output in (
            ("discount", _DISCOUNTS),
            ("n_steps", _USED),
            ("terminated", _ENDED),
            ("truncated", _CUT),
        ):
            if any(item.name == name for item in plan.computed):
                self._made[output] = self._made[name]
        self.outputs = {name: self._made[name] for name in plan.names}
        self.ids, self.versions, self.episodes, self.steps = (self._made[key] for key in KEYS)
        self.given_up = self._made[_GIVEN_UP]
        self.refresh()
        self.seek(seed, number)
        self._replay: Callable[[], None] | None = None
        self._seed, self._number = seed, number

    def _check_open(self) -> None:
        if self._mirror.closed:
            raise Closed(
                "Expected draws of an open loader, got one that was closed, and the pool is gone: open another one"
            )

    def seek(self, seed: int, number: int) -> None:
        """Make the draw of this seed and number the next one; waits for the device.

        Raises:
            Closed: The loader was closed.
        """
        self._check_open()
        from conduit.kernels.gpu.philox import make_state

        self._heads["state"].copy_(make_state(seed, number, self._device.place))

    def refresh(self) -> None:
        """Update the pool and the list of its rows, in the order of the current stream.

        A draw that is launched after this call takes no row that was deleted, or removed by a reset, before the call.

        Raises:
            Closed: The loader was closed.
        """
        self._check_open()
        self._mirror.refresh()
        self._show()

    def _show(self) -> None:
        """Update the device's list of the rows in the pool."""
        self._seen = self._mirror.refreshed
        turn = self._turn % _RING
        event = self._events[turn]
        if event is not None:
            event.wait()
        pinned = self._ring[turn]
        self._list(pinned.numpy())
        shown = pinned.numpy()[: self._listed_bytes].tobytes()
        if shown == self._shown:
            return
        self._shown = shown
        self._device.upload(self._head_memory[: self._listed_bytes], pinned[: self._listed_bytes])
        self._events[turn] = self._device.record()
        self._turn += 1

    def _list(self, memory: Array) -> None:
        """List the pages in the pool and their rows that may be drawn, by the rules of conduit.sampling.candidates."""
        heads = {
            name: np.ndarray(shape, dtype, memory, self._heads_at[name]) for name, (dtype, shape) in self._spans.items()
        }
        places, words = self._mirror.places, self._mirror.words
        rows = self._table.layout.page_rows
        pages = np.flatnonzero(places[:, BASE] >= 0)
        slots = places[pages, BASE] // rows
        block = words[pages]
        envs, have = block[:, w.PAGE_ENVS // 8], places[pages, ROWS]
        growing = (block[:, w.PAGE_STATE // 8] & w.KIND_MASK) == w.OPEN
        # while the stream's previous page is open, it offers the rows that it shares with the page just opened (sampling.candidates)
        elder = np.clip(block[:, w.PAGE_PREVIOUS // 8] - 1, 0, len(words) - 1)
        state = words[elder, w.PAGE_STATE // 8]
        named = (block[:, w.PAGE_PREVIOUS // 8] > 0) & (
            (state >> w.GENERATION_SHIFT) == block[:, w.PAGE_PREVIOUS_GENERATION // 8]
        )
        unborn = growing & named & ((state & w.KIND_MASK) == w.OPEN)
        need = 1 if self._window.newest == "bootstrap" else self._window.n_step
        committed = np.clip(block[:, w.PAGE_COMMITTED // 8], 0, rows)
        growing = growing | (block[:, w.PAGE_ENDED // 8] == w.CUT)
        goes_on = ~growing & (block[:, w.PAGE_ENDED // 8] == 0)
        ends = committed - goes_on * future_ticks(self._table.layout.table) * envs
        ends = np.where(growing | (have < committed), np.minimum(ends, have - need * envs), ends)
        complete = np.minimum(block[:, w.PAGE_TAIL // 8] >> w.COMPLETE_SHIFT, committed)
        ends = np.where(growing & (complete <= have), np.maximum(ends, complete), ends)
        ends[unborn | (envs < 1) | (envs > rows) | ~self._look(pages, ~unborn)] = 0
        begins = np.maximum(block[:, w.PAGE_FIRST // 8], 0)
        counts = np.maximum(ends - begins, 0)
        for name in ("firsts", "committed", "over", "envs", "names", "streams", "starts", "gone"):
            heads[name][:] = 0
        heads["gone"][slots] = self._gone[pages]
        heads["committed"][slots], heads["envs"][slots] = have, envs
        heads["over"][slots] = (block[:, w.PAGE_ENDED // 8] == w.ENDED) & ~growing & (have == committed)
        heads["names"][slots] = ((places[pages, GENERATION] & w.GENERATION_MASK) << w.ROW_BITS) | (pages * rows)
        heads["streams"][slots] = block[:, w.PAGE_STREAM // 8]
        listed = np.flatnonzero(counts)
        heads["firsts"][: len(listed)] = (places[pages, BASE] + begins)[listed]
        heads["starts"][1 : len(listed) + 1] = np.cumsum(counts[listed])
        heads["listed"][0] = len(listed)

    def _look(self, pages: Array, born: Array) -> Array:
        """Find the deleted rows of pages in the pool, where they may have changed.

        Args:
            pages: int64 [n], page numbers.
            born: Bool [n], False for a page whose rows its stream's previous page still offers.

        Returns:
            bool [n], False for a page whose rows have all been removed.
        """
        begun = entry(settling.times_begun)(self._table.address)
        if begun < 0 or begun != self._begun:
            self._looked[:] = -1
        self._begun = begun
        places, epoch = self._mirror.places, self._table.epoch
        there = np.ones(len(pages), bool)
        if epoch:
            there = self._mirror.words[pages, w.PAGE_EPOCH // 8] == epoch
        have = places[pages][:, [GENERATION, ROWS]]
        # until the page is offered, its writer copies deletions into it without counting them as begun: do not keep such a look
        stale = there & born & (have != self._looked[pages]).any(1)
        look, out, step = entry(deletion.deleted_rows), self._gone.ctypes.data, self._gone.strides[0]
        for i in np.flatnonzero(stale).tolist():
            page, (generation, rows) = int(pages[i]), have[i].tolist()
            there[i] = look(self._table.address, page, generation, rows, out + step * page) != 0
            self._looked[page] = (generation, rows) if there[i] else -1
        return there

    def launch(self) -> None:
        """Launch a draw. It consists of kernels only, so it may be captured in a graph.

        Raises:
            Closed: The loader was closed.
        """
        self._check_open()
        from conduit.kernels.gpu import augment, draws, philox, transitions
        from conduit.kernels.gpu.gather import MOST_FIELDS, Gather, gather

        heads, made, columns = self._heads, self._made, self._mirror.columns
        plan, window, page_rows = self._plan, self._window, self._table.layout.page_rows
        meta = columns["meta"]
        lists = heads["starts"], heads["firsts"], heads["listed"]
        draws.anchors(
            heads["state"],
            *lists,
            meta,
            heads["committed"],
            heads["over"],
            heads["gone"],
            made[_ROWS],
            self.given_up,
            window=window,
            page_rows=page_rows,
        )
        stacked = window.stack > 1
        lone = plan.lone_return
        transitions.transitions(
            made[_ROWS],
            meta,
            heads["committed"],
            heads["over"],
            heads["envs"],
            made[_FOLLOWING],
            made[_DISCOUNTS],
            made[_USED],
            made[_ENDED],
            made[_CUT],
            window=window,
            page_rows=page_rows,
            reward=None if lone is None else columns[lone.field.name],
            returns=None if lone is None else made[lone.name],
            reward_transform=None if lone is None else lone.transform,
            stack=made[_STACK] if stacked else None,
            following_stack=made[_FOLLOWING_STACK] if stacked else None,
            shift=made[_SHIFT] if stacked else None,
        )
        for item in plan.returns if lone is None else ():
            transitions.sums(
                made[_ROWS],
                made[_USED],
                heads["envs"],
                columns[item.field.name],
                made[item.name],
                window=window,
                page_rows=page_rows,
                transform=item.transform,
            )
        index = {"anchor": _ROWS, "following": _FOLLOWING, "stack": _STACK, "following_stack": _FOLLOWING_STACK}
        pairs = stack_pairs(plan)
        paired = {name for pair in pairs for name in pair}
        items = [
            Gather(
                columns[output.field.name], made[index[output.rows]], made[output.name], output.transform, output.name
            )
            for output in plan.outputs
            if output.name not in paired
        ]
        for first in range(0, len(items), MOST_FIELDS):
            gather(items[first : first + MOST_FIELDS])
        for name, following in pairs:
            output = next(output for output in plan.outputs if output.name == name)
            augment.frame_stacks(
                columns[output.field.name],
                made[_STACK],
                made[_FOLLOWING_STACK],
                made[_SHIFT],
                made[name],
                made[following],
                transform=output.transform,
                n_step=window.n_step,
                name=name,
            )
        keys = (made[key] for key in KEYS)
        draws.keys(made[_ROWS], meta, heads["names"], heads["streams"], *keys, page_rows=page_rows)
        philox.advance(heads["state"])

    def launched(self) -> None:
        """Record that a draw was launched in the current stream, so that the pool keeps its pages until the draw is done.

        Raises:
            Closed: The loader was closed; the launched draw has read memory that was released.
        """
        self._check_open()
        self._mirror.batched(self._device.record())

    def replay(self) -> dict[str, Tensor]:
        """Draw the next batch by one launch of a graph, which the first call captures.

        Returns:
            `outputs`.

        Raises:
            Closed: The loader was closed.
        """
        self._check_open()
        if self._replay is None:
            self._replay = self._device.capture(self.launch)
            self.seek(self._seed, self._number)
            self.given_up.zero_()
        if self._seen != self._mirror.refreshed:
            # the loader's `next` has refreshed the pool: its slots may hold other pages than the list says
            self._show()
        with self._device.guard():
            self._replay()
        self.launched()
        return self.outputs
