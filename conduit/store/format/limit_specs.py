"""Bounds for the ratio of sampled to inserted rows, as data (Reverb's formula).

With I rows inserted, S sampled, D deleted (evicted, or delivered max_times_sampled times), size = I - D:

    n rows may be sampled  while  size >= min_size  and  I * spi - S - n >= min_diff
    n rows may be inserted while  I + n - D <= min_size  or  (I + n) * spi - S <= max_diff

Rows are rows of the table, including rows that only hold the final observation of an episode. A sample is one element of a batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from conduit.errors import ConfigError
from conduit.numbers import at_least, real


@dataclass(frozen=True, slots=True)
class Limits:
    """The four numbers of the formula. Every limiter is converted to it; use it as a limiter to choose the range yourself.

    With `Limits(1.0, 1, 0.0, size)` each row is sampled once, and writers run ahead by at most `size` rows.

    Attributes:
        samples_per_insert: spi, above 0.
        min_size: Rows before the first sample, at least 1.
        min_diff, max_diff: Range of I * spi - S; may be infinite.
    """

    samples_per_insert: float
    min_size: int
    min_diff: float
    max_diff: float

    def __post_init__(self) -> None:
        low, high = real(self.min_diff), real(self.max_diff)
        if low is None or high is None:  # NaN is refused here: it would make every comparison false
            raise ConfigError(f"Expected numbers as limits, got {self.min_diff!r} and {self.max_diff!r}")
        for name, value in (
            ("samples_per_insert", _ratio(self.samples_per_insert)),
            ("min_size", at_least("min_size", self.min_size, 1)),
            ("min_diff", low),
            ("max_diff", high),
        ):
            object.__setattr__(self, name, value)


@dataclass(frozen=True, slots=True)
class SampleToInsertRatio:
    """Keeps the ratio of samples to inserts: neither side runs ahead of it by more than a buffer.

    Attributes:
        samples_per_insert: Samples per inserted row, above 0.
        min_size: Rows before the first sample, at least 1.
        error_buffer: A number e allows I * spi - S from spi * min_size - e to spi * min_size + e; a pair is that range itself.
    """

    samples_per_insert: float
    min_size: int
    error_buffer: float | tuple[float, float]

    def __post_init__(self) -> None:
        limits = self.limits()
        spi, low, high = limits.samples_per_insert, limits.min_diff, limits.max_diff
        buffer = (low, high) if isinstance(self.error_buffer, tuple) else real(self.error_buffer)
        for name, value in (("samples_per_insert", spi), ("min_size", limits.min_size), ("error_buffer", buffer)):
            object.__setattr__(self, name, value)
        least = 2 * max(1.0, spi)
        if not high - low >= least:
            raise ConfigError(
                f"Expected an error_buffer that is at least {least:g} wide (2 * max(1, samples_per_insert)), got {low:g} to "
                f"{high:g}: inserting and sampling would wait for each other. Raise error_buffer to {least / 2:g}"
            )
        if low > spi * limits.min_size:
            raise ConfigError(
                f"Expected a range that begins at most at samples_per_insert * min_size = {spi * limits.min_size:g}, got "
                f"{low:g}: sampling would still be blocked with min_size rows inserted"
            )

    def limits(self) -> Limits:
        """The numbers of the formula."""
        spi, size = _ratio(self.samples_per_insert), at_least("min_size", self.min_size, 1)
        if isinstance(self.error_buffer, tuple) and len(self.error_buffer) == 2:
            return Limits(spi, size, *self.error_buffer)
        e = real(self.error_buffer)
        if e is None:
            raise ConfigError(f"Expected error_buffer as a number or a pair, got {self.error_buffer!r}")
        return Limits(spi, size, spi * size - e, spi * size + e)


@dataclass(frozen=True, slots=True)
class MinSize:
    """No sample before the table has this many rows; nothing else is limited.

    Attributes:
        min_size: Rows, at least 1.
    """

    min_size: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "min_size", at_least("min_size", self.min_size, 1))

    def limits(self) -> Limits:
        """The numbers of the formula."""
        return Limits(1.0, self.min_size, -math.inf, math.inf)


Limiter = SampleToInsertRatio | MinSize | Limits


def numbers_of(limits: Limits) -> tuple[float, float, float, float]:
    """The four numbers in the order that kernels expect."""
    return limits.samples_per_insert, limits.min_size, limits.min_diff, limits.max_diff


def half_range(limits: Limits) -> float:
    """Most samples, or the samples' worth of rows, that one side may take at once, so that both sides are never blocked together.

    A batch of n samples and a write of r rows can block each other if n + r * spi is larger than the range's width, or, if all numbers
    are integers, larger than the width + 1. Neither side knows how much the other takes, so each may take half.
    """
    wide = limits.max_diff - limits.min_diff
    return (wide + all(map(_whole, (limits.samples_per_insert, limits.min_diff, limits.max_diff)))) / 2


def _whole(value: float) -> bool:
    return math.isfinite(value) and float(value).is_integer()


def rows_short(limits: Limits, inserted: int, sampled: int, deleted: int, count: int) -> tuple[int, int]:
    """How many more inserted rows `count` samples need, by min_size and by min_diff; 0 and 0 if they are allowed."""
    by_size = max(0, limits.min_size - (inserted - deleted))
    if inserted * limits.samples_per_insert - sampled - count >= limits.min_diff:
        return by_size, 0
    rows = math.ceil((limits.min_diff + sampled + count) / limits.samples_per_insert - inserted)
    return by_size, max(1, rows)


def samples_short(limits: Limits, inserted: int, sampled: int, deleted: int, rows: int) -> int:
    """How many more samples `rows` inserted rows need; 0 if they are allowed."""
    total = inserted + rows
    over = total * limits.samples_per_insert - sampled - limits.max_diff
    if total - deleted <= limits.min_size or over <= 0:
        return 0
    return max(1, math.ceil(over))


def _ratio(value: object) -> float:
    number = real(value)
    if number is None or not 0 < number < math.inf:
        raise ConfigError(f"Expected samples_per_insert above 0, got {value!r}")
    return number


def checked_limiter(limiter: Any) -> Limits | None:
    """The limits of a table's limiter; None for None.

    Raises:
        ConfigError: It is not a limiter, or under its limits neither side could go on.
    """
    if limiter is None:
        return None
    if isinstance(limiter, Limits):
        least = max(1.0, limiter.samples_per_insert)
        if not half_range(limiter) >= least:
            raise ConfigError(
                f"Expected max_diff - min_diff of at least {2 * least:g} (2 * max(1, samples_per_insert)), got {limiter}: inserting "
                "and sampling would wait for each other. Raise max_diff"
            )
        return limiter
    if not isinstance(limiter, SampleToInsertRatio | MinSize):
        raise ConfigError(
            "Expected a conduit.SampleToInsertRatio, conduit.MinSize or conduit.Limits as limiter, got "
            f"{type(limiter).__name__}"
        )
    return limiter.limits()
