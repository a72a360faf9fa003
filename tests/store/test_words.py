"""The words of a line, a table, a seat or a descriptor lie beside each other: each has its own bytes, and all have room."""

import itertools

import pytest

from conduit.store.format import episode_records, layout, words
from conduit.store.ingest import report_episodes
from conduit.store.segment import participants
from conduit.store.tables import loader_cursors

NO_WORDS = {"TABLE_CONTROL_BYTES", "ARENA_BYTES", "HEADER_BYTES", "LOADER_BYTES", "REWARD_BYTES"}
"""Constants that are sizes, beside those that end in _WORDS."""

BYTES = {
    "TABLE_DATA": 16,  # a count and a flag
    "TABLE_SPACE": 16,
    "POLICY_EVENT": 16,
    "TABLE_RECENT_LEAF": 24,
    "TABLE_CLIPPED": 16,
    "TABLE_LIMITS": 8 + 2 * words.LIMITS_BYTES,
    "SEAT_WEIGHING": 8 * words.WEIGHING_MARKS,
    "PROCESS_SLOTS": 8 * words.HAZARDS_PER_PARTICIPANT,
    "HEADER_UUID": 16,
    "LINE_NAME": words.LINE - 8 * participants.LINE_NAME,  # the rest of the line
}
"""Bytes of the words that are more than one."""

FAMILIES = {
    "page block": (words, "PAGE_", 1, words.LINE),
    "side line": (words, "SIDE_", 1, words.LINE),
    "table control": (words, "TABLE_", 1, words.TABLE_CONTROL_BYTES),
    "policy control": (words, "POLICY_", 1, words.LINE),
    "seat line": (words, "SEAT_", 1, words.LINE),
    "table descriptor": (words, "VIEW_", 1, 8 * words.VIEW_WORDS),
    "writer": (words, "WRITER_", 1, 8 * words.WRITER_WORDS),
    "arena": (words, "ARENA_", 1, words.ARENA_BYTES),
    "process seat": (words, "PROCESS_", 1, 8 * words.PROCESS_WORDS),
    "hold": (words, "HOLD_", 1, 8 * words.HOLD_WORDS),
    "header": (layout, "HEADER_", 1, layout.HEADER_BYTES),
    "named loader": (loader_cursors, "LOADER_", 8, words.LINE),
    "participant line": (participants, "LINE_", 8, layout.PARTICIPANT_BYTES),
    "episode": (episode_records, "RECORD_", 1, 56),
    "reports of a writer": (report_episodes, "REPORT_", 1, 8 * report_episodes.REPORT_WORDS),
    "source of a reward": (report_episodes, "REWARD_", 1, report_episodes.REWARD_BYTES),
}
"""Where the names are, what they begin with, bytes of their unit, and bytes that there are for them."""


def named(module, prefix, unit):
    """{name: (first byte, byte behind the last)}."""
    found = {}
    for name, value in vars(module).items():
        if name.startswith(prefix) and type(value) is int and name not in NO_WORDS and not name.endswith("_WORDS"):
            found[name] = (value * unit, value * unit + BYTES.get(name, 8))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_no_two_words_of_a_kind_of_line_overlap(family):
    module, prefix, unit, size = FAMILIES[family]
    found = sorted(named(module, prefix, unit).items(), key=lambda item: item[1])
    assert found
    for name, (first, behind) in found:
        assert first % 8 == 0, name
        assert behind <= size, f"{name} ends at {behind} of {size}"
    for (name, (_, behind)), (after, (first, _)) in itertools.pairwise(found):
        assert behind <= first, f"{after} lies in {name}"


@pytest.mark.parametrize("family", ["table descriptor", "writer", "process seat", "hold", "arena"])
def test_a_descriptor_has_as_many_words_as_have_names(family):
    module, prefix, unit, size = FAMILIES[family]
    used = sum(behind - first for first, behind in named(module, prefix, unit).values())
    assert used == size


def test_the_copies_of_the_limits_lie_in_their_line():
    assert words.TABLE_LIMITS % words.LINE + BYTES["TABLE_LIMITS"] <= words.LINE


def test_every_word_that_is_said_to_be_longer_is_there():
    names = {name for module, prefix, unit, _ in FAMILIES.values() for name in named(module, prefix, unit)}
    assert set(BYTES) <= names
