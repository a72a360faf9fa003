"""A table as a dataset of torch, iterated by real workers of a DataLoader."""

import itertools

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import conduit
from conduit.errors import ConfigError, DataTimeout

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
OPTIONS = {"batch_size": 16, "timeout": 30.0}


@pytest.fixture
def engine(make):
    made = make(capacity=2000, priorities=conduit.Priorities(alpha=1.0), policies={"policy": {"w": np.zeros(1)}})
    with made.writer("replay", keep_final=False) as writer:
        for k in range(500):
            writer.append(obs=np.full(4, k, np.float32), action=k, reward=float(k))
    return made


def rows(batches):
    return [(batch["action"].tolist(), batch.ids.tolist()) for batch in batches]


def one_loader(engine, count, **options):
    with engine.loader("replay", **{**OPTIONS, "on_busy": "error"} | options) as loader:
        return [(batch["action"].tolist(), batch.ids.tolist()) for batch in itertools.islice(loader, count)]


def first(dataset, count, **options):
    loader = DataLoader(dataset, batch_size=None, timeout=60 if options.get("num_workers") else 0, **options)
    return rows(itertools.islice(loader, count))


@pytest.mark.parametrize(("workers", "method"), [(0, None), (1, "spawn"), (2, "spawn"), (3, "fork"), (2, "forkserver")])
def test_workers_give_the_batches_of_one_loader_in_its_order(engine, workers, method):
    dataset = engine.dataset("replay", seed=7, **OPTIONS)
    wanted = one_loader(engine, 9, seed=7)
    for _ in range(2):
        assert first(dataset, 9, num_workers=workers, multiprocessing_context=method) == wanted


def test_batches_of_workers_are_batches(engine):
    dataset = engine.dataset("replay", seed=1, sampling=conduit.Prioritized(), **OPTIONS)
    with engine.loader("replay", seed=1, sampling=conduit.Prioritized(), **OPTIONS) as loader:
        for batch in itertools.islice(DataLoader(dataset, batch_size=None, num_workers=2, timeout=60), 3):
            assert isinstance(batch, conduit.Batch)
            assert batch.reward_names == ("reward",)
            assert torch.equal(batch["obs"][:, 0].long(), batch["action"])
            assert loader.update_priorities(batch.ids, batch["weights"] + 1) == 0
            assert batch.to("cpu") is batch


def test_ranks_and_their_workers_part_the_batches_of_one_loader(engine):
    wanted = one_loader(engine, 12, seed=3)
    for rank in range(2):
        dataset = engine.dataset("replay", seed=3, shard=(rank, 2), **OPTIONS)
        assert first(dataset, 6, num_workers=3) == wanted[rank::2]
        assert first(dataset, 6) == wanted[rank::2]


@pytest.mark.parametrize("workers", [0, 2])
def test_without_a_seed_it_is_torch_s_and_every_iteration_has_another(engine, workers):
    dataset = engine.dataset("replay", **OPTIONS)

    def twice():
        torch.manual_seed(5)
        return [first(dataset, 4, num_workers=workers) for _ in range(2)]

    one, other = twice()
    assert one != other
    assert len({ids for _, each in one for ids in [tuple(each)]}) == 4, "workers do not repeat each other"
    if workers:
        assert twice() == [one, other]


def test_workers_that_persist_draw_others_in_each_iteration(engine):
    loader = DataLoader(
        engine.dataset("replay", **OPTIONS), batch_size=None, num_workers=2, persistent_workers=True, timeout=60
    )
    found = [rows(itertools.islice(loader, 4)) for _ in range(3)]
    assert len({tuple(ids) for each in found for _, ids in each}) == 12


def test_a_batch_size_of_the_data_loader_s_own_is_refused_by_name(engine):
    dataset = engine.dataset("replay", **OPTIONS)
    with pytest.raises(ConfigError, match=r"DataLoader\(dataset, batch_size=None\), got 1 batches"):
        next(iter(DataLoader(dataset)))
    with pytest.raises(ConfigError, match=r"DataLoader\(dataset, batch_size=None\), got 4 batches"):
        next(iter(DataLoader(dataset, batch_size=4, num_workers=1, timeout=60)))


def test_what_is_wrong_with_the_options_is_said_at_once(engine):
    for options, text in (
        ({"name": "learner"}, "no name for a dataset"),
        ({"device": "cuda"}, "no device for a dataset"),
        ({"pool": "1 GiB"}, "no pool for a dataset"),
        ({"window": 3}, "Expected a window"),
    ):
        with pytest.raises(ConfigError, match=text):
            engine.dataset("replay", **OPTIONS, **options)
    with pytest.raises(ConfigError, match="Expected a table"):
        engine.dataset("replai", **OPTIONS)


def test_a_worker_s_error_is_the_learner_s(engine, make):
    empty = make()
    dataset = empty.dataset("replay", batch_size=4, timeout=0.2)
    with pytest.raises(DataTimeout, match="in table 'replay'"):
        next(iter(DataLoader(dataset, batch_size=None, num_workers=1, timeout=60)))


def test_staleness_is_counted_in_the_workers_too(engine):
    slot = engine.policy("policy")
    dataset = engine.dataset("replay", max_staleness=0, policy=slot, seed=0, **OPTIONS)
    assert len(first(dataset, 2, num_workers=1)) == 2
    slot.publish({"w": np.ones(1)})
    stale = engine.dataset("replay", max_staleness=0, policy=slot, seed=0, batch_size=16, timeout=0.2)
    with pytest.raises(DataTimeout, match="max_staleness"):
        first(stale, 1, num_workers=1)


def test_a_dropped_iterator_leaves_no_seat(engine):
    iterator = iter(engine.dataset("replay", **OPTIONS))
    next(iterator)
    before = len(engine._participants.list())
    iterator.close()
    assert len(engine._participants.list()) == before - 1


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iteration_over_shuffled_windows_is_one_epoch_of_which_workers_have_disjoint_parts(engine, workers):
    dataset = engine.dataset("replay", sampling=conduit.Shuffled(), batch_size=16)
    loader = DataLoader(dataset, batch_size=None, num_workers=workers, timeout=60 if workers else 0)
    orders = [[k for batch in loader for k in batch["action"].tolist()] for _ in range(2)]
    wanted = sorted(
        k
        for batch in engine.loader("replay", sampling=conduit.Shuffled(), batch_size=16)
        for k in batch["action"].tolist()
    )
    assert [sorted(order) for order in orders] == [wanted, wanted]
    assert len(set(wanted)) == len(wanted) >= 499
    assert orders[0] != orders[1]
