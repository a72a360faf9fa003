"""The ways of a row: found in what runs, and in what kernels can reach."""

from __future__ import annotations

import pytest

from conduit.plane.deliver import fill
from conduit.store.ingest import append_objects
from conduit.store.pages import deletion
from perf import visits


@pytest.fixture(scope="module")
def ways():
    return visits.in_a_fresh_process()


def test_a_row_is_followed_from_the_writer_through_kernels_and_callbacks_to_the_batch(ways):
    way = ways["append to next"]
    assert way["modules"][0].startswith("conduit.plane.ingest.")
    assert {"conduit.plane.deliver.loader", "conduit.kernels.cpu.job", "conduit.sampling.uniform"} <= set(
        way["modules"]
    )
    assert {"conduit.store.pages.protocol", "conduit.sampling.uniform"} <= set(way["kernels"]) <= set(way["modules"])
    assert "conduit.sampling.prioritized_draw" not in way["modules"]


@pytest.mark.parametrize("name", visits.MOST)
def test_a_row_visits_few_modules_and_no_room_twice_on_its_way_down(ways, name):
    way = ways[name]
    assert len(way["modules"]) <= visits.MOST[name], way["modules"]
    assert (way["again"], way["up"]) == ([], [])


def test_what_a_checkpoint_does_once_is_no_part_of_a_rows_way(ways):
    modules = set(ways["checkpoint to restore"]["modules"])
    assert {"conduit.store.checkpoint.files", "conduit.store.checkpoint.restore"} <= modules
    assert not modules & {"conduit.schema", "conduit.store.format.table_spec", "conduit.sampling.uniform"}


def test_kernels_are_followed_by_name():
    reached, waiting = set(), [fill.fill, deletion.still_valid]
    while waiting:
        one = waiting.pop()
        if one not in reached:
            reached.add(one)
            waiting += [found for found in visits.callees(one.function) if isinstance(found, visits.Declared)]
    assert {deletion.is_present, fill.write_meta} <= reached
    assert append_objects.append_row not in reached


def test_a_chain_that_comes_back_to_a_room_is_told_and_one_that_goes_up():
    way = visits.Tracer().way([("conduit.plane.client", "conduit.store.tables.view", "conduit.store.pages.protocol")])
    assert (way.again, way.up) == (set(), set())
    back = ("conduit.plane.client", "conduit.store.tables.view", "conduit.plane.engine")
    way = visits.Tracer().way([back])
    assert way.again == {("plane", "store.tables", "plane")}
    assert way.up == {("store.tables", "plane")}
    assert way.modules == list(back)


def test_of_two_counts_the_chains_that_grew_and_what_leads_to_them_remain():
    few = {("a",): 1, ("a", "b"): 1, ("a", "c"): 1, ("d",): 1}
    many = {("a",): 1, ("a", "b"): 3, ("a", "c"): 1, ("d",): 1, ("a", "e"): 1}
    assert visits.grown(few, many) == [("a",), ("a", "b"), ("a", "e")]
