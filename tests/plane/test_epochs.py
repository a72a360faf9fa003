"""Epochs: every window that could be drawn when one began comes once, in an order that a seed decides, and it can be gone on with."""

import subprocess
import sys
import textwrap
from collections import Counter

import numpy as np
import pytest

import conduit
from conduit.errors import ConfigError, DataTimeout, Exhausted

SCHEMA = conduit.Schema.from_example({"obs": np.zeros(2, np.float32), "action": 0, "reward": 0.0})


def open_engine(name, rows=1000, **options):
    options = {"page_rows": 40, "max_n_step": 3, "max_length": 5, **options}
    return conduit.Engine.create(name, {"data": conduit.Table(SCHEMA, rows, **options)})


def write(engine, steps, *, envs=None, length=17, start=0):
    """Episodes of a fixed length, the last one shorter; a row's action is its number, and so is its observation."""
    lead = () if envs is None else (envs,)
    with engine.writer("data", num_envs=envs, autoreset=None if envs is None else "same_step") as writer:
        for t in range(start, start + steps):
            number = np.arange(envs or 1).reshape(lead) + t * (envs or 1)
            obs = np.stack([number, number], -1).astype(np.float32)
            ended = np.full(lead, (t + 1) % length == 0 or t + 1 == start + steps)
            writer.append(
                obs=obs, action=number, reward=np.zeros(lead), terminated=ended, truncated=ended & False, final=obs
            )


def loader_of(engine, **options):
    options = {
        "batch_size": 64,
        "format": "numpy",
        "seed": 3,
        "sampling": conduit.Shuffled(),
        "timeout": 5.0,
        **options,
    }
    return engine.loader("data", **options)


def ids_of(batches):
    return [batch.ids.tolist() for batch in batches]


@pytest.mark.parametrize("envs", [None, 4])
@pytest.mark.parametrize(
    "window",
    [
        conduit.Transition(),
        conduit.Transition(n_step=3),
        conduit.Sequence(5),
        conduit.Sequence(4, overlap=2),
        conduit.Episode(5),
    ],
    ids=repr,
)
def test_every_window_comes_once_in_an_epoch_and_none_twice(engine_name, window, envs):
    length = 4 if isinstance(window, conduit.Episode) else 17
    with open_engine(engine_name) as engine:
        write(engine, 300 // (envs or 1), envs=envs, length=length)
        there = engine.table("data").sampleable(window)
        assert there > 32
        with engine.loader("data", batch_size=512, window=window, format="numpy", min_rows=1) as uniform:
            wanted = {i for _ in range(40) for i in uniform.next().ids.tolist()}
        assert len(wanted) == there
        with loader_of(engine, window=window, batch_size=32) as loader:
            epochs = [ids_of(loader) for _ in range(3)]
            assert len(loader) == -(-there // 32)
        for epoch in epochs:
            flat = [i for batch in epoch for i in batch]
            assert len(flat) == there
            assert set(flat) == wanted
            assert [len(batch) for batch in epoch[:-1]] == [32] * (len(epoch) - 1)
            assert len(epoch[-1]) == (there % 32 or 32)
        assert epochs[0] != epochs[1] != epochs[2]


def test_a_short_batch_is_like_any_other_and_may_be_left_out(engine_name):
    with open_engine(engine_name) as engine:
        write(engine, 100)
        with loader_of(engine, transform={"obs": conduit.scale(2.0)}, fields=["obs", "action"]) as loader:
            first, last = list(loader)
            assert loader.stats.rows == 100
            assert loader.stats.batches == 2
        assert last["obs"].shape == (36, 2)
        assert np.array_equal(last["obs"][:, 0], 2.0 * last["action"])
        assert sorted([*first["action"].tolist(), *last["action"].tolist()]) == list(range(100))
        with loader_of(engine, sampling=conduit.Shuffled(drop_last=True)) as loader:
            assert len(loader) == 1
            (only,) = loader
            assert only.ids.tolist() == first.ids.tolist()
            assert loader.sampler.skipped == 0
        with loader_of(engine, batch_size=50, sampling=conduit.Shuffled(drop_last=True)) as loader:
            assert len(list(loader)) == len(loader) == 2


def test_the_order_is_a_function_of_the_seed_and_of_the_rows(engine_name):
    with open_engine(engine_name) as engine:
        write(engine, 200)
        with loader_of(engine) as one, loader_of(engine) as same, loader_of(engine, seed=4) as other:
            first = ids_of(one)
            assert ids_of(same) == first
            assert ids_of(other) != first
            assert one.epoch == 1
    # numbers of generations differ from engine to engine, rows do not
    with open_engine(engine_name) as engine:
        write(engine, 200)
        with loader_of(engine) as again:
            assert [[i & (1 << 40) - 1 for i in batch] for batch in ids_of(again)] == [
                [i & (1 << 40) - 1 for i in batch] for batch in first
            ]


def test_next_goes_on_with_the_next_epoch_and_ends_behind_the_last(engine_name):
    with open_engine(engine_name) as engine:
        write(engine, 100)
        with loader_of(engine, sampling=conduit.Shuffled(epochs=2)) as loader:
            drawn = Counter(i for _ in range(4) for i in loader.next()["action"].tolist())
            assert set(drawn.values()) == {2}
            with pytest.raises(Exhausted, match="2 epochs"):
                loader.next()
            assert list(loader) == []
        with loader_of(engine, sampling=conduit.Shuffled(epochs=2)) as loader:
            assert [len(list(loader)) for _ in range(3)] == [2, 2, 0]


def test_a_resumed_epoch_goes_on_with_the_exact_batch(engine_name):
    with open_engine(engine_name) as engine:
        write(engine, 300)
        with loader_of(engine) as loader:
            wanted = [*ids_of(loader), *ids_of(loader)]
        for done in range(len(wanted) + 1):
            with loader_of(engine) as loader:
                for _ in range(done):
                    loader.next()
                state = loader.state_dict()
            with loader_of(engine) as loader:
                loader.load_state_dict(state)
                assert [loader.next().ids.tolist() for _ in range(len(wanted) - done)] == wanted[done:]
        with loader_of(engine, seed=9) as loader, pytest.raises(ConfigError, match="seed 9"):
            loader.load_state_dict(state)


def test_a_named_loader_goes_on_after_its_process_was_killed_and_from_a_checkpoint(engine_name, tmp_path):
    with open_engine(engine_name) as engine:
        write(engine, 300)
        with loader_of(engine) as loader:
            wanted = [*ids_of(loader), *ids_of(loader)]
        program = f"""
            import os, conduit
            with conduit.attach({engine_name!r}) as client:
                loader = client.loader("data", batch_size=64, format="numpy", seed=3, name="me", sampling=conduit.Shuffled())
                for _ in range(7):
                    loader.next()
                os.kill(os.getpid(), 9)
        """
        killed = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], timeout=100, check=False)
        assert killed.returncode == -9
        engine.checkpoint(tmp_path)
        with loader_of(engine, seed=None, name="me") as loader:
            assert loader.next().ids.tolist() == wanted[7]
        with pytest.raises(ConfigError, match="which began in epochs"):
            engine.loader("data", batch_size=64, name="me")
    with conduit.Engine.restore(tmp_path, engine_name) as engine, loader_of(engine, seed=None, name="me") as loader:
        assert loader.epoch == 1
        assert [batch.ids.tolist() for batch in loader] == wanted[7:]


def test_an_epoch_does_not_go_on_over_other_rows(engine_name):
    with open_engine(engine_name) as engine:
        write(engine, 300)
        with loader_of(engine, name="me") as loader:
            loader.next()
        write(engine, 10)
        with loader_of(engine, name="me") as loader, pytest.raises(ConfigError, match="has been written, deleted from"):
            loader.next()


def test_rows_that_are_deleted_are_left_out_and_rows_that_are_written_come_with_the_next_epoch(engine_name):
    with open_engine(engine_name) as engine:
        write(engine, 300)
        with loader_of(engine) as loader:
            first = loader.next()
            kept = set(first["action"].tolist())
            with loader_of(engine, batch_size=300) as all_at_once:
                batch = all_at_once.next()
                gone = batch.ids[np.isin(batch["action"], [a for a in range(300) if a % 3 == 0])]
            engine.table("data").delete(gone)
            write(engine, 50, start=1000)
            rest = [a for batch in loader for a in batch["action"].tolist()]
            assert len(rest) == len(set(rest))
            assert set(rest) == {a for a in range(300) if a % 3} - kept
            assert loader.sampler.skipped == len({a for a in range(300) if a % 3 == 0} - kept)
            later = [a for batch in loader for a in batch["action"].tolist()]
            assert sorted(later) == sorted([a for a in range(300) if a % 3] + list(range(1000, 1050)))


def test_rows_that_writers_overwrite_are_left_out_and_counted(engine_name):
    with open_engine(engine_name, rows=200) as engine:
        write(engine, 200)
        with loader_of(engine, batch_size=16) as loader:
            there = engine.table("data").sampleable()
            drawn = []
            for round_ in range(100):
                batch = next(loader, None)
                if batch is None:
                    break
                assert np.array_equal(batch["obs"][:, 0], batch["action"])
                drawn += batch["action"].tolist()
                write(engine, 5, start=1000 + 5 * round_)
            assert len(drawn) == len(set(drawn))
            assert max(drawn) < 1000
            assert len(drawn) + loader.sampler.skipped == there
            assert loader.sampler.skipped > 0


def test_the_shards_of_an_epoch_are_the_whole_and_share_nothing(engine_name):
    with open_engine(engine_name) as engine:
        write(engine, 100)
        parts = []
        for rank in range(3):
            with loader_of(engine, shard=(rank, 3), batch_size=8) as loader:
                parts.append([a for batch in loader for a in batch["action"].tolist()])
        assert sorted(a for part in parts for a in part) == list(range(100))
        assert [len(part) for part in parts] == [34, 33, 33]


def test_an_empty_table_is_waited_for_and_said(engine_name):
    with open_engine(engine_name) as engine, loader_of(engine, timeout=0.1) as loader:
        assert len(loader) == 0
        with pytest.raises(DataTimeout, match="at least 1 rows that begin a Transition"):
            loader.next()
        write(engine, 30)
        assert len(list(loader)) == 1


@pytest.mark.parametrize(
    ("options", "table", "what"),
    [
        ({"sampling": conduit.Shuffled(), "max_staleness": 1}, {}, "max_staleness"),
        ({"sampling": conduit.Shuffled()}, {"max_times_sampled": 2}, "max_times_sampled"),
        ({"sampling": conduit.Shuffled()}, {"limiter": conduit.MinSize(5)}, "limiter"),
        ({"sampling": conduit.Shuffled(), "device": "cuda"}, {}, "device='cpu'"),
        ({"sampling": conduit.Shuffled(), "batch_size": 0}, {}, "batch_size"),
        ({"sampling": conduit.Shuffled(), "shard": (2, 2)}, {}, "shard"),
    ],
)
def test_what_has_no_epochs_is_refused_by_name(engine_name, options, table, what):
    with open_engine(engine_name, **table) as engine, pytest.raises(ConfigError, match=what):
        loader_of(engine, **options)


@pytest.mark.parametrize("options", [{"epochs": 0}, {"epochs": 1.5}, {"epochs": True}, {"drop_last": 1}])
def test_a_shuffled_that_is_none_is_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        conduit.Shuffled(**options)


def test_a_mixed_loader_has_no_epochs(engine_name):
    with open_engine(engine_name) as engine, pytest.raises(ConfigError, match="got Shuffled"):
        engine.mixed_loader({"data": 1.0}, batch_size=8, sampling=conduit.Shuffled())


def test_options_that_are_iterators_hold_for_the_shorter_last_batch_too(engine_name):
    with open_engine(engine_name) as engine:
        write(engine, 100)

        def doubled(batch):
            return {**batch, "double": 2 * batch["action"]}

        loader = loader_of(engine, fields=iter(["action"]), batch_transforms=iter([conduit.apply(doubled)]))
        batches = list(loader)
        assert len(batches[-1].ids) < 64
        for batch in batches:
            assert list(batch) == ["action", "double"]
            np.testing.assert_array_equal(batch["double"], 2 * batch["action"])
