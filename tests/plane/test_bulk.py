"""Writing and reading many steps at once: `Writer.extend` writes what `append` would, and a scan gives every step once."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import conduit
from conduit.store.format import words as w


def columns(ticks, lead, first=0):
    numbers = first + np.arange(ticks * int(np.prod(lead, dtype=int))).reshape(ticks, *lead)
    obs = np.repeat(numbers[..., None], 4, -1).astype(np.float32)
    return {"obs": obs, "action": numbers, "reward": numbers.astype(np.float32)}


def rows_of(engine):
    """Committed rows of every page, as the memory has them."""
    view = engine._views["replay"]
    names = (*view.columns, "terminated", "truncated", "meta")
    told = []
    for page in range(view.layout.pages):
        try:
            lease = view.lease(page)
        except conduit.errors.Overwritten:
            continue
        with lease:
            told.append({name: lease.column(name).tobytes() for name in names})
            told[-1]["envs"] = lease.envs
    assert view.meta.itemsize == w.META_BYTES
    return told


@given(
    ticks=st.integers(1, 90),
    envs=st.sampled_from([None, 1, 3]),
    mode=st.sampled_from(["next_step", "same_step", "disabled"]),
    calls=st.integers(1, 4),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_extend_writes_is_what_append_would_have_written(make, ticks, envs, mode, calls, seed):
    lead = () if envs is None else (envs,)
    rng = np.random.default_rng(seed)
    engines = [make(capacity=2000, page_rows=40, max_n_step=2, num_envs=envs or 1) for _ in range(2)]
    writers = [engine.writer("replay", num_envs=envs, autoreset=mode) for engine in engines]
    total, closing = 0, np.zeros(lead, bool)
    for _ in range(calls):
        data = columns(ticks, lead, total)
        total += ticks * (envs or 1)
        ends, cuts = rng.random((2, ticks, *lead)) < 0.15
        if mode == "next_step":  # a row that closes an episode ends none
            for t in range(ticks):
                ends[t] &= ~closing
                cuts[t] &= ~closing
                closing = ends[t] | cuts[t]
        places = np.flatnonzero(ends | cuts)
        finals = None
        if mode == "next_step":
            places = []
        else:
            finals = np.stack([np.full(4, -1 - place, np.float32) for place in places]) if len(places) > 0 else None
        writers[0].extend(data, terminated=ends, truncated=cuts, places=places, finals=finals)
        for t in range(ticks):
            final = None
            if mode != "next_step":
                count = envs or 1
                rows = np.array([np.full(4, -1 - (t * count + env), np.float32) for env in range(count)])
                final = rows if envs else rows[0]
            flags = {"terminated": ends[t] if envs else bool(ends[t]), "truncated": cuts[t] if envs else bool(cuts[t])}
            row = {name: array[t] for name, array in data.items()}
            writers[1].append(**row, **flags, final=final)
    scans = [list(engine.table("replay").scan()) for engine in engines]
    for steps, other in zip(*map(joined_by_episode, scans), strict=True):
        assert steps == other
    for engine in engines:
        engine.close()


def joined_by_episode(pieces):
    """Steps one by one, without where their pages turn: `extend` fills pages to the last row, `append` keeps room for ends."""
    told = []
    for steps in pieces:
        kept = {int(place): steps.finals["obs"][i].tolist() for i, place in enumerate(steps.places)}
        told += [
            (
                int(steps.columns["action"][row]),
                bool(steps.terminated[row]),
                bool(steps.truncated[row]),
                bool(steps.starts[row]),
                int(steps.episodes[row]) & 0xFFFFFFFF,
                int(steps.numbers[row]),
                kept.get(row),
            )
            for row in range(len(steps))
        ]
    return told


def test_extend_goes_on_where_append_stopped_and_the_other_way_round(make):
    engine = make(page_rows=16)
    data = columns(50, ())
    with engine.writer("replay") as writer:
        for first in range(0, 50, 10):
            for t in range(first, first + 3):
                writer.append(**{name: array[t] for name, array in data.items()})
            writer.extend({name: array[first + 3 : first + 10] for name, array in data.items()})
        told = joined_by_episode(engine.table("replay").scan())
    assert [one[0] for one in told] == list(range(50))
    assert [one[5] for one in told] == list(range(50))
    with engine.loader("replay", batch_size=256, min_rows=1, format="numpy") as loader:
        batch = loader.next()
        np.testing.assert_array_equal(batch["next_obs"], batch["obs"] + 1)
        assert len(rows_of(engine)) > 3


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda c: c.update(action=c["action"].astype(np.float64)), "int64.*`action`"),
        (lambda c: c.update(obs=c["obs"][:, :3]), r"\(20, 4\).*`obs`"),
        (lambda c: c.update(obs=c["obs"][:7]), r"\(7, 4\).*|\(20,\).*"),
        (lambda c: c.pop("reward"), "reward"),
        (lambda c: c.update(terminated=np.ones(19, bool)), r"\(20,\).*`terminated`"),
        (lambda c: c.update(terminated=np.ones(20, bool)), "missing at place 0.*`obs`"),
        (lambda c: c.update(places=[3], finals=np.zeros((1, 4), np.float32)), "places"),
        (
            lambda c: c.update(terminated=np.arange(20) > 17, places=[19, 18], finals=np.zeros((2, 4), np.float32)),
            "ascending",
        ),
        (lambda c: c.update(terminated=np.arange(20) > 18, places=[19], finals=np.zeros((2, 4), np.float32)), "final"),
    ],
    ids=range(9),
)
def test_a_bad_call_writes_nothing(make, unchanged, spoil, message):
    engine = make(page_rows=40)
    with engine.writer("replay") as writer:
        writer.extend(columns(30, ()))
        data = columns(20, ())
        spoil(data)
        options = {key: data.pop(key) for key in ("terminated", "places", "finals") if key in data}
        with unchanged(engine), pytest.raises(conduit.errors.FieldError, match=message):
            writer.extend(data, **options)


def test_a_full_table_is_busy_and_what_filled_the_pages_before_stays(make):
    engine = make(capacity=60, page_rows=20)
    view = engine._views["replay"]
    with engine.writer("replay", on_full="raise") as writer:
        writer.extend(columns(130, ()))
        leases = []
        for page in range(view.layout.pages):
            try:
                leases.append(view.lease(page))
            except conduit.errors.Overwritten:
                continue
        with pytest.raises(conduit.errors.Busy):
            writer.extend(columns(100, (), 130))
        for lease in leases:
            lease.end()
        told = [one[0] for one in joined_by_episode(engine.table("replay").scan())]
        assert told == list(range(told[0], told[-1] + 1))
        writer.extend(columns(5, (), told[-1] + 1))
        assert joined_by_episode(engine.table("replay").scan())[-1][0] == told[-1] + 5


def test_a_rollout_in_progress_keeps_extend_out(make):
    engine = make()
    with engine.writer("replay") as writer:
        rollout = writer.rollout(3)
        with pytest.raises(conduit.errors.Closed, match="rollout"):
            writer.extend(columns(3, ()))
        rollout.abort()


def test_a_scan_of_a_table_whose_pages_turned_has_the_newest_steps_without_a_hole(make):
    engine = make(capacity=200, page_rows=20, max_n_step=3)
    with engine.writer("replay") as writer:
        writer.extend(columns(1000, ()))
        told = [one[0] for one in joined_by_episode(engine.table("replay").scan())]
    assert told[-1] == 999
    assert told == list(range(told[0], 1000))
    assert len(told) >= 200


def test_pages_that_are_reused_after_the_scan_was_made_are_missing_and_counted(make):
    engine = make(capacity=200, page_rows=20)
    with engine.writer("replay") as writer:
        writer.extend(columns(200, ()))
        scan = engine.table("replay").scan()
        writer.extend(columns(150, (), 200))
        told = joined_by_episode(scan)
    assert scan.missing > 100
    assert len(told) + scan.missing == scan.rows == 200
    assert told[-1][0] == 199
    assert told[0][3]


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
@pytest.mark.parametrize("every", [1, 2, 7, 1000])
def test_extend_fills_the_rollouts_of_a_queue_and_loses_none(make, mode, every):
    engine = make(capacity=4000, kind="queue", rollout_length=8, num_envs=3)
    data = columns(100, (3,))
    ends = np.zeros((100, 3), bool)
    # with "next_step" no two ticks in a row end episodes
    ends[every - 1 :: max(every, 2 if mode == "next_step" else 1)] = True
    places = np.flatnonzero(ends) if mode == "same_step" else []
    finals = np.zeros((len(places), 4), np.float32) if len(places) > 0 else None
    taken, complete = [], 0
    with engine.writer("replay", num_envs=3, autoreset=mode) as writer:
        writer.extend(data, terminated=ends, places=places, finals=finals)
    with engine.consumer("replay", format="numpy") as consumer:
        while (claim := consumer.poll()) is not None:
            with claim:
                taken += claim["action"].ravel().tolist()
                complete += claim.complete
            del claim
    assert taken == list(range(300))
    # a rollout in which every step ends an episode has no room for all of their observations
    assert complete == 12 if mode == "next_step" or every > 2 else complete <= 12


@pytest.mark.parametrize("num_envs", [None, 2])
def test_a_scan_leaves_out_rows_that_are_gone_and_begins_anew_behind_them(engine_name, num_envs):
    schema = conduit.Schema([conduit.Field("obs", "int64", observation=True), conduit.Field("n", "int64")])
    table = conduit.Table(schema, 400, page_rows=40, num_envs=num_envs or 1, max_times_sampled=1)
    with conduit.Engine.create(engine_name, {"t": table}) as engine:
        with engine.writer(
            "t", num_envs=num_envs, autoreset="next_step" if num_envs else None, keep_final=False
        ) as writer:
            shape = () if num_envs is None else (num_envs,)
            for n in range(60):
                numbers = np.full(shape, n) + 1000 * np.arange(num_envs or 1).reshape(shape or (1,))[()]
                writer.append(obs=np.asarray(numbers).reshape(shape), n=np.asarray(numbers).reshape(shape))
        with engine.loader("t", batch_size=5, format="numpy") as loader:
            gone = loader.next()["n"].tolist()  # delivered as often as they may be
        with engine.loader("t", batch_size=5, format="numpy", seed=1) as loader:
            batch = loader.next()
            gone += batch["n"].tolist()
        found, begun = [], []
        for steps in engine.table("t").scan():
            found += steps.columns["n"].tolist()
            begun += steps.columns["n"][steps.starts].tolist()
        everything = {n + 1000 * env for env in range(num_envs or 1) for n in range(60)}
        assert sorted(found) == sorted(everything - set(gone))
        assert set(begun) == {n for n in found if n % 1000 == 0 or n - 1 not in found}
        engine.table("t").reset()
        assert [len(steps) for steps in engine.table("t").scan()] == []
        with engine.writer(
            "t", num_envs=num_envs, autoreset="next_step" if num_envs else None, keep_final=False
        ) as writer:
            writer.append(obs=np.full(shape, 7), n=np.full(shape, 7))
        assert {n for steps in engine.table("t").scan() for n in steps.columns["n"].tolist()} == {7}


def test_a_scan_leaves_out_deleted_rows(engine_name):
    schema = conduit.Schema([conduit.Field("obs", "int64", observation=True), conduit.Field("n", "int64")])
    with conduit.Engine.create(engine_name, {"t": conduit.Table(schema, 400, page_rows=40)}) as engine:
        with engine.writer("t", keep_final=False) as writer:
            for n in range(60):
                writer.append(obs=np.int64(n), n=n)
        with engine.loader("t", batch_size=8, format="numpy") as loader:
            batch = loader.next()
            engine.table("t").delete(batch.ids)
            gone = set(batch["n"].tolist())
        assert {n for steps in engine.table("t").scan() for n in steps.columns["n"].tolist()} == set(range(60)) - gone
