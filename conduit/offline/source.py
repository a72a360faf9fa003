"""What can be read: steps, episode after episode, of a schema that is known before any of them is read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from conduit.plane.deliver.steps import Steps
from conduit.schema import Schema

Progress: TypeAlias = Callable[[int, int], None]
"""Called with rows done and rows in all, now and then."""


@dataclass(frozen=True, slots=True)
class Description:
    """What a source holds.

    Attributes:
        name: What it is called in errors.
        format: "npz", "parquet", "hdf5" or "minari".
        schema: Fields of its steps.
        rows: Steps.
        episodes: Episodes, the unfinished ones included.
        ends: Episodes that end by a flag: at most so many final observations are kept.
        mean_lengths: {ragged field: mean length of its values}.
        ignored: Columns that are there and not taken.
        skipped: {those of them that no field can hold: what they are}: text, objects, a value per episode, and so on.
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
    """Contract: everything that can be known without reading the steps has been checked when a source exists.

    Attributes:
        description: What it holds.
    """

    description: Description

    @abstractmethod
    def steps(self) -> Iterator[Steps]:
        """All steps in order, some thousand at a time.

        Raises:
            SourceError: What was read is damaged, or does not fit what was read before.
        """
