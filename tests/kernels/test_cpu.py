"""The delivery kernel with a sampler of the test's own: blocks of slots, the check after the copy, and drawing again."""

import ctypes

import numba
import numpy as np
import pytest

import conduit
from conduit import Field, Schema
from conduit.kernels.cpu import job as cpu
from conduit.kernels.spec.make_plan import make_plan
from conduit.kernels.spec.plan import IDS, STEPS
from conduit.native.jit import entry
from conduit.native.memory import peek_i64, poke_i64
from conduit.plane.deliver import fill
from conduit.plane.deliver.batch_maker import BatchMaker

SCHEMA = Schema([Field("obs", "int64", (3,), observation=True), Field("big", "uint8", (200,))])
ROWS = 12

_FIRST, _GENERATION, _BAD, _CALLS, _FAIL_AT = range(5)
"""The sampler's state: first physical row, generation, one in how many slots is stale at first, calls, attempt that fails."""


@numba.cfunc("int64(int64, int64, int64, int64, int64)")
def draw(state, job, slots, count, attempt):
    """Slot s gets row s % (ROWS - 1), at first with a generation that has passed for one in `bad` slots."""
    poke_i64(state + 8 * _CALLS, peek_i64(state + 8 * _CALLS) + 1)
    if attempt >= peek_i64(state + 8 * _FAIL_AT):
        return -1
    for i in range(count):
        slot = peek_i64(slots + 8 * i)
        row = peek_i64(state + 8 * _FIRST) + (slot + attempt) % (ROWS - 1)
        stale = attempt < 2 and slot % peek_i64(state + 8 * _BAD) == 0
        poke_i64(peek_i64(job + cpu.JOB_ROWS) + 8 * slot, row)
        poke_i64(peek_i64(job + cpu.JOB_FOLLOWING) + 8 * slot, row + 1)
        poke_i64(peek_i64(job + cpu.JOB_PAGES) + 8 * slot, 0)
        poke_i64(peek_i64(job + cpu.JOB_GENERATIONS) + 8 * slot, peek_i64(state + 8 * _GENERATION) - stale)
    return count


class Fixed:
    """A sampler as `BatchMaker` wants one."""

    def __init__(self, bad, fail_at=1 << 40):
        self.words = np.array([0, 1, bad, 0, fail_at], np.int64)
        self.function = ctypes.cast(draw.ctypes, ctypes.c_void_p).value
        self.state = self.words.ctypes.data

    def finish(self, arrays):
        """Nothing is made beside the rows."""


@pytest.fixture
def table(engine_name):
    with conduit.Engine.create(engine_name, {"t": conduit.Table(SCHEMA, 100, page_rows=20)}) as engine:
        with engine.writer("t") as writer:
            for k in range(ROWS):
                writer.append(obs=np.full(3, k), big=np.full(200, k, np.uint8))
        yield engine._views["t"]


def deliver(table, sampler, batch, block):
    plan = make_plan(SCHEMA, batch)
    maker = BatchMaker(table, plan, sampler, 0)
    buffer = maker.open_buffer()
    buffer.job.words[cpu.JOB_BLOCK // 8] = block
    buffer.maker = maker
    for array in buffer.arrays.values():
        array.view(np.uint8)[...] = 0xA5
    return buffer, entry(fill.fill)(buffer.job_address)


def check(buffer, rows):
    arrays = buffer.arrays
    np.testing.assert_array_equal(arrays["obs"], np.repeat(rows[:, None], 3, 1))
    np.testing.assert_array_equal(arrays["next_obs"], np.repeat(rows[:, None], 3, 1) + 1)
    np.testing.assert_array_equal(arrays["big"], np.repeat(rows[:, None], 200, 1))
    np.testing.assert_array_equal(arrays[IDS], (1 << 40) + rows)
    np.testing.assert_array_equal(arrays[STEPS], rows)


@pytest.mark.parametrize("batch", [1, 2, 15, 16, 17, 64, 257])
@pytest.mark.parametrize("block", [1, 16, 1000])
def test_every_slot_is_filled_block_by_block(table, batch, block):
    sampler = Fixed(bad=10**6)
    sampler.words[_GENERATION] = 1
    buffer, result = deliver(table, sampler, batch, block)
    assert result == batch
    assert sampler.words[_CALLS] >= -(-batch // block)
    if batch > 1:
        # slot 0 of each delivery is stale twice here: it is drawn a third time
        rows = np.arange(batch) % (ROWS - 1)
        rows[0] = 2
        check(buffer, rows)
        assert buffer.job.redrawn == 2


@pytest.mark.parametrize("bad", [1, 2, 3, 7])
@pytest.mark.parametrize("block", [5, 1000])
def test_rows_whose_page_has_another_generation_after_the_copy_are_drawn_again_and_only_they(table, bad, block):
    sampler = Fixed(bad)
    buffer, result = deliver(table, sampler, 60, block)
    slots = np.arange(60)
    stale = slots % bad == 0
    assert result == 60
    check(buffer, np.where(stale, slots + 2, slots) % (ROWS - 1))
    assert buffer.job.redrawn == 2 * stale.sum()
    deliver_again = entry(fill.fill)(buffer.job_address)
    assert deliver_again == 60
    assert buffer.job.redrawn == 4 * stale.sum()


def test_a_sampler_with_nothing_to_draw_ends_the_delivery(table):
    buffer, result = deliver(table, Fixed(10**6, fail_at=0), 8, 1000)
    assert result == -1
    assert not buffer.maker.fill(buffer)
    _, result = deliver(table, Fixed(2, fail_at=1), 8, 1000)
    assert result == -1


@pytest.mark.parametrize("kind", ["free", "initialising"])
def test_a_page_that_holds_no_rows_any_more_is_never_handed_out(table, kind):
    """Its generation alone would still be the one that was drawn."""
    sampler = Fixed(10**6)
    words = table.segment.words
    at = table.layout.blocks // 8
    before = words[at]
    words[at] = before & ~15 | (0 if kind == "free" else 1)
    sampler.words[_FAIL_AT] = 5
    _, result = deliver(table, sampler, 8, 1000)
    assert result == -1
    assert sampler.words[_CALLS] == 6
    words[at] = before
    _, result = deliver(table, Fixed(10**6), 8, 1000)
    assert result == 8
