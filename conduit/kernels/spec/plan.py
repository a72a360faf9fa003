"""A plan: which outputs a batch has, where each comes from, and what is done to it. Data, not code."""

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
"""How the names of a batch's arrays begin that are not delivered under their names: no field can have such a name."""
IDS, VERSIONS, EPISODES, STEPS = KEYS = (":ids", ":versions", ":episodes", ":steps")
"""The arrays that say where a batch's rows come from."""
STORED = ":stored "
"""What the name of an array begins with that holds a normalized field's values as they are stored."""

Rows = Literal["anchor", "following", "stack", "following_stack", "lanes", "following_lanes", "goal"]
"""Which row numbers of a window an output reads."""


@dataclass(frozen=True, slots=True)
class Output:
    """One array of a batch that is read from a field.

    Attributes:
        name: Name in the batch, "next_" + field for the observation that follows.
        field: The schema's field it is read from.
        rows: Which rows of the window it reads.
        lanes: Axes between the batch and the field's shape.
        transform: What is done to it, element by element.
        classes: One-hot classes, a last axis; 0 for none.
        normalize: Running statistics that are applied first.
        shift: Where an image is read.
        start: The first of the classes.
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
        """True when it is not delivered."""
        return self.name.startswith(INTERNAL)

    @property
    def is_augmented(self) -> bool:
        """True when more than an affine cast is asked for (conduit.kernels.cpu.augment)."""
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
    """One array of a batch that is read from no field: the window makes it from flags, or a sampler or step adds it.

    Attributes:
        name: Name in the batch.
        dtype: numpy dtype name.
        lanes: Axes behind the batch.
    """

    name: str
    dtype: str
    lanes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Return:
    """One array of a batch that the window sums up from a reward field.

    Attributes:
        name: Name in the batch.
        field: The schema's field; each of its elements is summed up by itself.
        transform: What is done to every single reward before.
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
    """What a plan of single transitions relabels.

    Attributes:
        strategy: Number of the strategy: what the same or a later step achieved, what the last one did, or any.
        threshold: Of 62 random bits.
        longest: Steps of the longest episode that is drawn.
        same: What a step achieved is stored in its own row, not in the observation behind it.
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
    """What one batch is made of.

    Attributes:
        batch_size: Samples.
        window: What a sample is built from.
        outputs: Arrays read from fields.
        computed: Arrays that the window makes.
        names: All that is delivered, in the order of the batch.
        returns: Arrays that the window sums up from rewards.
        ragged: Arrays read from ragged fields.
        reward_names: Those of `names` that are rewards, or returns.
        batchwise: What is done to the whole batch after that, in this order (conduit.kernels.spec.batch_transforms).
        added: Arrays that these steps add.
        adds: How many of these each step adds.
        goals: Goals that single transitions are relabelled with, where they are.
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
        """Ticks of history and of future that a sample is read from around its anchor."""
        history, future = need(self.window)
        more = (0, 0) if self.goals is None else self.goals.reach
        return max(history, more[0]), max(future, more[1])

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal characters: equal plans have equal ones, in every process."""
        return hashlib.sha256(json.dumps(describe(self)).encode()).hexdigest()[:16]

    @property
    def lone_return(self) -> Return | None:
        """The return, where there is one and it is a number: resolvers sum it up on their way (kernels.cpu.transitions)."""
        return self.returns[0] if len(self.returns) == 1 and self.returns[0].field.shape == () else None

    @property
    def sample_bytes(self) -> int:
        """Bytes of output per sample."""
        fixed = sum(output.row_bytes * output.lane_count for output in self.outputs)
        return fixed + sum(item.row_bytes for item in self.ragged)


def describe(value: Any) -> Any:
    """A plan, or a part of one, as JSON can hold it: dataclasses with their names, functions by their qualified names."""
    if is_dataclass(value):
        return [type(value).__name__, {item.name: describe(getattr(value, item.name)) for item in fields(value)}]
    if isinstance(value, tuple):
        return [describe(item) for item in value]
    if callable(value):
        return f"{value.__module__}.{value.__qualname__}"
    # JSON knows no infinities
    return repr(value) if isinstance(value, float) else value
