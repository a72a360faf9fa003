"""Returns and lengths of episodes: what `client.table(name).episodes` has, against sums that the test makes itself."""

import multiprocessing
import os
import signal
import time

import numpy as np
import pytest

import conduit
from conduit.errors import Closed, ConfigError
from conduit.store.format.episode_records import RECORDS

OBS = np.zeros(2, np.float32)


def schema(reward="float32", shape=()):
    fields = [
        conduit.Field("obs", "float32", (2,), observation=True),
        conduit.Field("action", "int64"),
        conduit.Field("reward", reward, shape, casting="same_kind"),
    ]
    return conduit.Schema(fields)


class Naive:
    """Sums and lengths kept step by step, as a wrapper of the environments would."""

    def __init__(self, envs, mode):
        self.sums, self.lengths = np.zeros(envs), np.zeros(envs, int)
        self.closing = np.zeros(envs, bool)
        self.mode, self.ended = mode, []

    def step(self, rewards, terminated, truncated):
        for env, reward in enumerate(rewards):
            if self.closing[env]:
                self.closing[env] = False
                continue
            self.sums[env] += float(reward)
            self.lengths[env] += 1
            if terminated[env] or truncated[env]:
                self.ended.append((self.sums[env], self.lengths[env], terminated[env], truncated[env], env))
                self.sums[env] = self.lengths[env] = 0
                self.closing[env] = self.mode == "next_step"


def listed(episodes):
    columns = (episodes.returns, episodes.lengths, episodes.terminated, episodes.truncated, episodes.envs)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def steps(random, envs, mode, count, share=0.05):
    """Rewards and flags of `count` ticks; with "next_step" no end follows an end."""
    rewards = random.normal(size=(count, envs)).astype(np.float32)
    flags = random.random((2, count, envs)) < share
    if mode == "next_step":
        for tick in range(1, count):
            flags[:, tick] &= ~flags[:, tick - 1].any(0)
    return rewards, *flags


TABLES = {
    "replay": {"capacity": 600, "page_rows": 64},
    "halo": {"capacity": 900, "page_rows": 64, "max_n_step": 3, "max_stack": 4},
    "queue": {"capacity": 400, "kind": "queue"},
    "rollouts": {"capacity": 400, "kind": "queue", "rollout_length": 16},
}


@pytest.mark.parametrize("mode", ["same_step", "next_step", "disabled"])
@pytest.mark.parametrize("envs", [1, 3])
@pytest.mark.parametrize("kind", TABLES)
def test_returns_and_lengths_are_those_of_the_steps_over_pages_that_come_and_go(make, path, kind, envs, mode):
    engine = make(schema(), num_envs=envs, **TABLES[kind])
    consumer = engine.consumer("replay", format="numpy") if "kind" in TABLES[kind] else None
    writer = engine.writer("replay", num_envs=envs, autoreset=mode, keep_final=False)
    naive = Naive(envs, mode)
    found, since = [], None
    for tick, (reward, *ends) in enumerate(zip(*steps(np.random.default_rng(1), envs, mode, 700), strict=True)):
        writer.append(
            obs=np.zeros((envs, 2), np.float32),
            action=np.zeros(envs, np.int64),
            reward=reward,
            terminated=ends[0],
            truncated=ends[1],
        )
        naive.step(reward, *ends)
        while consumer is not None and (claim := consumer.poll()) is not None:
            claim.ack()
        if tick % 90 == 0:
            since = engine.table("replay").episodes(since=since)
            assert since.missed == 0
            found += listed(since)
    found += listed(engine.table("replay").episodes(since=since))
    # one after the other in float64: equal to the last bit
    assert found == naive.ended
    assert len(found) > 20


@pytest.mark.parametrize("mode", ["same_step", "next_step"])
def test_every_form_of_writing_counts(make, mode):
    envs = 2
    engine = make(schema(), 2000, page_rows=128, num_envs=envs)
    writer = engine.writer("replay", num_envs=envs, autoreset=mode, keep_final=False)
    rewards, terminated, truncated = steps(np.random.default_rng(2), envs, mode, 400)
    naive = Naive(envs, mode)
    for one in zip(rewards, terminated, truncated, strict=True):
        naive.step(*one)
    zeros, none = np.zeros((envs, 2), np.float32), np.zeros(envs, np.int64)
    for tick in range(50):
        with writer.step() as row:
            row.obs, row.action, row.reward = zeros, none, rewards[tick]
            row.terminated, row.truncated = terminated[tick], truncated[tick]
    for start in range(50, 150, 20):
        here = slice(start, start + 20)
        with writer.rollout(20) as rollout:
            rollout.obs[:], rollout.action[:], rollout.reward[:] = 0, 0, rewards[here]
            rollout.terminated[:], rollout.truncated[:] = terminated[here], truncated[here]
    with writer.unchecked() as unchecked:
        for tick in range(150, 250):
            row = slice(unchecked.row, unchecked.row + envs)
            unchecked.obs[row], unchecked.action[row], unchecked.reward[row] = 0, 0, rewards[tick]
            unchecked.terminated[row], unchecked.truncated[row] = terminated[tick], truncated[tick]
            unchecked.commit()
    writer.extend(
        {
            "obs": np.zeros((150, envs, 2), np.float32),
            "action": np.zeros((150, envs), np.int64),
            "reward": rewards[250:],
        },
        terminated=terminated[250:],
        truncated=truncated[250:],
    )
    assert listed(engine.table("replay").episodes()) == naive.ended


@pytest.mark.parametrize(
    "dtype",
    "float16 bfloat16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool".split(),  # noqa: SIM905
)
def test_a_reward_of_any_dtype_is_summed_up_as_it_was_stored(make, dtype):
    engine = make(schema(dtype))
    writer = engine.writer("replay")
    values = {
        "bool": [True, False, True],
        "uint8": [200, 255, 3],
        "uint16": [60000, 1, 2],
        "uint32": [2**32 - 1, 7, 0],
        "uint64": [2**63 + 2**13, 2**20, 1],
        "int8": [-128, 127, -5],
        "int16": [-32768, 5, 7],
        "int32": [-(2**31), 3, 9],
        "int64": [-(2**60), 3, 9],
    }.get(dtype, [-1.5, 2.0**-14 if dtype == "float16" else 0.125, 2.0**-24 if dtype == "float16" else 3.0])
    for place, value in enumerate(values):
        writer.append(obs=OBS, action=0, reward=value, terminated=place == 2, final=OBS if place == 2 else None)
    assert engine.table("replay").episodes().returns.tolist() == [sum(map(float, values))]


def test_several_rewards_and_vector_rewards_are_summed_up_element_by_element(make):
    fields = [
        conduit.Field("obs", "float32", (2,), observation=True),
        conduit.Field("gain", "float64", reward=True),
        conduit.Field("costs", "float32", (2,), reward=True),
    ]
    engine = make(conduit.Schema(fields))
    writer = engine.writer("replay")
    for place in range(3):
        end = place == 2
        writer.append(obs=OBS, gain=1.5, costs=[place, 10.0], terminated=end, final=OBS if end else None)
    episodes = engine.table("replay").episodes()
    assert episodes.reward_names == ("gain", "costs[0]", "costs[1]")
    assert episodes.returns.tolist() == [[4.5, 3.0, 30.0]]
    assert episodes.mean_return.tolist() == [4.5, 3.0, 30.0]
    assert np.isnan(engine.table("replay").episodes(since=episodes).mean_return).all()


def test_a_table_without_reward_has_lengths_and_refuses_returns_by_name(make):
    engine = make(conduit.Schema([conduit.Field("obs", "float32", (2,), observation=True)]))
    writer = engine.writer("replay")
    for place in range(4):
        writer.append(obs=OBS, truncated=place == 3, final=OBS if place == 3 else None)
    episodes = engine.table("replay").episodes()
    assert (episodes.lengths.tolist(), episodes.mean_length, episodes.truncated.tolist()) == ([4], 4.0, [True])
    for ask in (lambda: episodes.returns, lambda: episodes.mean_return):
        with pytest.raises(
            ConfigError, match="Expected a reward in table 'replay' to sum up, got none: declare it by reward="
        ):
            ask()
    assert "mean length 4" in repr(episodes)


def end(writer, reward=1.0):
    writer.append(obs=OBS, action=0, reward=reward, terminated=True, final=OBS)


def test_an_episode_says_where_it_comes_from(make):
    engine = make(schema(), policies={"policy": {"w": np.zeros(1, np.float32)}})
    engine.policy().publish({"w": np.zeros(1, np.float32)})
    engine.policy().poll()
    begun = time.time()
    writers = [engine.writer("replay", policy=engine.policy()) for _ in range(2)]
    for writer in (writers[0], writers[1], writers[1]):
        writer.append(obs=OBS, action=0, reward=0.0)
        end(writer)
    episodes = engine.table("replay").episodes()
    assert episodes.streams.tolist() == [writers[0].stream, writers[1].stream, writers[1].stream]
    assert episodes.versions.tolist() == [1, 1, 1]
    assert ((begun <= episodes.times) & (episodes.times <= time.time())).all()
    drawn = engine.loader("replay", batch_size=64, format="numpy", min_rows=1).next()
    assert set(episodes.numbers.tolist()) == set(drawn.episodes.tolist())


def test_what_was_overwritten_is_counted_and_each_episode_comes_once(make):
    engine = make(schema(), 500)
    writer = engine.writer("replay")
    for number in range(10):
        end(writer, float(number))
    first = engine.table("replay").episodes()
    for number in range(10, RECORDS + 25):
        end(writer, float(number))
    second = engine.table("replay").episodes(since=first)
    assert (len(second), second.missed, second.total) == (RECORDS, 15, RECORDS + 25)
    assert second.returns.tolist() == [float(number) for number in range(25, RECORDS + 25)]
    assert len(engine.table("replay").episodes(since=second)) == 0
    whole = engine.table("replay").episodes()
    assert (len(whole), whole.missed) == (RECORDS, 25)
    assert engine.table("replay").episodes(last=3).returns.tolist() == [
        float(RECORDS + 22),
        float(RECORDS + 23),
        float(RECORDS + 24),
    ]


def test_a_record_that_is_being_written_comes_later_and_is_missed_only_when_it_is_overwritten(make):
    engine = make(schema(), 500)
    writer = engine.writer("replay")
    for number in range(3):
        end(writer, float(number))
    view = engine._views["replay"]
    record = view.segment.words[view.layout.episodes // 8 + 16 :]
    check, record[8] = record[8], 0  # the second one, not finished
    first = engine.table("replay").episodes()
    assert (first.returns.tolist(), first.missed) == ([0.0, 2.0], 0)
    second = engine.table("replay").episodes(since=first)
    assert (len(second), second.missed) == (0, 0)
    record[8] = check
    third = engine.table("replay").episodes(since=second)
    assert (third.returns.tolist(), third.missed) == ([1.0], 0)
    assert len(engine.table("replay").episodes(since=third)) == 0
    # a writer that died in the middle: its record is never finished
    record[8] = 0
    for number in range(3, RECORDS + 2):
        end(writer, float(number))
    fourth = engine.table("replay").episodes(since=second)
    assert (len(fourth), fourth.missed) == (RECORDS - 1, 1)


def test_cut_episodes_resets_and_deletions_change_no_ended_episode(make):
    engine = make(schema())
    writer = engine.writer("replay")
    writer.append(obs=OBS, action=0, reward=100.0)
    writer.cut()
    writer.append(obs=OBS, action=0, reward=1.0)
    end(writer, 2.0)
    writer.append(obs=OBS, action=0, reward=50.0)
    engine.table("replay").reset()
    writer.append(obs=OBS, action=0, reward=4.0)
    end(writer, 5.0)
    with pytest.raises(RuntimeError), writer.step() as row:  # noqa: PT012 - what leaving the block does is the test
        row.reward, row.terminated = 1000.0, True
        raise RuntimeError
    episodes = engine.table("replay").episodes()
    assert (episodes.returns.tolist(), episodes.lengths.tolist()) == ([3.0, 9.0], [2, 2])


def write_until_killed(name, ready):
    with conduit.attach(name) as client:
        writer = client.writer("replay")
        number = 0
        while True:
            for place in range(number % 5 + 1):
                last = place == number % 5
                writer.append(obs=OBS, action=number, reward=1.0, terminated=last, final=OBS if last else None)
            number += 1
            if number == 50:
                ready.set()


def test_a_killed_writers_ended_episodes_are_all_there_and_no_other(make):
    engine = make(schema(), 50_000)
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=write_until_killed, args=(engine.name, ready))
    process.start()
    try:
        assert ready.wait(120)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.join(30)
    engine.recover()
    episodes = engine.table("replay").episodes()
    assert episodes.total - episodes.missed - len(episodes) in {0, 1}  # it may have died in the middle of a record
    assert (episodes.returns == episodes.lengths).all()
    last = episodes.numbers & 0xFFFFFFFF
    assert (episodes.lengths == last % 5 + 1).all()
    # without the copies that the pages' halos hold
    ended = sum(int(steps.terminated.sum()) for steps in engine.table("replay").scan())
    # the record comes before its row is visible
    assert ended - 1 <= episodes.total <= ended + 1


def test_several_processes_episodes_are_in_one_ring_and_none_is_lost(make):
    engine = make(schema(), 50_000, writers=8)
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=write_some, args=(engine.name, 300)) for _ in range(3)]
    for process in processes:
        process.start()
    found, since = [], None
    while len(found) < 900:
        since = engine.table("replay").episodes(since=since)
        assert since.missed == 0
        found += since.numbers.tolist()
        if not any(process.is_alive() for process in processes) and not len(since):
            break
        time.sleep(0.005)
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    assert len(found) == len(set(found)) == 900


def write_some(name, count):
    with conduit.attach(name) as client, client.writer("replay") as writer:
        for _ in range(count):
            end(writer)


def test_a_restored_engine_begins_without_episodes(make, engine_name, tmp_path):
    engine = make(schema())
    writer = engine.writer("replay")
    writer.append(obs=OBS, action=0, reward=3.0)
    end(writer)
    engine.checkpoint(tmp_path)
    with conduit.Engine.restore(tmp_path, f"{engine_name}-again") as again:
        assert (len(again.table("replay").episodes()), again.table("replay").episodes().total) == (0, 0)
        end(again.writer("replay"), 8.0)
        assert again.table("replay").episodes().returns.tolist() == [8.0]


def test_ragged_tables_have_episodes_too(make):
    fields = [
        conduit.Field("obs", "float32", (2,), observation=True),
        conduit.Field("tokens", "int32", (9,), ragged=True),
        conduit.Field("reward", "float32"),
    ]
    engine = make(conduit.Schema(fields), 400, page_rows=64)
    writer = engine.writer("replay")
    want, total, length = [], 0.0, 0
    for step in range(300):
        last = step % 37 == 36
        writer.append(
            obs=OBS,
            tokens=np.arange(step % 9, dtype=np.int32),
            reward=np.float32(step),
            terminated=last,
            final=OBS if last else None,
        )
        total, length = total + step, length + 1
        if last:
            want.append((total, length))
            total, length = 0.0, 0
    episodes = engine.table("replay").episodes()
    assert list(zip(episodes.returns.tolist(), episodes.lengths.tolist(), strict=True)) == want


def test_wrong_options_and_closed_clients_are_refused(make):
    engine, other = make(schema()), make()
    with pytest.raises(ConfigError, match="Expected what an earlier call of episodes returned as since, got int"):
        engine.table("replay").episodes(since=3)
    with pytest.raises(ConfigError, match="last"):
        engine.table("replay").episodes(last=0)
    with pytest.raises(ConfigError, match="did you mean `replay`"):
        engine.table("repaly").episodes()
    engine.close()
    with pytest.raises(Closed):
        engine.table("replay").episodes()
    assert len(other.table("replay").episodes()) == 0


def test_status_has_the_number_of_ended_episodes_and_the_newest_ones_means(make):
    from conduit.plane.observe.inspect import inspect

    engine = make(schema())
    (table,) = inspect(engine.name).tables
    assert (table.episodes.ended, table.episodes.mean_return, table.episodes.mean_length) == (0, None, None)
    writer = engine.writer("replay")
    for number in range(150):
        end(writer, float(number))
    (table,) = inspect(engine.name).tables
    assert (table.episodes.ended, table.episodes.newest) == (150, 100)
    assert table.episodes.mean_return == (99.5,)
    assert table.episodes.mean_length == 1.0
