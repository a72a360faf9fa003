"""Ragged fields from `append` to the batch: against a twin of plain Python values, through page turns, evictions and deaths."""

import itertools
import os
import signal
import subprocess
import sys
import time
import zlib

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import conduit
from conduit.errors import Busy, CapacityError, ConfigError, DataTimeout, FieldError
from conduit.plane.observe import inspect
from conduit.store.format import words
from conduit.store.format.episode_records import ring_bytes
from tests.plane.model import Full, Model

LONGEST, POINTS = 13, 4
SCHEMA = conduit.Schema(
    [
        conduit.Field("serial", "int64", observation=True),
        conduit.Field("tokens", "int32", (LONGEST,), observation=True, ragged=True),
        conduit.Field("points", "float32", (POINTS, 2), casting="same_kind", ragged=True),
    ]
)


def tokens(serial):
    """The tokens of a row: 0 to LONGEST of them, as its number says."""
    length = [0, LONGEST, 1, (serial * 7) % (LONGEST + 1), (serial * 5) % (LONGEST + 1)][serial % 5]
    return (serial * 1000 + np.arange(length)).astype(np.int32)


def points(serial):
    return np.full(((serial * 3) % (POINTS + 1), 2), serial / 4, np.float32) + np.float32([0, 0.125])


class RaggedModel(Model):
    """The model, with arenas that run out."""

    def __init__(self, view, *shape):
        super().__init__(*shape)
        layout = view.layout.arenas
        self.capacity = (layout["tokens"].items, layout["points"].items)

    def used(self, stream):
        rows = [row for tick in stream.ticks[stream.page.start :] for row in tick]
        kept = [row.final for row in rows if row.final is not None]
        taken = sum(len(tokens(row.serial)) for row in rows) + sum(len(tokens(final)) for final in kept)
        return taken, sum(len(points(row.serial)) for row in rows)

    def reserve_values(self, stream, reserve, items):
        fits = self.room(stream) >= stream.envs + reserve
        if fits:
            fits = all(u + i <= c for u, i, c in zip(self.used(stream), items, self.capacity, strict=True))
        if not fits:
            self.turn(stream)


class Abandoned(Exception):
    """Leaves a step."""


def largest(stream):
    """Items that a step makes room for at its beginning."""
    return stream.envs * LONGEST * (2 if stream.explicit else 1), stream.envs * POINTS


def fill_step(row, single, serials, flags, finals, form):
    """Write a tick in place: assigned, or into memory that was reserved."""
    row.serial[...] = serials[0] if single else serials
    for name, value in (("tokens", tokens), ("points", points)):
        values = [value(serial) for serial in serials]
        if form == "step":
            row[name] = values[0] if single else values
            continue
        lengths = [len(one) for one in values]
        views = row.reserve(name, lengths[0] if single else np.array(lengths))
        for view, one in zip([views] if single else views, values, strict=True):
            assert view.shape == one.shape
            view[...] = one
    for env, ((terminated, truncated), final) in enumerate(zip(flags, finals, strict=True)):
        if single:
            row.terminated, row.truncated = terminated, truncated
        else:
            row.terminated[env], row.truncated[env] = terminated, truncated
        if final is not None:
            row.set_final(env, {"serial": np.int64(final), "tokens": tokens(final)})


class RaggedMachine(RuleBasedStateMachine):
    numbers = itertools.count()

    @initialize(
        windows=st.sampled_from([(1, 1), (1, 3), (3, 1), (2, 2)]),
        spare=st.integers(0, 9),
        mean=st.sampled_from([1, 4, 9, LONGEST]),
        pages=st.integers(4, 6),
    )
    def create(self, windows, spare, mean, pages):
        stack, n_step = windows
        halo = stack - 1 + n_step
        rows = 2 * (2 * halo + 4) + spare
        table = conduit.Table(
            SCHEMA,
            (pages - 1) * (rows - 2 * halo),
            page_rows=rows,
            max_stack=stack,
            max_n_step=n_step,
            max_length=2,
            num_envs=2,
            mean_lengths={"tokens": mean, "points": 1},
        )
        self.name = f"t{os.getpid()}-ragged{next(self.numbers)}"
        self.engine = conduit.Engine.create(self.name, {"replay": table}, max_participants=8)
        self.clients = [conduit.attach(self.name), conduit.attach(self.name)]
        self.view = self.engine._views["replay"]
        self.model = RaggedModel(self.view, self.view.layout.pages, rows, stack - 1, n_step)
        self.pairs = []
        self.serial = 0
        options = {"batch_size": 8, "min_rows": 1, "format": "numpy", "timeout": 0.0}
        self.loaders = [self.engine.loader("replay", ragged=layout, **options) for layout in ("pad", "pack")]

    def teardown(self):
        if hasattr(self, "engine"):
            for client in self.clients:
                client.close()
            self.engine.close()

    def open_pairs(self):
        return [pair for pair in self.pairs if pair[1].open]

    @precondition(lambda self: len(self.open_pairs()) < 3)
    @rule(
        mode=st.sampled_from([(None, "disabled"), (None, "next_step"), (2, "next_step"), (2, "same_step")]),
        client=st.integers(0, 1),
        every=st.sampled_from([1, 1, 3]),
    )
    def open_writer(self, mode, client, every):
        envs, autoreset = mode
        writer = self.clients[client].writer(
            "replay", num_envs=envs, autoreset=autoreset, on_full="raise", ingestion=conduit.CommitEvery(every)
        )
        self.pairs.append((writer, self.model.open(writer.stream, envs or 1, autoreset, True, every), client))

    @precondition(open_pairs)
    @rule(
        number=st.integers(0, 2),
        ticks=st.integers(1, 15),
        ends=st.integers(0, 2**60),
        form=st.sampled_from(["arrays", "lists", "objects", "tuple", "step", "reserve"]),
        handed=st.sampled_from(["whole", "each"]),
    )
    def write(self, number, ticks, ends, form, handed):
        writer, stream, _ = self.open_pairs()[number % len(self.open_pairs())]
        for tick in range(ticks):
            flags = [(ends >> (2 * (tick * stream.envs + env) % 60)) & 7 for env in range(stream.envs)]
            flags = [
                (flag in (1, 3), flag in (2, 3)) if stream.may_end(env) else (False, False)
                for env, flag in enumerate(flags)
            ]
            serials = [self.serial + env for env in range(stream.envs)]
            over = [any(pair) for pair in flags]
            self.serial += 2 * stream.envs
            finals = [s + stream.envs if o and stream.explicit else None for s, o in zip(serials, over, strict=True)]
            reserve = stream.envs if stream.explicit else 0
            items = (
                sum(len(tokens(s)) for s in (*serials, *(f for f in finals if f is not None))),
                sum(len(points(s)) for s in serials),
            )
            if form in ("step", "reserve"):
                items = largest(stream)
            try:
                self.append(writer, serials, flags, finals, form, handed)
            except Busy:
                with pytest.raises(Full):
                    self.model.reserve_values(stream, reserve, items)
                return
            self.model.reserve_values(stream, reserve, items)
            self.model.commit(stream, [(s, *f, final) for s, f, final in zip(serials, flags, finals, strict=True)])
            self.model.after_commit(stream, 1, reserve)

    def append(self, writer, serials, flags, finals, form, handed):
        single = writer.num_envs is None
        if form in ("step", "reserve"):
            with writer.step() as row:
                fill_step(row, single, serials, flags, finals, form)
            return
        values = {"tokens": [tokens(s) for s in serials], "points": [points(s) for s in serials]}
        if form == "lists":  # the exact path: nothing is an array
            values = {name: [one.tolist() for one in value] for name, value in values.items()}
        elif form == "tuple":
            values = {name: tuple(value) for name, value in values.items()}
        elif form == "objects" and not single:
            values["tokens"] = np.array([None, *values["tokens"]], dtype=object)[1:]
        if single:
            values = {name: value[0] for name, value in values.items()}
        final = None
        if any(f is not None for f in finals):
            if single:
                final = {"serial": np.int64(finals[0]), "tokens": tokens(finals[0])}
            elif handed == "each":
                final = [None if f is None else {"serial": np.int64(f), "tokens": tokens(f)} for f in finals]
            else:
                final = {
                    "serial": np.array([f or 0 for f in finals]),
                    "tokens": [None if f is None else tokens(f) for f in finals],
                }
        terminated, truncated = ([pair[i] for pair in flags] for i in (0, 1))
        writer.append(
            serial=serials[0] if single else np.array(serials),
            **values,
            terminated=terminated[0] if single else terminated,
            truncated=truncated[0] if single else truncated,
            final=final,
        )

    @precondition(open_pairs)
    @rule(number=st.integers(0, 2), form=st.sampled_from(["step", "reserve"]), ends=st.booleans())
    def abandon(self, number, form, ends):
        """A step that is given up may have turned the page, and leaves nothing else."""
        writer, stream, _ = self.open_pairs()[number % len(self.open_pairs())]
        serials = range(10**6, 10**6 + stream.envs)
        finals = [serial + 5 if ends and stream.explicit else None for serial in serials]
        reserve = stream.envs if stream.explicit else 0
        try:
            with writer.step() as row:
                fill_step(row, writer.num_envs is None, serials, [(ends, False)] * stream.envs, finals, form)
                raise Abandoned  # noqa: TRY301 - the step is to be left by an exception
        except Abandoned:
            self.model.reserve_values(stream, reserve, largest(stream))
        except Busy:
            with pytest.raises(Full):
                self.model.reserve_values(stream, reserve, largest(stream))

    @precondition(open_pairs)
    @rule(
        number=st.integers(0, 2), which=st.sampled_from(["tokens", "points"]), form=st.sampled_from(["arrays", "lists"])
    )
    def refuse(self, number, which, form):
        writer, stream, _ = self.open_pairs()[number % len(self.open_pairs())]
        before = self.view.pages().copy()
        field = SCHEMA[which]
        good = {"tokens": tokens(self.serial), "points": points(self.serial)}
        bad = np.zeros((field.max_length + 1, *field.shape[1:]), field.dtype)
        values = {name: [good[name]] * (stream.envs - 1) + [bad if name == which else good[name]] for name in good}
        if form == "lists":
            values = {name: [one.tolist() for one in value] for name, value in values.items()}
        single = writer.num_envs is None
        with pytest.raises(FieldError, match=f"at most {field.max_length} items, got {field.max_length + 1}.*`{which}"):
            writer.append(
                serial=0 if single else np.zeros(stream.envs, np.int64),
                **({name: value[0] for name, value in values.items()} if single else values),
            )
        np.testing.assert_array_equal(self.view.pages(), before)

    @precondition(open_pairs)
    @rule(number=st.integers(0, 2))
    def close(self, number):
        writer, stream, _ = self.open_pairs()[number % len(self.open_pairs())]
        writer.close()
        self.model.close(stream)

    @rule(client=st.integers(0, 1))
    def kill(self, client):
        """A client's process dies and is recovered."""
        self.clients[client]._participants.forget()
        self.model.kill([stream for _, stream, owner in self.pairs if owner == client and stream.open])
        self.engine.recover()
        self.clients[client] = conduit.attach(self.name)

    @rule()
    def draw(self):
        wanted = {}
        for page in self.model.pages:
            for tick in range(page.start, page.end) if page.is_live() else ():
                for env, row in enumerate(page.stream.ticks[tick]):
                    following = page.stream.next_of(tick, env)
                    if following is not None:
                        wanted[row.serial] = following[1]
        for loader in self.loaders:
            try:
                batch = loader.next()
            except DataTimeout:
                assert not list(self.model.transitions())
                continue
            pairs = zip(batch["serial"].tolist(), batch["next_serial"].tolist(), strict=True)
            for i, (serial, following) in enumerate(pairs):
                assert wanted[serial] == following
                np.testing.assert_array_equal(value_of(batch, "tokens", i), tokens(serial))
                np.testing.assert_array_equal(value_of(batch, "next_tokens", i), tokens(following))
                np.testing.assert_array_equal(value_of(batch, "points", i), points(serial))

    @invariant()
    def pages_hold_the_model_s_values(self):
        if not hasattr(self, "engine"):
            return
        found = self.view.pages()
        for number, page in enumerate(self.model.pages):
            state = int(found[number, 0])
            assert (state & words.KIND_MASK, state >> words.GENERATION_SHIFT) == (page.state, page.generation)
            if not page.is_live():
                continue
            rows = [row for tick in page.stream.ticks[page.start : page.end] for row in tick]
            with self.view.lease(number) as lease:
                assert lease.rows == len(rows)
                for name, value in (("tokens", tokens), ("points", points)):
                    for row, got in zip(rows, lease.values(name), strict=True):
                        np.testing.assert_array_equal(got, value(row.serial))
            ends = np.cumsum([self.view.columns["tokens"][number * self.model.rows :][: len(rows)]["length"]])
            if rows and all(row.final is None for row in rows):
                starts = self.view.columns["tokens"][number * self.model.rows :][: len(rows)]["start"]
                assert starts.tolist() == [0, *ends[:-1].tolist()], "values lie close together, in the order of rows"


def value_of(batch, name, i):
    """The value of sample `i`, from either layout; what surrounds it is checked."""
    values = np.asarray(batch[name])
    if f"{name}_cu_seqlens" in batch:
        starts, places = (np.asarray(batch[f"{name}_{part}"]) for part in ("cu_seqlens", "position_ids"))
        assert starts[0] == 0
        assert len(values) == len(places) == starts[-1]
        assert places[starts[i] : starts[i + 1]].tolist() == list(range(starts[i + 1] - starts[i]))
        return values[starts[i] : starts[i + 1]]
    length, mask = int(batch[f"{name}_lengths"][i]), np.asarray(batch[f"{name}_mask"][i])
    assert mask.tolist() == [True] * length + [False] * (len(mask) - length)
    assert not values[i, length:].any()
    return values[i, :length]


RaggedMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("CONDUIT_EXAMPLES", "40")),
    stateful_step_count=40,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
TestRaggedFields = RaggedMachine.TestCase


# -- one fact at a time


def row(serial):
    return {"serial": serial, "tokens": tokens(serial), "points": points(serial)}


def fill(engine, count, **options):
    with engine.writer("replay", **options) as writer:
        for serial in range(count):
            writer.append(**row(serial))


@pytest.mark.parametrize("layout", ["pad", "pack"])
@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_values_and_those_of_the_next_row_come_padded_or_packed(make, path, layout, kind):
    engine = make(SCHEMA, capacity=400)
    fill(engine, 300)
    with engine.loader("replay", batch_size=64, ragged=layout, format=kind) as loader:
        for _ in range(10):
            batch = loader.next()
            for i, serial in enumerate(batch["serial"].tolist()):
                np.testing.assert_array_equal(value_of(batch, "tokens", i), tokens(serial))
                np.testing.assert_array_equal(value_of(batch, "next_tokens", i), tokens(serial + 1))
                np.testing.assert_array_equal(value_of(batch, "points", i), points(serial))


def test_n_step_transitions_carry_the_value_n_rows_on(make):
    engine = make(SCHEMA, capacity=400, max_n_step=3)
    fill(engine, 300)
    loader = engine.loader(
        "replay", batch_size=64, window=conduit.Transition(n_step=3), format="numpy", fields=("serial", "next_tokens")
    )
    batch = loader.next()
    for i, serial in enumerate(batch["serial"].tolist()):
        np.testing.assert_array_equal(value_of(batch, "next_tokens", i), tokens(serial + 3))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"tokens": np.zeros(LONGEST + 1, np.int32)}, f"at most {LONGEST} items, got {LONGEST + 1}: .* - at `tokens`"),
        ({"tokens": np.zeros((2, 2), np.int32)}, r"Expected shape \(2,\), got \(2, 2\) - at `tokens`"),
        ({"points": np.zeros((2, 3), np.float32)}, r"Expected shape \(2, 2\), got \(2, 3\) - at `points`"),
        ({"tokens": np.zeros(3)}, "Expected `int32`, got `float64`.* - at `tokens`"),
        ({"tokens": [1, 2**31]}, "Expected values that fit `int32`.* - at `tokens`"),
        ({"tokens": 5}, "Expected `int32` of shape .*length.* - at `tokens`"),
        ({"tokens": np.int32(5)}, "Expected `int32` of shape .*length.* - at `tokens`"),
        ({"tokens": None}, "- at `tokens`"),
    ],
)
def test_a_wrong_value_is_refused_with_its_field_and_nothing_changes(make, path, unchanged, change, expected):
    engine = make(SCHEMA)
    writer = engine.writer("replay")
    writer.append(**row(1))
    with unchanged(engine), pytest.raises(FieldError, match=expected):
        writer.append(**(row(2) | change))
    with unchanged(engine), pytest.raises(FieldError, match=r"Expected a value for every field.*`points`"):
        writer.append(serial=2, tokens=tokens(2))
    writer.append(**row(2))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([tokens(1)], "Expected 2 arrays, one per environment, got 1 - at `tokens`"),
        ([tokens(1), np.zeros(99, np.int32)], r"at most 13 items, got 99: .* - at `tokens\[1\]`"),
        ([tokens(1), None], r"- at `tokens\[1\]`"),
        (np.empty(2, object), r"- at `tokens\[0\]`"),
        (7, "Expected a list of 2 arrays, one per environment, got int - at `tokens`"),
        ({0: tokens(1), 1: tokens(2)}, "Expected a list of 2 arrays"),
    ],
)
def test_a_wrong_list_of_values_is_refused_with_its_environment(make, path, unchanged, value, expected):
    engine = make(SCHEMA, num_envs=2)
    writer = engine.writer("replay", num_envs=2, autoreset="next_step")
    good = {"serial": np.arange(2), "tokens": [tokens(0), tokens(1)], "points": [points(0), points(1)]}
    writer.append(**good)
    with unchanged(engine), pytest.raises(FieldError, match=expected):
        writer.append(**(good | {"tokens": value}))
    writer.append(**good)


def test_an_array_with_an_axis_of_environments_is_a_list_of_equal_lengths(make, path):
    engine = make(SCHEMA, num_envs=2)
    with engine.writer("replay", num_envs=2, autoreset="next_step") as writer:
        block = np.arange(6, dtype=np.int32).reshape(2, 3)
        writer.append(serial=np.arange(2), tokens=block, points=np.zeros((2, 0, 2), np.float32))
        with engine._views["replay"].lease(0) as lease:
            assert [one.tolist() for one in lease.values("tokens")] == block.tolist()
            assert [one.shape for one in lease.values("points")] == [(0, 2), (0, 2)]


@pytest.mark.parametrize("form", ["rollout", "unchecked"])
def test_forms_that_hand_out_views_are_refused_with_the_remedy(make, form):
    engine = make(SCHEMA)
    writer = engine.writer("replay")
    with pytest.raises(
        ConfigError, match=r"without ragged fields .*, got tokens, points: use writer\.append, or writer\.step"
    ):
        getattr(writer, form)(*((4,) if form == "rollout" else ()))
    writer.append(**row(0))


# -- a step in place


def test_reserved_values_are_the_arena_itself_and_a_step_reads_what_it_has(make):
    engine = make(SCHEMA, num_envs=2)
    view = engine._views["replay"]
    with engine.writer("replay", num_envs=2, autoreset="next_step") as writer:
        for serial in range(3):
            with writer.step() as step:
                assert [one.shape for one in step.tokens] == [(0,), (0,)]
                views = step.reserve("tokens", [3, 5])
                for one, got in zip(views, step.tokens, strict=True):
                    assert np.shares_memory(one, view.arenas["tokens"])
                    assert np.shares_memory(one, got)
                    one[:] = serial
                step["points"] = [[[1, 2]], np.zeros((0, 2), np.float32)]
                assert [one.tolist() for one in step["points"]] == [[[1, 2]], []]
                assert view.rows_visible() == 2 * serial
        with view.lease(0) as lease:
            assert [one.tolist() for one in lease.values("tokens")] == [[k] * n for k in range(3) for n in (3, 5)]
    with engine.writer("replay") as writer, writer.step() as step:
        assert step.reserve("tokens", 4).shape == (4,)
        assert step.tokens.shape == (4,)
        assert step.points.shape == (0, 2)


def test_what_a_step_leaves_out_is_empty_whatever_the_memory_held(make):
    engine = make(SCHEMA, capacity=40, page_rows=8)
    fill(engine, 100)
    with engine.writer("replay") as writer:
        for _ in range(30):
            with writer.step() as step:
                step.serial = 7
    loader = engine.loader("replay", batch_size=64, min_rows=1, format="numpy", ragged="pack")
    batch = loader.next()
    assert set(batch["serial"].tolist()) >= {7}
    mine = batch["serial"] == 7
    assert not np.diff(batch["tokens_cu_seqlens"])[mine].any()
    assert not np.diff(batch["points_cu_seqlens"])[mine].any()


@pytest.mark.parametrize(
    ("envs", "call", "expected"),
    [
        (None, lambda row: row.reserve("tokens", LONGEST + 1), "at most 13 items, got 14: .* - at `tokens`"),
        (None, lambda row: row.reserve("tokens", -1), "an int of at least 0 as length, got -1 - at `tokens`"),
        (None, lambda row: row.reserve("tokens", 1.0), "an int of at least 0 as length, got 1.0"),
        (None, lambda row: row.reserve("tokens", True), "an int of at least 0 as length, got True"),
        (None, lambda row: row.reserve("tokens", [1]), "an int of at least 0 as length"),
        (
            None,
            lambda row: row.reserve("serial", 1),
            "a ragged field .*got 'serial', and there is only `tokens`, `points`",
        ),
        (2, lambda row: row.reserve("tokens", [1, 14]), r"at most 13 items, got 14: .* - at `tokens\[1\]`"),
        (2, lambda row: row.reserve("tokens", [1]), "Expected 2 lengths, one per environment"),
        (2, lambda row: row.reserve("tokens", 1), "Expected 2 lengths, one per environment, got 1"),
        (None, lambda row: setattr(row, "tokens", np.zeros(14, np.int32)), "at most 13 items, got 14.* - at `tokens`"),
        (None, lambda row: setattr(row, "tokens", np.zeros(3)), "Expected `int32`, got `float64`.* - at `tokens`"),
        (2, lambda row: setattr(row, "points", [points(1)]), "Expected 2 arrays, one per environment, got 1"),
    ],
)
def test_a_wrong_value_of_a_step_is_refused_and_the_step_may_go_on(make, envs, call, expected):
    engine = make(SCHEMA, num_envs=2)
    writer = engine.writer("replay", num_envs=envs, autoreset="next_step")
    with writer.step() as step:
        with pytest.raises(FieldError, match=expected):
            call(step)
        fill_step(step, envs is None, [1, 2][: envs or 1], [(False, False)] * (envs or 1), [None] * (envs or 1), "step")
    with engine._views["replay"].lease(0) as lease:
        assert [one.tolist() for one in lease.values("tokens")] == [tokens(s).tolist() for s in (1, 2)[: envs or 1]]
    with pytest.raises(conduit.errors.Closed):
        step.reserve("tokens", 1)
    with pytest.raises(conduit.errors.Closed):
        step.tokens  # noqa: B018 - reading is what is refused


def test_a_ragged_value_is_given_once_in_a_step(make, unchanged):
    engine = make(SCHEMA)
    writer = engine.writer("replay")
    writer.append(**row(0))
    final = {"serial": np.int64(1), "tokens": tokens(1)}
    for first, second in (
        (lambda step: step.reserve("tokens", 2), lambda step: setattr(step, "tokens", tokens(1))),
        (lambda step: setattr(step, "tokens", tokens(1)), lambda step: step.reserve("tokens", 2)),
        (lambda step: step.set_final(0, final), lambda step: step.set_final(0, final)),
    ):
        with unchanged(engine), pytest.raises(FieldError, match="once in a step"), writer.step() as step:  # noqa: PT012
            first(step)
            second(step)


def test_a_step_of_the_largest_values_and_finals_fits_whatever_came_before(make):
    """Arenas as small as they can be: every step finds room, at its longest, for its values and its final observations."""
    engine = make(SCHEMA, capacity=60, page_rows=14, num_envs=2, mean_lengths={"tokens": 0.5, "points": 0.5})
    long, flag = np.arange(LONGEST, dtype=np.int32), np.zeros((POINTS, 2), np.float32)
    with engine.writer("replay", num_envs=2, autoreset="same_step") as writer:
        for serial in range(0, 200, 2):
            with writer.step() as step:
                step.serial[:] = serial, serial + 1
                step.tokens = [long + serial, long + serial + 1] if serial % 3 else [long[:0], long[:1]]
                step.points = [flag, flag]
                step.terminated[:] = True
                for env in range(2):
                    step.set_final(env, {"serial": np.int64(serial), "tokens": long - serial})
        batch = engine.loader("replay", batch_size=64, min_rows=1, format="numpy").next()
    for i, serial in enumerate(batch["serial"].tolist()):
        np.testing.assert_array_equal(batch["next_tokens"][i], long - (serial & ~1))
        if serial // 2 * 2 % 3:
            np.testing.assert_array_equal(batch["tokens"][i], long + serial)


def test_a_missing_final_observation_is_refused_and_a_kept_one_is_delivered(make, path, unchanged):
    engine = make(SCHEMA, capacity=200)
    writer = engine.writer("replay")
    with unchanged(engine), pytest.raises(FieldError, match="final observation"):
        writer.append(**row(0), terminated=True)
    too_long = {"serial": 1, "tokens": np.zeros(LONGEST + 1, np.int32)}
    with unchanged(engine), pytest.raises(FieldError, match=r"at most .* - at `final.tokens`"):
        writer.append(**row(0), terminated=True, final=too_long)
    for serial in range(0, 100, 2):
        final = {"serial": serial + 1, "tokens": tokens(serial + 1)}
        writer.append(**row(serial), terminated=True, final=final)
    batch = engine.loader("replay", batch_size=64, min_rows=1, format="numpy").next()
    for i, serial in enumerate(batch["serial"].tolist()):
        assert batch["next_serial"][i] == serial + 1
        np.testing.assert_array_equal(value_of(batch, "next_tokens", i), tokens(serial + 1))


def test_a_packed_batch_that_is_kept_stays_as_it_is(make):
    torch = pytest.importorskip("torch")
    engine = make(SCHEMA, capacity=400)
    fill(engine, 300)
    with engine.loader("replay", batch_size=32, ragged="pack", on_busy="error") as loader:
        kept = loader.next()["tokens"][3:7]
        copy = kept.clone()
        for _ in range(20):
            loader.next()
        assert torch.equal(kept, copy)
        held = [loader.next()["tokens_position_ids"] for _ in range(2)]
        with pytest.raises(conduit.errors.BuffersBusy):
            loader.next()
        del kept, held
        batches = [loader.next() for _ in range(3)]
        batches[0].release()
        loader.next()


def test_a_batch_of_nothing_but_empty_values_is_delivered(make):
    engine = make(SCHEMA, capacity=100)
    with engine.writer("replay") as writer:
        for serial in range(20):
            writer.append(serial=serial, tokens=[], points=np.zeros((0, 2), np.float32))
    for kind in ("torch", "numpy"):
        batch = engine.loader("replay", batch_size=8, ragged="pack", format=kind).next()
        assert tuple(batch["tokens"].shape) == (0,)
        assert tuple(batch["points"].shape) == (0, 2)
        assert batch["tokens_cu_seqlens"].tolist() == [0] * 9


def test_bfloat16_values_are_tensors_of_bfloat16(make):
    torch = pytest.importorskip("torch")
    schema = conduit.Schema([conduit.Field("x", "bfloat16", (5,), ragged=True)])
    engine = make(schema, capacity=100)
    with engine.writer("replay") as writer:
        for _ in range(10):
            writer.append(x=torch.arange(3).to(torch.bfloat16))
    for layout in ("pad", "pack"):
        batch = engine.loader("replay", batch_size=4, ragged=layout, fields=("x",)).next()
        assert batch["x"].dtype == torch.bfloat16
        assert batch["x"].reshape(-1)[:3].tolist() == [0, 1, 2]


def test_nested_batches_keep_what_is_no_field_by_its_name(make):
    schema = conduit.Schema([conduit.Field("obs.words", "int32", (4,), observation=True, ragged=True)])
    engine = make(schema, capacity=100)
    with engine.writer("replay") as writer:
        for _ in range(10):
            writer.append(obs={"words": np.arange(2, dtype=np.int32)})
    nested = engine.loader("replay", batch_size=4, format="numpy").next().nest()
    assert nested["obs"]["words"].shape == nested["next_obs"]["words"].shape == (4, 4)
    assert nested["obs.words_mask"].sum() == 8


# -- sizes


def test_a_schema_says_which_fields_are_ragged_and_others_keep_their_fingerprints():
    plain = conduit.Schema([conduit.Field("tokens", "int32", (5,))])
    ragged = conduit.Schema([conduit.Field("tokens", "int32", (5,), ragged=True)])
    assert b"ragged" not in plain.to_json()
    assert conduit.Schema.from_json(ragged.to_json()) == ragged
    assert ragged.fingerprint != plain.fingerprint
    assert ragged.ragged_names == ("tokens",)
    assert "ragged in this schema and" in (ragged.difference(plain) or "")
    with pytest.raises(conduit.errors.SchemaError, match="largest length of a ragged field"):
        conduit.Field("x", "int32", (), ragged=True)


@pytest.mark.parametrize(
    ("means", "expected"),
    [
        (
            {"serial": 3},
            r"Expected names of ragged fields, got 'serial', and there is only `tokens`, `points` - at mean_lengths",
        ),
        ({"tokens": 0}, r"above 0 and up to 13, got 0 - at mean_lengths\['tokens'\]"),
        ({"tokens": 14}, "above 0 and up to 13, got 14"),
    ],
)
def test_mean_lengths_that_cannot_be_are_refused(means, expected):
    with pytest.raises(ConfigError, match=expected):
        conduit.Table(SCHEMA, 100, mean_lengths=means)


def test_a_writer_whose_tick_may_not_fit_an_arena_is_refused_with_the_remedy(make):
    engine = make(SCHEMA, capacity=2000, page_rows=200, mean_lengths={"tokens": 1, "points": 1})
    with pytest.raises(CapacityError, match=r"Expected arenas of at least \d+ items for 30 environments.*num_envs=30"):
        engine.writer("replay", num_envs=30, autoreset="next_step")


@pytest.mark.parametrize("text", ["1 MiB", "3 MB"])
def test_a_capacity_in_bytes_bounds_rows_and_arenas_together(make, engine_name, text):
    with conduit.Engine.create(f"{engine_name}-s", {"replay": conduit.Table(SCHEMA, text)}):
        status = inspect.inspect(f"{engine_name}-s").tables[0]
        limit = conduit.store.format.sizes.parse_bytes(text)
        # the table's control lines, those of the seats and the ring of episodes come on top
        assert 0.8 * limit < status.bytes < limit + 8192 + 128 * words.LINE + ring_bytes(SCHEMA)


def test_a_capacity_in_rows_is_kept_for_values_of_the_mean_length(make):
    engine = make(SCHEMA, capacity=500, mean_lengths={"tokens": 6, "points": 2})
    with engine.writer("replay") as writer:
        for serial in range(3000):
            writer.append(serial=serial, tokens=np.zeros(6, np.int32), points=np.zeros((2, 2), np.float32))
        assert engine._views["replay"].rows_visible() >= 500


def test_memory_holds_no_padding_and_a_look_counts_it(engine_name):
    schema = conduit.Schema([conduit.Field("tokens", "int32", (4000,), ragged=True)])
    table = conduit.Table(schema, capacity=512, page_rows=32, mean_lengths={"tokens": 100})
    with conduit.Engine.create(engine_name, {"replay": table}) as engine:
        with engine.writer("replay") as writer:
            for _ in range(512):
                writer.append(tokens=np.zeros(100, np.int32))
        status = inspect.inspect(engine_name).tables[0]
        assert status.bytes < 512 * 4000 * 4 / 4
        assert 400 + 26 <= status.bytes_per_transition < 1.2 * (400 + 26)


# -- other processes

WRITER = """
import sys, numpy as np, conduit, zlib
client = conduit.attach(sys.argv[1])
rng = np.random.default_rng(int(sys.argv[2]))
values = [rng.integers(0, 2**32, length, np.uint32) for length in rng.integers(0, 401, 499)]
sums = [zlib.crc32(value.tobytes()) for value in values]
with client.writer("replay") as writer:
    print("ready", flush=True)
    while True:
        for value, sum in zip(values, sums):
            writer.append(words=value, length=len(value), sum=sum)
"""
PROVING = conduit.Schema(
    [
        conduit.Field("words", "uint32", (400,), ragged=True, observation=True),
        conduit.Field("length", "int64", casting="same_kind"),
        conduit.Field("sum", "int64", casting="same_kind"),
    ]
)


def start(name, seed):
    child = subprocess.Popen([sys.executable, "-c", WRITER, name, str(seed)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


@pytest.mark.parametrize("layout", ["pad", "pack"])
def test_nothing_torn_is_delivered_while_writers_run_flat_out_and_are_killed(make, layout):
    # few pages of few rows, so that what is read is overwritten all the time
    engine = make(PROVING, capacity=24, page_rows=8, mean_lengths={"words": 200})
    children = [start(engine.name, seed) for seed in range(2)]
    size, batches = 512, 0
    try:
        loader = engine.loader(
            "replay",
            batch_size=size,
            min_rows=1,
            ragged=layout,
            format="numpy",
            timeout=10,
            fields=("words", "length", "sum"),
        )
        end, killed = time.monotonic() + 5, 0
        while time.monotonic() < end or ((loader.stats.redrawn == 0 or killed == 0) and time.monotonic() < end + 60):
            batch = loader.next()
            lengths, values = batch["length"], batch["words"]
            if layout == "pad":
                np.testing.assert_array_equal(lengths, batch["words_lengths"])
                np.testing.assert_array_equal(batch["words_mask"].sum(1), lengths)
            else:
                starts = batch["words_cu_seqlens"].tolist()
                np.testing.assert_array_equal(lengths, np.diff(starts))
            for i, length in enumerate(lengths.tolist()):
                value = values[i, :length] if layout == "pad" else values[starts[i] : starts[i + 1]]
                assert zlib.crc32(value.tobytes()) == batch["sum"][i]
            batches += 1
            if batches % 100 == 0:
                killed += 1
                children[0].send_signal(signal.SIGKILL)
                children[0].wait()
                children.append(start(engine.name, batches))
                children.pop(0).stdout.close()
        # the control: rows were overwritten while they were read, and it was noticed
        assert loader.stats.redrawn > 0
        assert killed > 0
    finally:
        for child in children:
            child.kill()
            child.wait()
            child.stdout.close()
