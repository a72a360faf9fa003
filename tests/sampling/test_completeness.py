"""Which of the newest rows are drawn: those whose window is whole, and those behind which nothing will ever come."""

import numpy as np
import pytest

import conduit
from conduit.errors import DataTimeout
from conduit.store.format import words as w
from conduit.testing.invariants import check_each_row_is_drawn_from_one_page, offered_ranges

SCHEMA = conduit.Schema(
    [
        conduit.Field("obs", "float32", observation=True),
        conduit.Field("reward", "float32"),
    ]
)


@pytest.fixture
def make(engine_name):
    """Create an engine with a table; closed after the test."""
    made = []

    def create(capacity=4000, **options):
        table = conduit.Table(SCHEMA, capacity, **options)
        made.append(conduit.Engine.create(f"{engine_name}-{len(made)}", {"t": table}))
        return made[-1]

    yield create
    for engine in made:
        engine.close()


def write(writer, steps, ends=(), final=True, truncated=False):
    """Steps with obs = reward = their number; the final observation of step t is t + 0.5."""
    for t in steps:
        over = t in ends
        flags = {"truncated": over} if truncated else {"terminated": over}
        writer.append(obs=t, reward=t, **flags, final=t + 0.5 if over and final else None)


def drawn(engine, **options):
    """{reward of the first step: (next obs, terminated or truncated)}, or other outputs, of everything that is drawn."""
    options = {"window": conduit.Transition()} | options
    found = {}
    with engine.loader("t", batch_size=512, min_rows=1, format="numpy", timeout=0.0, **options) as loader:
        for _ in range(20):
            batch = loader.next()
            for i, obs in enumerate(batch["obs"].reshape(512, -1)[:, 0].tolist()):
                found[obs] = {name: batch[name][i].tolist() for name in batch}
    return found


# -- a row that ends its episode


@pytest.mark.parametrize("truncated", [False, True], ids=["terminated", "truncated"])
def test_a_thousand_rows_of_which_the_newest_ends_its_episode_are_a_batch_of_a_thousand(make, truncated):
    engine = make()
    writer = engine.writer("t")
    write(writer, range(1000), ends={999}, truncated=truncated)
    with engine.loader("t", batch_size=1000, format="numpy", timeout=0.0) as loader:
        loader.next()
        assert loader.sampler.candidates == 1000
    found = drawn(engine)
    assert found.keys() == set(range(1000))
    assert found[999]["next_obs"] == 999.5


def test_a_terminated_row_without_its_final_observation_is_complete_and_a_truncated_one_never_is(make):
    engine = make()
    writer = engine.writer("t", keep_final=False)
    write(writer, range(10), ends={9}, final=False)
    assert drawn(engine).keys() == set(range(10))
    write(writer, range(10, 20), ends={19}, final=False, truncated=True)
    assert drawn(engine).keys() == set(range(19))
    write(writer, range(20, 21))
    assert drawn(engine).keys() == set(range(19))


def test_with_next_step_a_row_is_complete_once_its_final_observation_is_there(make):
    engine = make(num_envs=2)
    writer = engine.writer("t", num_envs=2, autoreset="next_step")
    for t in range(5):
        writer.append(
            obs=np.array([t, 100 + t], np.float32), reward=np.zeros(2, np.float32), terminated=np.array([False, t == 4])
        )
    assert drawn(engine).keys() == {0, 1, 2, 3, 100, 101, 102, 103}
    writer.append(obs=np.array([5, 105], np.float32), reward=np.zeros(2, np.float32))
    found = drawn(engine)
    assert found.keys() == {0, 1, 2, 3, 4, 100, 101, 102, 103, 104}
    assert found[104]["next_obs"] == 105


ENDS = ["close", "death", "cut", "another writer"]


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("sampling", [None, conduit.Prioritized()], ids=["uniform", "prioritized"])
@pytest.mark.parametrize("n_step", [1, 3])
def test_a_terminated_row_whose_final_observation_will_never_come_is_complete_and_a_truncated_one_is_not(
    make, how, sampling, n_step
):
    """With next_step the final observation is the next row: behind the last one of a stream, and before a cut, none comes."""
    engine = make(num_envs=3, max_n_step=3, priorities=conduit.Priorities())
    client = conduit.attach(engine.name)
    writer = client.writer("t", num_envs=3, autoreset="next_step")
    for t in range(5):
        last = t == 4
        flags = {"terminated": np.array([last, False, False]), "truncated": np.array([False, last, False])}
        writer.append(obs=np.array([t, 10 + t, 20 + t], np.float32), reward=np.full(3, t, np.float32), **flags)
    window = conduit.Transition(n_step=n_step, gamma=1.0)
    options = {"window": window, "sampling": sampling}
    open_end = {env * 10 + t for env in range(3) for t in range(5 - n_step)}
    assert drawn(engine, **options).keys() == open_end
    if how == "death":
        client._participants.forget()
        engine.recover()
    elif how == "cut":
        writer.cut()
        for t in (5, 6, 7):
            writer.append(obs=np.array([t, 10 + t, 20 + t], np.float32), reward=np.zeros(3, np.float32))
    else:
        writer.close()
    if how == "another writer":
        other = engine.writer("t", num_envs=3, autoreset="next_step")
        other.append(obs=np.array([5, 15, 25], np.float32), reward=np.zeros(3, np.float32))
    found = {obs: one for obs, one in drawn(engine, **options).items() if obs % 10 < 5}
    assert found.keys() == {0, 1, 2, 3, 4, 10, 11, 12, 13, 20, 21, 22, 23}
    assert (found[4]["next_obs"], found[4]["reward"], found[4]["terminated"]) == (4, 4, True)
    if n_step == 3:
        assert (found[2]["next_obs"], found[2]["reward"], found[2]["n_steps"]) == (4, 9, 3)
        assert (found[12]["next_obs"], found[12]["reward"], found[12]["n_steps"]) == (14, 5, 2)
        assert not found[12]["truncated"]
    client.close()


@pytest.mark.parametrize("window", [conduit.Sequence(2, next_obs=True), conduit.Rollout(2, 1, stride=1, next_obs=True)])
def test_windows_with_next_observations_end_with_a_terminated_row_that_none_follows(make, window):
    engine = make(max_length=3)
    writer = engine.writer("t", autoreset="next_step")
    for t in range(5):
        writer.append(obs=t, reward=t, terminated=t == 4)
    writer.close()
    found = drawn(engine, window=window)
    assert 3 in found
    assert np.ravel(found[3]["next_obs"]).tolist() == [4, 4]


def test_of_many_environments_only_those_that_ended_are_complete(make):
    engine = make(num_envs=8)
    writer = engine.writer("t", num_envs=8, autoreset="same_step")
    numbers = np.arange(8, dtype=np.float32)
    ends = np.isin(numbers, (2, 5))
    writer.append(obs=numbers, reward=numbers, terminated=ends, final=numbers + 0.5)
    found = drawn(engine)
    assert {obs: one["next_obs"] for obs, one in found.items()} == {2: 2.5, 5: 5.5}
    writer.append(obs=numbers + 10, reward=numbers)
    assert drawn(engine).keys() == set(range(8))


@pytest.mark.parametrize("n_step", [1, 3, 5])
def test_all_steps_before_an_end_are_complete_with_it_however_far_a_window_reaches(make, n_step):
    engine = make(max_n_step=5)
    writer = engine.writer("t")
    window = conduit.Transition(n_step=n_step, gamma=1.0)
    write(writer, range(20), ends={19})
    found = drawn(engine, window=window)
    assert found.keys() == set(range(20))
    assert found[18]["reward"] == (18 if n_step == 1 else 18 + 19)
    assert found[18]["terminated"] == (n_step > 1)
    write(writer, range(20, 22))
    assert drawn(engine, window=window).keys() == set(range(20)) | ({20} if n_step == 1 else set())


def test_an_episode_is_drawn_as_soon_as_it_has_ended(make):
    engine = make(max_length=64)
    writer = engine.writer("t")
    write(writer, range(10), ends={4, 9})
    for window in (conduit.Episode(64), conduit.Sequence(64, overlap=0)):
        found = drawn(engine, window=window)
        assert {int(first): one["lengths"] for first, one in found.items()} == {0: 5, 5: 5}
    write(writer, range(10, 12))
    assert drawn(engine, window=conduit.Episode(64)).keys() == {0, 5}


def test_what_is_complete_goes_over_into_the_stream_s_next_page(make):
    engine = make(capacity=400, page_rows=20, max_n_step=4)
    writer = engine.writer("t")
    for last in range(1, 60):
        write(writer, [last - 1], ends={last - 1})
        assert drawn(engine).keys() == set(range(last))


def test_priorities_are_summed_over_the_same_rows(make):
    engine = make(priorities=conduit.Priorities(alpha=1.0, eps=0.0))
    writer = engine.writer("t")
    write(writer, range(10), ends={9})
    with engine.loader(
        "t", batch_size=64, format="numpy", min_rows=10, timeout=0.0, sampling=conduit.Prioritized()
    ) as loader:
        batch = loader.next()
        newest = batch.ids[batch["obs"] == 9][:1]
        assert loader.update_priorities(newest, np.array([91.0])) == 0
        batch = loader.next()
        assert (batch["probabilities"][batch["obs"] == 9] == 0.91).all()
        assert (batch["obs"] == 9).sum() > 50


def test_where_deliveries_are_counted_a_row_waits_until_the_widest_window_is_complete_behind_it(make):
    """Its count could not move with it when its page is turned."""
    engine = make(max_times_sampled=60_000, max_n_step=2)
    writer = engine.writer("t")
    write(writer, range(10), ends={9})
    assert drawn(engine).keys() == set(range(8))
    writer.close()
    assert drawn(engine).keys() == set(range(10))


# -- where nothing will come any more


@pytest.mark.parametrize("newest", ["wait", "bootstrap"])
def test_the_rows_of_a_stream_that_has_ended_are_all_complete_but_the_last(make, newest):
    engine = make(max_n_step=4)
    writer = engine.writer("t")
    window = conduit.Transition(n_step=4, gamma=1.0, newest=newest)
    write(writer, range(10))
    assert drawn(engine, window=window).keys() == set(range(6 if newest == "wait" else 9))
    writer.close()
    found = drawn(engine, window=window)
    assert found.keys() == set(range(9))
    for t, used in ((5, 4), (6, 3), (7, 2), (8, 1)):
        assert found[t]["n_steps"] == used
        assert found[t]["reward"] == sum(range(t, t + used))
        assert found[t]["next_obs"] == t + used
        assert not found[t]["terminated"]
        assert not found[t]["truncated"]


@pytest.mark.parametrize("how", ["cut", "lost"])
def test_the_rows_before_a_cut_and_before_a_truncation_that_was_lost_are_complete_but_the_last(make, how):
    engine = make(max_n_step=4)
    writer = engine.writer("t", keep_final=False)
    write(writer, range(10), ends={9} if how == "lost" else (), final=False, truncated=True)
    if how == "cut":
        writer.cut()
    write(writer, range(10, 20))
    found = drawn(engine, window=conduit.Transition(n_step=4, gamma=1.0))
    assert found.keys() == set(range(9)) | set(range(10, 16))
    assert [found[t]["n_steps"] for t in range(5, 9)] == [4, 3, 2, 1]
    assert [found[t]["next_obs"] for t in range(5, 9)] == [9, 9, 9, 9]


def test_sequences_run_up_to_the_end_of_a_stream_as_they_run_up_to_a_cut(make):
    engine = make(max_length=8)
    writer = engine.writer("t")
    write(writer, range(10))
    writer.cut()
    write(writer, range(10, 20))
    assert drawn(engine, window=conduit.Sequence(8)).keys() == set(range(13))
    writer.close()
    found = drawn(engine, window=conduit.Sequence(8))
    assert found.keys() == set(range(20))
    assert (found[7]["lengths"], found[17]["lengths"], found[19]["lengths"]) == (3, 3, 1)
    # what has to be whole is not, and an episode that never ended is none
    assert drawn(engine, window=conduit.Sequence(8, pad=False)).keys() == {0, 1, 2, 10, 11, 12}
    assert drawn(engine, window=conduit.Sequence(8, across=True)).keys() == set(range(13))
    with pytest.raises(DataTimeout, match="none among 20"):
        drawn(engine, window=conduit.Episode(8))


def test_a_writer_that_was_killed_ends_its_stream_alike(make):
    engine = make(max_n_step=3)
    client = conduit.attach(engine.name)
    write(client.writer("t"), range(10))
    client._participants.forget()
    engine.recover()
    assert drawn(engine, window=conduit.Transition(n_step=3)).keys() == set(range(9))
    client.close()


# -- while a page is turned


@pytest.mark.parametrize("sampling", [None, conduit.Prioritized()], ids=["uniform", "prioritized"])
@pytest.mark.parametrize("n_step", [1, 3])
def test_between_the_opening_of_a_page_and_the_sealing_of_the_one_before_each_row_is_offered_once(
    make, n_step, sampling
):
    engine = make(capacity=400, page_rows=20, max_n_step=6, priorities=conduit.Priorities())
    writer = engine.writer("t", autoreset="next_step")
    view = engine._views["t"]
    write(writer, range(20))
    assert writer._stream.here() % 20 == 6, "the page has been turned, and nothing been written into the new one"
    states = view.pages()[:2, w.PAGE_STATE // 8]
    assert (states & w.KIND_MASK).tolist() == [w.SEALED, w.OPEN]
    options = {"window": conduit.Transition(n_step=n_step), "sampling": sampling}
    after = ids_of(engine, **options)
    # the store to the state word is the last that seals
    state = view.segment.array(view.layout.blocks, (view.layout.pages, 16), np.dtype(np.int64))[:, w.PAGE_STATE // 8]
    owner = engine._participants.number << w.OWNER_SHIFT
    state[0] = (int(states[0]) >> w.GENERATION_SHIFT << w.GENERATION_SHIFT) | owner | w.OPEN
    between = ids_of(engine, **options)
    assert between.keys() == after.keys() == set(range(20 - n_step))
    for found in (between, after):
        assert all(len(ids) == 1 for ids in found.values()), found
    for need in range(6):
        check_each_row_is_drawn_from_one_page(view, need)
        assert offered_ranges(view, need)[0] == [(0, 20 - need, 0)]
    state[0] = states[0]


def ids_of(engine, **options):
    """{obs: ids under which it was drawn}, and no row more often than others of its like."""
    found, times = {}, {}
    with engine.loader("t", batch_size=400, min_rows=1, format="numpy", timeout=0.0, **options) as loader:
        for _ in range(20):
            batch = loader.next()
            for obs, key in zip(batch["obs"].tolist(), batch.ids.tolist(), strict=True):
                found.setdefault(int(obs), set()).add(key)
                times[obs] = times.get(obs, 0) + 1
    mean = 8000 / len(times)
    assert max(times.values()) < mean + 6 * mean**0.5
    return found


# -- what a wait says


def test_a_wait_in_vain_says_how_many_rows_there_are_how_many_are_complete_and_who_writes(make):
    engine = make(max_n_step=3)
    writer = engine.writer("t")
    write(writer, range(1000))
    loader = engine.loader("t", batch_size=1000, window=conduit.Transition(n_step=3), format="numpy", timeout=0.0)
    expected = (
        r"at least 1000 sampleable rows in table 't', got 997 .*1,000 rows are there, 997 of them begin a complete"
    )
    with pytest.raises(DataTimeout, match=rf"{expected}.*others wait for.*1 of 1 writer alive, in process \d+: raise"):
        loader.next()
    writer.close()
    with pytest.raises(
        DataTimeout, match=r"at least 2000 .* got 1000 .*1,000 rows are there.*no writer is open .*start writers"
    ):
        engine.loader("t", batch_size=2000, min_rows=2000, format="numpy", timeout=0.0).next()
