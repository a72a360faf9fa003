"""Leaves, sums, draws and updates against the reference, and against the CPU's sampler: all of them integers, all of them equal."""

import numpy as np
import pytest
import torch

import conduit
from conduit.errors import ConfigError, FieldError
from conduit.kernels.cpu import priorities as cpu
from conduit.kernels.gpu import draws, philox, prioritized_draw
from conduit.kernels.gpu import priorities as priority
from conduit.kernels.gpu.launch import recorded
from conduit.kernels.reference import device as reference
from conduit.sampling.marks import SEEN_BEGIN, SEEN_BYTES, SEEN_END, SEEN_GENERATION
from conduit.store.format import words as w

RNG = np.random.default_rng(4)
F = priority.FAN_OUT
SIZE = 31


def leaves_of(priorities, rule, rows=700):
    maker = cpu.Leaves(rule, len(priorities), rows)
    maker.fill(np.asarray(priorities), len(priorities))
    leaves_of.clipped = maker.clipped.tolist()
    return maker.array.copy()


def largest_leaf(rows):
    """The code of the largest priority of a table of so many rows."""
    return leaves_of([2.0**70], conduit.Priorities(alpha=1.0), rows)[0]


def tree_of(leaves, device):
    tree = priority.make_tree(len(leaves), device([0]).device)
    tree.leaves[: len(leaves)] = device(leaves.astype(np.uint32))
    priority.build(tree)
    return tree


def check_sums(tree, leaves):
    np.testing.assert_array_equal(tree.leaves.cpu()[: len(leaves)], leaves)
    assert not tree.leaves.cpu().numpy()[len(leaves) :].any()
    levels = reference.summed(leaves, F)
    assert len(levels) == len(tree.sums)
    for sums, want in zip(tree.sums, levels, strict=True):
        assert sums[: len(want)].tolist() == want
        assert not sums[len(want) :].any()


@pytest.mark.parametrize(
    ("alpha", "eps", "scale"),
    [
        (0.6, 1e-6, 1.0),
        (0.0, 0.0, 1.0),
        (1.0, 0.0, 1.0),
        (1.0, 0.0, 1e-8),
        (1.0, 1e-6, 3e5),
        (0.7, 0.0, 1.0),
        (3.3, 1e-3, 1e9),
        (40.0, 0.5, 1.0),
        (1e-3, 1e300, 1.0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_leaves_equal_the_cpus(out, device, alpha, eps, scale, dtype):
    rule = conduit.Priorities(alpha=alpha, eps=eps, scale=scale)
    some = np.concatenate([[0.0, 1.0, 1e-30, 1e30, 4096.0, 5e-324, 2**-20], RNG.pareto(0.5, 300), RNG.random(200)])
    values = device(some).to(dtype)
    tree, made = priority.make_tree(600, values.device), out(len(some), torch.uint32)
    rows = device(np.arange(len(some)))
    priority.update(tree, rows, values, made, rule=rule)
    want = leaves_of(values.double().cpu().numpy(), rule, 600)
    np.testing.assert_array_equal(made.cpu(), want)
    check_sums(tree, np.concatenate([want, np.zeros(600 - len(want), np.uint32)]))
    assert tree.refused.tolist() == [0, 0]
    assert tree.clipped.tolist() == [0, 0, *leaves_of.clipped]
    assert tree.total.item() == cpu.values_of(want).sum()


@pytest.mark.parametrize("rows", [1, 128, 129, 1000, F * F + 1])
def test_sums_of_all_sizes_are_exact(device, rows):
    leaves = np.full(rows, largest_leaf(rows), np.uint32)
    check_sums(tree_of(leaves, device), leaves)


def test_updates_with_duplicates_are_those_of_one_after_the_other(out, device, program_order):
    rows, count, rule = 700, 300, conduit.Priorities(alpha=0.6, eps=0.0)
    tree = priority.make_tree(rows, device([0]).device)
    want = np.zeros(rows, np.uint32)
    for _ in range(4):
        at = RNG.integers(0, 40, count) * RNG.integers(1, 18, count)
        at[RNG.random(count) < 0.1] = -1
        at[:3] = rows, 2**40, -(2**40)
        values = RNG.pareto(1.0, count) * (RNG.random(count) < 0.9)
        priority.update(tree, device(at), device(values), out(count, torch.uint32), rule=rule)
        for row, leaf in zip(at.tolist(), leaves_of(values, rule).tolist(), strict=True):
            if 0 <= row < rows:
                want[row] = leaf
        check_sums(tree, want)
    assert tree.ticket.item() == 4 * count


def test_updates_of_few_rows_touch_few_blocks(out, device, program_order):
    rows, rule = 2 * F * F + 77, conduit.Priorities(alpha=1.0, eps=0.0)
    want = RNG.integers(0, 1 << 20, rows).astype(np.uint32)
    tree = tree_of(want, device)
    at = np.array([0, rows - 1, F * F, F * F - 1, rows - 1])
    values = np.array([0.0, 1.5, 2.5, 3.0, 0.25])
    with recorded() as launches:
        priority.update(tree, device(at), device(values), device(np.zeros(5, np.uint32)), rule=rule)
    assert [launch.grid for launch in launches] == [1, 1, 1, 5, 3]
    priority.update(tree, device(at), device(values), out(5, torch.uint32), rule=rule)
    want[[0, F * F, F * F - 1, rows - 1]] = np.array([0.0, 2.5, 3.0, 0.25]) * cpu.ONE
    check_sums(tree, want)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1e-9, -np.inf])
def test_one_priority_that_is_none_changes_nothing_and_is_counted(out, device, bad):
    want = RNG.integers(1, 1 << 20, 300).astype(np.uint32)
    tree = tree_of(want, device)
    values = np.ones(200)
    values[[3, 150]] = bad
    rule = conduit.Priorities()
    priority.update(tree, device(np.arange(200)), device(values), out(200, torch.uint32), rule=rule)
    check_sums(tree, want)
    assert tree.refused.tolist() == [0, 2]
    values[[3, 150]] = 1.0
    priority.update(tree, device(np.arange(200)), device(values), out(200, torch.uint32), rule=rule)
    want[:200] = leaves_of(values, rule)
    check_sums(tree, want)
    assert tree.refused.tolist() == [0, 2]


@pytest.mark.parametrize("stratified", [True, False])
@pytest.mark.parametrize(("rows", "count"), [(1, 3), (5, 1), (300, 33), (F * F + 200, 20)])
def test_draws_equal_the_reference(out, device, rows, count, stratified):
    leaves = leaves_of(RNG.pareto(0.2, rows) * (RNG.random(rows) < 0.5), conduit.Priorities(eps=0.0), rows)
    leaves[rows // 2] = largest_leaf(rows)
    tree = tree_of(leaves, device)
    at, probabilities = out(count, torch.int64), out(count, torch.float64)
    prioritized_draw.draw(tree, philox.make_state(2**64 - 5, 3, at.device), at, probabilities, stratified=stratified)
    want_rows, want = reference.drawn(leaves, 2**64 - 5, 3, count, stratified=stratified)
    assert at.tolist() == want_rows
    assert probabilities.tolist() == want


def test_sums_that_are_out_of_date_lead_to_rows_of_the_table(out, device):
    tree = tree_of(np.full(200, 5, np.uint32), device)
    tree.sums[0][1:] = 10**9
    at = out(9, torch.int64)
    prioritized_draw.draw(tree, philox.make_state(1, 1, at.device), at, out(9, torch.float64))
    assert ((at >= 0) & (at < len(tree.leaves))).all()


def test_where_all_leaves_are_zero_nothing_is_drawn(out, device):
    tree = priority.make_tree(200, device([0]).device)
    at, probabilities = out(5, torch.int64), out(5, torch.float64)
    prioritized_draw.draw(tree, philox.make_state(1, 1, at.device), at, probabilities)
    assert at.tolist() == [-1] * 5
    assert probabilities.tolist() == [0.0] * 5


@pytest.mark.parametrize("stratified", [True, False])
def test_a_loader_draws_the_same_rows_with_the_same_probabilities(out, device, engine_name, stratified):
    """Over pages that were reused, of which one is being written, after updates with duplicates on both sides."""
    schema = conduit.Schema([conduit.Field("obs", "int64", (), observation=True), conduit.Field("reward", "float32")])
    rule = conduit.Priorities(alpha=0.7)
    table = conduit.Table(schema, 300, page_rows=64, priorities=rule)
    sampling = conduit.Prioritized(stratified=stratified)
    with (
        conduit.Engine.create(engine_name, {"replay": table}) as engine,
        engine.writer("replay") as writer,
        engine.loader("replay", batch_size=SIZE, sampling=sampling, seed=77, format="numpy", min_rows=1) as loader,
    ):
        for t in range(530):
            writer.append(obs=t, reward=1.0)
        view = engine._views["replay"]
        rows = view.layout.rows
        assert view.rows_evicted > 0

        def candidates():
            words = SEEN_BYTES // 8
            known = loader.sampler._tree[: words * view.layout.pages].reshape(-1, words)
            chosen = np.zeros(rows, bool)
            for page in np.flatnonzero(known[:, SEEN_GENERATION // 8] >= 0):
                first = page * view.layout.page_rows
                chosen[first + known[page, SEEN_BEGIN // 8] : first + known[page, SEEN_END // 8]] = True
            return chosen

        batch = loader.next()
        tree = tree_of(np.where(candidates(), view.priorities, 0), device)
        for _ in range(2):
            ids = batch.ids
            errors = RNG.pareto(1.0, len(ids))
            assert loader.update_priorities(ids, errors) == 0
            at = ids & ((1 << 40) - 1)
            priority.update(tree, device(at), device(errors), out(len(at), torch.uint32), rule=rule)
            check_sums(tree, np.where(candidates(), view.priorities, 0).astype(np.uint32))
            number = loader.sampler.batch
            batch = loader.next()
            drawn, probabilities = out(SIZE, torch.int64), out(SIZE, torch.float64)
            prioritized_draw.draw(
                tree, philox.make_state(77, number, drawn.device), drawn, probabilities, stratified=stratified
            )
            np.testing.assert_array_equal(drawn.cpu(), batch.ids & ((1 << 40) - 1))
            np.testing.assert_array_equal(probabilities.cpu(), batch["probabilities"])
            weights = out(SIZE, torch.float32)
            prioritized_draw.weigh(probabilities, weights, beta=device([0.4], torch.float64))
            np.testing.assert_allclose(weights.cpu(), batch["weights"], rtol=3e-7)


@pytest.mark.parametrize(
    "window",
    [conduit.Transition(), conduit.Transition(n_step=3), conduit.Transition(n_step=3, newest="bootstrap")],
    ids=str,
)
def test_rows_that_cannot_be_drawn_weigh_nothing_as_on_the_cpu(out, device, engine_name, window):
    """Newest rows that wait, rows that only close an episode, truncated ones without a final, and deleted ones."""
    schema = conduit.Schema([conduit.Field("obs", "int64", (), observation=True), conduit.Field("reward", "float32")])
    table = conduit.Table(schema, 300, page_rows=64, max_n_step=3, priorities=conduit.Priorities(alpha=0.7))
    options = {"batch_size": SIZE, "sampling": conduit.Prioritized(normalize="none"), "seed": 77, "format": "numpy"}
    with (
        conduit.Engine.create(engine_name, {"replay": table}) as engine,
        engine.writer("replay", autoreset="next_step") as writer,
        engine.loader("replay", window=window, min_rows=1, **options) as loader,
    ):
        for t in range(530):
            writer.append(obs=t, reward=1.0, terminated=t % 17 == 8, truncated=t % 17 == 14)
        view = engine._views["replay"]
        pages, page_rows = view.layout.pages, view.layout.page_rows
        batch = loader.next()
        loader.update_priorities(batch.ids, RNG.pareto(1.0, SIZE))
        some = np.unique(batch.ids)[::3]
        assert engine.table("replay").delete(some) == len(some)
        number = loader.sampler.batch
        batch = loader.next()
        known = loader.sampler._tree[: SEEN_BYTES // 8 * pages].reshape(pages, -1)
        there = known[:, SEEN_GENERATION // 8] >= 0
        begins, ends = (np.where(there, known[:, word // 8], 0) for word in (SEEN_BEGIN, SEEN_END))
        blocks = view.pages()
        over = (blocks[:, 0] & w.KIND_MASK == w.SEALED) & (blocks[:, w.PAGE_ENDED // 8] == w.ENDED)
        # the deleted rows by their bits alone: what was copied before they were
        meta = np.array(view.meta).view(np.int32).reshape(-1, 4)
        flags = meta[:, 3]
        deleted = flags & w.DELETED != 0
        flags &= ~w.DELETED
        gone = np.zeros((pages, 32 * -(-page_rows // 32)), bool)
        gone[:, :page_rows] = deleted.reshape(pages, page_rows)
        gone = np.packbits(gone, 1, bitorder="little").view(np.int32)
        # a leaf that a learner stored before it knew
        leaves = np.where(deleted, 1000, view.priorities).astype(np.uint32)
        tree = priority.make_tree(view.layout.rows, device([0]).device)
        draws.drawable(
            device(leaves), device(begins), device(ends), device(meta), device(blocks[:, w.PAGE_COMMITTED // 8]),
            device(over.astype(np.int64)), device(gone), tree.leaves, window=window, page_rows=page_rows,
        )  # fmt: skip
        assert np.count_nonzero(tree.leaves.cpu().numpy()) == loader.sampler.candidates < (ends - begins).sum()
        priority.build(tree)
        drawn, probabilities = out(SIZE, torch.int64), out(SIZE, torch.float64)
        prioritized_draw.draw(tree, philox.make_state(77, number, drawn.device), drawn, probabilities)
        np.testing.assert_array_equal(drawn.cpu(), batch.ids & ((1 << 40) - 1))
        np.testing.assert_array_equal(probabilities.cpu(), batch["probabilities"])
        weights = out(SIZE, torch.float32)
        candidates = device([loader.sampler.candidates])
        prioritized_draw.weigh(probabilities, weights, beta=device([0.4], torch.float64), candidates=candidates)
        np.testing.assert_allclose(weights.cpu(), batch["weights"], rtol=3e-7)


@pytest.mark.parametrize("count", [1, 300])
def test_weights_over_each_base(out, device, count):
    p = RNG.random(count) * 1e-3
    p[count // 2 + 1 :: 7] = 0.0
    for base, given in (
        (p[p > 0].min(), {}),
        (1 / 5000, {"candidates": device([5000])}),
        (1e-6, {"least": device([1e-6], torch.float64)}),
    ):
        weights = out(count, torch.float32)
        prioritized_draw.weigh(device(p), weights, beta=device([0.7], torch.float64), **given)
        want = np.where(p > 0, np.maximum(p, 1e-300) / base, np.inf) ** -0.7
        np.testing.assert_allclose(weights.cpu(), want, rtol=3e-7)


def test_what_cannot_be_is_refused(out, device):
    with pytest.raises(ConfigError, match="Expected from 1 to 2147483647 rows, got 0"):
        priority.make_tree(0, "cpu")
    with pytest.raises(ConfigError, match="rows, got 2147483648"):
        priority.make_tree(2**31, "meta")
    tree = priority.make_tree(10, device([0]).device)
    rows, values, made = device([1, 2]), device([1.0, 2.0], torch.float64), out(2, torch.uint32)
    for wrong, text in (
        ((rows.int(), values, made), "Expected `int64`, got `int32` - at `rows`"),
        ((rows, values[:1], made), r"Expected shape \[2\], got \[1\] - at `priorities`"),
        ((rows, values.long(), made), "Expected `float32` or `float64`, got `int64` - at `priorities`"),
        ((rows, values, made.view(torch.int32)), "Expected `uint32`, got `int32` - at `leaves`"),
    ):
        with pytest.raises(FieldError, match=text):
            priority.update(tree, *wrong, rule=conduit.Priorities())
    assert tree.total.item() == 0
    with pytest.raises(ConfigError, match="Expected candidates or least, got both"):
        prioritized_draw.weigh(values, out(2, torch.float32), beta=values[:1], candidates=rows[:1], least=values[:1])
