"""Writers that come and go fill pages up: rows stay what they are, and no window goes from one writer's rows into another's."""

import multiprocessing
import time

import numpy as np
import pytest

import conduit
from conduit import Field, Schema
from conduit.errors import ConfigError
from conduit.native.jit import entry
from conduit.store.format import words as w
from conduit.testing import puppets, rows
from conduit.testing.invariants import check_each_row_is_drawn_from_one_page
from conduit.testing.puppets import Puppet

SCHEMA = Schema([Field("obs", "int64", (2,), observation=True), Field("action", "int64"), Field("reward", "float64")])


def write(engine, number, steps, ends=True, envs=None, **options):
    """A writer of its own: obs (number, step), the last step ends the episode; kept finals are (number, -1)."""
    with engine.writer("replay", num_envs=envs, autoreset="disabled", **options) as writer:
        for step in range(steps):
            obs = (
                np.array([number, step])
                if envs is None
                else np.stack([[number * 10 + env, step] for env in range(envs)])
            )
            end = ends and step == steps - 1
            final = obs * [1, 0] - [0, 1]
            writer.append(
                obs=obs,
                action=step if envs is None else np.full(envs, step),
                reward=1.0 if envs is None else np.ones(envs),
                terminated=end if envs is None else np.full(envs, end),
                final=final if end else None,
            )
        return writer.stream


def pages_with_rows(engine):
    found = engine._views["replay"].pages()
    return found[np.isin(found[:, w.PAGE_STATE // 8] & w.KIND_MASK, (w.OPEN, w.SEALED))]


@pytest.mark.parametrize(
    "options", [{}, {"max_stack": 4, "max_n_step": 5}, {"max_length": 25, "within_episodes": True}]
)
def test_a_writer_for_each_episode_fills_the_table(make, options):
    engine = make(SCHEMA, 5000, **options)
    view = engine._views["replay"]
    for number in range(600):
        write(engine, number, 20)
        if number > 250:
            assert view.rows_visible() >= 5000
    assert view.rows_written() == 12_000
    check_each_row_is_drawn_from_one_page(view)
    # every row once, each episode under a number of its own, from its first step to its last
    told = {}
    for steps in engine.table("replay").scan():
        for episode, step, obs in zip(steps.episodes, steps.numbers, steps.columns["obs"], strict=True):
            told.setdefault(int(episode), []).append((int(step), *obs.tolist()))
    whole = [episode for episode in told.values() if len(episode) == 20]
    assert len(whole) >= len(told) - 2 * len(pages_with_rows(engine))
    for episode in told.values():
        assert len({number for _, number, _ in episode}) == 1
        assert [step for step, _, _ in episode] == [step for _, _, step in episode]
        assert np.diff([step for step, _, _ in episode]).tolist() == [1] * (len(episode) - 1)


@pytest.mark.parametrize("newest", ["wait", "bootstrap"])
@pytest.mark.parametrize("ends", [True, False], ids=["episodes end", "writers stop in the middle"])
def test_no_window_goes_from_one_writer_s_rows_into_another_s(make, newest, ends):
    engine = make(SCHEMA, 200, page_rows=40, max_stack=3, max_n_step=3)
    for number in range(30):
        write(engine, number, 7, ends)
    assert len(pages_with_rows(engine)) <= 7
    window = conduit.Transition(n_step=3, gamma=1.0, stack=3, newest=newest)
    with engine.loader("replay", batch_size=4000, window=window, min_rows=1, format="numpy", timeout=0) as loader:
        batch = loader.next()
        obs, after = batch["obs"], batch["next_obs"]
        assert (obs[:, :, 0] == obs[:, -1:, 0]).all()
        assert (after[:, :, 0] == obs[:, -1:, 0]).all()
        step = obs[:, -1, 1]
        np.testing.assert_array_equal(obs[:, 0, 1], np.maximum(step - 2, 0))
        used = np.minimum(3, 7 - step) if ends else np.minimum(3, 6 - step)
        np.testing.assert_array_equal(batch["reward"], used)
        reached = step + used
        np.testing.assert_array_equal(after[:, -1, 1], np.where(reached == 7, -1, reached))
        np.testing.assert_array_equal(batch["terminated"], reached == 7)
        # what lies in the table is drawn, of each writer as far as it can be
        assert {int(k) for k in step} >= set(range(7 if ends else 6))


def test_ids_drawn_before_name_the_same_rows_afterwards(make):
    engine = make(SCHEMA, 500)
    write(engine, 1, 5)
    with engine.loader("replay", batch_size=64, min_rows=1, format="numpy") as loader:
        batch = loader.next()
        ids, obs = batch.ids.copy(), batch["obs"].copy()
        for number in range(2, 5):
            write(engine, number, 5)
        assert loader.valid(ids).all()
        np.testing.assert_array_equal(engine._views["replay"].columns["obs"][ids & (1 << 40) - 1], obs)
    assert len(pages_with_rows(engine)) <= 2


def test_a_leased_page_is_filled_up_and_its_lease_shows_what_it_showed(make):
    engine = make(SCHEMA, 500, page_rows=50)
    write(engine, 1, 5)
    view = engine._views["replay"]
    with view.lease(0) as lease:
        before = lease.column("obs").copy()
        write(engine, 2, 5)
        assert view.pages()[0, w.PAGE_COMMITTED // 8] == 10
        np.testing.assert_array_equal(lease.column("obs"), before)
        assert lease.rows == 5


def test_a_writer_says_which_stream_it_goes_on_in_with_its_first_row(make):
    engine = make(SCHEMA, 500)
    first = write(engine, 1, 5)
    writer = engine.writer("replay")
    assert writer.stream != first
    writer.append(obs=np.zeros(2, np.int64), action=0, reward=0.0)
    assert writer.stream == first == pages_with_rows(engine)[0, w.PAGE_STREAM // 8]
    other = engine.writer("replay")
    other.append(obs=np.zeros(2, np.int64), action=0, reward=0.0)
    assert other.stream not in {first, writer.stream}


@pytest.mark.parametrize(
    ("options", "second"),
    [
        ({}, {"envs": 2}),
        ({"max_length": 5}, {}),
        ({"max_times_sampled": 3}, {}),
    ],
    ids=["another number of environments", "windows may cross episodes", "deliveries are counted"],
)
def test_a_page_is_left_alone_where_it_does_not_fit(make, options, second):
    engine = make(SCHEMA, 500, page_rows=50, **options)
    write(engine, 1, 5)
    write(engine, 2, 5, **second)
    assert len(pages_with_rows(engine)) == 2


def test_a_page_from_before_a_reset_is_left_alone(make):
    engine = make(SCHEMA, 500, page_rows=50)
    write(engine, 1, 5)
    engine.table("replay").reset()
    write(engine, 2, 5)
    assert pages_with_rows(engine)[:, w.PAGE_COMMITTED // 8].tolist() == [5, 5]
    with engine.loader("replay", batch_size=64, min_rows=1, format="numpy") as loader:
        assert set(loader.next()["obs"][:, 0].tolist()) == {2}


@pytest.mark.parametrize("window", [conduit.Rollout(2, 1), conduit.Sequence(4, across=True)], ids=str)
def test_windows_across_episodes_need_a_table_made_for_them(make, window):
    engine = make(SCHEMA, 500, max_n_step=9)
    with pytest.raises(
        ConfigError, match=r"across episodes of at most 0 ticks behind its first.*create the table with max_length="
    ):
        engine.loader("replay", batch_size=4, window=window)
    engine = make(SCHEMA, 500, max_length=9, within_episodes=True)
    with pytest.raises(ConfigError, match=r"within an episode.*within_episodes=False"):
        engine.loader("replay", batch_size=4, window=window)
    engine.loader("replay", batch_size=4, window=conduit.Sequence(4)).close()


def test_ragged_values_go_on_behind_those_that_are_there(make):
    schema = Schema([Field("x", "int64", observation=True), Field("tokens", "int64", (9,), ragged=True)])
    engine = make(schema, 300, page_rows=60, mean_lengths={"tokens": 6})
    view = engine._views["replay"]
    for number in range(40):
        with engine.writer("replay", keep_final=False) as writer:
            for step in range(5):
                k = 5 * number + step
                writer.append(x=k, tokens=np.full(k % 10, k))
    assert len(pages_with_rows(engine)) <= 6
    for page in np.flatnonzero(view.pages()[:, w.PAGE_COMMITTED // 8]).tolist():
        with view.lease(page) as lease:
            for k, tokens in zip(lease.column("x").tolist(), lease.values("tokens"), strict=True):
                assert tokens.tolist() == [k] * (k % 10)


def test_priorities_of_rows_that_are_there_stay_and_those_behind_them_are_drawn(make):
    engine = make(SCHEMA, 500, page_rows=50, priorities=conduit.Priorities(alpha=1.0, eps=0.0))
    write(engine, 1, 10)
    options = {"batch_size": 256, "min_rows": 1, "format": "numpy", "sampling": conduit.Prioritized()}
    with engine.loader("replay", **options) as loader:
        ids = np.unique(loader.next().ids)
        loader.update_priorities(ids, np.zeros(len(ids)))
        write(engine, 2, 10)
        assert set(loader.next()["obs"][:, 0].tolist()) == {2}
        loader.update_priorities(ids, np.ones(len(ids)))
        assert set(loader.next()["obs"][:, 0].tolist()) == {1, 2}


def test_statistics_count_a_writer_s_own_rows_alone(make):
    engine = make(SCHEMA, 500, page_rows=50, statistics=("obs",))
    for number in range(4):
        write(engine, number, 5, statistics=True)
    assert engine.table("replay").statistics.read("obs").count == 20
    assert len(pages_with_rows(engine)) == 1


def test_a_killed_writer_s_page_is_filled_up(engine_name):
    table = conduit.Table(rows.SCHEMA, 500, page_rows=50)
    with conduit.Engine.create(engine_name, {"replay": table}) as engine:
        with Puppet() as puppet:
            puppet.do(puppets.attach, engine_name)
            puppet.do(puppets.write_rows, 7, 1)
            puppet.kill()
        assert engine.recover() == 1
        with Puppet() as puppet:
            puppet.do(puppets.attach, engine_name)
            puppet.do(puppets.write_rows, 6, 2)
            assert puppet.end() == 0
        view = engine._views["replay"]
        assert pages_with_rows(engine)[:, w.PAGE_COMMITTED // 8].tolist() == [13]
        numbers = view.columns["obs"][:13, :2].tolist()
        assert numbers == [[1, k] for k in range(7)] + [[2, k] for k in range(6)]


def _come_and_go(name, environment, enough):
    """Writers of four steps each, as fast as they can be opened; a page is evicted now and then."""
    with conduit.attach(name) as client:
        obs, number = np.zeros(rows.WORDS, np.int64), 0
        while number == 0 or not enough.is_set():
            with client.writer("replay", keep_final=False) as writer:
                for _ in range(4):
                    done = entry(rows.write_observation)(obs.ctypes.data, environment, number)
                    writer.append(
                        obs=obs,
                        action=entry(rows.action_of)(environment, number),
                        reward=entry(rows.reward_of)(environment, number),
                        terminated=done == 1,
                        truncated=done == 2,
                    )
                    number += 1


def test_processes_that_want_the_same_page_do_not_get_in_each_other_s_way(engine_name):
    table = conduit.Table(rows.SCHEMA, 60, page_rows=20)
    with conduit.Engine.create(engine_name, {"replay": table}) as engine:
        context = multiprocessing.get_context("fork")
        enough = context.Event()
        crew = [context.Process(target=_come_and_go, args=(engine_name, k + 1, enough)) for k in range(4)]
        view = engine._views["replay"]
        torn = np.zeros(64, np.uint8)
        batches = 0
        with engine.loader("replay", batch_size=64, min_rows=1, format="numpy", timeout=30) as loader:
            for one in crew:
                one.start()
            end = time.monotonic() + 60
            while (batches < 500 or view.rows_evicted < 1000) and time.monotonic() < end:
                batch = loader.next()
                columns = [batch[name].ctypes.data for name in ("obs", "action", "reward", "terminated", "truncated")]
                assert entry(rows.find_torn_rows)(*columns, 64, torn.ctypes.data) == 0
                # the next observation is the same writer's, one step on
                running = ~(batch["terminated"] | batch["truncated"])
                assert (batch["next_obs"][running, :2] == batch["obs"][running, :2] + [0, 1]).all()
                batches += 1
        enough.set()
        for one in crew:
            one.join()
            assert one.exitcode == 0
        assert batches >= 500
        assert view.rows_evicted >= 1000
        check_each_row_is_drawn_from_one_page(view)
        counts = view.counts()
        assert counts.inserted == counts.size + counts.evicted
        steps = {}
        for part in engine.table("replay").scan():
            for episode, obs in zip(part.episodes.tolist(), part.columns["obs"][:, :2].tolist(), strict=True):
                steps.setdefault(episode, []).append(obs)
        for told in steps.values():
            assert len({environment for environment, _ in told}) == 1
            assert np.diff([number for _, number in told]).tolist() == [1] * (len(told) - 1)


def test_a_checkpoint_with_a_page_that_was_filled_up_restores_and_fills_it_further(engine_name, tmp_path):
    table = conduit.Table(SCHEMA, 500, page_rows=50)
    with conduit.Engine.create(engine_name, {"replay": table}) as engine:
        for number in range(3):
            write(engine, number, 5)
        engine.checkpoint(tmp_path)
    with conduit.Engine.restore(tmp_path, f"{engine_name}-again") as engine:
        write(engine, 3, 5)
        assert pages_with_rows(engine)[:, w.PAGE_COMMITTED // 8].tolist() == [20]
        with engine.loader("replay", batch_size=500, min_rows=1, format="numpy") as loader:
            batch = loader.next()
            assert len(set(zip(*batch["obs"].T.tolist(), strict=True))) == 20
            assert len(set(batch.episodes.tolist())) == 4
