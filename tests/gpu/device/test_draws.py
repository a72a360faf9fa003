"""Draws made by the device: the rows of a loader on the CPU, in arrays that stay where they are."""

import numpy as np
import pytest
import torch

import conduit
from conduit.errors import Closed, ConfigError
from conduit.store.format import words as w
from tests.gpu.device.conftest import SMALL, Source

WINDOWS = [
    conduit.Transition(),
    conduit.Transition(n_step=3, gamma=0.9, stack=2),
    conduit.Transition(n_step=2, stack=3, padding="zero", newest="bootstrap"),
]


def assert_drawn(draws, batch):
    for name, want in batch.items():
        assert torch.equal(draws.outputs[name].cpu(), want), name
    for key in ("ids", "versions", "episodes", "steps"):
        assert torch.equal(getattr(draws, key).cpu(), getattr(batch, key)), key


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("envs", [None, 2])
def test_the_device_draws_the_rows_that_a_loader_on_the_cpu_draws(make, device, window, envs):
    engine = make(SMALL, max_stack=3, max_n_step=3, num_envs=envs or 1)
    source = Source(engine, envs=envs)(150)
    options = {"batch_size": 40, "seed": 11, "window": window, "transform": {"obs": conduit.scale(0.5)}}
    with (
        engine.loader("replay", **options) as loader,
        engine.loader("replay", device=device, pool="1 MiB", **options) as other,
    ):
        other.residence.fill()
        draws = other.draws()
        places = {name: value.data_ptr() for name, value in draws.outputs.items()}
        for _ in range(3):
            other.residence.fill()
            draws.refresh()
            assert draws.replay() is draws.outputs
            assert_drawn(draws, loader.next())
            source(60)
        assert draws.given_up.item() == 0
        assert places == {name: value.data_ptr() for name, value in draws.outputs.items()}


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("envs", [None, 2])
def test_deleted_rows_are_drawn_no_more_wherever_they_lie(make, device, window, envs):
    """In whole pages, in the halo of the page behind, in the page that is being written, and in pages mirrored later."""
    engine = make(SMALL, max_stack=3, max_n_step=3, num_envs=envs or 1)
    source = Source(engine, envs=envs)(100)
    options = {"batch_size": 40, "seed": 11, "window": window}
    with (
        engine.loader("replay", **options) as loader,
        engine.loader("replay", device=device, pool="1 MiB", **options) as other,
    ):
        other.residence.fill()
        draws = other.draws()
        gone = set()
        for _ in range(4):
            other.residence.fill()
            draws.refresh()
            draws.replay()
            batch = loader.next()
            assert not gone & set(draws.outputs["action"].tolist())
            assert_drawn(draws, batch)
            some = np.unique(batch.ids.numpy())[::2]
            gone |= set(batch["action"][np.isin(batch.ids.numpy(), some)].tolist())
            assert engine.table("replay").delete(some) == len(some)
            # what was mirrored is what it was
            draws.refresh()
            draws.replay()
            batch = loader.next()
            assert not gone & set(draws.outputs["action"].tolist())
            assert_drawn(draws, batch)
            source(25)
        assert len(gone) > 40


def test_a_copy_of_a_row_whose_own_page_was_overwritten_is_drawn_no_more_once_it_is_deleted(make, device):
    """No count of its table tells of it."""
    engine = make(SMALL, capacity=96, max_n_step=3)
    source = Source(engine)(60)
    with engine.loader("replay", batch_size=100, min_rows=1, seed=2, device=device, pool="1 MiB") as other:
        other.residence.fill()
        draws = other.draws()
        copies = []
        while not copies:
            source(10)
            other.residence.fill()
            draws.refresh()
            draws.replay()
            words = other.residence.words
            elder = words[:, w.PAGE_PREVIOUS // 8] - 1
            left = (elder >= 0) & (
                words[elder, w.PAGE_STATE // 8] >> w.GENERATION_SHIFT != words[:, w.PAGE_PREVIOUS_GENERATION // 8]
            )
            places = [(key, *divmod(key & w.ROW_MASK, 48)) for key in draws.ids.tolist()]
            copies = [key for key, page, local in places if left[page] and local < words[page, w.PAGE_HALO // 8]]
        copies = sorted(set(copies))
        assert engine.table("replay").delete(np.array(copies)) == len(copies)
        draws.refresh()
        for _ in range(5):
            draws.replay()
            assert not set(copies) & set(draws.ids.tolist())


def test_rows_that_went_with_a_reset_are_drawn_no_more(make, device):
    engine = make(SMALL)
    source = Source(engine)(200)
    options = {"batch_size": 40, "seed": 5}
    with (
        engine.loader("replay", min_rows=1, **options) as loader,
        engine.loader("replay", device=device, pool="1 MiB", **options) as other,
    ):
        other.residence.fill()
        draws = other.draws()
        draws.replay()
        assert draws.given_up.item() == 0
        engine.table("replay").reset()
        draws.refresh()
        draws.replay()
        assert draws.given_up.item() == 40
        assert (draws.ids == -1).all()
        source(60)
        other.residence.fill()
        draws.refresh()
        draws.seek(5, loader.sampler.batch)
        draws.replay()
        assert draws.outputs["action"].min() >= 200
        assert_drawn(draws, loader.next())


def test_draws_without_a_refresh_go_on_over_the_same_rows(make, device):
    engine = make(SMALL)
    source = Source(engine)(100)
    options = {"batch_size": 30, "seed": 4}
    with (
        engine.loader("replay", **options) as loader,
        engine.loader("replay", device=device, pool="1 MiB", **options) as other,
    ):
        other.residence.fill()
        draws = other.draws()
        wanted = [loader.next() for _ in range(3)]
        kept = [{name: value.clone() for name, value in batch.items()} for batch in wanted]
        source(1000)
        for batch in kept:
            draws.replay()
            assert all(torch.equal(draws.outputs[name].cpu(), value) for name, value in batch.items())


def test_draws_beside_batches_of_the_loader_are_of_whole_rows(make, device):
    """`next` moves the pool on, and fills slots that draws knew as another page's."""
    engine = make(SMALL, capacity=400)
    source = Source(engine)(390)
    with engine.loader("replay", batch_size=40, seed=4, device=device, pool=6000) as loader:
        loader.residence.fill()
        draws = loader.draws()
        for _ in range(4):
            source(100)
            loader.next()
            loader.residence.fill()
            draws.replay()
            assert loader.valid(draws.ids).all()
            # obs[0] = 3 * action
            assert torch.equal(draws.outputs["obs"][:, 0], 3.0 * draws.outputs["action"].float())


def test_a_pool_that_holds_a_part_draws_from_all_of_that_part(make, device):
    engine = make(SMALL, capacity=400)
    Source(engine)(390)
    with engine.loader("replay", batch_size=400, seed=4, device=device, pool=6000) as loader:
        loader.residence.fill()
        held = loader.residence.slot_of >= 0
        assert 0 < held.sum() < len(held)
        draws = loader.draws()
        draws.replay()
        pages = (draws.ids & ((1 << 40) - 1)) // 48
        assert set(pages.unique().tolist()) <= set(held.nonzero()[0].tolist())
        assert loader.valid(draws.ids).all()
        assert len(draws.outputs["action"].unique()) > 50


def test_an_empty_pool_gives_zeros_and_says_so(make, device):
    engine = make(SMALL)
    Source(engine)(1)
    with engine.loader("replay", batch_size=5, device=device, pool="1 MiB") as loader:
        draws = loader.draws()
        draws.replay()
        assert draws.given_up.item() == 5
        assert (draws.ids == -1).all()
        assert not draws.outputs["obs"].any()


def test_what_the_device_cannot_draw_is_refused(make, device):
    engine = make(SMALL, priorities=conduit.Priorities(), max_length=3)
    Source(engine)(50)
    for options, message in (
        ({}, "Expected a loader that draws uniformly out of a pool"),
        ({"pool": "1 MiB", "sampling": conduit.Prioritized()}, "got PrioritizedSampler"),
        (
            {"pool": "1 MiB", "window": conduit.Sequence(3)},
            "Expected a plan that the device can draw for, got Sequence",
        ),
    ):
        with (
            engine.loader("replay", batch_size=5, device=device, **options) as loader,
            pytest.raises(ConfigError, match=message),
        ):
            loader.draws()


NAMED = conduit.Schema(
    [
        conduit.Field("stack", "float32", (4,), observation=True),
        *(
            conduit.Field(name, "float32")
            for name in ("state", "shift", "rows", "used", "ids", "following", "discount")
        ),
        conduit.Field("returns", "float32", (3,), reward=True),
        conduit.Field("cut", "float64", reward=True),
    ]
)


@pytest.mark.parametrize("way", ["host", "pool", "draws"])
def test_fields_of_any_name_and_several_rewards_come_as_on_the_cpu(make, device, way):
    engine = make(NAMED, max_n_step=3, max_stack=2)
    with engine.writer("replay") as writer:
        for t in range(120):
            row = {field.name: np.full(field.shape, t + i / 8, field.numpy_dtype) for i, field in enumerate(NAMED)}
            ended = t % 11 == 10
            final = {"final": row["stack"] + 1} if ended else {}
            writer.append(**row, terminated=ended, **final)
    window = conduit.Transition(n_step=3, gamma=0.5, stack=2)
    options = {"batch_size": 20, "seed": 3, "window": window, "rename": {"discount": "env_discount"}}
    with (
        engine.loader("replay", **options) as loader,
        engine.loader("replay", device=device, pool=None if way == "host" else "1 MiB", **options) as other,
    ):
        if way != "host":
            other.residence.fill()
        if way == "draws":
            draws = other.draws()
            draws.replay()
            assert_drawn(draws, loader.next())
            return
        for _ in range(3):
            batch, copy = loader.next(), other.next()
            assert copy.reward_names == ("returns", "cut")
            assert tuple(batch) == tuple(copy)
            for name, want in batch.items():
                assert torch.equal(copy[name].cpu(), want), name
            assert torch.equal(copy.ids.cpu(), batch.ids)
            assert torch.equal(batch["ids"], batch["state"] + 0.5)


def test_draws_of_a_closed_loader_are_closed(make, device):
    engine = make(SMALL)
    Source(engine)(100)
    loader = engine.loader("replay", batch_size=4, device=device, pool="1 MiB")
    loader.residence.fill()
    draws = loader.draws()
    draws.replay()
    before = {name: tensor.clone() for name, tensor in draws.outputs.items()}
    loader.close()
    for call in (draws.replay, draws.refresh, draws.launch, draws.launched, lambda: draws.seek(0, 1), loader.draws):
        with pytest.raises(Closed, match="open loader, got one that was closed"):
            call()
    assert all(torch.equal(tensor, before[name]) for name, tensor in draws.outputs.items())
