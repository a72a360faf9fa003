"""The pool: what is in it is what the table has; what a writer took meanwhile is dropped."""

import gc
import threading
import time

import numpy as np
import pytest
import torch

from conduit.contracts.device import Event
from conduit.errors import CapacityError, ConfigError, LostDevice
from conduit.plane.device.host import HostDevice
from conduit.plane.device.mirror import Mirror
from conduit.plane.device.row_sources import BASE, GENERATION, ROWS, TAIL
from tests.gpu.device.conftest import SMALL, Source, host_only


class Late(Event):
    """An event that passes when it is told to."""

    def __init__(self, stream=0):
        self.stream = stream
        self.passed_at = threading.Event()

    def passed(self):
        return self.passed_at.is_set()

    def wait(self):
        assert self.passed_at.wait(30)


class Noting(HostDevice):
    """Host memory whose current stream is late: what it was given has not passed until `release`; notes what it does."""

    def __init__(self):
        super().__init__(1 << 26)
        self.done = []
        self.events = []

    def empty(self, size):
        self.done.append("empty")
        return super().empty(size)

    def record(self):
        self.done.append("record")
        self.events.append(Late())
        return self.events[-1]

    def stream(self, after):
        self.done.append("stream")
        made = super().stream(after)
        end = made.close
        made.close = lambda: (self.done.append("waited"), end())
        return made

    def release(self):
        for event in self.events:
            event.passed_at.set()


@host_only
def test_the_first_copies_wait_for_what_used_the_pools_memory_before(make):
    """The allocator hands out memory that work of the current stream may still use: the event is right behind it."""
    device = Noting()
    engine = make(SMALL)
    source, view = Source(engine), engine._views["replay"]
    mirror = Mirror(device, view, "1 MiB", None)
    assert device.done == ["empty", "record", "stream"]
    mirror._memory.fill_(77)
    source(100)
    mirror.refresh()
    time.sleep(0.1)
    assert mirror._flying
    assert not mirror._flying[0].event.passed()
    assert (mirror._memory == 77).all()
    device.release()
    mirror.fill()
    assert assert_mirrored(mirror, view) >= 90
    mirror.close()


@host_only
def test_copies_wait_for_the_last_batch_of_every_stream(make):
    engine = make(SMALL, capacity=600)
    source, view = Source(engine), engine._views["replay"]
    mirror = Mirror(HostDevice(1 << 26), view, 8000, None)
    source(400)
    mirror.fill()
    first, second, third = Late(7), Late(8), Late(8)
    for event in (first, second, third):
        mirror.batched(event)
    source(200)
    mirror.refresh()
    third.passed_at.set()
    time.sleep(0.1)
    assert not mirror._flying[0].event.passed(), "a batch of another stream still reads the pool"
    first.passed_at.set()
    mirror.fill()
    assert_mirrored(mirror, view)
    mirror.batched(third)
    assert list(mirror._reads) == [8]
    mirror.close()


@host_only
def test_a_mirror_that_is_dropped_waits_for_its_copies_and_one_that_could_not_be_made_for_none(make, device):
    class Failing(Noting):
        def stream(self, after):
            raise LostDevice("Expected cpu to go on working")

    engine = make(SMALL)
    Source(engine)(100)
    noting, view = Noting(), engine._views["replay"]
    mirror = Mirror(noting, view, "1 MiB", None)
    mirror.refresh()
    memory = mirror._memory
    threading.Timer(0.2, noting.release).start()
    del mirror
    gc.collect()
    assert noting.done[-1] == "waited"
    before = memory.clone()
    time.sleep(0.05)
    assert torch.equal(memory, before), "nothing is copied into it any more"
    for other, size in ((noting, 100), (Failing(), "1 MiB")):
        with pytest.raises((CapacityError, LostDevice)):
            Mirror(other, view, size, None)
    gc.collect()  # a destructor that fails would be an error of the test


@host_only
def test_a_mirror_is_closed_once_and_lets_go_also_of_a_device_that_was_lost(make):
    class Lost(Late):
        def wait(self):
            raise LostDevice("Expected cpu to go on working")

    engine = make(SMALL)
    mirror = Mirror(HostDevice(1 << 26), engine._views["replay"], "1 MiB", None)
    mirror.batched(Lost())
    with pytest.raises(LostDevice):
        mirror.close()
    assert mirror.closed
    assert mirror._memory is None
    mirror.close()


@pytest.fixture
def mirrored(make, device):
    """`mirrored(size, **options of the table)`: an engine, its source, and a mirror of its table."""
    made = []

    def create(size="1 MiB", schema=SMALL, envs=None, **options):
        engine = make(schema, num_envs=envs or 1, **options)
        view = engine._views["replay"]
        made.append(Mirror(device, view, size, None))
        return Source(engine, envs=envs), made[-1], view

    yield create
    for mirror in made:
        mirror.close()


def assert_mirrored(mirror, view):
    """Every row that the mirror tells of is the table's; returns how many there are."""
    rows = view.layout.page_rows
    found = 0
    for page in np.flatnonzero(mirror.places[:, BASE] >= 0).tolist():
        base, generation, have, tail = mirror.places[page].tolist()
        assert view.pages()[page, 0] >> 16 == generation
        for name, column in mirror.columns.items():
            source = getattr(view, name) if name == "meta" else view.columns[name]
            source = source.view(np.int32).reshape(-1, 4) if name == "meta" else source
            for begin, end in ((0, have), (tail, rows)):
                want = torch.from_numpy(source[page * rows + begin : page * rows + end].copy())
                assert torch.equal(column[base + begin : base + end].cpu(), want), (page, name)
        found += have
    return found


@pytest.mark.parametrize("envs", [None, 3])
def test_all_rows_and_kept_finals_are_mirrored_also_of_pages_that_are_being_written(mirrored, envs):
    source, mirror, view = mirrored(envs=envs, capacity=600)
    for _ in range(8):
        source(30 // (envs or 1))
        mirror.fill()
        live = view.pages()[mirror.places[:, BASE] >= 0]
        missing = live[:, 1].sum() - assert_mirrored(mirror, view)
        # of the page that is being written less than a part may be missing
        assert 0 <= missing < view.layout.page_rows // 8
    assert (mirror.places[mirror.places[:, BASE] >= 0, TAIL] < view.layout.page_rows).any()


def test_a_page_that_is_being_written_is_mirrored_in_parts(mirrored):
    source, mirror, view = mirrored()
    source(6)
    mirror.fill()
    (page,) = np.flatnonzero(mirror.places[:, BASE] >= 0)
    seen = [int(mirror.places[page, ROWS])]
    for _ in range(30):
        source(1)
        mirror.fill()
        if mirror.places[page, ROWS] != seen[-1]:
            seen.append(int(mirror.places[page, ROWS]))
    assert len(seen) > 3
    assert min(np.diff(seen)) >= view.layout.page_rows // 8
    assert assert_mirrored(mirror, view) == seen[-1]


@pytest.mark.parametrize("size", [9500, "1 MiB"], ids=["a part", "all"])
def test_whatever_the_order_of_writes_copies_and_refreshes_what_is_told_of_is_true(mirrored, size):
    """Copies run beside: they end whenever they do, also while three writers overwrite what they read."""
    source, mirror, view = mirrored(size, capacity=700)
    rng = np.random.default_rng(4)
    sources = [source, *(Source(source.engine, seed=seed) for seed in (1, 2))]
    told = 0
    for _ in range(150):
        sources[rng.integers(3)](int(rng.choice([1, 5, 40, 150], p=[0.4, 0.3, 0.2, 0.1])))
        mirror.refresh()
        told += assert_mirrored(mirror, view) > 0
        if rng.random() < 0.1:
            mirror.fill()
            assert assert_mirrored(mirror, view) > 0
    assert told > 50
    in_place = np.flatnonzero(mirror.places[:, BASE] >= 0)
    assert len(set((mirror.places[in_place, BASE] // view.layout.page_rows).tolist())) == len(in_place)


def test_the_newest_pages_are_in_a_pool_that_holds_a_part(mirrored):
    source, mirror, view = mirrored(9500, capacity=600)
    assert mirror.slots == 4
    for _ in range(6):
        source(200)
        mirror.fill()
        ages = view.pages()[:, 2]
        held = np.flatnonzero(mirror.places[:, BASE] >= 0)
        sealed = (view.pages()[:, 0] & 15) == 3
        others = np.setdiff1d(np.flatnonzero(sealed), held)
        assert len(held) == 4
        assert_mirrored(mirror, view)
        assert ages[held[sealed[held]]].min() > ages[others].max()


def test_pages_that_writers_took_are_forgotten_at_the_next_refresh(mirrored):
    source, mirror, view = mirrored(capacity=200)
    source(190)
    mirror.fill()
    before = mirror.places.copy()
    source(2000)
    mirror.refresh()
    held = (mirror.places[:, BASE] >= 0) & (before[:, BASE] >= 0)
    assert (mirror.places[held, GENERATION] != before[held, GENERATION]).all()
    mirror.fill()
    assert_mirrored(mirror, view)


@host_only
def test_a_page_that_is_overwritten_while_it_is_copied_is_dropped(mirrored):
    source, mirror, view = mirrored(capacity=200)
    source(190)
    goes_on = threading.Event()
    mirror._stream._thread.submit(goes_on.wait, 30)
    mirror.refresh()
    begun = len(mirror._flying)
    assert begun > 2
    assert (mirror.places[:, BASE] < 0).all(), "told of before it is copied"
    source(2000)
    goes_on.set()
    mirror._flying[-1].event.wait()
    mirror.refresh()
    assert mirror.dropped == begun
    assert mirror.copied == 0
    mirror.fill()
    assert assert_mirrored(mirror, view) > 100


def test_a_slot_is_filled_anew_only_after_what_reads_it(mirrored, device):
    """A copy into the pool waits for the event behind the last batch."""
    late = Late()
    source, mirror, view = mirrored(8000, capacity=600)
    source(400)
    mirror.fill()
    if device.place != "cpu":
        pytest.skip("of host memory as a device")
    mirror.batched(late)
    kept = {name: column.clone() for name, column in mirror.columns.items()}
    source(200)
    mirror.refresh()
    assert mirror._flying
    assert not mirror._flying[0].event.passed()
    assert all(column.numpy().tobytes() == kept[name].numpy().tobytes() for name, column in mirror.columns.items())
    late.passed_at.set()
    mirror.fill()
    assert_mirrored(mirror, view)


def test_a_pool_that_cannot_be_is_refused_with_what_it_would_need(make, device):
    engine = make(SMALL)
    view = engine._views["replay"]
    for size, error, message in (
        (100, CapacityError, r"Expected a pool of at least one page of this table, [\d,]+ bytes, got 100"),
        ("1 KB", CapacityError, "or create the table with a smaller page_rows - at pool"),
        (
            1 << 50,
            CapacityError,
            r"Expected a pool of at most the [\d,]+ bytes that are free on (cpu|cuda:0), got 1,125,",
        ),
        ("much", CapacityError, "Expected a size such as"),
        (1.5, ConfigError, "Expected a size such as '8 GiB', or bytes, got 1.5 - at pool"),
        (True, ConfigError, "got True - at pool"),
    ):
        with pytest.raises(error, match=message):
            engine.loader("replay", batch_size=4, device=device, pool=size)
        with pytest.raises(error):
            Mirror(device, view, size, None)
    if hasattr(device, "registered"):
        assert device.registered == {}, "what was registered before is given back"


def test_two_loaders_have_pools_of_their_own(make, device):
    engine = make(SMALL)
    Source(engine)(100)
    options = {"batch_size": 4, "device": device, "pool": "1 MiB"}
    with engine.loader("replay", **options) as one, engine.loader("replay", **options) as other:
        assert one.residence.columns["obs"].data_ptr() != other.residence.columns["obs"].data_ptr()
        one.residence.fill()
        assert (other.residence.places[:, BASE] < 0).all()
        assert torch.equal(one.next()["obs"], other.next()["obs"])
