"""A plan: the outputs of a batch, the source of each, and its transform. A plan is data, not code."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

import numpy as np

from conduit.field import Field
from conduit.kernels.spec.ragged import Ragged
from conduit.kernels.spec.transforms import Normalize, RandomShift, Transform
from conduit.kernels.spec.windows import Window, need

NEXT = "next_"
FLAGS = ("terminated", "truncated")

INTERNAL = ":"
"""Prefix of the names of internal arrays, which are not delivered under their names; no field's name begins with it."""
IDS, VERSIONS, EPISODES, STEPS = KEYS = (":ids", ":versions", ":episodes", ":steps")
"""Names of the arrays that say where a batch's rows come from."""
STORED = ":stored "
"""Prefix of the name of an array with the stored values of a field that is normalized."""

Rows = Literal["anchor", "following", "stack", "following_stack", "lanes", "following_lanes", "goal"]
"""Which row numbers of a window an output reads."""


@dataclass(frozen=True, slots=True)
class Output:
    """One array of a batch that is read from a field.

    Attributes:
        name: Name in the batch; "next_" + field for the next observation.
        field: The field of the schema that it is read from.
        rows: Which rows of the window it reads.
        lanes: Axes between the batch axis and the field's shape.
        transform: Applied to each element.
        classes: Number of one-hot classes, which are the last axis; 0 for none.
        normalize: Normalization by running statistics, applied first, or None.
        shift: Random shift of images, or None.
        start: The first one-hot class.
    """

    name: str
    field: Field
    rows: Rows
    lanes: tuple[int, ...]
    transform: Transform
    classes: int = 0
    normalize: Normalize | None = None
    shift: RandomShift | None = None
    start: int = 0

    @property
    def is_internal(self) -> bool:
        """True if the array is not delivered."""
        return self.name.startswith(INTERNAL)

    @property
    def is_augmented(self) -> bool:
        """True if the output needs more than an affine cast (conduit.kernels.cpu.augment)."""
        return bool(self.classes or self.normalize or self.shift or self.transform.is_clipped)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one row of the output."""
        return (*self.field.shape, self.classes) if self.classes else self.field.shape

    @property
    def lane_count(self) -> int:
        """Rows read per sample."""
        return int(np.prod(self.lanes, dtype=np.int64))

    @property
    def numpy_dtype(self) -> np.dtype:
        """Dtype of the output array; bfloat16 as its uint16 bits."""
        return np.dtype(Field("out", self.transform.dtype).numpy_dtype)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the output."""
        return self.numpy_dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Computed:
    """One array of a batch that is not read from a field: a window makes it from flags, or a sampler or batch transform adds it.

    Attributes:
        name: Name in the batch.
        dtype: Name of its numpy dtype.
        lanes: Axes after the batch axis.
    """

    name: str
    dtype: str
    lanes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Return:
    """One array of a batch that the window sums up from a reward field.

    Attributes:
        name: Name in the batch.
        field: The field of the schema; each of its elements is summed up by itself.
        transform: Applied to every single reward before the sum.
    """

    name: str
    field: Field
    transform: Transform

    @property
    def elements(self) -> int:
        """Elements of one sample."""
        return int(np.prod(self.field.shape, dtype=np.int64))

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """Dtype of the array, float32 or float64."""
        return np.dtype(self.transform.dtype)


@dataclass(frozen=True, slots=True)
class Goals:
    """The relabeling of goals in a plan of single transitions (conduit.hindsight).

    Attributes:
        strategy: Number of the strategy: the goal is what the same or a later step achieved, what the last step achieved, or what any
            step of the episode achieved.
        threshold: A sample is relabeled if 62 random bits are below it.
        longest: Steps of the longest episode that is drawn.
        same: True if the goal that a step achieved is stored in its own row, and not in the next observation.
    """

    strategy: int
    threshold: int
    longest: int
    same: bool

    @property
    def reach(self) -> tuple[int, int]:
        """Ticks of history and of future that are read around an anchor."""
        return self.longest - 1 if self.strategy == 2 else 0, self.longest


@dataclass(frozen=True, slots=True)
class Plan:
    """The specification of a batch.

    Attributes:
        batch_size: Samples per batch.
        window: What a sample is built from.
        outputs: Arrays read from fields.
        computed: Arrays that the window makes.
        names: Names of all delivered arrays, in the order of the batch.
        returns: Arrays that the window sums up from rewards.
        ragged: Arrays read from ragged fields.
        reward_names: Names of the delivered rewards and returns.
        batchwise: Transforms of the whole batch, in order (conduit.kernels.spec.batch_transforms).
        added: Arrays that these transforms add.
        adds: Number of arrays that each transform adds.
        goals: The relabeling of goals, or None.
    """

    batch_size: int
    window: Window
    outputs: tuple[Output, ...]
    computed: tuple[Computed, ...]
    names: tuple[str, ...]
    returns: tuple[Return, ...] = ()
    ragged: tuple[Ragged, ...] = ()
    reward_names: tuple[str, ...] = ()
    batchwise: tuple[Any, ...] = ()
    added: tuple[Computed, ...] = ()
    adds: tuple[int, ...] = ()
    goals: Goals | None = None

    @property
    def reach(self) -> tuple[int, int]:
        """Ticks of history and of future around its anchor that a sample is read from."""
        history, future = need(self.window)
        more = (0, 0) if self.goals is None else self.goals.reach
        return max(history, more[0]), max(future, more[1])

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits; equal plans have equal fingerprints, in every process."""
        return hashlib.sha256(json.dumps(describe(self)).encode()).hexdigest()[:16]

    @property
    def lone_return(self) -> Return | None:
        """The return, if there is only one and it is a scalar: resolvers sum it up as they follow links (kernels.cpu.transitions)."""
        return self.returns[0] if len(self.returns) == 1 and self.returns[0].field.shape == () else None

    @property
    def sample_bytes(self) -> int:
        """Bytes of output per sample."""
        fixed = sum(output.row_bytes * output.lane_count for output in self.outputs)
        return fixed + sum(item.row_bytes for item in self.ragged)


def describe(value: Any) -> Any:
    """A plan, or a part of one, as values for JSON: dataclasses with their names, functions as their qualified names."""
    if is_dataclass(value):
        return [type(value).__name__, {item.name: describe(getattr(value, item.name)) for item in fields(value)}]
    if isinstance(value, tuple):
        return [describe(item) for item in value]
    if callable(value):
        return f"{value.__module__}.{value.__qualname__}"
    # JSON has no infinities
    return repr(value) if isinstance(value, float) else value
