"""The contract of a source: steps, episode after episode, with a schema that is known before any step is read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from conduit.plane.deliver.steps import Steps
from conduit.schema import Schema

Progress: TypeAlias = Callable[[int, int], None]
"""Called now and then with the rows done and the total rows."""


@dataclass(frozen=True, slots=True)
class Description:
    """The contents of a source.

    Attributes:
        name: Its name in errors.
        format: "npz", "parquet", "hdf5" or "minari".
        schema: Fields of its steps.
        rows: Number of steps.
        episodes: Number of episodes, including unfinished ones.
        ends: Number of episodes that end by a flag; there are at most this many final observations.
        mean_lengths: {ragged field: mean length of its values}.
        ignored: Columns that are not read.
        skipped: {ignored column that no field can hold: description of its contents}: text, objects, one value per episode, and so on.
    """

    name: str
    format: str
    schema: Schema
    rows: int
    episodes: int
    ends: int
    mean_lengths: Mapping[str, float] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)


class Source(ABC):
    """Contract of a source: its constructor checks everything that can be checked without reading the steps.

    Attributes:
        description: The contents of the source.
    """

    description: Description

    @abstractmethod
    def steps(self) -> Iterator[Steps]:
        """All steps in order, some thousand at a time.

        Raises:
            SourceError: Values are damaged, or do not fit earlier values.
        """
