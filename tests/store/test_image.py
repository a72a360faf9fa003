"""A page as bytes: exactly the rows that were written to it, and refused once they are not that page's any more."""

import threading

import numpy as np
import pytest

import conduit
from conduit.errors import BadSegment
from conduit.native.jit import entry
from conduit.store.format import words as w
from conduit.store.pages import protocol
from conduit.store.pages.image import Extent, row_parts

WIDE = 130
"""Bytes of an observation: rows of it lie 192 bytes apart."""
SCHEMA = conduit.Schema(
    [
        conduit.Field("obs", "uint8", (WIDE,), observation=True),
        conduit.Field("tokens", "int16", (9, 3), observation=True, ragged=True),
        conduit.Field("number", "int64"),
    ]
)


def obs(number):
    return np.full(WIDE, number % 251, np.uint8)


def tokens(number):
    return np.full((number % 10, 3), number, np.int16)


def observation(number):
    return {"obs": obs(number), "tokens": tokens(number)}


def write(writer, start, count, every=7):
    """Steps that prove themselves by their number; each `every`-th ends an episode, with -number - 1 as the final one."""
    for number in range(start, start + count):
        final = observation(number + 5000) if number % every == every - 1 else None
        writer.append(**observation(number), number=number, terminated=final is not None, final=final)


@pytest.fixture
def engine(engine_name):
    table = conduit.Table(SCHEMA, 160, page_rows=40, max_times_sampled=3, priorities=conduit.Priorities())
    with conduit.Engine.create(engine_name, {"replay": table}) as engine:
        yield engine


def extents(view):
    """Of all pages that hold rows, oldest first."""
    words = view.pages()
    kinds = words[:, w.PAGE_STATE // 8] & w.KIND_MASK
    live = np.flatnonzero((kinds != w.FREE) & (words[:, w.PAGE_COMMITTED // 8] > 0))
    order = live[np.argsort(words[live, w.PAGE_TICK // 8])]
    return [Extent.of(page, words[page], view.layout.page_rows) for page in order.tolist()]


def image(view, extent):
    """{column or ragged field: its bytes}, copied."""
    found = {
        one.name: b"".join(part.tobytes() for part in view.images.rows(one, extent)) for one in view.images.columns
    }
    return found | {f"values of {name}": values.tobytes() for name, values in view.images.values(extent)}


def test_an_image_has_the_bytes_of_every_row_and_value_that_was_written(engine):
    view = engine._views["replay"]
    with engine.writer("replay", autoreset="same_step") as writer:
        write(writer, 0, 130)
    seen = set()
    assert sum(extent.tail for extent in extents(view)) > 8
    for extent in extents(view):
        found = image(view, extent)
        # an observation is kept for a row of this page, from the page's end on in the order of time
        numbers = np.frombuffer(found["number"], np.int64)[: extent.rows].tolist()
        kept = [number + 5000 for number in numbers if number % 7 == 6][::-1]
        assert len(kept) == extent.tail
        rows = [*numbers, *kept]
        assert found["obs"] == b"".join(obs(number).tobytes() for number in rows)
        spans = np.frombuffer(found["tokens"], [("start", "<u4"), ("length", "<u4")])
        values = np.frombuffer(found["values of tokens"], np.int16).reshape(-1, 3)
        assert len(spans) == len(rows)
        for (start, length), number in zip(spans.tolist(), rows, strict=True):
            np.testing.assert_array_equal(values[start : start + length], tokens(number))
        assert len(values) == sum(number % 10 for number in rows), "no item behind the last one"
        assert found["terminated"][: extent.rows] == bytes(number % 7 == 6 for number in numbers)
        assert set(found) >= {"truncated", "meta", "priority", "sampled"}
        seen |= set(numbers)
    assert seen == set(range(130))


def test_a_page_that_was_restored_has_the_image_it_had(engine, engine_name, tmp_path):
    view = engine._views["replay"]
    with engine.writer("replay", autoreset="same_step") as writer:
        write(writer, 0, 250)
        before = {extent.page: image(view, extent) for extent in extents(view)}
        engine.checkpoint(tmp_path)
        with conduit.Engine.restore(tmp_path, f"{engine_name}-again") as again:
            copy = again._views["replay"]
            after = {extent.page: image(copy, extent) for extent in extents(copy)}
    assert len(before) >= 4
    assert after == before


def test_a_page_that_was_overwritten_is_neither_held_nor_current(engine):
    view = engine._views["replay"]
    with engine.writer("replay", autoreset="same_step") as writer:
        write(writer, 0, 130)
        old = extents(view)[0]
        before = image(view, old)
        assert view.images.is_current(old)
        with view.hold(old):
            assert image(view, old) == before
        write(writer, 130, 200)
        assert view.hold(old) is None
        assert not view.images.is_current(old)
        assert image(view, old)["obs"] != before["obs"], "or there was nothing to refuse"


def test_a_page_in_use_is_an_image_of_the_rows_of_the_look_however_many_follow(engine):
    view = engine._views["replay"]
    with engine.writer("replay", autoreset="same_step") as writer:
        write(writer, 0, 10)
        (extent,) = extents(view)
        before = image(view, extent)
        write(writer, 10, 10)
        assert view.images.is_current(extent)
        with view.hold(extent):
            after = image(view, extent)
    tail = WIDE * extent.tail
    # kept observations lie from the page's end on: what came since is below them
    assert extent.rows == 10
    assert extent.tail == 1
    assert after["obs"][-tail:] == before["obs"][-tail:]
    assert after == before


def test_a_claim_that_is_given_back_leaves_the_rows_and_takes_the_generation(engine):
    view = engine._views["replay"]
    with engine.writer("replay", autoreset="same_step") as writer:
        write(writer, 0, 400)
        old = extents(view)[0]
        before = image(view, old)
        with view.hold(old):
            # as somebody who looked at the leases before this one was there
            page = entry(protocol.claim)(view.address, engine._participants.number, 1)
            assert page != old.page
            entry(protocol.free)(view.address, page)
        assert not view.images.is_current(old), "or no claim was given back"
        with view.hold(old):
            assert image(view, old) == before


@pytest.mark.parametrize("way", ["held", "checked afterwards"])
def test_while_writers_overwrite_a_table_each_image_is_whole_or_refused(engine, way):
    view = engine._views["replay"]
    stop = threading.Event()

    def overwrite():
        with engine.writer("replay", autoreset="same_step", timeout=10) as writer:
            number = 0
            while not stop.is_set():
                write(writer, number % 4000, 7)
                number += 7

    thread = threading.Thread(target=overwrite)
    thread.start()
    whole = refused = 0
    try:
        while whole < 40 or refused < 5:
            looked = extents(view)
            if refused < 5:
                stop.wait(0.002)  # long enough for a page to be overwritten
            for extent in looked:
                if way == "held":
                    lease = view.hold(extent)
                    if lease is None:
                        refused += 1
                        continue
                    with lease:
                        found = image(view, extent)
                else:
                    try:
                        found = image(view, extent)
                    except BadSegment:  # spans of two lives
                        assert not view.images.is_current(extent)
                        refused += 1
                        continue
                    if not view.images.is_current(extent):
                        refused += 1
                        continue
                numbers = np.frombuffer(found["number"], np.int64)[: extent.rows]
                halo = np.flatnonzero(np.diff(numbers) != 1)
                assert np.isin(numbers[halo + 1], 0).all(), numbers
                rows = np.frombuffer(found["obs"], np.uint8).reshape(-1, WIDE)
                assert (rows == rows[:, :1]).all()
                np.testing.assert_array_equal(rows[: extent.rows, 0], numbers % 251)
                whole += 1
    finally:
        stop.set()
        thread.join()
    assert whole >= 40
    assert refused >= 5


def test_a_span_that_leads_out_of_the_arena_is_refused(engine):
    view = engine._views["replay"]
    with engine.writer("replay", autoreset="same_step") as writer:
        write(writer, 0, 20)
    (extent,) = extents(view)
    view.columns["tokens"][extent.page * view.layout.page_rows + 3] = (1 << 31, 9)
    with pytest.raises(BadSegment, match="tokens"):
        image(view, extent)


@pytest.mark.parametrize(
    ("committed", "tail", "rows"), [(1 << 40, 3, (40, 0)), (-5, 3, (0, 3)), (38, 9, (38, 2)), (40, 0, (40, 0))]
)
def test_words_of_two_lives_make_no_more_rows_than_a_page_has(committed, tail, rows):
    words = np.zeros(w.LINE // 8, np.int64)
    words[w.PAGE_COMMITTED // 8], words[w.PAGE_TAIL // 8] = committed, tail
    extent = Extent.of(0, words, 40)
    assert (extent.rows, extent.tail) == rows


@pytest.mark.parametrize(
    ("rows", "tail", "known", "parts"),
    [
        (0, 0, 0, []),
        (4, 0, 0, [(0, 4)]),
        (4, 3, 0, [(0, 4), (7, 10)]),
        (4, 3, 4, [(7, 10)]),
        (6, 4, 2, [(2, 6), (6, 10)]),
    ],
)
def test_the_parts_of_a_page_are_its_rows_and_what_is_kept_at_its_end(rows, tail, known, parts):
    assert [(part.start, part.stop) for part in row_parts(10, rows, tail, known)] == parts
