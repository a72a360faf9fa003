"""Writing in place: one step, a rollout, the unchecked handle; and that only one form is in progress at a time."""

import numpy as np
import pytest

import conduit
from conduit import Field, Schema
from conduit.errors import Busy, Closed, ConfigError, FieldError, SpaceTimeout
from conduit.store.format import words as w
from tests.plane.conftest import CARTPOLE

NESTED = Schema(
    [
        Field("obs.camera", "uint8", (2, 70), observation=True),  # 140 bytes: padded
        Field("obs.pose.0", "float32", (), observation=True),
        Field("obs.pose.1", "bfloat16", (2,), observation=True),
        Field("reward", "float32"),
    ]
)
OBS = np.arange(4, dtype=np.float32)
GOOD = {"obs": OBS, "action": 1, "reward": 0.5}
TICK = {"obs": np.stack([OBS] * 2), "action": np.zeros(2, np.int64), "reward": np.zeros(2)}


def visible(engine):
    return engine._views["replay"].rows_visible()


def drawn(engine, count=64):
    """Sampled transitions as a set of plain values."""
    with engine.loader("replay", batch_size=count, min_rows=1, format="numpy", timeout=0) as loader:
        batch = loader.next()
        names = sorted(batch)
        return {tuple(batch[name][i].tobytes() for name in names) for i in range(count)}


# one step


@pytest.mark.parametrize("num_envs", [None, 1, 3])
def test_a_step_s_views_are_the_shared_memory_itself(make, num_envs):
    engine = make(NESTED)
    writer = engine.writer("replay", num_envs=num_envs, autoreset="next_step" if num_envs else None)
    lead = () if num_envs is None else (num_envs,)
    with writer.step() as row:
        assert row.reward.shape == lead
        assert row["obs.pose.1"].shape == (*lead, 2)
        assert row.obs["camera"].shape == (*lead, 2, 70)
        assert row.obs["camera"].dtype == np.uint8
        assert row.terminated.shape == row.truncated.shape == lead
        row.obs["camera"][...] = 7
        row.obs["pose.0"][...] = 1
        row["obs.pose.1"] = np.ones((*lead, 2)).tolist()
        row.reward = np.full(lead, 2, np.float32)
        view = engine._views["replay"]
        for name in NESTED.names:
            assert np.shares_memory(row[name], view.columns[name])
        assert visible(engine) == 0
    assert visible(engine) == (num_envs or 1)
    assert (view.columns["obs.camera"][: num_envs or 1] == 7).all()
    assert (view.columns["obs.pose.1"][: num_envs or 1] == 0x3F80).all()


def test_an_exception_in_a_step_discards_it_with_its_flags(make, unchanged):
    engine = make()
    writer = engine.writer("replay")
    writer.append(**GOOD)
    with unchanged(engine), pytest.raises(KeyError), writer.step() as row:  # noqa: PT012 - what leaving the block does is the test
        row.obs[:] = 1
        row.terminated = True
        row.set_final(0, OBS)
        raise KeyError
    writer.append(**GOOD)
    assert not engine._views["replay"].terminated.any()


def test_flags_that_a_step_does_not_assign_are_false_and_one_bool_stands_for_all(make):
    engine = make()
    writer = engine.writer("replay", num_envs=2, autoreset="next_step")
    for flag in (True, None):
        with writer.step() as row:
            row.obs[:], row.action[:], row.reward[:] = 1, 1, 1
            if flag:
                row.truncated = flag
    view = engine._views["replay"]
    assert view.truncated[:4].tolist() == [True, True, False, False]
    assert not view.terminated[:4].any()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("obs", lambda lead: np.zeros((*lead, 4)), "Expected `float32`, got `float64`"),
        ("obs", lambda lead: np.zeros((*lead, 3), np.float32), r"Expected shape \(.*2, 4\), got \(.*2, 3\)"),
        ("action", lambda lead: np.full(lead, 1.5).tolist(), "Expected `int64`, got list"),
        ("terminated", lambda lead: np.zeros(lead, np.int8), "Expected `bool`, got `int8`"),
        ("truncated", lambda lead: [True], r"Expected shape .*, got \(1,\)"),
        ("rewards", lambda lead: 1.0, "Expected the name of an array, got 'rewards': did you mean `reward`"),
    ],
    ids=["dtype", "shape", "list", "flag dtype", "flag shape", "unknown"],
)
@pytest.mark.parametrize("how", ["attribute", "name"])
@pytest.mark.parametrize("form", ["step", "rollout"])
def test_a_whole_field_is_assigned_with_the_checks_of_append(make, unchanged, name, value, expected, how, form):
    engine = make()
    writer = engine.writer("replay", num_envs=2, autoreset="next_step")
    writer.append(**TICK)

    def assign(rows, lead):
        if how == "attribute":
            setattr(rows, name, value(lead))
        else:
            rows[name] = value(lead)

    with unchanged(engine), pytest.raises(FieldError, match=f"{expected}.* - at `{name}`"):  # noqa: PT012 - one form of writing or the other
        if form == "step":
            with writer.step() as row:
                assign(row, (2,))
        else:
            with writer.rollout(3) as rollout:
                assign(rollout, (3, 2))


def test_a_step_without_the_final_observation_of_an_end_is_discarded(make, unchanged):
    engine = make()
    writer = engine.writer("replay", num_envs=2, autoreset="same_step")
    writer.append(**TICK)
    with (
        unchanged(engine),
        pytest.raises(FieldError, match=r"pass final=.*environment 1 - at `obs`"),
        writer.step() as row,
    ):
        row.terminated[1] = True
    writer.append(**TICK)
    assert visible(engine) == 4


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda row: row.set_final(2, OBS), "an environment from 0 to 1, got 2 - at `final`"),
        (lambda row: row.set_final(-1, OBS), "an environment from 0 to 1, got -1 - at `final`"),
        (lambda row: row.set_final(0, np.zeros(4)), "Expected `float32`.* - at `final.obs`"),
        (lambda row: row.set_final(0, OBS[:3]), r"Expected shape \(4,\).* - at `final.obs`"),
    ],
    ids=["beyond", "negative", "dtype", "shape"],
)
@pytest.mark.parametrize("form", ["step", "rollout", "unchecked"])
def test_a_wrong_final_observation_is_refused_at_its_call(make, unchanged, call, expected, form):
    engine = make()
    writer = engine.writer("replay", num_envs=2, autoreset="same_step")
    writer.append(**TICK)

    class Row:
        def __init__(self, rows):
            self.rows = rows

        def set_final(self, env, observation):
            if form == "step":
                self.rows.set_final(env, observation)
            elif form == "rollout":
                self.rows.set_final(0, env, observation)
            else:
                self.rows.set_final(observation, env)

    begin = {"step": writer.step, "rollout": lambda: writer.rollout(2), "unchecked": writer.unchecked}[form]
    with unchanged(engine), pytest.raises(FieldError, match=expected), begin() as rows:
        call(Row(rows))


@pytest.mark.parametrize("form", ["step", "rollout", "unchecked"])
def test_a_final_observation_is_refused_where_the_next_row_is_it(make, form):
    writer = make().writer("replay", num_envs=1, autoreset="next_step")
    with pytest.raises(FieldError, match="the row after the end is the final observation - at `final`"):  # noqa: PT012 - one form of writing or another
        if form == "step":
            with writer.step() as row:
                row.set_final(0, OBS)
        elif form == "rollout":
            with writer.rollout(2) as rollout:
                rollout.set_final(0, 0, OBS)
        else:
            with writer.unchecked() as unchecked:
                unchecked.set_final(OBS)


def test_rows_that_were_committed_or_discarded_are_closed(make):
    engine = make()
    writer = engine.writer("replay")
    with writer.step() as row:
        row.obs[:], row.action[...], row.reward[...] = 1, 1, 1
    rollout = writer.rollout(2)
    rollout.abort()
    rollout.abort()
    for rows in (row, rollout):
        for use in (lambda rows=rows: rows.obs, lambda rows=rows: rows["action"]):
            with pytest.raises(Closed, match="committed or discarded"):
                use()
    with pytest.raises(Closed, match="committed or discarded"):
        row.reward = 1.0
    with pytest.raises(Closed, match="committed or discarded"):
        rollout.commit()
    with pytest.raises(Closed, match="committed or discarded"):
        rollout.set_final(0, 0, OBS)
    assert visible(engine) == 1


OTHERS = {
    "append": lambda writer: writer.append(**GOOD),
    "step": lambda writer: writer.step().__enter__(),
    "rollout": lambda writer: writer.rollout(2),
    "unchecked": lambda writer: writer.unchecked(),
    "cut": lambda writer: writer.cut(),
    "flush": lambda writer: writer.flush(),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("form", ["step", "rollout", "unchecked handle"])
def test_one_form_of_writing_is_in_progress_at_a_time(make, form, other):
    engine = make()
    writer = engine.writer("replay")
    writer.append(**GOOD)
    with {"step": writer.step, "rollout": lambda: writer.rollout(2), "unchecked handle": writer.unchecked}[
        form
    ]() as rows:
        with pytest.raises(Closed, match=f"the {form} in progress to be finished first"):
            OTHERS[other](writer)
        if form == "unchecked handle":
            row = rows.row
            rows.obs[row], rows.action[row], rows.reward[row] = 1, 1, 1
            rows.commit()
        else:
            rows.obs[...], rows.action[...], rows.reward[...] = 1, 1, 1
    writer.append(**GOOD)
    assert visible(engine) == {"step": 3, "rollout": 4, "unchecked handle": 3}[form]


@pytest.mark.parametrize("form", ["append", "step", "rollout", "unchecked", "flush", "cut"])
@pytest.mark.parametrize("what", ["writer", "client", "engine"])
def test_writing_after_close_is_refused(make, form, what):
    engine = make()
    client = conduit.attach(engine.name)
    writer = client.writer("replay")
    writer.append(**GOOD)
    if what == "engine":
        engine.close()
    else:
        {"writer": writer, "client": client}[what].close()
    calls = OTHERS
    if form == "append" and what == "engine":
        # a row goes into memory that nobody looks at any more; the next page's turn notices
        with pytest.raises(Closed, match="closed by its owner"):  # noqa: PT012 - some row of many
            for _ in range(1000):
                writer.append(**GOOD)
    else:
        with pytest.raises(Closed, match="clos"):
            calls[form](writer)
    client.close()


@pytest.mark.parametrize("form", ["step", "rollout", "unchecked"])
def test_rows_begun_before_a_close_are_not_committed_after_it(make, unchanged, form):
    """The page may be another writer's by then."""
    engine = make(capacity=30, page_rows=10)
    writer = engine.writer("replay")
    other = engine.writer("replay")
    writer.append(**GOOD)
    block = {"step": writer.step, "rollout": lambda: writer.rollout(2), "unchecked": writer.unchecked}[form]()
    rows = block.__enter__()
    if form == "unchecked":
        assert rows.row == 1
    writer.close()
    for k in range(60):
        other.append(**GOOD | {"action": k})
    with unchanged(engine):
        if form == "unchecked":
            assert rows.commit() >= rows.rows
            with pytest.raises(Closed):
                _ = rows.row
            rows.close()
        else:
            with pytest.raises(Closed, match="or their writer closed"):
                rows["obs"]
            with pytest.raises(Closed):
                rows.reward = 1.0
            with pytest.raises(Closed):
                block.__exit__(None, None, None)


@pytest.mark.parametrize("form", ["step", "rollout"])
def test_rows_begun_before_the_engine_closed_say_so_when_they_are_committed(make, form):
    engine = make()
    client = conduit.attach(engine.name)
    writer = client.writer("replay")
    begin = writer.step if form == "step" else lambda: writer.rollout(2)
    with pytest.raises(Closed, match="closed by its owner"), begin() as rows:  # noqa: PT012 - what leaving the block does is the test
        rows.obs[...] = 1
        engine.close()
    client.close()


# rollouts


@pytest.mark.parametrize("num_envs", [None, 2])
@pytest.mark.parametrize("autoreset", ["next_step", "same_step", "disabled"])
def test_a_rollout_is_the_same_as_its_steps_appended(make, num_envs, autoreset):
    rng = np.random.default_rng(5)
    lead = () if num_envs is None else (num_envs,)
    ticks = 9
    obs = rng.random((ticks, *lead, 4), np.float32)
    action = rng.integers(0, 9, (ticks, *lead))
    reward = rng.random((ticks, *lead), np.float32)
    ends = rng.random((ticks, *lead)) < 0.3
    if autoreset == "next_step":  # a row that closes an episode ends none
        for t in range(1, ticks):
            ends[t] &= ~ends[t - 1]
    final = rng.random((ticks, *lead, 4), np.float32)
    engines = [make(page_rows=50), make(page_rows=50)]
    first, second = (engine.writer("replay", num_envs=num_envs, autoreset=autoreset) for engine in engines)
    with first.rollout(ticks, max_finals=18) as rollout:
        assert rollout.ticks == ticks
        rollout.obs[:], rollout.action, rollout["reward"], rollout.terminated = obs, action, reward, ends
        if autoreset != "next_step":
            for at in np.argwhere(ends):
                rollout.set_final(at[0], at[1] if num_envs else 0, final[tuple(at)])
        assert visible(engines[0]) == 0
    for t in range(ticks):
        given = {"obs": obs[t], "action": np.asarray(action[t])[()], "reward": reward[t], "terminated": ends[t]}
        second.append(**given, final=None if autoreset == "next_step" else final[t])
    views = [engine._views["replay"] for engine in engines]
    rows = ticks * (num_envs or 1)
    assert visible(engines[0]) == visible(engines[1]) == rows
    for name in ("version", "step", "episode"):
        np.testing.assert_array_equal(views[0].meta[name][:rows], views[1].meta[name][:rows])
    for writer in (first, second):
        writer.close()
    assert drawn(engines[0], 2000) == drawn(engines[1], 2000)


def test_a_rollout_that_does_not_fit_a_page_is_refused_with_the_page_size_it_needs(make):
    writer = make(capacity=60, page_rows=20).writer("replay", num_envs=2, autoreset="same_step")
    with pytest.raises(ConfigError, match=r"a page of 20 rows, got 14 rows, 3 for final.* 4 of halo.*page_rows=21"):
        writer.rollout(7)
    with writer.rollout(7, max_finals=2) as rollout:
        rollout.obs[:] = 1
    with pytest.raises(ConfigError, match="ticks of at least 1, got 0"):
        writer.rollout(0)
    with pytest.raises(ConfigError, match=r"ticks of at least 1, got 1\.5"):
        writer.rollout(1.5)
    next_step = make(capacity=60, page_rows=20).writer("replay", num_envs=2, autoreset="next_step")
    with pytest.raises(ConfigError, match=r"got 20 rows, 0 for final observations and 2 of halo.*page_rows=22"):
        next_step.rollout(10)


def test_an_end_in_a_rollout_without_its_final_observation_is_named_and_the_slab_stays_open(make, unchanged):
    engine = make()
    writer = engine.writer("replay", num_envs=2, autoreset="same_step")
    rollout = writer.rollout(3)
    rollout.obs[:], rollout.action[:], rollout.reward[:] = 1, 1, 1
    rollout.truncated[2, 1] = True
    with unchanged(engine), pytest.raises(FieldError, match=r"set_final\(2, 1, observation\)"):
        rollout.commit()
    rollout.set_final(2, 1, OBS)
    rollout.commit()
    assert visible(engine) == 6


def test_a_rollout_whose_commit_is_refused_on_leaving_its_block_is_discarded(make, unchanged):
    engine = make()
    writer = engine.writer("replay")
    writer.append(**GOOD)
    with unchanged(engine), pytest.raises(FieldError, match=r"set_final\(1, 0"), writer.rollout(2) as rollout:
        rollout.terminated[1] = True
    writer.append(**GOOD)
    assert visible(engine) == 2


def test_final_observations_never_grow_into_the_rollout_that_they_belong_to(make):
    engine = make(capacity=40, page_rows=10)
    writer = engine.writer("replay")
    rollout = writer.rollout(7, max_finals=1)
    rollout.obs[:] = np.arange(7)[:, None]
    rollout.terminated[:4] = True
    for tick in range(3):
        rollout.set_final(tick, 0, OBS - 50)
    with pytest.raises(FieldError, match=r"raise max_finals in writer.rollout - at `final`"):
        rollout.set_final(3, 0, OBS - 50)
    assert rollout.obs[:, 0].tolist() == list(range(7))
    rollout.terminated[3] = False
    rollout.commit()
    view = engine._views["replay"]
    assert view.columns["obs"][:10, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, -50, -50, -50]


def test_a_rollout_s_exception_discards_it(make, unchanged):
    engine = make()
    writer = engine.writer("replay")
    writer.append(**GOOD)
    with unchanged(engine), pytest.raises(KeyError), writer.rollout(3) as rollout:  # noqa: PT012 - what leaving the block does is the test
        rollout.obs[:] = 1
        rollout.terminated = True
        raise KeyError
    assert visible(engine) == 1


# the unchecked handle


@pytest.mark.parametrize("num_envs", [None, 3])
def test_the_unchecked_handle_writes_the_same_rows_as_append(make, num_envs):
    engines = [make(page_rows=30), make(page_rows=30)]
    first, second = (engine.writer("replay", num_envs=num_envs, autoreset="same_step") for engine in engines)
    envs = num_envs or 1
    rng = np.random.default_rng(0)
    with first.unchecked() as unchecked:
        obs, action, reward, terminated = unchecked.obs, unchecked["action"], unchecked.reward, unchecked.terminated
        row = unchecked.row
        for k in range(40):
            values = rng.random((envs, 4), np.float32)
            ended = k % 7 == 6
            obs[row : row + envs] = values
            if num_envs is None:
                action[row], reward[row] = k, k / 2
                if ended:
                    terminated[row] = True
            else:
                action[row : row + envs], reward[row : row + envs] = k, k / 2
                terminated[row : row + envs] = ended
            if ended:
                for env in range(envs):
                    unchecked.set_final(values[env] + 1, env)
            row = unchecked.commit()
            given = {
                "obs": values if num_envs else values[0],
                "action": np.full(envs, k) if num_envs else k,
                "reward": np.full(envs, k / 2) if num_envs else k / 2,
                "terminated": np.full(envs, ended) if num_envs else ended,
            }
            second.append(**given, final=given["obs"] + 1 if ended else None)
    first.close()
    second.close()
    views = [engine._views["replay"] for engine in engines]
    assert visible(engines[0]) == visible(engines[1]) == 40 * envs
    np.testing.assert_array_equal(views[0].meta, views[1].meta)
    assert drawn(engines[0], 3000) == drawn(engines[1], 3000)


def test_columns_of_single_numbers_are_memoryviews_for_one_environment(make):
    schema = Schema([*CARTPOLE.fields, Field("half", "float16"), Field("done", "bool"), Field("brain", "bfloat16")])
    engine = make(schema)
    with engine.writer("replay").unchecked() as unchecked:
        assert {name: type(unchecked[name]) for name in schema.names} == {
            "obs": np.ndarray,
            "action": memoryview,
            "reward": memoryview,
            "half": np.ndarray,
            "done": memoryview,
            "brain": memoryview,
        }
        with pytest.raises(FieldError, match="got 'rewards'"):
            _ = unchecked.rewards


def test_the_unchecked_handle_s_commit_is_refused_without_a_final_observation_and_the_row_says_so(make):
    engine = make()
    writer = engine.writer("replay")
    with writer.unchecked() as unchecked:
        row = unchecked.row
        unchecked.obs[row], unchecked.terminated[row] = 1, True
        assert unchecked.commit() >= unchecked.rows
        with pytest.raises(FieldError, match="pass final="):
            _ = unchecked.row
        assert unchecked.row == row
        assert not unchecked.terminated[row]
        assert unchecked.commit() == row + 1
    assert visible(engine) == 1


@pytest.mark.parametrize("on_full", ["raise", "wait"])
def test_without_a_free_page_the_unchecked_handle_returns_a_row_behind_the_table_and_commits_nothing_twice(
    make, on_full
):
    engine = make(capacity=20, page_rows=8)
    view = engine._views["replay"]
    holders = [engine.writer("replay") for _ in range(view.layout.pages - 1)]
    for holder in holders:
        holder.append(**GOOD)
    writer = engine.writer("replay", on_full=on_full, timeout=0.05)
    with writer.unchecked() as unchecked:
        row = unchecked.row
        while row < unchecked.rows:
            unchecked.obs[row], unchecked.action[row], unchecked.reward[row] = 1, 1, 1
            row = unchecked.commit()
        with pytest.raises(IndexError):
            unchecked.obs[row] = 1
        full = visible(engine)
        for _ in range(3):
            assert unchecked.commit() >= unchecked.rows
        with pytest.raises(Busy if on_full == "raise" else SpaceTimeout, match="a free page in table 'replay'"):
            _ = unchecked.row
        assert visible(engine) == full
        holders[0].close()
        assert unchecked.row < unchecked.rows
    assert view.pages()[:, w.PAGE_COMMITTED // 8].max() <= 8


def test_closing_the_unchecked_handle_discards_what_was_not_committed(make):
    engine = make()
    writer = engine.writer("replay")
    with writer.unchecked() as unchecked:
        unchecked.terminated[unchecked.row] = True
        unchecked.set_final(OBS)
    unchecked.close()
    writer.append(**GOOD)
    assert not engine._views["replay"].terminated.any()
