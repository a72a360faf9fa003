"""A batch maker by itself: the same inputs give the same bytes, and a batch made in parts is the batch made at once."""

import signal
import subprocess
import sys

import numpy as np
import pytest

import conduit
from conduit.errors import ConfigError
from conduit.kernels.spec.batch_transforms import with_batch_transforms
from conduit.kernels.spec.make_plan import make_plan
from conduit.kernels.spec.plan import Computed
from conduit.plane.deliver.batch_maker import BatchMaker
from conduit.sampling.prioritized import WEIGHTS, Prioritized, PrioritizedSampler
from conduit.sampling.uniform import Uniform

SIZE, SEED, POISON = 48, 7, 0xA5
SCHEMA = conduit.Schema(
    [
        conduit.Field("obs", "uint8", (6, 6), observation=True),
        conduit.Field("kind", "int64"),
        conduit.Field("text", "int32", (9, 2), ragged=True),
        conduit.Field("reward", "float32"),
    ]
)
IMAGES = {"obs": (conduit.random_shift(1), conduit.scale(1 / 255)), "kind": conduit.one_hot(5)}
PLANS = {
    "transitions": {"transform": {"kind": conduit.one_hot(5)}},
    "3 steps of 2 frames": {"window": conduit.Transition(n_step=3, stack=2), "transform": IMAGES},
    "sequences": {
        "window": conduit.Sequence(4),
        "fields": ["obs", "reward", "mask"],
        "transform": {"obs": IMAGES["obs"]},
    },
    "packed": {"ragged": "pack"},
    "priorities": {"fields": ["obs", "next_obs", "reward"]},
}


@pytest.fixture
def engine(make):
    """Pages of 16 rows, so that 400 rows go round 128 of them more than once."""
    return make(SCHEMA, 128, page_rows=16, max_length=4, max_stack=2, max_n_step=3, priorities=conduit.Priorities())


def write(engine, count, start=0):
    with engine.writer("replay", keep_final=False) as writer:
        for number in range(start, start + count):
            writer.append(
                obs=np.full((6, 6), number % 251, np.uint8),
                kind=number % 5,
                text=np.full((number % 10, 2), number, np.int32),
                reward=number,
                terminated=number % 23 == 22,
            )


def maker_of(engine, name, size=SIZE):
    view = engine._views["replay"]
    options = {"fields": ["obs", "next_obs", "reward", "kind", "text"], **PLANS[name]}
    if "window" in options:
        options["fields"] = [field for field in options["fields"] if field != "text"]
    by_priority = name == "priorities"
    plan = make_plan(SCHEMA, size, extra=WEIGHTS if by_priority else (), **options)
    sampler = Uniform(SEED, view.layout.pages)
    if by_priority:
        geometry = view.layout.pages, view.layout.page_rows
        rule = view.layout.table.priorities
        line = view.seat_line()
        sampler = PrioritizedSampler(Prioritized(), rule, "replay", view.address, line, geometry, size, SEED, 1)
    return BatchMaker(view, with_batch_transforms(plan, ()), sampler, SEED)


def poisoned(maker):
    buffer = maker.open_buffer()
    for name, array in buffer.arrays.items():
        if not name.endswith("_cu_seqlens"):
            array.view(np.uint8)[...] = POISON
    return buffer


def begin(maker, number):
    maker.sampler.batch = number
    maker.prepare(number)


def contents(buffer):
    """Every array's bytes; of packed ones those that are handed out."""
    found = {name: array.copy() for name, array in buffer.arrays.items()}
    for names, starts in buffer.narrowed:
        found |= {name: found[name][: starts[-1]] for name in names}
    return found


def check(found, wanted):
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.parametrize("name", PLANS)
def test_the_same_inputs_give_the_same_bytes(engine, name):
    write(engine, 100)
    first, second = maker_of(engine, name), maker_of(engine, name)
    made = {}
    for number in (0, 1, 5):
        begin(first, number)
        buffer = poisoned(first)
        assert first.fill(buffer)
        made[number] = contents(buffer)
    assert not np.array_equal(made[0]["reward"], made[1]["reward"])
    for number in (5, 0, 1):  # in another order, by another maker
        begin(second, number)
        buffer = poisoned(second)
        assert second.fill(buffer)
        check(contents(buffer), made[number])


def test_a_loader_hands_out_what_its_maker_makes_of_the_number_of_the_batch(engine):
    write(engine, 100)
    transform = PLANS["transitions"]["transform"]
    fields = ["obs", "next_obs", "reward", "kind", "text"]
    loader = engine.loader("replay", batch_size=SIZE, seed=SEED, format="numpy", fields=fields, transform=transform)
    maker = maker_of(engine, "transitions")
    for number in range(3):
        batch = loader.next()
        begin(maker, number)
        buffer = poisoned(maker)
        assert maker.fill(buffer)
        for name in fields:
            np.testing.assert_array_equal(batch[name], buffer.arrays[name])


@pytest.mark.parametrize("name", PLANS)
def test_what_is_drawn_and_gathered_apart_is_what_is_made_at_once(engine, name):
    write(engine, 100)
    maker = maker_of(engine, name)
    begin(maker, 3)
    whole, parts = poisoned(maker), poisoned(maker)
    assert maker.fill(whole)
    assert maker.draw(parts)
    assert (parts.arrays["obs"].view(np.uint8) == POISON).all()
    assert maker.gather(parts)
    check(contents(parts), contents(whole))


@pytest.mark.parametrize("name", [name for name in PLANS if name != "packed"])
def test_listed_slots_are_gathered_as_in_the_whole_and_no_other_is_touched(engine, name):
    write(engine, 100)
    maker = maker_of(engine, name)
    begin(maker, 2)
    whole, parts = poisoned(maker), poisoned(maker)
    assert maker.fill(whole)
    assert maker.draw(parts)
    slots = np.array([40, 3, 17, 18, 47, 0])
    assert maker.gather(parts, slots)
    others = np.setdiff1d(np.arange(SIZE), slots)
    gathered = [output.name for output in maker.plan.outputs] + [
        part for item in maker.plan.ragged for part in item.parts
    ]
    assert "obs" in gathered
    for array_name in gathered:
        found, wanted = parts.arrays[array_name], whole.arrays[array_name]
        np.testing.assert_array_equal(found[slots], wanted[slots])
        assert (np.ascontiguousarray(found[others]).view(np.uint8) == POISON).all()


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("more", [1, 40, 300], ids=["one row more", "two pages overwritten", "all overwritten"])
def test_a_batch_made_early_and_drawn_again_needs_only_the_slots_that_differ(engine, name, more):
    write(engine, 128)
    early, late = maker_of(engine, name), maker_of(engine, name)
    begin(early, 4)
    buffer = poisoned(early)
    assert early.fill(buffer)
    before = early.drawn(buffer)
    assert len(before.differing(before)) == 0
    write(engine, more, 128)
    begin(early, 4)
    assert early.draw(buffer)
    slots = before.differing(early.drawn(buffer))
    # a row alone may be nobody's; where every page is another no slot can stand
    assert len(slots) == SIZE if more == 300 else len(slots) >= more // 40
    assert early.gather(buffer, slots)
    begin(late, 4)
    wanted = poisoned(late)
    assert late.fill(wanted)
    check(contents(buffer), contents(wanted))
    assert len(early.drawn(buffer).differing(late.drawn(wanted))) == 0


def test_slots_differ_by_row_generation_or_any_row_of_the_window(engine):
    write(engine, 100)
    maker = maker_of(engine, "3 steps of 2 frames")
    begin(maker, 0)
    buffer = maker.open_buffer()
    assert maker.draw(buffer)
    first = maker.drawn(buffer)
    scratch = maker.scratch
    for slot, array in (
        (5, scratch.pages),
        (6, scratch.generations),
        (7, scratch.index["anchor"]),
        (8, scratch.index["following"]),
        (9, scratch.index["following_stack"][:, 1]),
    ):
        array[slot] += 1
    assert first.differing(maker.drawn(buffer)).tolist() == [5, 6, 7, 8, 9]


@pytest.mark.parametrize("name", ["transitions", "packed", "priorities"])
def test_rows_that_were_overwritten_between_draw_and_gather_are_drawn_again(engine, name):
    write(engine, 128)
    maker = maker_of(engine, name)
    begin(maker, 0)
    buffer = poisoned(maker)
    assert maker.draw(buffer)
    write(engine, 300, 128)
    assert maker.gather(buffer)
    assert buffer.job.redrawn == SIZE
    batch = maker.batch(buffer, 0)
    assert (engine.loader("replay", batch_size=1).valid(batch.ids)).all()
    assert (batch["reward"] >= 128).all()
    np.testing.assert_array_equal(batch["obs"][:, 0, 0], batch["reward"] % 251)


def test_a_draw_without_rows_says_so(engine):
    maker = maker_of(engine, "transitions")
    buffer = maker.open_buffer()
    assert not maker.fill(buffer)
    assert not maker.draw(buffer)


def test_a_table_that_counts_deliveries_is_not_drawn_apart(make):
    engine = make(SCHEMA, 128, max_times_sampled=2)
    write(engine, 60)
    view = engine._views["replay"]
    maker = BatchMaker(view, make_plan(SCHEMA, 8), Uniform(0, view.layout.pages), 0)
    buffer = maker.open_buffer()
    for call in (maker.draw, maker.gather):
        with pytest.raises(ConfigError, match="without max_times_sampled to draw and gather apart"):
            call(buffer)
    assert maker.fill(buffer)
    maker.give_back(buffer)


def test_arrays_of_a_sampler_and_of_steps_are_those_of_the_slots_a_buffer_is_narrowed_to(engine):
    write(engine, 100)
    view = engine._views["replay"]
    plan = make_plan(SCHEMA, SIZE, fields=["reward"], extra=(Computed("source", "int64", ()),))
    maker = BatchMaker(view, plan, Uniform(SEED, view.layout.pages), SEED)
    whole, part = poisoned(maker), poisoned(maker)
    begin(maker, 0)
    assert maker.fill(whole)
    part.narrow(10, 30)
    begin(maker, 0)
    assert maker.draw(part)
    assert maker.gather(part)
    np.testing.assert_array_equal(part.arrays["reward"][10:30], whole.arrays["reward"][10:30])
    outside = np.r_[0:10, 30:SIZE]
    assert (part.arrays["reward"][outside].view(np.uint8).reshape(-1) == POISON).all()


_UNREADABLE = """
import ctypes, sys
import conduit
from conduit.kernels.spec.make_plan import make_plan
from conduit.plane.deliver.batch_maker import BatchMaker
from conduit.sampling.uniform import Uniform

with conduit.attach(sys.argv[1]) as client:
    view = client._views["replay"]
    maker = BatchMaker(view, make_plan(view.layout.schema, 16), Uniform(0, view.layout.pages), 0)
    buffer = maker.open_buffer()
    column = view.columns["obs"]
    begin = -(-column.ctypes.data // 4096) * 4096
    size = (column.ctypes.data + column.nbytes - begin) // 4096 * 4096
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(begin), ctypes.c_size_t(size), 0) == 0
    assert maker.draw(buffer)
    print("drawn", len(set(maker.drawn(buffer).index["anchor"].tolist())) > 1, flush=True)
    if sys.argv[2] == "gather":
        maker.gather(buffer)
    assert libc.mprotect(ctypes.c_void_p(begin), ctypes.c_size_t(size), 3) == 0
"""


@pytest.mark.parametrize("way", ["draw", "gather"])
def test_a_draw_reads_no_field_and_a_gather_does(engine_name, way):
    schema = conduit.Schema([conduit.Field("obs", "uint8", (1 << 14,), observation=True)])
    with conduit.Engine.create(engine_name, {"replay": conduit.Table(schema, 64)}) as engine:
        with engine.writer("replay") as writer:
            for number in range(40):
                writer.append(obs=np.full(1 << 14, number, np.uint8))
        command = [sys.executable, "-c", _UNREADABLE, engine_name, way]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.stdout == "drawn True\n", result.stderr
    # the column cannot be read at all: whoever reads it dies of it
    assert result.returncode == (0 if way == "draw" else -signal.SIGSEGV), result.stderr
