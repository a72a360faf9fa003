"""Row operations of ragged fields against their references, with poisoned outputs, redraws and spans that make no sense."""

import ctypes
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import conduit
from conduit.errors import ConfigError
from conduit.kernels.cpu.ragged import describe_ragged
from conduit.kernels.reference import gather
from conduit.kernels.spec.conversion import as_steps, fuse
from conduit.kernels.spec.make_plan import make_plan
from conduit.kernels.spec.plan import Output
from conduit.kernels.spec.ragged import ragged_output
from conduit.store.format.columns import SPAN_DTYPE

POISON = 0xA5
PAGES, PAGE_ROWS = 3, 8

PIPELINES = [
    pytest.param("int32", (), (), id="int32 as it is"),
    pytest.param("uint8", (3,), (), id="three bytes an item"),
    pytest.param("bfloat16", (2,), (), id="bfloat16 as it is"),
    pytest.param("int32", (), (conduit.cast("int64"),), id="int32 to int64"),
    pytest.param("uint8", (5,), (conduit.scale(1 / 255),), id="bytes scaled"),
    pytest.param("float32", (3,), (conduit.cast("bfloat16"),), id="float32 to bfloat16"),
    pytest.param("float64", (), (conduit.scale(0.5, offset=1.0, dtype="float64"), conduit.clip(-1, 2)), id="clipped"),
]


class Memory:
    """Pages with arenas of a field, in the middle of poisoned memory, and values that lie in them."""

    def __init__(self, field, lengths, seed=0):
        self.field = field
        rng = np.random.default_rng(seed)
        self.items = max(sum(lengths), field.max_length) + 5
        page_bytes = -(-self.items * field.item_bytes // 128) * 128
        self.raw = np.full((PAGES + 2) * page_bytes, POISON, np.uint8)
        inner = field.shape[1:]
        strides = (page_bytes, *np.empty(field.shape, field.numpy_dtype).strides)
        self.arenas = np.ndarray((PAGES, self.items, *inner), field.numpy_dtype, self.raw, page_bytes, strides)
        self.spans = np.zeros(PAGES * PAGE_ROWS, SPAN_DTYPE)
        self.values = {}
        for page in range(PAGES):
            used = 0
            for i, length in enumerate(lengths):
                bits = rng.integers(0, 256, length * field.item_bytes, np.uint8)
                value = bits.view(field.numpy_dtype).reshape(length, *inner)
                if field.dtype.startswith("float"):
                    value = rng.normal(size=(length, *inner)).astype(field.dtype)
                row = page * PAGE_ROWS + i
                self.arenas[page, used : used + length] = value
                self.spans[row] = (used, length)
                self.values[row] = value
                used += length


class Made:
    """The three arrays of a batch, poisoned, with the operation that fills them."""

    def __init__(self, field, layout, pipeline, memory, rows):
        conversion = fuse(as_steps(pipeline, field.name), field)
        self.item = ragged_output(field.name, field, "anchor", layout, conversion, len(rows))
        self.rows = np.array(rows, np.int64)
        self.arrays = {}
        self.raws = []
        for name, (dtype, shape) in self.item.arrays(len(rows)).items():
            raw = np.full(dtype.itemsize * math.prod(shape) + 128, POISON, np.uint8)
            self.raws.append((raw, 64, 64 + dtype.itemsize * math.prod(shape)))
            self.arrays[name] = np.ndarray(shape, dtype, raw, 64)
        at = {name: array.ctypes.data for name, array in self.arrays.items()}
        spans = memory.spans.ctypes.data
        self.words, self.keep = describe_ragged(self.item, spans, memory.arenas, PAGE_ROWS, at, self.rows.ctypes.data)

    def run(self, slots, attempt=0):
        call = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 4)(int(self.words[0]))
        slots = np.array(slots, np.int64)
        assert call(self.words.ctypes.data, slots.ctypes.data, len(slots), attempt) == 0
        for raw, start, end in self.raws:
            assert (raw[:start] == POISON).all()
            assert (raw[end:] == POISON).all()

    def check(self, memory):
        """All slots hold their rows' values; what lies behind the packed total stays poisoned."""
        field, item = self.item.field, self.item
        one = Output("x", conduit.Field("x", field.dtype, field.shape[1:]), "anchor", (), item.transform)
        values = [gather.transform(one, memory.values[row]) for row in self.rows.tolist()]
        got = [self.arrays[name] for name in item.parts]
        if item.layout == "pad":
            wanted = gather.padded(values, field.max_length, field.shape[1:])
        else:
            wanted = gather.packed(values)
            total = int(wanted[1][-1])
            for array in (got[0], got[2]):
                assert (array[total:].view(np.uint8) == POISON).all()
            got = [got[0][:total], got[1], got[2][:total]]
        for mine, theirs in zip(got, wanted, strict=True):
            assert mine.dtype == theirs.dtype
            assert mine.tobytes() == theirs.tobytes()


@pytest.mark.parametrize(("dtype", "inner", "pipeline"), PIPELINES)
@pytest.mark.parametrize("layout", ["pad", "pack"])
@given(data=st.data())
def test_values_are_delivered_as_the_reference_says(layout, dtype, inner, pipeline, data):
    field = conduit.Field("x", dtype, (data.draw(st.integers(1, 70)), *inner), ragged=True)
    lengths = data.draw(st.lists(st.integers(0, field.max_length), min_size=PAGE_ROWS, max_size=PAGE_ROWS))
    memory = Memory(field, lengths)
    rows = data.draw(st.lists(st.integers(0, PAGES * PAGE_ROWS - 1), min_size=1, max_size=12))
    made = Made(field, layout, pipeline, memory, rows)
    cut = data.draw(st.integers(1, len(rows)))
    for block in (range(cut), range(cut, len(rows))):
        if len(block):
            made.run(block)
    made.check(memory)


@pytest.mark.parametrize("layout", ["pad", "pack"])
@given(data=st.data())
def test_slots_that_are_drawn_again_take_their_new_length_and_leave_the_others_as_they_were(layout, data):
    field = conduit.Field("x", "int16", (40, 3), ragged=True)
    lengths = data.draw(st.lists(st.integers(0, 40), min_size=PAGE_ROWS, max_size=PAGE_ROWS))
    memory = Memory(field, lengths, seed=1)
    row = st.integers(0, PAGES * PAGE_ROWS - 1)
    rows = data.draw(st.lists(row, min_size=1, max_size=12))
    made = Made(field, layout, (), memory, rows)
    cut = data.draw(st.integers(0, len(rows) - 1))
    if cut:
        made.run(range(cut))
    for attempt in range(3):
        slots = sorted(data.draw(st.sets(st.integers(cut, len(rows) - 1)))) if attempt else range(cut, len(rows))
        if attempt:
            for slot in slots:
                made.rows[slot] = data.draw(row)
        if len(slots):
            made.run(slots, attempt)
    # what lies behind a batch that became shorter is what the longer one left
    for array in (made.arrays[name] for name in made.item.narrowed):
        array[int(made.arrays["x_cu_seqlens"][-1]) :].view(np.uint8)[...] = POISON
    made.check(memory)


@pytest.mark.parametrize("layout", ["pad", "pack"])
@given(spans=st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)), min_size=4, max_size=4))
def test_a_span_of_any_bits_leads_nowhere_outside_its_page_s_arena(layout, spans):
    field = conduit.Field("x", "uint8", (17,), ragged=True)
    memory = Memory(field, [0] * PAGE_ROWS)
    memory.arenas[1] = 7
    rows = range(PAGE_ROWS, PAGE_ROWS + 4)
    for row, span in zip(rows, spans, strict=True):
        memory.spans[row] = span
    made = Made(field, layout, (), memory, list(rows))
    made.run(range(4))
    made.run([1, 3], attempt=1)
    wanted = [min(length, 17) for _, length in spans]
    if layout == "pack":
        assert made.arrays["x_cu_seqlens"].tolist() == np.cumsum([0, *wanted]).tolist()
        assert (made.arrays["x"][: sum(wanted)] == 7).all()
    else:
        assert made.arrays["x_lengths"].tolist() == wanted
        assert (made.arrays["x"] == 7 * made.arrays["x_mask"]).all()


SCHEMA = conduit.Schema(
    [
        conduit.Field("tokens", "int32", (9,), ragged=True, observation=True),
        conduit.Field("more.points", "float32", (4, 2), ragged=True),
        conduit.Field("reward", "float32"),
    ]
)


def test_what_comes_with_a_ragged_field_is_named_behind_it():
    plan = make_plan(SCHEMA, 4, ragged={"tokens": "pack"}, fields=("reward", "next_tokens", "more.points"))
    assert plan.names == (
        "reward",
        "next_tokens",
        "next_tokens_cu_seqlens",
        "next_tokens_position_ids",
        "more.points",
        "more.points_mask",
        "more.points_lengths",
    )
    assert plan.sample_bytes == 4 + 9 * 4 + 4 * 2 * 4
    assert (
        plan.fingerprint
        != make_plan(SCHEMA, 4, ragged="pad", fields=("reward", "next_tokens", "more.points")).fingerprint
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"ragged": "packed"}, "Expected 'pad' or 'pack', got 'packed' - at ragged"),
        ({"ragged": {"tokens": "flat"}}, "Expected 'pad' or 'pack', got 'flat'"),
        (
            {"ragged": {"reward": "pad"}},
            r"Expected names of ragged fields, got 'reward', and there is only `tokens`, `more.points` - at ragged",
        ),
        ({"ragged": 3}, "Expected ragged='pad', 'pack' or a dict"),
        ({"window": conduit.Sequence(3)}, "Expected a window of single steps .* fields=.* - at `tokens`"),
        ({"window": conduit.Rollout(3, 1)}, "Expected a window of single steps"),
        ({"window": conduit.Transition(stack=2)}, "Expected a window of single steps .* - at `tokens`"),
        (
            {"transform": {"tokens": conduit.one_hot(5)}},
            r"Expected conduit.cast, scale or clip .* transform\['tokens'\]",
        ),
        ({"transform": {"tokens": conduit.normalize()}}, "Expected conduit.cast, scale or clip"),
        ({"batch_size": 1 << 28, "ragged": "pack"}, "Expected a packed batch of at most 2147483647 items"),
    ],
)
def test_what_has_no_meaning_for_values_of_varying_lengths_is_refused(options, expected):
    with pytest.raises(ConfigError, match=expected):
        make_plan(SCHEMA, options.pop("batch_size", 4), **options)


def test_windows_of_several_rows_are_made_of_the_other_fields():
    plan = make_plan(SCHEMA, 4, window=conduit.Sequence(3), fields=("reward", "mask"))
    assert plan.ragged == ()


def test_a_field_of_the_name_of_what_comes_with_another_is_refused():
    schema = conduit.Schema([conduit.Field("x", "int8", (3,), ragged=True), conduit.Field("x_mask", "int8")])
    with pytest.raises(
        ConfigError, match=r"stored field `x_mask` and what comes with the ragged `x`: .*rename=.* fields="
    ):
        make_plan(schema, 4, fields=("x", "x_mask"))
    assert "x_mask" in make_plan(schema, 4, fields=("x", "x_mask"), ragged="pack").names
    assert "y" in make_plan(schema, 4, fields=("x", "y"), rename={"x_mask": "y"}).names
