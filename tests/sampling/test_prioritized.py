"""Prioritized sampling: draws against exact probabilities, sums against a naive twin, updates whatever they bring."""

import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import conduit
from conduit.errors import Closed, ConfigError, DataTimeout, FieldError
from conduit.kernels.cpu.priorities import ONE, Leaves, largest_of, values_of
from conduit.kernels.reference import gather
from conduit.sampling.marks import BLOCK, SEEN_BEGIN, SEEN_COUNT, SEEN_END, SEEN_GENERATION, SEEN_SUM
from conduit.sampling.prioritized_draw import DRAW_CANDIDATES, DRAW_TOTAL
from conduit.store.format import words
from tests.plane.history import MODES, ROW_BITS, History, operations
from tests.sampling.marked import can_be_drawn, marks_in

SCHEMA = conduit.Schema(
    [
        conduit.Field("obs", "int64", (), observation=True),
        conduit.Field("reward", "float32", casting="same_kind"),
    ]
)


@pytest.fixture
def table(engine_name):
    """Call it with rows, priorities, ends and Table options: an engine whose rows' obs are their numbers, and its writer."""
    opened = []

    def make(rows, priorities=None, ends=(), capacity=None, **options):
        spec = conduit.Table(
            SCHEMA, capacity or 2 * rows + 64, priorities=priorities or conduit.Priorities(), **options
        )
        engine = conduit.Engine.create(f"{engine_name}-{len(opened)}", {"replay": spec})
        writer = engine.writer("replay", autoreset="next_step")
        # a writer that nobody holds closes: its last row would be listed then, though it has no successor
        opened.append((engine, writer))
        write(writer, range(rows), ends)
        return engine, writer

    yield make
    for engine, _ in opened:
        engine.close()


def write(writer, numbers, ends=()):
    for t in numbers:
        writer.append(obs=t, reward=1.0, terminated=t in ends)


def open_loader(engine, size=256, sampling=None, **options):
    options = {"min_rows": 1, "format": "numpy", "seed": 11, "timeout": 0.0} | options
    return engine.loader("replay", batch_size=size, sampling=sampling or conduit.Prioritized(), **options)


def ids_by_number(loader, rows, batches=4000):
    """int64 [rows]: row ids by the number in obs, or -1 for rows that never came."""
    ids = np.full(rows, -1)
    for _ in range(batches):
        batch = loader.next()
        numbers = batch["obs"].reshape(len(batch.ids), -1)[:, 0]
        ids[numbers[numbers < rows]] = batch.ids[numbers < rows]
        if (ids >= 0).all():
            break
    return ids


def counts_of(loader, rows, draws):
    """How often each number was drawn."""
    counts = np.zeros(rows, np.int64)
    size = loader.plan.batch_size
    for _ in range(-(-draws // size)):
        batch = loader.next()
        counts += np.bincount(batch["obs"].reshape(size, -1)[:, 0], minlength=rows)
    return counts


def deviation(counts, probabilities):
    """Chi-square of counts as a standard normal score (Wilson and Hilferty); rows of probability 0 must have none."""
    positive = probabilities > 0
    assert counts[~positive].sum() == 0
    expected = counts.sum() * probabilities[positive]
    chi = ((counts[positive] - expected) ** 2 / expected).sum()
    freedom = positive.sum() - 1
    return ((chi / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / np.sqrt(2 / (9 * freedom))


def leaves(values, rule, rows=1000):
    """What the leaves of priorities stand for."""
    maker = Leaves(rule, len(values), rows)
    maker.fill(values, len(values))
    return values_of(maker.array)


def check_sums(sampler, view):
    """Every sum a learner holds is the sum, from scratch, of the leaves of the rows that it has marked; returns that of all."""
    pages, rows = view.layout.pages, view.layout.page_rows
    blocks = -(-rows // BLOCK)
    groups = -(-blocks // BLOCK)
    known, block_sums, group_sums, marked = marks_in(sampler._tree, pages, rows)
    total = 0
    for page in np.flatnonzero(known[:, SEEN_GENERATION // 8] >= 0):
        begin, end = known[page, SEEN_BEGIN // 8], known[page, SEEN_END // 8]
        assert not marked[page, :begin].any()
        assert not marked[page, end:].any()
        assert known[page, SEEN_COUNT // 8] == marked[page].sum()
        own = np.zeros(groups * BLOCK * BLOCK, np.int64)
        own[:rows] = np.where(marked[page, :rows], values_of(view.priorities[page * rows : (page + 1) * rows]), 0)
        assert known[page, SEEN_SUM // 8] == own.sum()
        np.testing.assert_array_equal(block_sums[page], own.reshape(-1, BLOCK).sum(1)[:blocks])
        np.testing.assert_array_equal(group_sums[page], own.reshape(groups, -1).sum(1))
        total += own.sum()
    assert sampler._state[DRAW_TOTAL // 8] == total
    return total


# -- probabilities


@pytest.mark.parametrize("stratified", [True, False])
def test_five_million_draws_fit_the_exact_probabilities_and_zeros_never_come(table, stratified):
    rows, rule = 700, conduit.Priorities(alpha=0.7, eps=0.0)
    engine, _ = table(rows + 1, rule)
    rng = np.random.default_rng(2)
    priorities = rng.pareto(1.5, rows) + 1e-3
    priorities[rng.permutation(rows)[:100]] = 0.0
    with open_loader(engine, 8192, conduit.Prioritized(stratified=stratified)) as loader:
        ids = ids_by_number(loader, rows)
        assert loader.update_priorities(ids, priorities) == 0
        counts = counts_of(loader, rows, 5_000_000)
    exact = gather.probabilities(priorities, rule.alpha, rule.eps)
    assert counts[priorities == 0].sum() == 0
    score = deviation(counts, exact)
    assert score < 5
    # independent draws vary as a multinomial does, stratified ones less
    assert score < -5 if stratified else score > -5


def test_all_priorities_zero_is_uniform(table):
    rows = 300
    engine, _ = table(rows + 1, conduit.Priorities(eps=0.0))
    with open_loader(engine, 1000) as loader:
        ids = ids_by_number(loader, rows)
        loader.update_priorities(ids, np.zeros(rows))
        counts = counts_of(loader, rows, 500_000)
        assert abs(deviation(counts, np.full(rows, 1 / rows))) < 5
        batch = loader.next()
        assert (batch["weights"] == 1).all()
        assert (batch["probabilities"] == 1 / rows).all()


def test_alpha_zero_is_uniform_whatever_the_priorities(table):
    rows = 200
    engine, _ = table(rows + 1, conduit.Priorities(alpha=0.0, eps=0.0))
    with open_loader(engine, 1000, conduit.Prioritized(stratified=False)) as loader:
        ids = ids_by_number(loader, rows)
        loader.update_priorities(ids, np.arange(rows, dtype=float))
        assert abs(deviation(counts_of(loader, rows, 400_000), np.full(rows, 1 / rows))) < 5


@pytest.mark.parametrize("stratified", [True, False])
@pytest.mark.parametrize(
    ("window", "anchors"),
    [
        (conduit.Sequence(4, overlap=0), lambda t, step: step % 4 == 0),
        (conduit.Sequence(6, overlap=3, across=True), lambda t, step: t % 3 == 0),
        (conduit.Episode(20), lambda t, step: step == 0),
        (conduit.Rollout(5, 1), lambda t, step: t % 5 == 0),
        (conduit.Transition(n_step=3), lambda t, step: True),
        (conduit.Transition(n_step=3, newest="bootstrap"), lambda t, step: True),
    ],
    ids=lambda value: type(value).__name__ if not callable(value) else "",
)
def test_rows_that_begin_no_window_take_no_share(table, window, anchors, stratified):
    """Draws, probabilities and table size are of the rows that begin a window, in exact proportion, refusals or not."""
    length, episodes = 17, 40
    rows = (length + 1) * episodes
    ends = {t for t in range(rows) if t % (length + 1) == length - 1}
    rule = conduit.Priorities(alpha=1.0, eps=0.0)
    engine, writer = table(rows, rule, ends, max_n_step=3, max_length=20, page_rows=rows + 100, capacity=rows)
    write(writer, range(rows, rows + 40))
    rng = np.random.default_rng(3)
    step = np.arange(rows) % (length + 1)
    chosen = np.array([anchors(t, s) and s < length for t, s in zip(range(rows), step, strict=True)])
    priorities = rng.pareto(1.0, rows) + 0.1
    with open_loader(engine, 1000, conduit.Prioritized(stratified=False), window=None) as plain:
        ids = ids_by_number(plain, rows, batches=300)
    with open_loader(
        engine, 1000, conduit.Prioritized(stratified=stratified, normalize="none"), window=window
    ) as loader:
        update = np.flatnonzero(ids >= 0)
        assert set(np.flatnonzero(chosen)) <= set(update)
        loader.next()
        assert loader.update_priorities(ids[update], priorities[update]) == 0
        # the rows behind those that are counted get nothing
        engine._views["replay"].priorities[(int(ids[0]) & (1 << ROW_BITS) - 1) + rows :][:60] = 0
    with open_loader(
        engine, 1000, conduit.Prioritized(stratified=stratified, normalize="none"), window=window
    ) as loader:
        exact = np.where(chosen, leaves(priorities, rule), 0)
        exact = exact / exact.sum()
        assert deviation(counts_of(loader, rows, 600_000), exact) < 5
        batch = loader.next()
        drawn = batch["obs"].reshape(1000, -1)[:, 0]
        np.testing.assert_allclose(batch["probabilities"], exact[drawn], rtol=1e-12)


@pytest.mark.parametrize("normalize", ["none", "batch", "buffer"])
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_weights_are_the_reference_s(table, normalize, beta):
    rows, rule = 500, conduit.Priorities(alpha=0.6, eps=1e-3)
    engine, _ = table(rows + 1, rule)
    rng = np.random.default_rng(4)
    priorities = rng.pareto(1.2, rows)
    with open_loader(engine, 64, conduit.Prioritized(beta=0.9, normalize=normalize)) as loader:
        loader.beta = beta
        loader.update_priorities(ids_by_number(loader, rows), priorities)
        exact = gather.probabilities(priorities, rule.alpha, rule.eps)
        for _ in range(10):
            batch = loader.next()
            drawn = batch["obs"]
            np.testing.assert_allclose(batch["probabilities"], exact[drawn], rtol=1e-4)
            want = gather.importance_weights(exact, drawn, beta, normalize)
            np.testing.assert_allclose(batch["weights"], want, rtol=1e-4)
            assert batch["weights"].dtype == np.float32
            assert loader.sampler.candidates == rows
            if normalize != "none":
                assert batch["weights"].max() <= np.float32(1)


@settings(max_examples=200)
@given(
    st.lists(st.floats(0, 1e12) | st.sampled_from([0.0, 5e-324, 1e-300, 1e300, 1.0]), min_size=1, max_size=40),
    st.sampled_from([0.0, 0.3, 0.6, 1.0, 2.0]),
    st.sampled_from([0.0, 1e-6, 0.01]),
    st.sampled_from([1e-9, 1.0, 1e7]),
    st.sampled_from([1, 1000, 1 << 20, 1 << 33]),
)
def test_a_leaf_is_the_formula_rounded_once(values, alpha, eps, scale, rows):
    """To a whole step below 2^27 steps, to 27 bits above; the largest is such that a whole table of it is below 2^63."""
    rule = conduit.Priorities(alpha=alpha, eps=eps, scale=scale)
    got = leaves(np.array(values), rule, rows)
    largest = largest_of(rows)
    assert largest * rows < 1 << 63
    with np.errstate(over="ignore"):
        p = (np.array(values, np.longdouble) + eps) ** alpha * rule.unit
    want = np.where(p > 0, np.clip(np.rint(np.minimum(p, largest)), 1, largest), 0).astype(np.int64)
    # the power itself is right to 40 bits
    step = np.maximum(1, want >> 26)
    np.testing.assert_array_less(np.abs(got - want), step + 1)
    assert (np.abs(got - want) > step // 2).sum() <= 1 or alpha not in (0.0, 1.0)
    np.testing.assert_array_equal(got == 0, want == 0)


# -- draws


def test_the_same_seed_gives_the_same_draws_and_another_seed_others(table):
    engine, _ = table(400)
    with open_loader(engine, seed=1) as one, open_loader(engine, seed=1) as same, open_loader(engine, seed=2) as other:
        differing = 0
        for _ in range(20):
            a, b, c = one.next(), same.next(), other.next()
            np.testing.assert_array_equal(a.ids, b.ids)
            np.testing.assert_array_equal(a["weights"], b["weights"])
            differing += (a.ids != c.ids).any()
        assert differing == 20
        one.sampler.batch = 0
        same.sampler.batch = 0
        np.testing.assert_array_equal(one.next().ids, same.next().ids)


def test_stratified_draws_take_one_from_each_slice(table):
    """Equal priorities, as many rows as slots: each slice of the mass is one row, so each row comes once."""
    rows = 64
    engine, _ = table(rows + 1)
    with open_loader(engine, rows) as loader:
        for _ in range(20):
            assert sorted(loader.next()["obs"].tolist()) == list(range(rows))
    with open_loader(engine, rows, conduit.Prioritized(stratified=False)) as loader:
        assert len(set(loader.next()["obs"].tolist())) < rows


def test_an_empty_table_is_a_clear_error_and_never_fill_rows(table):
    engine, writer = table(0)
    with open_loader(engine, 8, min_rows=8) as loader:
        with pytest.raises(DataTimeout, match="at least 8 sampleable rows"):
            loader.next()
        write(writer, range(8))
        with pytest.raises(DataTimeout, match="got 7"):
            loader.next()
        write(writer, [8])
        assert set(loader.next()["obs"].tolist()) <= set(range(8))


# -- updates


def test_of_duplicates_the_last_one_wins(table):
    rule = conduit.Priorities(alpha=1.0, eps=0.0)
    engine, _ = table(101, rule)
    with open_loader(engine, 100, conduit.Prioritized(normalize="none")) as loader:
        ids = ids_by_number(loader, 100)
        loader.update_priorities(ids, np.ones(100))
        repeated = np.concatenate([np.tile(ids[:10], 3), ids[:10][::-1]])
        values = np.concatenate([np.full(30, 7.0), np.arange(10.0)])
        assert loader.update_priorities(repeated, values) == 0
        view = engine._views["replay"]
        rows = ids[:10] & ((1 << ROW_BITS) - 1)
        np.testing.assert_array_equal(values_of(view.priorities[rows]), leaves(np.arange(10.0)[::-1].copy(), rule))
        loader.next()
        assert check_sums(loader.sampler, view) == (90 + 45) * ONE


def test_updates_of_overwritten_rows_are_ignored_and_counted(table):
    engine, writer = table(200, capacity=160, page_rows=20)
    with open_loader(engine, 64) as loader:
        old = loader.next().ids.copy()
        view = engine._views["replay"]
        write(writer, range(200, 800))
        assert not loader.valid(old).any()
        before = view.priorities.copy()
        assert loader.update_priorities(old, np.full(64, 1e3)) == 64
        np.testing.assert_array_equal(view.priorities, before)
        new = loader.next().ids.copy()
        assert loader.update_priorities(np.concatenate([old, new]), np.full(128, 2.0)) == 64
        assert loader.sampler.ignored == 128
        loader.next()
        check_sums(loader.sampler, view)
        # late priorities do not become those of new rows either
        write(writer, [800])
        assert view.priorities.max() <= leaves(np.array([2.0]), view.layout.table.priorities).max()


@pytest.mark.parametrize("number", [-(1 << 62), (1 << 62) + 5, (1 << ROW_BITS) - 1, 1 << 20, 0, 9 << ROW_BITS])
def test_ids_that_are_none_of_the_table_s_are_refused_by_name(table, number):
    engine, _ = table(100)
    with open_loader(engine, 16) as loader:
        own = loader.next().ids.copy()
        view = engine._views["replay"]
        before = view.priorities.copy()
        with pytest.raises(FieldError, match=rf"rows of table 'replay', got {number} at index 1, .* at `ids`"):
            loader.update_priorities(np.array([own[0], number]), np.array([9.0, 9.0]))
        with pytest.raises(FieldError, match=rf"rows of table 'replay', got {number} at index 1"):
            engine.table("replay").delete([own[0], number])
        assert loader.update_priorities(np.array([-1]), np.array([9.0])) == 1
        np.testing.assert_array_equal(view.priorities, before)
        assert loader.valid(own[:1]).all()
        loader.next()
        check_sums(loader.sampler, view)


def test_rows_that_cannot_be_drawn_take_no_priority(table):
    """A closing observation, the rows a page has copied for history, and rows not written yet."""
    engine, _ = table(100, ends={9}, max_stack=3, page_rows=250, capacity=1000)
    with open_loader(engine, 16) as loader:
        loader.next()
        view = engine._views["replay"]
        generation = int(view.pages()[0, 0]) >> words.GENERATION_SHIFT
        ids = (generation << ROW_BITS) | np.array([10, 100, 150])
        assert loader.update_priorities(ids, np.ones(3)) == 3
        assert view.priorities[10] == 0
        assert (view.priorities[100:151] == 0).all()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([1.0, float("nan"), 2.0], "got nan at index 1"),
        ([1.0, 2.0, float("inf")], "got inf at index 2"),
        ([-0.5, 2.0, float("nan")], "got -0.5 at index 0"),
        ([1.0, 2.0], r"Expected 3 priorities, one per row, got shape \(2,\)"),
        ([[1.0], [2.0], [3.0]], r"got shape \(3, 1\)"),
    ],
)
def test_what_is_no_priority_is_refused_and_nothing_changes(table, values, said):
    engine, _ = table(100)
    with open_loader(engine, 3, conduit.Prioritized(stratified=False)) as loader:
        view = engine._views["replay"]
        batch = loader.next()
        state = [view.priorities.copy(), loader.sampler._tree.copy(), view.pages()]
        with pytest.raises(FieldError, match=said):
            loader.update_priorities(batch.ids, values)
        for now, before in zip([view.priorities, loader.sampler._tree, view.pages()], state, strict=True):
            np.testing.assert_array_equal(now, before)
        assert loader.sampler.ignored == 0
        assert np.isfinite(loader.next()["weights"]).all()


def test_ids_of_another_shape_or_kind_are_refused(table):
    engine, _ = table(100)
    with open_loader(engine, 4) as loader:
        ids = loader.next().ids
        with pytest.raises(FieldError, match="ids as int64"):
            loader.update_priorities(ids.reshape(2, 2), np.ones(4))
        with pytest.raises(FieldError, match="ids as int64"):
            loader.update_priorities(ids.astype(float), np.ones(4))
        assert loader.update_priorities([], []) == 0


def test_priorities_come_from_numpy_torch_and_lists_of_any_length(table):
    torch = pytest.importorskip("torch")
    engine, _ = table(100)
    rule = engine._views["replay"].layout.table.priorities
    with open_loader(engine, 16, format="torch") as loader:
        view = engine._views["replay"]
        batch = loader.next()
        rows = batch.ids.numpy() & ((1 << ROW_BITS) - 1)
        for values in (
            torch.arange(16, dtype=torch.float32, requires_grad=True),
            torch.arange(16, dtype=torch.bfloat16),
            np.arange(16, dtype=np.float32),
            list(range(16)),
        ):
            assert loader.update_priorities(batch.ids, values) == 0
            last = {row: float(value) for row, value in zip(rows.tolist(), range(16), strict=True)}
            got = view.priorities[list(last)]
            np.testing.assert_array_equal(got, leaves(np.array(list(last.values())), rule))
        many = torch.cat([batch.ids] * 20)
        assert loader.update_priorities(many, torch.ones(320)) == 0


def _unaligned(values):
    memory = np.zeros(values.nbytes + 1, np.uint8)[1:].view(values.dtype)
    memory[:] = values
    return memory


@pytest.mark.parametrize(
    "laid_out",
    [
        pytest.param(np.copy, id="plain"),
        pytest.param(lambda values: np.repeat(values, 2)[::2], id="every second item"),
        pytest.param(lambda values: values[::-1].copy()[::-1], id="backwards"),
        pytest.param(lambda values: values.astype(values.dtype.newbyteorder()), id="bytes swapped"),
        pytest.param(_unaligned, id="not aligned"),
        pytest.param(lambda values: values.view(np.recarray), id="a subclass"),
        pytest.param(lambda values: np.frombuffer(values.tobytes(), values.dtype), id="read-only"),
        pytest.param(np.ndarray.tolist, id="a list"),
    ],
)
@pytest.mark.parametrize("of", ["ids", "priorities", "both"])
def test_arrays_of_any_layout_store_the_same_priorities(table, laid_out, of):
    engine, _ = table(100)
    rule = engine._views["replay"].layout.table.priorities
    with open_loader(engine, 16, conduit.Prioritized(stratified=False)) as loader:
        view = engine._views["replay"]
        ids = np.unique(loader.next().ids)
        values = np.arange(1.0, len(ids) + 1)
        keys = ids if of == "priorities" else laid_out(ids)
        given = values if of == "ids" else laid_out(values)
        assert loader.update_priorities(keys, given) == 0
        np.testing.assert_array_equal(view.priorities[ids & ((1 << ROW_BITS) - 1)], leaves(values, rule))
        loader.next().release()
        check_sums(loader.sampler, view)
        with pytest.raises(FieldError, match=rf"Expected {len(ids)} priorities, one per row"):
            loader.update_priorities(keys, np.ones(len(ids) + 1))
        with pytest.raises(FieldError, match=r"got nan at index 0"):
            loader.update_priorities(keys, np.full(len(ids), np.nan))


def test_updates_need_an_open_loader_with_priorities(table):
    engine, _ = table(100)
    loader = open_loader(engine, 4)
    ids = loader.next().ids.copy()
    with (
        engine.loader("replay", batch_size=4, format="numpy") as uniform,
        pytest.raises(ConfigError, match="uniformly"),
    ):
        uniform.update_priorities(ids, np.ones(4))
    loader.close()
    with pytest.raises(Closed):
        loader.update_priorities(ids, np.ones(4))


def test_a_table_without_priorities_and_bad_options_are_refused(engine_name):
    with conduit.Engine.create(engine_name, {"replay": conduit.Table(SCHEMA, 1000)}) as engine:
        with pytest.raises(ConfigError, match=r"priorities=conduit.Priorities"):
            open_loader(engine)
        with pytest.raises(ConfigError, match=r"conduit.Shuffled\(...\) or None"):
            open_loader(engine, sampling="prioritized")
    for make in (
        lambda: conduit.Prioritized(beta=-1.0),
        lambda: conduit.Prioritized(beta=float("nan")),
        lambda: conduit.Prioritized(normalize="max"),
        lambda: conduit.Priorities(alpha=-0.1),
        lambda: conduit.Priorities(eps=float("nan")),
        lambda: conduit.Priorities(span=0),
    ):
        with pytest.raises(ConfigError):
            make()


# -- new rows


def test_new_rows_get_the_largest_priority_of_late_not_of_all_time(table):
    rule = conduit.Priorities(alpha=1.0, eps=0.0, span=100)
    engine, writer = table(101, rule, page_rows=250, capacity=1000)
    view = engine._views["replay"]

    def newest():
        here = view.pages()[0]
        row = int(here[words.PAGE_COMMITTED // 8])
        write(writer, [101])
        return int(view.priorities[row])

    with open_loader(engine, 50) as loader:
        ids = ids_by_number(loader, 100)
        assert newest() == ONE, "before any update: 1"
        loader.update_priorities(ids[:50], np.full(50, 40.0))
        assert newest() == 40 * ONE
        loader.update_priorities(ids[:49], np.full(49, 2.0))
        assert newest() == 40 * ONE
        loader.update_priorities(ids[:50], np.full(50, 3.0))
        assert newest() == 40 * ONE, "the span before still counts"
        loader.update_priorities(ids, np.full(100, 5.0))
        assert newest() == 5 * ONE, "a span without it has passed, and it is forgotten"


def test_rows_that_continue_on_the_next_page_take_their_priority_along(table):
    rule = conduit.Priorities(alpha=1.0, eps=0.0)
    engine, writer = table(30, rule, page_rows=32, capacity=200, max_n_step=6)
    with open_loader(engine, 200) as loader:
        ids = ids_by_number(loader, 29)
        loader.update_priorities(ids, np.arange(1.0, 30.0))
        write(writer, range(30, 60))
        view = engine._views["replay"]
        second = view.pages()[1]
        first = int(second[words.PAGE_FIRST // 8])
        assert first == 0
        copied = view.priorities[32 : 32 + 4].tolist()
        assert copied == [27 * ONE, 28 * ONE, 29 * ONE, ONE], "rows 26 to 29, the last one never updated"
        batch = loader.next()
        check_sums(loader.sampler, view)
        drawn = set(batch["obs"].tolist())
        assert drawn <= set(range(59))


# -- several learners


def test_two_learners_see_each_other_s_updates(table):
    rule = conduit.Priorities(alpha=1.0, eps=0.0)
    engine, _ = table(501, rule)
    view = engine._views["replay"]
    with open_loader(engine, 500, seed=1) as one, open_loader(engine, 500, seed=2) as other:
        ids = ids_by_number(one, 500)
        other.next()
        one.update_priorities(ids, np.zeros(500))
        other.update_priorities(ids[3:4], [2.0])
        one.update_priorities(ids[5:6], [6.0])
        for loader in (one, other):
            batch = loader.next()
            check_sums(loader.sampler, view)
            assert set(batch["obs"].tolist()) == {3, 5}
            np.testing.assert_array_equal(batch["probabilities"], np.where(batch["obs"] == 3, 0.25, 0.75))


def test_a_learner_updates_what_another_has_drawn_before_it_draws_itself(table):
    engine, _ = table(200, conduit.Priorities(alpha=1.0, eps=0.0))
    with open_loader(engine, 200) as one, open_loader(engine, 200) as other:
        ids = ids_by_number(one, 199)
        assert other.update_priorities(ids, np.arange(199.0)) == 0
        assert (one.next()["obs"] > 0).all()
        assert (other.next()["obs"] > 0).all()


_LEARNER = """
import sys, numpy as np, conduit
name, seed, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
rng = np.random.default_rng(seed)
with conduit.attach(name) as client:
    with client.loader("replay", batch_size=128, sampling=conduit.Prioritized(), format="numpy", seed=seed) as loader:
        for _ in range(rounds):
            batch = loader.next()
            assert np.isfinite(batch["weights"]).all() and (batch["probabilities"] > 0).all()
            loader.update_priorities(batch.ids, rng.random(128) * 10)
            batch.release()
    print("done", flush=True)
"""


def test_learners_in_two_processes_and_a_writer_stay_coherent(table):
    engine, writer = table(3000, capacity=4000, page_rows=250, max_n_step=3)
    view = engine._views["replay"]
    others = [
        subprocess.Popen(
            [sys.executable, "-c", _LEARNER, engine.name, str(seed), "1500"], stdout=subprocess.PIPE, text=True
        )
        for seed in (1, 2)
    ]
    rng = np.random.default_rng(0)
    number = 3000
    with open_loader(engine, 128, timeout=10.0) as loader:
        while any(process.poll() is None for process in others):
            batch = loader.next()
            loader.update_priorities(batch.ids, rng.random(128))
            write(writer, range(number, number + 5))
            number += 5
        assert [process.communicate()[0].strip() for process in others] == ["done", "done"]
        loader.next()
        check_sums(loader.sampler, view)


_DYING = """
import os, signal, sys, numpy as np, conduit
with conduit.attach(sys.argv[1]) as client:
    loader = client.loader("replay", batch_size=1024, sampling=conduit.Prioritized(), format="numpy", seed=1)
    ids = np.unique(np.concatenate([loader.next().ids.copy() for _ in range(30)]))
    # where an update stands between its stores and its counts
    client._views["replay"].priorities[ids & (1 << 40) - 1] = np.arange(len(ids))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_learner_killed_in_an_update_leaves_no_sums_stale(table):
    """Step by step it is killed in tests/store/test_stepkill.py; here by SIGKILL, with everything stored and nothing counted."""
    engine, _ = table(3000, capacity=4000, page_rows=250)
    view = engine._views["replay"]
    with open_loader(engine, 128) as loader:
        loader.next()
        process = subprocess.run([sys.executable, "-c", _DYING, engine.name], check=False)
        assert process.returncode == -signal.SIGKILL
        loader.next()
        with pytest.raises(AssertionError):
            check_sums(loader.sampler, view)
        assert engine.recover() == 0
        loader.next()
        check_sums(loader.sampler, view)


def test_only_a_death_lets_learners_sum_anew(table):
    engine, _ = table(300)
    view = engine._views["replay"]

    def counts():
        return view.pages()[:, words.PAGE_UPDATES // 8].tolist()

    before = counts()
    assert len(before) > 3
    for _ in range(3):
        with conduit.attach(engine.name) as client:
            client.writer("replay").close()
    engine.recover()
    assert counts() == before
    conduit.attach(engine.name)._participants.forget()  # as a death: the seat's lock goes, its line stays
    with conduit.attach(engine.name):  # who takes the dead one's seat recovers it
        assert counts() == [count + 1 for count in before]
    engine.recover()
    assert counts() == [count + 1 for count in before]


@pytest.mark.parametrize("tables", [2, 5])
def test_ids_of_another_table_are_refused_however_often_its_pages_were_reused(engine_name, tables):
    spec = conduit.Table(SCHEMA, 100, page_rows=20, priorities=conduit.Priorities())
    names = [f"t{number}" for number in range(tables)]
    with conduit.Engine.create(engine_name, dict.fromkeys(names, spec)) as engine:
        loaders = {
            name: engine.loader(name, batch_size=8, min_rows=1, format="numpy", sampling=conduit.Prioritized())
            for name in names
        }
        for rounds in (100, 900):
            for name in names:
                with engine.writer(name) as writer:
                    write(writer, range(rounds))
            for name, loader in loaders.items():
                ids = loader.next().ids
                for other in names:
                    if other == name:
                        assert loader.update_priorities(ids, np.ones(8)) == 0
                        continue
                    assert not loaders[other].valid(ids).any()
                    with pytest.raises(FieldError, match=f"rows of table '{other}'"):
                        loaders[other].update_priorities(ids, np.ones(8))
                    with pytest.raises(FieldError, match=f"rows of table '{other}'"):
                        engine.table(other).delete(ids)
        for loader in loaders.values():
            loader.close()


# -- the range of priorities


def shares(engine, priorities, draws=200_000):
    """How large a share of all draws each row has, by number, after an update."""
    with open_loader(engine, 1000, conduit.Prioritized(stratified=False)) as loader:
        loader.update_priorities(ids_by_number(loader, len(priorities)), priorities)
        return counts_of(loader, len(priorities), draws) / draws, loader.sampler


@pytest.mark.parametrize(
    ("low", "high", "scale"),
    [(2e3, 2e6, 1.0), (2e3, 2e6, 1e4), (2e-9, 2e-6, 1e-9), (2e9, 2e12, 1e12), (0.1, 100.0, 1.0)],
)
def test_large_and_tiny_priorities_are_drawn_in_proportion(table, low, high, scale):
    rows = 200
    priorities = np.full(rows, low)
    priorities[7] = high * rows
    engine, _ = table(rows + 1, conduit.Priorities(alpha=1.0, eps=0.0, scale=scale * rows if high > 1e5 else scale))
    drawn, sampler = shares(engine, priorities)
    exact = priorities / priorities.sum()
    assert abs(drawn[7] - exact[7]) < 0.005
    assert (sampler.raised, sampler.lowered) == (0, 0)


def test_priorities_from_2e3_to_2e6_are_drawn_with_their_true_probability(table):
    """The largest of a thousand, 2e3 to 2e6: it had 0.28 of the draws."""
    priorities = np.append(np.full(110, 2e3), 2e6)
    engine, _ = table(112, conduit.Priorities(alpha=1.0, eps=0.0))
    drawn, _ = shares(engine, priorities)
    assert abs(drawn[-1] - 2e6 / priorities.sum()) < 0.005
    assert drawn[-1] > 0.89


def test_priorities_that_do_not_fit_are_counted_and_told_with_a_remedy_that_helps(table):
    rows = 50
    values = np.full(rows, 1e12)
    values[:5] = 3e14
    engine, _ = table(rows + 1, conduit.Priorities(alpha=1.0, eps=0.0))
    with open_loader(engine) as loader:
        ids = ids_by_number(loader, rows)
        with pytest.warns(RuntimeWarning, match=r"stored p .* of 50 above .*conduit.Priorities\(scale=") as told:
            loader.update_priorities(ids, values)
        assert (loader.sampler.raised, loader.sampler.lowered) == (0, rows)
        loader.update_priorities(ids, values)  # told once
        assert loader.sampler.lowered == 2 * rows
    scale = float(str(told[0].message).split("scale=")[1].split(",")[0])
    engine, _ = table(rows + 1, conduit.Priorities(alpha=1.0, eps=0.0, scale=scale))
    drawn, sampler = shares(engine, values)
    assert (sampler.raised, sampler.lowered) == (0, 0)
    np.testing.assert_allclose(drawn[:5].sum(), values[:5].sum() / values.sum(), atol=0.01)


def test_positive_priorities_below_half_a_step_are_counted_and_told(table):
    engine, writer = table(30, conduit.Priorities(alpha=1.0, eps=0.0))
    with open_loader(engine) as loader:
        ids = ids_by_number(loader, 29)
        with pytest.warns(RuntimeWarning, match=r"29 below 4.77e-07 as 9.54e-07") as told:
            loader.update_priorities(ids, np.linspace(2e-9, 2e-7, 29))
        assert (loader.sampler.raised, loader.sampler.lowered) == (29, 0)
        loader.update_priorities(ids, np.zeros(29))
        assert loader.sampler.raised == 29
    with pytest.warns(RuntimeWarning, match="1 above"):
        writer.append(obs=30, reward=1.0, priority=1e300)
    scale = float(str(told[0].message).split("scale=")[1].split(",")[0])
    assert conduit.Priorities(scale=scale).unit * 2e-9 > 500


@pytest.mark.parametrize("bad", [np.nan, -1.0, np.inf, 1j, "1"])
def test_a_beta_that_is_none_is_refused_live_too(table, bad):
    engine, _ = table(10)
    with open_loader(engine) as loader, pytest.raises(ConfigError, match="Expected beta of at least 0"):
        loader.beta = bad


def test_beta_is_read_and_set_by_the_loader_and_only_where_rows_are_drawn_by_priority(table):
    engine, _ = table(10)
    with open_loader(engine, sampling=conduit.Prioritized(beta=0.25)) as loader:
        assert loader.beta == 0.25
        loader.beta = 0.5
        assert loader.sampler.beta == loader.beta == 0.5
    with engine.loader("replay", batch_size=4, format="numpy") as uniform:
        with pytest.raises(ConfigError, match="got one that draws uniformly"):
            _ = uniform.beta
        with pytest.raises(ConfigError, match="got one that draws uniformly"):
            uniform.beta = 0.5


@pytest.mark.parametrize("bad", [np.array([1 + 1j]), [2j], np.array(["1"])])
def test_complex_priorities_and_texts_are_refused(table, bad):
    engine, writer = table(10)
    with open_loader(engine) as loader:
        ids = loader.next().ids[:1]
        with pytest.raises(FieldError, match="Expected real priorities, got"):
            loader.update_priorities(ids, bad)
        with pytest.raises(FieldError, match="Expected real priorities, got"):
            writer.append(obs=1, reward=1.0, priority=bad[0])


# -- the naive twin


@settings(max_examples=60)
@given(
    reach=st.sampled_from([(1, 1, 1), (1, 3, 1), (3, 2, 1), (1, 1, 4)]),
    modes=st.lists(st.sampled_from(MODES), min_size=1, max_size=2),
    pages=st.integers(4, 6),
    spare=st.integers(0, 80),
    moves=operations,
    seed=st.integers(0, 2**32),
)
def test_leaves_and_sums_are_those_of_a_naive_twin(reach, modes, pages, spare, moves, seed):
    """Random writes, deaths, evictions and updates by two learners: each row's leaf, each learner's sums, from scratch."""
    rule = conduit.Priorities(alpha=0.5, eps=0.0, span=40)
    rng = np.random.default_rng(seed)
    with History(reach, modes, pages, spare, rule) as world:
        narrow = conduit.Transition(newest="bootstrap")
        loaders = [
            open_loader(world.engine, 32, conduit.Prioritized(stratified=k == 0), seed=k, window=window)
            for k, window in enumerate([narrow, conduit.Transition(n_step=world.future)])
        ]
        twin: dict[tuple[int, int, int], int] = {}
        recent = [0, 0, 0]

        def new_leaf():
            return max(recent[:2]) or ONE

        def written():
            for stream in world.model.streams:
                for tick in range(stream.published):
                    for env, row in enumerate(stream.ticks[tick]):
                        twin.setdefault((stream.number, tick, env), 0 if row.closing else new_leaf())

        for move in moves:
            world.do(*move)
            written()
            for loader, need in zip(loaders, (1, world.future), strict=True):
                places = world.places(0)
                offered = world.places(need)
                try:
                    batch = loader.next()
                except DataTimeout:
                    batch = None
                for key, (stream, tick, env) in places.items():
                    row = key & ((1 << ROW_BITS) - 1)
                    assert world.view.priorities[row] == twin[stream.number, tick, env]
                total = check_sums(loader.sampler, world.view)
                anchors = {
                    key: place for key, place in offered.items() if can_be_drawn(world, loader.plan.window, *place)
                }
                assert total == sum(twin[s.number, t, e] for s, t, e in anchors.values())
                assert loader.sampler._state[DRAW_CANDIDATES // 8] == len(anchors)
                drawn = [] if batch is None else batch.ids.tolist()
                for i, key in enumerate(drawn):
                    stream, tick, env = anchors[key]
                    leaf = twin[stream.number, tick, env]
                    assert batch["probabilities"][i] == (leaf / total if total else 1 / len(anchors))
                keys = [*drawn, *rng.choice(list(places) or [-1], 8).tolist(), -1]
                values = rng.choice([0.0, 0.25, 1.0, 9.0], len(keys)) * rng.integers(0, 4)
                ignored, largest = 0, 0
                for key, leaf in zip(keys, leaves(values, rule).tolist(), strict=True):
                    if key not in places or places[key][0].ticks[places[key][1]][places[key][2]].closing:
                        ignored += 1
                        continue
                    stream, tick, env = places[key]
                    twin[stream.number, tick, env] = leaf
                    largest = max(largest, leaf)
                assert loader.update_priorities(np.array(keys), values) == ignored
                recent[2] += len(keys) - ignored
                if recent[2] >= rule.span:
                    recent[:] = [largest, recent[0], 0]
                else:
                    recent[0] = max(recent[0], largest)
        for loader in loaders:
            loader.close()


# -- cost


def test_a_learner_that_starts_sums_a_million_rows_in_milliseconds(table):
    rows = 1 << 20
    engine, writer = table(0, capacity=rows, num_envs=64)
    writer.close()
    with engine.writer("replay", num_envs=64, autoreset="next_step") as many:
        obs, reward = np.zeros(64, np.int64), np.zeros(64, np.float32)
        for _ in range(rows // 64 - 600):
            many.append(obs=obs, reward=reward)
    times = []
    for _ in range(5):
        with open_loader(engine) as loader:
            begun = time.perf_counter()
            loader.next()
            times.append(time.perf_counter() - begun)
            assert loader.sampler.candidates > 900_000
    assert min(times) < 0.01, times
