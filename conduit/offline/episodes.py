"""Where episodes begin and end in a set of files: by flags, by episode numbers, or by a format that stores episodes apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from conduit.errors import SourceError
from conduit.offline.columns import FLAGS, NEXT, Part, behind
from conduit.plane.deliver.steps import Array


def as_flags(part: Part, column: str, values: Array, done: int = 0) -> Array:
    """A flag's values as bool; integers are accepted if each is 0 or 1.

    Args:
        part: The file.
        column: The flag's column.
        values: Some of its values.
        done: The row of the first of them.

    Raises:
        SourceError: A value is another number; names the row.
    """
    if values.dtype == bool:
        return values
    wrong = np.flatnonzero((values != 0) & (values != 1))
    if len(wrong):
        row = int(wrong[0])
        raise part.refuse(column, f"0 or 1 for a flag in row {done + row}", str(values[row]))
    return values.astype(bool)


class Walk:
    """Finds where episodes begin, file by file: after a flag, where the episode number changes, or, without numbers, at a file's start.

    Args:
        system: {flag or number: its column}.

    Attributes:
        flagged: Rows so far that end an episode by a flag.
        numbers: Episode numbers in the order of the episodes' starts, one array per file.
    """

    def __init__(self, system: Callable[[str], str]) -> None:
        self.flagged = 0
        self.numbers: list[Array] = []
        self._system = system
        self._ended = True
        self._number: int | None = None
        self._step = -1

    def begun(self, part: Part) -> Array:
        """Bool [rows] of the next file: an episode begins here.

        Raises:
            SourceError: An episode continues after its end, or its step numbers do not count up.
        """
        if part.rows == 0:
            return np.zeros(0, bool)
        ended = np.zeros(part.rows, bool)
        for flag in FLAGS:
            column = self._system(flag)
            if column in part.names:
                ended = ended | as_flags(part, column, part.whole(column))
        begun = behind(self._ended, ended)
        begun = self._by_number(part, begun) if part.begins is None else begun | part.begins
        column = self._system("_step")
        if column in part.names:
            steps = part.whole(column).astype(np.int64)
            wrong = np.flatnonzero((steps != behind(self._step, steps) + 1) & ~begun)
            if len(wrong):
                row = int(wrong[0])
                raise part.refuse(column, f"steps that count up in an episode, at row {row}", f"{int(steps[row])}")
            self._step = int(steps[-1])
        self._ended = bool(ended[-1])
        self.flagged += int(ended.sum())
        return begun

    def _by_number(self, part: Part, begun: Array) -> Array:
        column = self._system("_episode")
        if column not in part.names:
            begun[0] = True
            return begun
        numbers = part.whole(column).astype(np.int64)
        before = int(numbers[0]) - 1 if self._number is None else self._number
        changed: Array = numbers != behind(before, numbers)
        wrong = np.flatnonzero(begun & ~changed)
        if len(wrong):
            row = int(wrong[0])
            what = f"another number in row {row}, since the row before it ends its episode"
            raise part.refuse(column, what, f"{int(numbers[row])} again")
        self.numbers.append(numbers[changed])
        self._number = int(numbers[-1])
        return changed

    def check_numbers(self, where: Path) -> None:
        """Refuse an episode whose rows are not contiguous.

        Raises:
            SourceError: There is such an episode.
        """
        seen, counts = np.unique(np.concatenate([np.zeros(0, np.int64), *self.numbers]), return_counts=True)
        if (counts > 1).any():
            raise SourceError(
                f"Expected the rows of an episode side by side, got those of episode {int(seen[counts > 1][0])} in several "
                f"places: sort them by episode and step - column {self._system('_episode')!r} in {where}"
            )


def ends(starts: Sequence[Array]) -> list[Array]:
    """For each file bool [rows], True for the last row of an episode."""
    found = []
    following = True
    for begun in reversed(starts):
        over = np.ones(len(begun), bool)
        over[:-1] = begun[1:]
        if len(begun):
            over[-1] = following
            following = bool(begun[0])
        found.append(over)
    return found[::-1]


def check_next(
    part: Part,
    done: int,
    columns: Mapping[str, Array],
    after: Mapping[str, Array],
    over: Array,
    held: dict[str, Array],
) -> None:
    """Check that each next observation equals the observation of the following row.

    Args:
        part: The file.
        done: The row of the first value.
        columns: Observations.
        after: Next observations, by the observations' names.
        over: Bool [rows], True where an episode ends.
        held: Keeps the last next observations for the call with the following values.

    Raises:
        SourceError: A next observation differs; names the row.
    """
    for name, follow in after.items():
        seen = _bytes(columns[name])
        told = _bytes(follow)
        wrong = np.flatnonzero((told[:-1] != seen[1:]).any(1) & ~over[:-1])
        if name in held and len(seen) and not np.array_equal(held[name], seen[0]):
            wrong = np.array([-1])
        if len(wrong):
            raise SourceError(
                f"Expected {NEXT}{name} of row {done + int(wrong[0])} to be {name} of the row behind it, since no episode "
                f"ends there, got another: mark the ends by flags or an episode column - in {part.path}"
            )
        held.pop(name, None)
        if len(over) and not over[-1]:
            held[name] = told[-1].copy()


def _bytes(values: Array) -> Array:
    flat = np.ascontiguousarray(values)
    together: Array = flat.reshape(len(flat), -1).view(np.uint8)
    return together
