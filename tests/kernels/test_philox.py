"""The counter-based generator: the published answers, and indices without bias."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from conduit.native import philox
from conduit.native.jit import entry

WORDS = st.integers(0, 2**64 - 1)


def signed(value):
    return value - 2**64 if value >= 2**63 else value


def test_the_published_answers_of_philox_4x32_10():
    """Random123's kat_vectors: counter, key, result, as 32-bit words from the lowest on."""
    for counter, key, result in (
        ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([2**32 - 1] * 4, [2**32 - 1] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ):
        seed, lane, draw = (signed(low | high << 32) for low, high in (key, counter[:2], counter[2:]))
        first, second = philox.random_pair(seed, draw, lane)
        assert [int(first) & 0xFFFFFFFF, int(first) >> 32, int(second) & 0xFFFFFFFF, int(second) >> 32] == result


@given(random=WORDS, n=st.integers(1, 2**63 - 1))
def test_scaling_is_the_high_half_of_the_full_product(random, n):
    assert philox.scale_to(np.uint64(random), n) == random * n >> 64


def test_indices_are_spread_evenly_over_any_range():
    for n in (1, 2, 3, 10, 1000, 2**40 + 1):
        out = np.zeros(20_000, np.int64)
        assert entry(philox.indices)(7, 1, n, len(out), out.ctypes.data) == len(out)
        assert out.min() >= 0
        assert out.max() < n
        counts = np.bincount(out * 10 // n if n >= 10 else out, minlength=min(n, 10))
        expected = len(out) / len(counts)
        assert ((counts - expected) ** 2 / expected).sum() < 40


def test_another_seed_draw_or_lane_gives_other_numbers():
    pairs = {
        tuple(int(x) for x in philox.random_pair(seed, draw, lane))
        for seed in (0, 1, -1)
        for draw in (0, 1, 2**40)
        for lane in (0, 1, 2**33)
    }
    assert len({number for pair in pairs for number in pair}) == 54


def test_no_two_uses_of_the_generator_share_a_counter():
    """The table of conduit.native.philox, at the corners of every number in it."""
    slots, pairs = (0, 2, 2**32, 2**33 - 2), (0, 1, 2**31, 2**32 - 1)
    lanes = [
        (philox.draw_lane(slot, attempt, tries), "row", slot, attempt, tries)
        for slot in slots
        for attempt in (0, 1, 2**11, 2**12 - 1)
        for tries in (0, 1, 2**18, 2**19 - 1)
    ]
    picks = {"image": (0, 1, philox.PICK_GOALS - 1), "goal": (philox.PICK_GOALS,)}
    lanes += [
        (philox.pick_lane(pick, slot), what, pick, slot)
        for what, numbers in picks.items()
        for pick in numbers
        for slot in pairs
    ]
    assert len({lane % 2**64 for lane, *_ in lanes}) == len(lanes)
    # a pair of slots shares 128 bits, of which each takes half
    assert philox.draw_lane(6, 3, 2) == philox.draw_lane(7, 3, 2) != philox.draw_lane(8, 3, 2)
