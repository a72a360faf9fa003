"""What a capacity promises: rows of one writer, however its episodes end, and a page for each of many writers."""

import re

import numpy as np
import pytest

import conduit
from conduit.errors import Busy, CapacityError, ConfigError, SpaceTimeout
from conduit.store.format import words as w
from conduit.store.format.page_sizes import MAX_PAGE_ROWS
from conduit.store.format.table_spec import geometry
from tests.plane.conftest import CARTPOLE

OBS = np.zeros(4, np.float32)
ROW = {"obs": OBS, "action": 0, "reward": 0.0}


def tick(num_envs):
    if num_envs is None:
        return ROW
    return {
        "obs": np.zeros((num_envs, 4), np.float32),
        "action": np.zeros(num_envs, np.int64),
        "reward": np.zeros(num_envs, np.float32),
    }


@pytest.mark.parametrize("share", [0.0, 0.05, 0.3, 1.0], ids="{:.0%} of steps end an episode".format)
@pytest.mark.parametrize(
    ("capacity", "num_envs", "options"),
    [
        (100, None, {}),
        (1000, None, {"max_n_step": 5, "max_stack": 4}),
        (2000, 16, {}),
        (2000, 16, {"page_rows": 200, "mean_episode": 1}),
        (3000, None, {"writers": 1, "mean_episode": 1}),
        (3000, 4, {"writers": 20, "max_length": 12, "mean_episode": 1}),
    ],
    ids=str,
)
def test_a_writer_keeps_as_many_rows_as_the_capacity_says_however_many_of_them_end(
    make, capacity, num_envs, options, share
):
    engine = make(capacity=capacity, num_envs=num_envs or 1, **options)
    view, lanes = engine._views["replay"], num_envs or 1
    row, rng = tick(num_envs), np.random.default_rng(0)
    lowest = capacity
    with engine.writer("replay", num_envs=num_envs, autoreset="disabled") as writer:
        for number in range(3 * capacity // lanes):
            ends = rng.random(lanes) < share
            writer.append(**row, terminated=ends if num_envs else bool(ends[0]), final=row["obs"])
            if number * lanes >= capacity:
                lowest = min(lowest, view.rows_visible())
    assert lowest >= capacity


def test_rows_go_although_pages_for_other_writers_are_free(make):
    """The horizon is what was asked for, and a page or two, not all the memory that there is."""
    engine = make(capacity=1000)
    view = engine._views["replay"]
    with engine.writer("replay") as writer:
        for _ in range(5000):
            writer.append(**ROW)
    assert 1000 <= view.rows_visible() <= 1150
    assert view.layout.rows > 2000


def test_a_leased_table_lets_its_writer_go_on_in_the_pages_that_are_free(make):
    """Where every page with rows is leased, a free one is taken although enough rows are there."""
    engine = make(capacity=20)
    view = engine._views["replay"]
    with engine.writer("replay", on_full="raise") as writer:
        for _ in range(20):
            writer.append(**ROW)
        sealed = np.flatnonzero(view.pages()[:, w.PAGE_STATE // 8] & w.KIND_MASK == w.SEALED)
        held = [view.lease(page) for page in sealed[:15].tolist()]
        before = [lease.column("obs").copy() for lease in held]
        for _ in range(150):
            writer.append(**ROW)
        for lease, rows in zip(held, before, strict=True):
            np.testing.assert_array_equal(lease.column("obs"), rows)
            lease.end()


@pytest.mark.parametrize("capacity", [100, 10_000, 100_000])
def test_sixty_four_writers_of_one_environment_need_not_be_told_of(make, capacity):
    engine = make(capacity=capacity)
    writers = [engine.writer("replay", on_full="raise") for _ in range(64)]
    for _ in range(3 * capacity // 64):
        for writer in writers:
            writer.append(**ROW)
    assert engine._views["replay"].rows_written() == 3 * capacity // 64 * 64


def test_a_writer_of_sixty_four_environments_need_not_be_told_of(make):
    engine = make(capacity=10_000)
    row = tick(64)
    with engine.writer("replay", num_envs=64, autoreset="same_step", on_full="raise") as writer:
        for _ in range(500):
            writer.append(**row)
    assert engine._views["replay"].rows_visible() >= 10_000


def test_a_table_is_made_for_as_many_writers_as_are_declared(make):
    engine = make(capacity=10_000, writers=300)
    writers = [engine.writer("replay", on_full="raise") for _ in range(300)]
    for _ in range(100):
        for writer in writers:
            writer.append(**ROW)
    view = engine._views["replay"]
    assert view.rows_written() == 30_000
    assert view.rows_visible() >= 10_000


@pytest.mark.parametrize("capacity", [100, 10_000, 1_000_000, "2 MiB"])
def test_the_remedy_that_a_full_table_names_helps(make, capacity):
    def fill(engine):
        writers = []
        for _ in range(300):
            writers.append(engine.writer("replay", on_full="raise"))
            writers[-1].append(**ROW)

    engine = make(capacity=capacity, writers=4)
    with pytest.raises(Busy, match=r"of its \d+ pages of \d+ rows (\d+) are being written") as caught:
        fill(engine)
    assert "by 1 processes" not in str(caught.value)
    least = int(re.search(r"writers=<as many as are open at once>, at least (\d+)", str(caught.value))[1])
    assert least <= 300
    fill(make(capacity=capacity, writers=300))


def test_a_full_table_tells_its_writers_who_wait_too(make):
    engine = make(capacity=20, page_rows=8, writers=1)
    holders = [engine.writer("replay") for _ in range(engine._views["replay"].layout.pages)]
    for holder in holders:
        holder.append(**ROW)
    writer = engine.writer("replay", timeout=0.01)
    with pytest.raises(
        SpaceTimeout, match=r"5 are being written, by 5 writers in 1 process, and 0 are leased.*at least 6"
    ):
        writer.append(**ROW)


def test_a_capacity_in_bytes_stays_a_bound_and_has_pages_for_many_writers():
    for size in (2 << 20, 64 << 20):
        table = conduit.Table(CARTPOLE, str(size))
        with conduit.Engine.create(f"bytes-{size}", {"t": table}) as engine:
            layout = engine._views["t"].layout
            assert layout.pages >= 72
            assert layout.pages * (256 + layout.page_rows * 46) <= size


@pytest.mark.parametrize(
    ("options", "error", "expected"),
    [
        ({"capacity": 10**13}, CapacityError, "at most 65536 pages"),
        ({"capacity": 10**30}, CapacityError, "a capacity of at most .* rows"),
        ({"capacity": f"{'9' * 400} GB"}, CapacityError, "a size of at most"),
        ({"capacity": "1000000000 TB"}, CapacityError, "a size of at most"),
        (
            {"capacity": 1000, "page_rows": MAX_PAGE_ROWS + 1},
            CapacityError,
            "at most 67,108,864 rows per page.*26 bits",
        ),
        ({"capacity": 1000, "num_envs": 1 << 26}, CapacityError, "at most 67,108,864 rows per page"),
        ({"capacity": 1000, "max_length": 1 << 40}, CapacityError, "at most 67,108,864 rows per page"),
        ({"capacity": 10**12 + 10**11, "page_rows": MAX_PAGE_ROWS}, CapacityError, "at most 1,099,511,627,776 rows"),
        ({"capacity": 1000, "writers": 10**6}, CapacityError, "at most 65536 pages.*lower the capacity, or writers"),
        ({"capacity": "1 MiB", "writers": 50_000}, CapacityError, "at least 50002 pages.*lower writers"),
        ({"capacity": 1000, "writers": 0}, ConfigError, "writers of at least 1, got 0"),
        ({"capacity": 1000, "writers": True}, ConfigError, "writers of at least 1, got True"),
        ({"capacity": 1000, "mean_episode": 0.5}, ConfigError, "mean_episode of at least 1, got 0.5"),
        ({"capacity": 1000, "mean_episode": float("nan")}, ConfigError, "mean_episode of at least 1, got nan"),
    ],
    ids=str,
)
def test_what_the_words_of_a_segment_cannot_represent_is_refused_by_name(options, error, expected):
    with pytest.raises(error, match=expected):
        conduit.Table(CARTPOLE, **options)


def test_the_page_rows_that_an_error_names_are_enough():
    with pytest.raises(CapacityError, match="raise page_rows to at least") as caught:
        conduit.Table(CARTPOLE, 10**7, page_rows=20)
    enough = int(re.search(r"at least (\d+)", str(caught.value).split("raise page_rows")[1])[1])
    assert geometry(conduit.Table(CARTPOLE, 10**7, page_rows=enough)).pages <= 65536
    with pytest.raises(CapacityError, match="at most 65536 pages"):
        conduit.Table(CARTPOLE, 10**7, page_rows=enough - 1)
