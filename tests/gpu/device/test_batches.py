"""Whole batches on a device are those of a loader on the CPU, wherever their rows are read."""

import numpy as np
import pytest
import torch

import conduit
from conduit.errors import ConfigError, DataTimeout
from conduit.plane.device.mirror import Mirror
from conduit.plane.device.row_sources import BASE, Nowhere, Registered
from tests.gpu.device.conftest import SCHEMA, SMALL, Source, host_only

FLOATS = {"obs": conduit.scale(1 / 255), "pose": conduit.scale(2.0, offset=1.0)}


def assert_equal(batch, other):
    """Every value and key of two batches, bit for bit."""
    assert list(batch) == list(other)
    for name, want in batch.items():
        have = other[name].cpu()
        assert have.dtype == want.dtype, name
        assert torch.equal(have, want) or torch.equal(have.nan_to_num(), want.nan_to_num()), name
    for key in ("ids", "versions", "episodes", "steps"):
        assert torch.equal(getattr(other, key).cpu(), getattr(batch, key)), key


def compare(engine, source, device, *, rounds=3, rows=25, pool=None, **options):
    """Batches of a loader on the CPU and of one on a device, while pages are overwritten; returns the device's loader."""
    options = {"batch_size": 8, "seed": 7, **options}
    with (
        engine.loader("replay", **options) as loader,
        engine.loader("replay", device=device, pool=pool, **options) as other,
    ):
        for _ in range(rounds):
            if isinstance(other.residence, Mirror):
                other.residence.fill()
            assert_equal(loader.next(), other.next())
            source(rows)
        assert other.stats.rows == loader.stats.rows
        return other


WINDOWS = [
    None,
    conduit.Transition(n_step=3, gamma=0.9, stack=3),
    conduit.Transition(stack=2, padding="zero", newest="bootstrap"),
    conduit.Sequence(5, burn_in=1, next_obs=True),
    conduit.Episode(9),
]
POOLS = {"whole table": "1 MiB", "three pages": 200_000, "registered": None}


@pytest.mark.parametrize(
    ("window", "pool"),
    [(window, "three pages") for window in WINDOWS] + [(None, "whole table"), (WINDOWS[1], "registered")],
    ids=str,
)
def test_batches_equal_the_cpus_while_pages_are_overwritten(make, device, window, pool):
    engine = make(max_stack=3, max_n_step=3, max_length=9)
    source = Source(engine)(290)
    loader = compare(engine, source, device, window=window, pool=POOLS[pool], batch_size=6, rounds=3, transform=FLOATS)
    assert isinstance(loader.residence, Registered if pool == "registered" else Mirror)
    # some rows were read by the device itself, and but for the pool that has all pages, some were copied
    assert loader.copied_rows < loader.stats.rows
    if pool == "three pages":
        assert loader.copied_rows > 0


def test_rollouts_of_many_environments_equal_the_cpus(make, device):
    engine = make(max_length=6, page_rows=96, num_envs=3)
    source = Source(engine, envs=3)(60)
    compare(engine, source, device, window=conduit.Rollout(5, 3, next_obs=True), batch_size=2, rows=5, pool="1 MiB")


def test_moved_images_equal_the_cpus(make, device):
    engine = make()
    source = Source(engine)(100)
    shift = {"obs": (conduit.random_shift(3), conduit.scale(1 / 255, offset=0.5))}
    compare(engine, source, device, transform=shift, pool="1 MiB", fields=["next_obs", "obs", "action"])
    compare(engine, source, device, transform=shift, pool=150_000, fields=["obs"])


@pytest.mark.parametrize("normalize", ["batch", "buffer"])
def test_prioritized_batches_equal_the_cpus(make, device, normalize):
    engine = make(priorities=conduit.Priorities())
    source = Source(engine)(200)
    sampling = conduit.Prioritized(beta=0.6, normalize=normalize)
    options = {"batch_size": 8, "seed": 2, "sampling": sampling, "transform": FLOATS}
    rng = np.random.default_rng(1)
    with (
        engine.loader("replay", **options) as loader,
        engine.loader("replay", device=device, pool="1 MiB", **options) as other,
    ):
        for _ in range(3):
            batch, same = loader.next(), other.next()
            assert_equal(batch, same)
            other.residence.fill()
            assert other.update_priorities(same.ids, torch.as_tensor(rng.random(8), device=device.place)) == 0
            source(10)


def test_narrow_rows_and_what_only_the_host_can_make_come_as_one_copy(make, device):
    engine = make(SMALL)
    source = Source(engine)(100)
    assert compare(engine, source, device, batch_size=64).residence is None
    engine = make(statistics=("pose",))
    source = Source(engine)(100)
    transform = {"pose": conduit.normalize(update=True, dtype="bfloat16"), "action": conduit.one_hot(500)}
    fields = ["obs", "pose", "action", "terminated"]
    with engine.loader("replay", batch_size=9, device=device, transform=transform, fields=fields) as loader:
        assert loader.residence is None
        batch = loader.next()
        assert batch["pose"].dtype == torch.bfloat16
        assert batch["action"].shape == (9, 500)
        # the image's first byte is 3 * action
        assert torch.equal((3 * batch["action"].argmax(1)) % 256, batch["obs"][:, 0, 0].long())
    with pytest.raises(ConfigError, match="Expected a plan that the device can make out of a pool, got one_hot"):
        engine.loader("replay", batch_size=9, device=device, transform=transform, pool="1 MiB")


def test_ragged_fields_come_as_the_host_makes_them(make, device):
    schema = conduit.Schema([conduit.Field("tokens", "int32", (7,), ragged=True), conduit.Field("action", "int64")])
    engine = make(schema)
    with engine.writer("replay") as writer:
        for n in range(60):
            writer.append(tokens=np.arange(n % 8, dtype=np.int32), action=n)
    for layout in ("pad", "pack"):
        compare(engine, lambda rows: None, device, ragged=layout, fields=("tokens", "action"))


@host_only
def test_memory_that_cannot_be_registered_is_copied_from(make, device, monkeypatch):
    monkeypatch.setattr(type(device), "register", lambda *_: "the limit is too low")
    engine = make()
    source = Source(engine)(100)
    loader = compare(engine, source, device, transform=FLOATS)
    assert isinstance(loader.residence, Nowhere)
    assert loader.copied_rows == loader.stats.rows


@pytest.mark.parametrize("pool", [None, "1 MiB"])
def test_rows_that_are_overwritten_between_draw_and_copy_are_drawn_again(make, device, pool, monkeypatch):
    """Writers go round the table after the draw: what the host would copy, or lease, is gone by then."""
    engine = make(SCHEMA, capacity=200)
    source = Source(engine)(150)
    with engine.loader("replay", batch_size=10, device=device, pool=pool, fields=["obs", "action"]) as loader:
        settle, rounds = loader.residence.settle, []

        def overtaken(pages, generations):
            if len(rounds) < 2:
                rounds.append(len(pages))
                source(1000)
            settle(pages, generations)

        monkeypatch.setattr(loader.residence, "settle", overtaken)
        batch = loader.next()
        assert rounds == [10, 10]
        assert loader.stats.redrawn == 20
        assert loader.valid(batch.ids).all()
        assert (batch["action"] >= 1900).all()
        want = (np.arange(32 * 33) + 3 * batch["action"].cpu().numpy()[:, None]).astype(np.uint8)
        assert torch.equal(batch["obs"].cpu(), torch.from_numpy(want).view(10, 32, 33))


def test_stale_rows_are_refused_as_on_the_cpu(engine_name, device):
    table = conduit.Table(SMALL, 300, page_rows=48)
    weights = {"policy": {"w": np.zeros(3, np.float32)}}
    with conduit.Engine.create(engine_name, {"replay": table}, policies=weights) as engine:
        policy = engine.policy("policy")
        with engine.writer("replay", policy=policy) as writer:
            for n in range(120):
                if n % 20 == 0:
                    policy.publish({"w": np.zeros(3, np.float32)})
                    policy.poll()
                writer.append(obs=np.full(4, n, np.float32), action=n, reward=1.0)
        loader = compare(engine, lambda rows: None, device, pool="1 MiB", max_staleness=2, policy=policy, batch_size=20)
        assert sum(loader.stats.stale.values()) > 0
        assert set(loader.stats.stale) <= {3, 4, 5}


def test_too_few_rows_are_waited_for_and_said(make, device):
    engine = make(SMALL)
    with engine.loader("replay", batch_size=8, device=device, pool="1 MiB", timeout=0.05) as loader:
        with pytest.raises(DataTimeout, match="Expected at least 8 sampleable rows"):
            loader.next()
        Source(engine)(60)
        assert len(loader.next()["action"]) == 8


def test_a_batch_stays_as_it_is_when_later_ones_are_made_and_its_rows_are_overwritten(make, device):
    engine = make()
    source = Source(engine)(200)
    with engine.loader("replay", batch_size=6, device=device, pool="1 MiB", buffers=2) as loader:
        kept = [loader.next() for _ in range(6)]
        before = [{name: value.clone() for name, value in batch.items()} for batch in kept]
        source(400)
        for _ in range(4):
            loader.next()
        for batch, values in zip(kept, before, strict=True):
            assert all(torch.equal(batch[name], value) for name, value in values.items())
        assert not loader.valid(kept[0].ids).any()


def test_pages_under_a_batch_are_leased_until_its_event_has_passed(make, device):
    """Of a table of few pages all that a batch reads are held, and let go when the next one begins."""
    engine = make(capacity=400, page_rows=100)
    source = Source(engine)(250)
    with engine.loader("replay", batch_size=16, device=device) as loader:
        batch = loader.next()
        residence = loader.residence
        held = np.flatnonzero(residence.places[:, BASE] >= 0).tolist()
        assert held
        assert loader.copied_rows == 0
        source(600)
        pages = engine._views["replay"].pages()
        assert all(pages[page, 0] >> 16 == residence.places[page, 1] for page in held), "a leased page was reused"
        batch["obs"].cpu()  # waits for the device
        residence.refresh()
        assert (residence.places[:, BASE] < 0).all()
        source(600)
        pages = engine._views["replay"].pages()
        assert all(pages[page, 0] >> 16 != residence.places[page, 1] for page in held)


@pytest.mark.parametrize("pool", [None, "1 MiB"])
def test_ranks_deliver_the_batches_of_one_loader_in_turn(make, device, pool):
    engine = make()
    Source(engine)(200)
    options = {"batch_size": 6, "seed": 3}
    with (
        engine.loader("replay", **options) as whole,
        engine.loader("replay", device=device, pool=pool, shard=(0, 2), **options) as first,
        engine.loader("replay", device=device, pool=pool, shard=(1, 2), **options) as second,
    ):
        for _ in range(3):
            assert_equal(whole.next(), first.next())
            assert_equal(whole.next(), second.next())
