"""Many steps of one environment as whole columns: the unit of scans and of bulk writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Steps:
    """Consecutive steps of one environment, episode after episode; final observations lie beside the steps.

    Attributes:
        columns: {field: array [n, *shape]}; of a ragged field a list of n arrays [length, *shape[1:]].
        terminated, truncated: bool [n].
        starts: bool [n], True where an episode begins; if the first one is False, the first step continues the previous `Steps`.
        places: int64 [k], ascending: the steps that end an episode and whose final observation is known.
        finals: {observation: array [k, *shape]}, or a list of k arrays for a ragged observation: the observations of `places`.
        episodes, numbers: int64 [n], episode numbers and steps in the episode, if they are known.
    """

    columns: Mapping[str, Any]
    terminated: Array
    truncated: Array
    starts: Array
    places: Array
    finals: Mapping[str, Any]
    episodes: Array | None = None
    numbers: Array | None = None

    def __len__(self) -> int:
        return len(self.terminated)

    def __repr__(self) -> str:
        kinds = [
            f"{name}: ragged" if isinstance(values, list) else f"{name}: {values.shape[1:]} {values.dtype}"
            for name, values in self.columns.items()
        ]
        return f"Steps({len(self):,} steps, {len(self.places):,} final observations: {', '.join(kinds)})"

    def part(self, start: int, stop: int) -> Steps:
        """The steps [start, stop), as views."""
        low, high = np.searchsorted(self.places, (start, stop)).tolist()
        here = slice(start, stop)
        return Steps(
            {name: values[here] for name, values in self.columns.items()},
            self.terminated[here],
            self.truncated[here],
            self.starts[here],
            self.places[low:high] - start,
            {name: values[low:high] for name, values in self.finals.items()},
            None if self.episodes is None else self.episodes[here],
            None if self.numbers is None else self.numbers[here],
        )
