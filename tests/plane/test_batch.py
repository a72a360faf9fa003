"""A batch's memory: valid as long as anything made from it lives, reused when nothing does."""

import gc
import itertools
import re
import threading
import time
import warnings
import weakref

import numpy as np
import pytest
import torch

import conduit
from conduit import Field, Schema, cast
from conduit.errors import BuffersBusy

SCHEMA = Schema([Field("obs", "float32", (3,), observation=True), Field("action", "int64"), Field("brain", "bfloat16")])


@pytest.fixture
def loader(make, request):
    """A loader over 200 rows; parametrised indirectly with more options."""
    engine = make(SCHEMA)
    writer = engine.writer("replay")
    for k in range(201):
        writer.append(obs=np.full(3, k, np.float32), action=k, brain=float(k % 100))
    return engine.loader("replay", **{"batch_size": 16, "seed": 2} | getattr(request, "param", {}))


def address(batch):
    value = batch["obs"]
    return value.data_ptr() if isinstance(value, torch.Tensor) else value.ctypes.data


KEEPERS = {
    "the batch": lambda batch: batch,
    "a tensor": lambda batch: batch["action"],
    "the flags": lambda batch: batch["terminated"],
    "a view": lambda batch: batch["obs"][3:5],
    "a reshaped view": lambda batch: batch["obs"].reshape(-1),
    "a view of a view": lambda batch: batch["next_obs"][1:][::2][0],
    "one element": lambda batch: batch["action"][3:4],
    "the ids": lambda batch: batch.ids,
    "the versions": lambda batch: batch.versions,
    "the dict": dict,
    "the nest": lambda batch: batch.nest(),
    "an iterator over values": lambda batch: iter(list(batch.values())),
    "DLPack of a tensor": lambda batch: batch["obs"].__dlpack__(),
    "numpy made of it": lambda batch: np.asarray(batch["obs"])[2:],
    "torch made of it by DLPack": lambda batch: torch.from_dlpack(batch["obs"]),
    "numpy made of it by DLPack": lambda batch: np.from_dlpack(batch["obs"]),
    "a memoryview": lambda batch: memoryview(np.asarray(batch["obs"])),
    "a closure": lambda batch: lambda: batch["obs"],
    "an autograd graph": lambda batch: (
        torch.ones(3, requires_grad=True) * torch.as_tensor(np.asarray(batch["obs"]))
    ).sum(),
}
TORCH_ONLY = {
    "bfloat16 bits": lambda batch: batch["brain"][1:],
    "the storage": lambda batch: batch["action"].untyped_storage(),
}


@pytest.mark.parametrize(
    ("loader", "keeper"),
    [({"format": kind}, keeper) for kind in ("torch", "numpy") for keeper in KEEPERS]
    + [({"format": "torch"}, keeper) for keeper in TORCH_ONLY],
    indirect=["loader"],
)
def test_memory_is_not_reused_while_anything_made_from_a_batch_lives(loader, keeper):
    batch = loader.next()
    where = address(batch)
    before = bytes(memoryview(np.asarray(batch["obs"])))
    kept = (KEEPERS | TORCH_ONLY)[keeper](batch)
    obs_too = keeper in ("the batch", "the dict", "the nest", "a closure")
    del batch
    for _ in range(10):
        assert address(loader.next()) != where
    if obs_too:
        whole = kept() if keeper == "a closure" else kept["obs"]
        assert bytes(memoryview(np.asarray(whole))) == before
        del whole
    del kept
    assert where in {address(loader.next()) for _ in range(4)}


def test_a_loop_that_keeps_nothing_goes_round_the_buffers(loader):
    addresses = [address(loader.next()) for _ in range(12)]
    assert len(set(addresses)) == 3
    assert addresses[3:] == addresses[:-3]
    held = None
    addresses = []
    for _ in range(12):
        held = loader.next()
        addresses.append(address(held))
    assert len(set(addresses)) == 3


@pytest.mark.parametrize("loader", [{"buffers": 4, "on_busy": "error"}], indirect=True)
def test_batches_that_are_kept_stay_as_they_were_and_one_too_many_is_an_error(loader):
    kept = [loader.next() for _ in range(4)]
    copies = [{name: value.clone() for name, value in batch.items()} for batch in kept]
    with pytest.raises(
        BuffersBusy, match=r"at most 3 batches.* all 4 buffers.*4 times a whole batch.*release\(\).*clone.*more buffers"
    ):
        loader.next()
    assert isinstance(BuffersBusy(""), BufferError)
    del kept[2]
    for _ in range(20):
        loader.next()
    for batch, copy in zip(kept, [copies[0], copies[1], copies[3]], strict=True):
        for name, value in batch.items():
            assert torch.equal(value, copy[name])


@pytest.mark.parametrize("loader", [{"on_busy": "error"}], indirect=True)
def test_a_released_batch_s_memory_is_reused_although_it_is_still_referred_to(loader):
    kept = [loader.next() for _ in range(3)]
    where = [address(batch) for batch in kept]
    kept[1].release()
    assert address(loader.next()) == where[1]
    with pytest.raises(BuffersBusy):
        # the batch from the reused buffer is gone, but the released one still refers to its memory
        loader.next()


def test_releasing_a_batch_twice_does_not_give_away_the_batch_that_took_its_place(loader):
    old = loader.next()
    where = address(old)
    old.release()
    new = next(batch for batch in (loader.next() for _ in range(3)) if address(batch) == where)
    copy = {name: value.clone() for name, value in new.items()}
    old.release()
    for _ in range(10):
        assert address(loader.next()) != where
    for name, value in new.items():
        assert torch.equal(value, copy[name])
    new.release()
    assert where in {address(loader.next()) for _ in range(3)}


@pytest.mark.parametrize("loader", [{"on_busy": "wait", "buffers": 2, "timeout": 20}], indirect=True)
def test_a_loader_that_waits_takes_the_buffer_that_another_thread_lets_go(loader):
    kept = [loader.next(), loader.next()]
    where = address(kept[0])
    thread = threading.Timer(0.1, lambda: kept.pop(0))
    thread.start()
    begun = time.monotonic()
    batch = loader.next()
    assert time.monotonic() - begun >= 0.05
    assert address(batch) == where
    assert loader.stats.waited_s >= 0.05
    thread.join()


@pytest.mark.parametrize("loader", [{"on_busy": "wait", "buffers": 2, "timeout": 0.05}], indirect=True)
def test_waiting_for_a_buffer_ends_with_the_timeout(loader):
    kept = [loader.next(), loader.next()]
    begun = time.monotonic()
    with pytest.raises(BuffersBusy):
        loader.next()
    assert 0.05 <= time.monotonic() - begun < 5
    with pytest.raises(BuffersBusy):
        loader.next(timeout=0)
    del kept[0]
    loader.next()


def test_batches_outlive_the_loader_the_client_and_the_engine(make):
    engine = make(SCHEMA)
    writer = engine.writer("replay")
    for k in range(50):
        writer.append(obs=np.full(3, k, np.float32), action=k, brain=0.0)
    loader = engine.loader("replay", batch_size=8)
    batch = loader.next()
    alive = weakref.ref(loader)
    del loader
    gc.collect()
    assert alive() is None
    engine.close()
    gc.collect()
    assert torch.equal(batch["obs"][:, 0].long(), batch["action"])


@pytest.mark.parametrize("loader", [{"transform": {"obs": cast("bfloat16")}}], indirect=True)
def test_tensors_of_a_batch_may_be_written_to_and_share_nothing_with_the_table(loader):
    batch = loader.next()
    assert batch["obs"].dtype == torch.bfloat16
    action = batch["action"].clone()
    loader.sampler.batch -= 1
    for value in batch.values():
        value.zero_()
    again = loader.next()
    assert torch.equal(again["action"], action)
    assert torch.equal(again["obs"][:, 0].long(), action.bfloat16().long())


RICH = Schema([*SCHEMA.fields, Field("tokens", "int32", (9,), ragged=True), Field("reward", "float32")])
STEPS = ("obs", "reward", "terminated", "truncated", "next_obs", "mask", "loss_mask")


def guess(batch):
    return {**batch, "values": batch["reward"] * 2, "bootstrap": batch["reward"][:, -1] * 2}


LOADERS = {
    "transitions": {"transform": {"obs": cast("float64")}, "ragged": "pack"},
    "n-step returns by priority": {"window": conduit.Transition(n_step=3), "sampling": conduit.Prioritized()},
    "sequences": {"window": conduit.Sequence(4, next_obs=True), "format": "numpy", "fields": STEPS},
    "advantages of rollouts": {
        "window": conduit.Rollout(4, 1, stride=1),
        "fields": STEPS[:4],
        "batch_transforms": (
            conduit.apply(guess),
            conduit.gae(values="values", bootstrap="bootstrap"),
        ),
    },
}


def filled(make, rows=201, **options):
    """An engine with rows of everything."""
    engine = make(RICH, max_n_step=3, max_length=5, priorities=conduit.Priorities(alpha=1.0), **options)
    writer = engine.writer("replay")
    for k in range(rows):
        tokens = np.arange(k % 10, dtype=np.int32)
        writer.append(obs=np.full(3, k, np.float32), action=k, brain=float(k % 100), tokens=tokens, reward=float(k))
    return engine


def everything(batch):
    """All of a batch, as arrays that share no memory with it."""
    named = {**batch, **{name: getattr(batch, name) for name in ("ids", "versions", "episodes", "steps")}}
    return {
        name: value.copy() if isinstance(value, np.ndarray) else value.to(torch.float64, copy=True).numpy()
        for name, value in named.items()
    }


def same(left, right):
    assert left.keys() == right.keys()
    for name, value in left.items():
        np.testing.assert_array_equal(value, right[name], err_msg=name)


@pytest.mark.parametrize("options", LOADERS.values(), ids=LOADERS)
def test_a_list_of_batches_holds_as_many_as_were_asked_for_each_as_it_would_have_been_alone(make, options):
    engine = filled(make)
    options = {"batch_size": 16, "seed": 2} | options
    with engine.loader("replay", **options) as loader:
        alone = [everything(batch) for batch in itertools.islice(loader, 9)]
        assert loader.stats.allocated == 0
    with engine.loader("replay", **options) as loader:
        with pytest.warns(RuntimeWarning, match="All 3 buffers of a loader of table 'replay'"):
            kept = list(itertools.islice(loader, 7))
        assert loader.stats.allocated == 4
        for batch, wanted in zip(kept, alone, strict=False):
            same(everything(batch), wanted)
        assert len({address(batch) for batch in kept}) == 7
        del kept[0]  # a buffer of the loader's own
        kept.append(loader.next())
        assert loader.stats.allocated == 4
        kept.append(loader.next())
        assert loader.stats.allocated == 5
        for batch, wanted in zip(kept, alone[1:], strict=True):
            same(everything(batch), wanted)
        assert loader.stats.batches == 9


def test_the_warning_comes_once_from_the_caller_s_line_and_says_who_holds_what(loader):
    whole, part, ids = loader.next(), loader.next()["action"], loader.next().ids
    with pytest.warns(RuntimeWarning) as told:
        kept = [batch for batch, _ in zip(loader, range(2), strict=False)]
    assert [each.filename for each in told] == [__file__]
    text = str(told[0].message)
    assert re.search(r"held: a whole batch, `action` of a batch, `ids` of a batch\)", text)
    assert "more buffers" in text
    assert "on_busy='error'" in text
    del whole, part, ids, kept


@pytest.mark.parametrize("loader", [{"format": "numpy"}], indirect=True)
def test_memory_of_a_batch_s_own_goes_with_the_last_thing_made_of_it(loader):
    kept = [loader.next() for _ in range(3)]
    with pytest.warns(RuntimeWarning, match="3 times `some array` of a batch"):
        batch = loader.next()
    memory, view = weakref.ref(batch["obs"].base), batch["obs"][3:5]
    copy = view.copy()
    del batch
    for _ in range(5):
        loader.next()
    assert memory() is not None
    np.testing.assert_array_equal(view, copy)
    del view
    assert memory() is None
    del kept


def test_a_warning_that_is_an_error_takes_no_batch_away(make):
    engine = filled(make)
    with engine.loader("replay", batch_size=8) as loader:
        wanted = [everything(batch) for batch in itertools.islice(loader, 4)]
    with engine.loader("replay", batch_size=8) as loader:
        kept = list(itertools.islice(loader, 3))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(RuntimeWarning, match="3 times a whole batch"):
                loader.next()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kept.append(loader.next())
        for batch, each in zip(kept, wanted, strict=True):
            same(everything(batch), each)


@pytest.mark.filterwarnings("ignore:All 2 buffers")
def test_rows_that_are_delivered_so_often_only_are_counted_in_memory_of_a_batch_s_own_too(make):
    engine = filled(make, max_times_sampled=1)
    with engine.loader("replay", batch_size=20, min_rows=1, buffers=2) as loader:
        kept = [loader.next(timeout=0) for _ in range(10)]
        with pytest.raises(conduit.errors.DataTimeout):
            loader.next(timeout=0)
        ids = np.concatenate([batch.ids for batch in kept])
    assert len(set(ids.tolist())) == 200


@pytest.mark.filterwarnings("ignore:All 2 buffers")
def test_a_batch_that_is_refused_in_memory_of_its_own_is_passed_over_as_any_other(make):
    engine = filled(make)
    options = {"batch_size": 4, "seed": 1, "buffers": 2}
    refusing = {**options, "transform": {"action": conduit.one_hot(197)}}

    def delivered(loader, number):
        try:
            return everything(next(loader))["steps"].tolist() if number > 2 else kept.append(next(loader))
        except conduit.errors.FieldError as error:
            return error.value

    outcomes = []
    for keep in (False, True):
        kept = []
        with engine.loader("replay", **refusing) as loader:
            outcomes.append([delivered(loader, number if keep else 3) for number in range(60)])
            assert (loader.stats.allocated > 0) == keep
    assert any(isinstance(outcome, int) for outcome in outcomes[0])
    assert outcomes[1][3:] == outcomes[0][3:]


@pytest.mark.parametrize("options", [*LOADERS.values(), {}], ids=[*LOADERS, "padded"])
def test_what_is_written_into_a_batch_is_gone_with_the_next_one_in_its_memory(make, options):
    engine = filled(make)
    options = {"batch_size": 16, "seed": 2, "buffers": 2, "on_busy": "error"} | options
    with engine.loader("replay", **options) as loader:
        wanted = [everything(batch) for batch in itertools.islice(loader, 6)]
    with engine.loader("replay", **options) as loader:
        for each in wanted:
            batch = loader.next()
            same(everything(batch), each)
            for value in (*batch.values(), batch.ids, batch.versions, batch.episodes, batch.steps):
                value[...] = 77 if value.dtype not in (bool, torch.bool) else True
            del batch, value
