"""Values of varying lengths, padded and packed, against the reference."""

import numpy as np
import pytest
import torch

from conduit.errors import ConfigError, FieldError
from conduit.kernels.gpu import ragged
from conduit.kernels.gpu.launch import recorded
from conduit.kernels.reference import gather
from conduit.kernels.reference.device import loss_mask
from conduit.kernels.spec.transforms import Transform

PAGES, PAGE_ROWS = 3, 6


class Memory:
    """Pages with arenas, their rows behind each other by a gap, and values that lie in them."""

    def __init__(self, device, shape, dtype, lengths, gap=0):
        rng = np.random.default_rng(6)
        self.items = sum(lengths) + 3
        self.values, self.spans = {}, np.zeros(PAGES * PAGE_ROWS, np.int64)
        arenas = (rng.random((PAGES, self.items, *shape)) * 250).astype(dtype)
        for page in range(PAGES):
            start = page
            for i, length in enumerate(lengths):
                row = page * PAGE_ROWS + i
                self.spans[row] = start | length << 32
                self.values[row] = arenas[page, start : start + length]
                start += length
        flat = np.zeros((PAGES, arenas[0].size + gap), arenas.dtype)
        flat[:, : arenas[0].size] = arenas.reshape(PAGES, -1)
        inner = torch.empty(arenas.shape[1:], device="meta").stride()
        self.arenas = device(flat).as_strided(arenas.shape, (flat.shape[1], *inner))
        self.device_spans = device(self.spans)


CASES = [
    pytest.param((), "int32", Transform("int32"), [5, 0, 9, 1, 2, 9], id="tokens"),
    pytest.param((), "int32", Transform("int64"), [5, 0, 9, 1, 2, 9], id="tokens to int64"),
    pytest.param((3,), "float32", Transform("float16", 0.01, 1.0), [2, 4, 0, 1, 3, 4], id="points scaled"),
    pytest.param((), "uint8", Transform("float32", 1 / 255), [700, 1, 0, 513, 2, 3], id="bytes over several tiles"),
    pytest.param((4,), "float32", Transform("float32"), [140, 139, 1, 0, 7, 8], id="items of 16 bytes"),
]
ROWS = [np.array([0, 13, 2, 5, 7, 8, 3, 3]), np.array([2]), np.array([4, -1, 16])]


@pytest.mark.parametrize(("shape", "dtype", "transform", "lengths"), CASES)
@pytest.mark.parametrize("rows", ROWS, ids=["eight", "one", "with a row that is none"])
@pytest.mark.parametrize("prompted", [False, True], ids=["", "prompts"])
def test_both_layouts_equal_the_reference(out, device, shape, dtype, transform, lengths, rows, prompted):
    memory = Memory(device, shape, dtype, lengths, gap=16)
    nothing = np.zeros((0, *shape), dtype)
    values = [memory.values.get(row, nothing) for row in rows.tolist()]
    longest, batch, kind = max(lengths), len(rows), getattr(torch, transform.dtype)
    work = np.float32 if dtype != "int32" else np.int64
    scaled = [
        v if transform.is_cast else v.astype(work) * work(transform.factor) + work(transform.offset) for v in values
    ]
    scaled = [v.astype(transform.dtype) for v in scaled]
    prompts = np.random.default_rng(1).integers(0, 4, batch)
    common = {"transform": transform, "page_rows": PAGE_ROWS}
    source = (memory.device_spans, memory.arenas, device(rows))

    def options(*shape):
        if not prompted:
            return {}
        return {"prompts": device(prompts), "loss_mask": out(shape, torch.uint8).view(torch.bool)}

    padded, mask = out((batch, longest, *shape), kind), out((batch, longest), torch.uint8).view(torch.bool)
    counts, given = out(batch, torch.int64), options(batch, longest)
    ragged.pad(*source, padded, mask, counts, **common, **given)
    want, want_mask, want_lengths = gather.padded(scaled, longest, shape)
    np.testing.assert_array_equal(padded.cpu(), want)
    np.testing.assert_array_equal(mask.cpu(), want_mask)
    np.testing.assert_array_equal(counts.cpu(), want_lengths)
    want_loss = loss_mask(want_lengths, prompts, longest)
    if prompted:
        np.testing.assert_array_equal(given["loss_mask"].cpu(), want_loss)

    room = batch * longest
    packed, starts, places = out((room, *shape), kind), out(batch + 1, torch.int32), out(room, torch.int32)
    given = options(room)
    before = [tensor.clone() for tensor in (packed, places)]
    ragged.pack(*source, packed, starts, places, longest=longest, **common, **given)
    want, want_starts, want_places = gather.packed(scaled)
    total = len(want)
    np.testing.assert_array_equal(starts.cpu(), want_starts)
    np.testing.assert_array_equal(packed[:total].cpu(), want)
    np.testing.assert_array_equal(places[:total].cpu(), want_places)
    assert torch.equal(packed[total:].view(torch.uint8), before[0][total:].view(torch.uint8))
    assert torch.equal(places[total:], before[1][total:])
    if prompted:
        np.testing.assert_array_equal(given["loss_mask"][:total].cpu(), want_loss[want_mask])


def test_spans_that_make_no_sense_lead_nowhere_else(out, device):
    """Torn spans: lengths and starts of any bits. The arena's neighbours are bands that must not be read as values."""
    memory = Memory(device, (), "int32", [4, 3])
    bits = np.random.default_rng(2).integers(-(2**63), 2**63 - 1, PAGES * PAGE_ROWS)
    bits[:3] = [-1, 5 << 32 | 0xFFFFFFFF, 0x7FFFFFFF << 32]
    rows, longest = np.arange(PAGES * PAGE_ROWS), 7
    padded, mask = out((len(rows), longest), torch.int32), out((len(rows), longest), torch.uint8).view(torch.bool)
    lengths = out(len(rows), torch.int64)
    ragged.pad(
        device(bits),
        memory.arenas,
        device(rows),
        padded,
        mask,
        lengths,
        transform=Transform("int32"),
        page_rows=PAGE_ROWS,
    )
    want = np.minimum(bits >> 32 & 0xFFFFFFFF, longest)
    start = np.minimum(bits & 0xFFFFFFFF, memory.items - want)
    np.testing.assert_array_equal(lengths.cpu(), want)
    arenas = memory.arenas.cpu().numpy()
    for i, row in enumerate(rows):
        np.testing.assert_array_equal(
            padded[i, : want[i]].cpu(), arenas[row // PAGE_ROWS, start[i] : start[i] + want[i]]
        )


def test_lengths_of_many_rows_are_summed_up(out, device):
    memory = Memory(device, (), "uint8", [3, 0, 1, 2, 2, 3])
    rows = np.random.default_rng(3).integers(0, PAGES * PAGE_ROWS, 1100)
    starts, room = out(1101, torch.int32), 1100 * 3
    with recorded() as launches:
        ragged.pack(
            memory.device_spans, memory.arenas, device(rows), out(room, torch.uint8), starts, out(room, torch.int32),
            longest=3, transform=Transform("uint8"), page_rows=PAGE_ROWS,
        )  # fmt: skip
    launches[0].kernel[(1,)](*launches[0].args, **launches[0].meta)
    lengths = memory.spans[rows] >> 32
    np.testing.assert_array_equal(starts.cpu(), np.concatenate([[0], np.cumsum(lengths)]))


def test_an_empty_batch_has_a_total_of_zero(out, device):
    memory = Memory(device, (), "int32", [4, 3])
    none = device(np.zeros(0, np.int64))
    starts = out(1, torch.int32)
    common = {"transform": Transform("int32"), "page_rows": PAGE_ROWS}
    empty = [out(0, torch.int32), starts, out(0, torch.int32)]
    ragged.pack(memory.device_spans, memory.arenas, none, *empty, longest=4, **common)
    assert starts.tolist() == [0]
    mask = out((0, 4), torch.uint8).view(torch.bool)
    ragged.pad(memory.device_spans, memory.arenas, none, out((0, 4), torch.int32), mask, out(0, torch.int64), **common)


def test_what_cannot_be_is_refused(out, device):
    memory = Memory(device, (), "int32", [4, 3])
    rows = device([0, 1])
    made = [device(np.zeros(8, np.int32)), device(np.zeros(3, np.int32)), device(np.zeros(8, np.int32))]
    options = {"longest": 4, "transform": Transform("int32"), "page_rows": PAGE_ROWS}
    source = (memory.device_spans, memory.arenas, rows)
    with pytest.raises(
        ConfigError, match="a longest value of 1 to 10 items, which an arena has, got 6 and 11 - at `tokens`"
    ):
        ragged.pack(*source, *made, **options | {"longest": 11})
    with pytest.raises(FieldError, match=r"Expected shape \[8\], got \[7\] - at `tokens.out`"):
        ragged.pack(*source, made[0][:7], *made[1:], **options)
    with pytest.raises(ConfigError, match="Expected both prompts and loss_mask, or neither - at `tokens`"):
        ragged.pack(*source, *made, prompts=rows, **options)
    with pytest.raises(FieldError, match=r"Expected arenas \[pages, items, \*shape\] - at `tokens`"):
        ragged.pack(memory.device_spans, rows, rows, *made, **options)
    with pytest.raises(FieldError, match="Expected an output of `int64`, got `int32`"):
        ragged.pack(*source, *made, **options | {"transform": Transform("int64")})
