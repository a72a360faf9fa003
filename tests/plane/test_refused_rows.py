"""A stored row that a transform cannot take: the error names it, it can be deleted, and the loader goes on."""

import numpy as np
import pytest

import conduit
from conduit.errors import FieldError

SCHEMA = conduit.Schema(
    [
        conduit.Field("obs", "float32", (3,), observation=True),
        conduit.Field("extra", "float32", observation=True),
        conduit.Field("kind", "int64", (2,)),
        conduit.Field("reward", "float32"),
    ]
)
STATISTICS = ("obs", "extra")
BAD = 7


def fill(engine, table="t", nan=False, kind=0):
    """40 rows, of which number 7 is a bad one."""
    with engine.writer(table, keep_final=False) as writer:
        for t in range(40):
            obs = np.full(3, t, np.float32)
            if nan and t == BAD:
                obs[1] = np.nan
            writer.append(
                obs=obs, extra=float(t), kind=np.array([0, kind if t == BAD else 1]), reward=float(t), terminated=False
            )


@pytest.fixture
def engine(engine_name):
    tables = {
        name: conduit.Table(SCHEMA, 400, statistics=STATISTICS, max_length=4, **options)
        for name, options in (
            ("t", {}),
            ("other", {}),
            ("counted", {"max_times_sampled": 1}),
            ("limited", {"limiter": conduit.MinSize(1)}),
        )
    }
    with conduit.Engine.create(engine_name, tables) as engine:
        yield engine


NORMALISED = {"obs": conduit.normalize(update=True), "extra": conduit.normalize(update=True)}
REFUSED = {
    "nan under normalize": ({"nan": True}, NORMALISED, "obs", np.nan),
    "class above": ({"kind": 5}, {"kind": conduit.one_hot(2)}, "kind", 5),
    "class below": ({"kind": -3}, {"kind": conduit.one_hot(2)}, "kind", -3),
}


def check(error, bad_id, at, value):
    assert error.at == at
    assert error.row_id == bad_id
    np.testing.assert_equal(error.value, value)
    assert f"row {bad_id}" in str(error)
    assert repr(value) in str(error)
    assert f"[{bad_id}]" in str(error)


def id_of_bad(engine, table="t"):
    with engine.loader(table, batch_size=512, min_rows=1, format="numpy") as loader:
        batch = loader.next()
        return int(batch.ids[batch["reward"] == BAD][0])


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_the_error_names_row_field_and_value_and_deleting_the_row_helps(engine, case):
    row, transform, at, value = case
    fill(engine, **row)
    bad_id = id_of_bad(engine)
    with engine.loader("t", batch_size=256, min_rows=1, transform=transform, format="numpy") as loader:
        with pytest.raises(FieldError) as caught:
            loader.next()
        check(caught.value, bad_id, at, value)
        assert engine.table("t").delete([caught.value.row_id]) == 1
        for _ in range(5):
            batch = loader.next()
            assert BAD not in np.asarray(batch["reward"]).tolist()


@pytest.mark.parametrize("table", ["t", "limited"])
def test_the_next_call_draws_another_batch_and_a_repeated_number_is_refused_again(engine, table):
    fill(engine, table, kind=5)
    with (
        engine.loader(
            table, batch_size=8, min_rows=1, transform={"kind": conduit.one_hot(2)}, format="numpy", seed=1
        ) as loader,
        engine.loader(table, batch_size=8, min_rows=1, format="numpy", seed=1) as plain,
    ):
        refused = 0
        for number in range(40):
            assert loader.sampler.batch == number
            rewards = plain.next()["reward"]
            if BAD in rewards:
                refused += 1
                with pytest.raises(FieldError, match="the next call draws another batch"):
                    loader.next()
            else:
                np.testing.assert_array_equal(loader.next()["reward"], rewards)
        assert 3 < refused < 20
        assert loader.stats.batches == 40 - refused


def test_a_named_loader_does_not_come_back_to_the_batch_that_was_refused(engine):
    fill(engine, kind=5)
    transform = {"kind": conduit.one_hot(2)}
    loader = engine.loader("t", batch_size=256, transform=transform, format="numpy", min_rows=1, name="n")
    with loader, pytest.raises(FieldError):
        loader.next()
    with engine.loader("t", batch_size=256, format="numpy", min_rows=1, name="n") as again:
        assert again.sampler.batch == 1


def test_statistics_take_all_of_a_batch_or_nothing(engine):
    fill(engine, nan=True)
    statistics = engine.table("t").statistics
    # the field without a NaN comes first in one order, last in the other
    for transform in (NORMALISED, dict(reversed(NORMALISED.items()))):
        loader = engine.loader("t", batch_size=256, min_rows=1, transform=transform, format="numpy")
        with loader, pytest.raises(FieldError, match=r"nan in \(1,\) of 'obs'"):
            loader.next()
        assert [statistics.read(name).count for name in STATISTICS] == [0, 0]
    engine.table("t").delete([id_of_bad(engine)])
    with engine.loader("t", batch_size=256, min_rows=1, transform=NORMALISED, format="numpy") as loader:
        loader.next()
    assert [statistics.read(name).count for name in STATISTICS] == [256, 256]


def fail(batch):
    raise ValueError("no")


def test_a_batch_that_a_step_on_the_whole_batch_refuses_is_in_no_statistics_and_is_passed_over(engine):
    fill(engine)
    with engine.loader(
        "t", batch_size=8, transform=NORMALISED, batch_transforms=(conduit.apply(fail),), format="numpy"
    ) as loader:
        for number in range(3):
            assert loader.sampler.batch == number
            with pytest.raises(ValueError, match="no"):
                loader.next()
    assert engine.table("t").statistics.read("obs").count == 0


def test_a_mixed_loader_goes_on_too_and_its_tables_keep_their_statistics_whole(engine):
    fill(engine)
    fill(engine, "other", nan=True)
    with engine.mixed_loader(
        {"t": 1.0, "other": 1.0}, batch_size=512, min_rows=1, transform=NORMALISED, format="numpy"
    ) as loader:
        with pytest.raises(FieldError) as caught:
            loader.next()
        assert loader.batch == 1
        check(caught.value, id_of_bad(engine, "other"), "obs", np.nan)
        assert "'other'" in str(caught.value)
        for table in ("t", "other"):
            assert engine.table(table).statistics.read("obs").count == 0
        engine.table("other").delete([caught.value.row_id])
        loader.next()
        for table in ("t", "other"):
            assert engine.table(table).statistics.read("obs").count == 256


def test_in_a_sequence_the_row_that_the_sample_begins_at_is_named(engine):
    fill(engine, kind=5)
    with engine.loader(
        "t",
        batch_size=64,
        window=conduit.Sequence(4),
        transform={"kind": conduit.one_hot(2)},
        format="numpy",
        min_rows=1,
    ) as loader:
        deleted = set()
        while True:
            try:
                batch = loader.next()
            except FieldError as error:
                engine.table("t").delete([error.row_id])
                deleted.add(error.row_id & ((1 << 40) - 1))
                continue
            if len(deleted) == 4:
                break
        assert deleted == {BAD - 3, BAD - 2, BAD - 1, BAD}
        assert not (batch["reward"] == BAD).any()


def test_what_is_refused_counts_no_deliveries(engine):
    fill(engine, "counted", kind=5)
    options = {"batch_size": 39, "min_rows": 1, "format": "numpy", "timeout": 0.0}
    with engine.loader("counted", transform={"kind": conduit.one_hot(2)}, **options) as loader:
        for _ in range(3):
            with pytest.raises(FieldError, match="got 5"):
                loader.next()
    with engine.loader("counted", **options) as plain:
        assert sorted(plain.next()["reward"].tolist()) == list(range(39))
