"""Mixed loaders: whose rows a batch has, how many of each, and that they are what the table's own loader would give."""

import itertools
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import conduit
from conduit.plane.deliver.mixed import _given, _shares

CARTPOLE = conduit.Schema([conduit.Field("obs", "float32", (4,), observation=True), conduit.Field("action", "int64")])


def fill(engine, table, first, rows=200):
    with engine.writer(table) as writer:
        for n in range(first, first + rows):
            writer.append(obs=np.full(4, n, np.float32), action=n)


@pytest.fixture
def engine(engine_name):
    """Tables `replay` with actions from 0, `demos` from 1,000, `old` from 2,000; `ranked` (from 3,000) has priorities."""
    tables = {name: conduit.Table(CARTPOLE, 400) for name in ("replay", "demos", "old", "empty")}
    tables["ranked"] = conduit.Table(CARTPOLE, 400, priorities=conduit.Priorities(alpha=1.0, eps=0.0))
    with conduit.Engine.create(engine_name, tables) as made:
        for name, first in (("replay", 0), ("demos", 1000), ("old", 2000), ("ranked", 3000)):
            fill(made, name, first)
        yield made


def test_rows_of_each_table_lie_side_by_side_with_their_source_and_next_observation(engine):
    with engine.mixed_loader({"replay": 0.75, "demos": 0.25}, batch_size=64, format="numpy") as loader:
        for _ in range(5):
            batch = loader.next()
            np.testing.assert_array_equal(batch["source"], np.repeat([0, 1], [48, 16]))
            np.testing.assert_array_equal(batch["action"] // 1000, batch["source"])
            np.testing.assert_array_equal(batch["obs"][:, 0], batch["action"])
            np.testing.assert_array_equal(batch["next_obs"][:, 0], batch["action"] + 1)
            assert loader.valid(batch).all()
    assert {name: stats.rows for name, stats in loader.stats.items()} == {"replay": 240, "demos": 80}


def test_a_part_draws_what_a_loader_of_its_own_with_its_seed_and_slots_draws(engine):
    with (
        engine.mixed_loader({"replay": 3, "demos": 1}, batch_size=64, seed=7, format="numpy") as mixed,
        engine.loader("replay", batch_size=64, seed=7, format="numpy") as alone,
    ):
        for _ in range(4):
            np.testing.assert_array_equal(mixed.next()["action"][:48], alone.next()["action"][:48])


def test_the_same_seed_gives_the_same_batches_and_another_one_others(engine):
    def batches(seed, counts):
        with engine.mixed_loader(
            {"replay": 1, "demos": 2}, batch_size=50, seed=seed, counts=counts, format="numpy"
        ) as loader:
            return np.stack([loader.next()["action"].copy() for _ in range(6)])

    for counts in ("exact", "random"):
        np.testing.assert_array_equal(batches(3, counts), batches(3, counts))
        assert (batches(3, counts) != batches(4, counts)).any()


def test_a_batch_can_be_repeated_by_its_number(engine):
    with engine.mixed_loader({"replay": 1, "demos": 2}, batch_size=50, counts="random", format="numpy") as loader:
        first = [loader.next()["action"].copy() for _ in range(4)]
        loader.batch = 2
        np.testing.assert_array_equal(loader.next()["action"], first[2])
        np.testing.assert_array_equal(loader.next()["action"], first[3])


@given(
    weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=5),
    size=st.integers(1, 300),
    start=st.integers(0, 10**9),
)
def test_exact_counts_are_never_negative_and_never_a_row_off_in_the_long_run(weights, size, start):
    shares = _shares(dict(enumerate(weights)))
    assert sum(shares) == 1
    size = max(size, -(-1 // min(shares)))
    wholes = list(itertools.accumulate(shares))
    for number in range(start, start + 20):
        ends = [_given(whole, (number + 1) * size) - _given(whole, number * size) for whole in wholes]
        assert ends[-1] == size
        assert all(low <= high for low, high in itertools.pairwise([0, *ends]))
    for whole in wholes:
        assert abs(_given(whole, (start + 1) * size) - whole * (start + 1) * size) <= 0.5


def test_thirds_of_a_batch_that_three_does_not_divide_come_out_exact(engine):
    with engine.mixed_loader({"replay": 1 / 3, "demos": 1 / 3, "old": 1 / 3}, batch_size=64, format="numpy") as loader:
        counts = np.sum([np.bincount(loader.next()["source"], minlength=3) for _ in range(30)], axis=0)
    np.testing.assert_array_equal(counts, [640, 640, 640])


def test_random_counts_have_the_binomial_spread(engine):
    with engine.mixed_loader({"replay": 0.75, "demos": 0.25}, batch_size=64, counts="random") as loader:
        counts = np.array([loader.bounds(number)[1] for number in range(2000)])
    assert abs(counts.mean() - 48) < 4 * np.sqrt(12 / 2000)
    assert 10 < counts.var() < 14


def test_a_random_batch_may_have_no_row_of_a_table(engine):
    with engine.mixed_loader({"replay": 0.5, "demos": 0.5}, batch_size=2, counts="random", format="numpy") as loader:
        seen = {tuple((loader.next()["action"] // 1000).tolist()) for _ in range(60)}
    assert seen == {(0, 0), (0, 1), (1, 1)}


def test_a_prioritized_table_beside_a_uniform_one(engine):
    sampling = {"ranked": conduit.Prioritized(beta=1.0, normalize="none")}
    with engine.mixed_loader({"demos": 1, "ranked": 1}, batch_size=64, sampling=sampling, format="numpy") as loader:
        batch = loader.next()
        assert (batch["weights"] == 1).all()
        priorities = np.where(np.isin(batch["action"], (3010, 3011)), 1.0, 0.0)
        for _ in range(200):
            assert loader.update_priorities(batch, np.where(batch["action"] < 3100, 1.0, 3.0)) == 0
            batch = loader.next()
        ranked = batch["source"] == 1
        assert (batch["weights"][~ranked] == 1).all()
        high = batch["action"] >= 3100
        ratio = batch["weights"][ranked & ~high].mean() / batch["weights"][ranked & high].mean()
        assert ratio == pytest.approx(3.0, rel=1e-5)
        # strata are of the table's own slots: each mass is met
        assert 0.7 < high[ranked].mean() < 0.8
        with pytest.raises(conduit.errors.FieldError, match="Expected 64 priorities"):
            loader.update_priorities(batch, priorities[:3])
        with pytest.raises(conduit.errors.FieldError, match="finite"):
            loader.update_priorities(batch, np.full(64, np.nan))
    with (
        engine.mixed_loader({"demos": 1, "old": 1}, batch_size=4) as loader,
        pytest.raises(conduit.errors.ConfigError, match="Prioritized"),
    ):
        loader.update_priorities(loader.next(), np.ones(4))


def test_batches_that_are_held_stay_as_they_are_and_buffers_are_told_apart(engine):
    with engine.mixed_loader({"replay": 1, "demos": 1}, batch_size=32, buffers=3, on_busy="error") as loader:
        held = [loader.next() for _ in range(3)]
        copies = [batch["action"].clone() for batch in held]
        with pytest.raises(conduit.errors.BuffersBusy):
            loader.next()
        kept = held.pop()["obs"][3]
        with pytest.raises(conduit.errors.BuffersBusy):
            loader.next()
        del kept
        loader.next()
        assert all((batch["action"] == copy).all() for batch, copy in zip(held, copies, strict=False))


def test_batches_beyond_the_buffers_have_memory_of_their_own_and_the_rows_they_would_have_had(engine):
    options = {"tables": {"replay": 3, "demos": 1}, "batch_size": 32, "seed": 4}
    with engine.mixed_loader(**options) as loader:
        wanted = [
            (batch["action"].tolist(), batch["source"].tolist()) for batch, _ in zip(loader, range(7), strict=False)
        ]
    with engine.mixed_loader(**options) as loader:
        with pytest.warns(RuntimeWarning, match="All 3 buffers of a loader of table 'replay'"):
            held = [loader.next() for _ in range(6)]
        assert {name: stats.allocated for name, stats in loader.stats.items()} == {"replay": 3, "demos": 3}
        del held[4]
        held.append(loader.next())
        del wanted[4]
        assert [(batch["action"].tolist(), batch["source"].tolist()) for batch in held] == wanted
        assert len({batch["action"].data_ptr() for batch in held}) == 6


def test_a_table_without_rows_is_waited_for_and_named_and_nothing_is_lost(engine):
    with engine.mixed_loader({"replay": 1, "empty": 1}, batch_size=32, format="numpy") as loader:
        with pytest.raises(conduit.errors.DataTimeout, match="'empty'"):
            loader.next(timeout=0.05)
        assert loader.batch == 0
        fill(engine, "empty", 5000)
        assert np.bincount(loader.next()["source"]).tolist() == [16, 16]
        assert loader.stats["replay"].batches == 1


def test_windows_transforms_and_steps_on_the_batch_work_on_mixtures(engine_name):
    schema = conduit.Schema(
        [
            conduit.Field("obs", "uint8", (8, 8), observation=True),
            conduit.Field("reward", "float32"),
            conduit.Field("value", "float32"),
        ]
    )
    tables = {name: conduit.Table(schema, 600, max_length=8) for name in ("a", "b")}
    with conduit.Engine.create(engine_name, tables) as engine:
        for k, name in enumerate(tables):
            with engine.writer(name) as writer:
                for n in range(300):
                    writer.append(obs=np.full((8, 8), n % 100 + 100 * k, np.uint8), reward=1.0 + k, value=np.float32(0))
        with engine.mixed_loader(
            {"a": 1, "b": 3},
            batch_size=8,
            window=conduit.Rollout(ticks=8, num_envs=1),
            transform={"obs": conduit.scale(1 / 255)},
            batch_transforms=(conduit.returns_to_go(gamma=0.0),),
            format="numpy",
        ) as loader:
            batch = loader.next()
            rewards = np.repeat([1.0, 2.0], [2, 6])
            np.testing.assert_allclose(batch["reward"][:, 0, 0], rewards)
            np.testing.assert_allclose(batch["returns_to_go"][:, 0, 0], rewards)
            assert batch["obs"].shape == (8, 8, 1, 8, 8)
            frames = np.rint(batch["obs"][:, 0, 0, 0, 0] * 255)
            np.testing.assert_array_equal(frames >= 100, rewards > 1.5)


@pytest.mark.parametrize("ragged", ["pad", "pack"])
def test_ragged_values_of_several_tables_lie_in_one_batch(engine_name, ragged):
    schema = conduit.Schema([conduit.Field("tokens", "int32", (9,), ragged=True), conduit.Field("n", "int64")])
    tables = {name: conduit.Table(schema, 300) for name in ("a", "b")}
    with conduit.Engine.create(engine_name, tables) as engine:
        for k, name in enumerate(tables):
            with engine.writer(name) as writer:
                for n in range(100):
                    writer.append(tokens=np.full(n % 10, 1000 * k + n, np.int32), n=1000 * k + n)
        with engine.mixed_loader(
            {"a": 1, "b": 1}, batch_size=10, ragged=ragged, format="numpy", fields=("tokens", "n")
        ) as loader:
            for _ in range(10):
                batch = loader.next()
                np.testing.assert_array_equal(batch["n"] // 1000, batch["source"])
                if ragged == "pack":
                    told = np.split(batch["tokens"], batch["tokens_cu_seqlens"][1:-1])
                else:
                    told = [row[mask] for row, mask in zip(batch["tokens"], batch["tokens_mask"], strict=True)]
                for n, tokens in zip(batch["n"].tolist(), told, strict=True):
                    assert tokens.tolist() == [n] * (n % 1000 % 10)


@pytest.mark.parametrize(
    ("tables", "options", "message"),
    [
        ({}, {}, "at least one table"),
        ({"nowhere": 1}, {}, "'nowhere'"),
        ({"replay": 0}, {}, "above 0.*'replay'"),
        ({"replay": -1.0}, {}, "above 0"),
        ({"replay": float("nan")}, {}, "above 0"),
        ({"replay": True}, {}, "above 0"),
        ({"replay": 0.99, "demos": 0.01}, {"batch_size": 50}, r"'demos' would give 0\.5.*at least 100"),
        ({"replay": 1}, {"counts": "some"}, "'exact' or 'random'"),
        ({"replay": 1}, {"sampling": {"demos": None}}, "'demos'.*sampling"),
        ({"replay": 1}, {"sampling": conduit.Prioritized()}, "to have priorities"),
        ({"replay": 1}, {"batch_size": 0}, "batch_size"),
    ],
)
def test_a_bad_mixture_is_refused(engine, tables, options, message):
    with pytest.raises(conduit.errors.ConfigError, match=message):
        engine.mixed_loader(tables, **{"batch_size": 32} | options)


def test_tables_of_different_outputs_are_refused_by_the_first_difference(engine_name):
    wide = conduit.Schema([conduit.Field("obs", "float64", (4,), observation=True), conduit.Field("action", "int64")])
    more = conduit.Schema([*CARTPOLE.fields, conduit.Field("expert", "bool")])
    source = conduit.Schema([*CARTPOLE.fields, conduit.Field("source", "bool")])
    schemas = {"a": CARTPOLE, "wide": wide, "more": more, "source": source}
    with conduit.Engine.create(engine_name, {name: conduit.Table(s, 100) for name, s in schemas.items()}) as engine:
        with pytest.raises(conduit.errors.ConfigError, match=r"'a' and 'wide'.*float32 \(8, 4\).*float64.*at `obs`"):
            engine.mixed_loader({"a": 1, "wide": 1}, batch_size=8)
        with pytest.raises(conduit.errors.ConfigError, match=r"none and bool \(8,\).*fields=.*at `expert`"):
            engine.mixed_loader({"a": 1, "more": 1}, batch_size=8)
        with pytest.raises(conduit.errors.ConfigError, match="'source'"):
            engine.mixed_loader({"a": 1, "source": 1}, batch_size=8)
        fill(engine, "a", 0, 50)
        with engine.writer("more") as writer:
            for n in range(50):
                writer.append(obs=np.zeros(4, np.float32), action=1000 + n, expert=True)
        with engine.mixed_loader(
            {"a": 1, "more": 1}, batch_size=8, fields=iter(["action", "obs"]), format="numpy"
        ) as loader:
            assert (loader.next()["action"] // 1000).tolist() == [0] * 4 + [1] * 4
        same = {"obs": conduit.cast("float32")}
        with engine.writer("wide") as writer:
            for n in range(50):
                writer.append(obs=np.zeros(4), action=1000 + n)
        with engine.mixed_loader({"a": 1, "wide": 1}, batch_size=8, transform=same, format="numpy") as loader:
            assert (loader.next()["action"] // 1000).tolist() == [0] * 4 + [1] * 4


def test_a_closed_mixture_refuses(engine):
    loader = engine.mixed_loader({"replay": 1, "demos": 1}, batch_size=4)
    batch = loader.next()
    loader.close()
    loader.close()
    with pytest.raises(conduit.errors.Closed):
        loader.next()
    assert len(batch["action"]) == 4


def test_a_named_mixture_goes_on_where_the_one_before_it_ended(engine):
    shares = {"replay": 0.7, "demos": 0.3}
    with engine.mixed_loader(shares, batch_size=64, format="numpy", seed=5) as plain:
        wanted = [plain.next()["action"].copy() for _ in range(4)]
    found = []
    for seed in (5, None):
        with engine.mixed_loader(shares, batch_size=64, format="numpy", seed=seed, name="mixture") as named:
            found += [named.next()["action"].copy() for _ in range(2)]
            with pytest.raises(conduit.errors.Busy, match="has it open"):
                engine.mixed_loader(shares, batch_size=64, name="mixture")
    np.testing.assert_array_equal(found, wanted)


def test_rows_are_whole_while_a_writer_overwrites_one_of_the_tables(engine_name):
    schema = conduit.Schema([conduit.Field("obs", "int64", (64,), observation=True), conduit.Field("action", "int64")])
    tables = {"live": conduit.Table(schema, 300, page_rows=30), "demos": conduit.Table(schema, 300)}
    stop = threading.Event()
    with conduit.Engine.create(engine_name, tables) as engine:

        def write(table, numbers):
            with engine.writer(table) as writer:
                for start in numbers:
                    if stop.is_set():
                        return
                    actions = np.arange(start, start + 50)
                    writer.extend({"obs": np.repeat(actions[:, None], 64, 1), "action": actions})

        write("demos", range(-1000, -800, 50))
        thread = threading.Thread(target=write, args=("live", itertools.count(0, 50)))
        thread.start()
        try:
            with engine.mixed_loader({"live": 2, "demos": 1}, batch_size=96, format="numpy", min_rows=1) as loader:
                for _ in range(150):
                    batch = loader.next()
                    np.testing.assert_array_equal(batch["source"], np.repeat([0, 1], [64, 32]))
                    np.testing.assert_array_equal(batch["action"] < 0, batch["source"] == 1)
                    assert (batch["obs"] == batch["action"][:, None]).all()
                    assert (batch["next_obs"] == batch["action"][:, None] + 1).all()
        finally:
            stop.set()
            thread.join(20)


def test_beta_is_that_of_the_tables_that_are_drawn_by_priority(engine):
    sampling = {"ranked": conduit.Prioritized(beta=0.25)}
    with engine.mixed_loader({"replay": 1, "ranked": 1}, batch_size=4, sampling=sampling, format="numpy") as loader:
        assert loader.beta == {"ranked": 0.25}
        loader.beta = 0.5
        assert loader.samplers["ranked"].beta == 0.5
        loader.beta = {"ranked": 1}
        assert loader.beta == {"ranked": 1.0}
        for bad, message in (({"replay": 0.5}, "replay"), (-1, "at least 0"), ({"ranked": "1"}, "at least 0")):
            with pytest.raises(conduit.errors.ConfigError, match=message):
                loader.beta = bad
        assert loader.beta == {"ranked": 1.0}
    with (
        engine.mixed_loader({"replay": 1}, batch_size=4) as uniform,
        pytest.raises(conduit.errors.ConfigError, match="Prior"),
    ):
        uniform.beta = 0.5
