"""How fast a table may be sampled for what is inserted: the limits as data (Reverb's formula).

With I rows inserted, S sampled, D deleted (evicted, or sampled as often as they may be), size = I - D:

    n rows may be sampled  while  size >= min_size  and  I * spi - S - n >= min_diff
    n rows may be inserted while  I + n - D <= min_size  or  (I + n) * spi - S <= max_diff

Rows are steps as a table stores them, observation-only rows that close an episode included; a sample is one element of a batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from conduit.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Limits:
    """The four numbers of the formula; what every limiter comes down to.

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
        spi = self.samples_per_insert
        if not _number(spi) or not 0 < spi < math.inf:
            raise ConfigError(f"Expected samples_per_insert above 0, got {spi!r}")
        if not isinstance(self.min_size, int) or isinstance(self.min_size, bool) or self.min_size < 1:
            raise ConfigError(f"Expected min_size of at least 1 row, got {self.min_size!r}")
        if not (_number(self.min_diff) and _number(self.max_diff)):  # a NaN makes every comparison false
            raise ConfigError(f"Expected numbers as limits, got {self.min_diff!r} and {self.max_diff!r}")

    @property
    def numbers(self) -> tuple[float, float, float, float]:
        """The four numbers as kernels take them."""
        return self.samples_per_insert, self.min_size, self.min_diff, self.max_diff


@dataclass(frozen=True, slots=True)
class SampleToInsertRatio:
    """Samples and inserts keep step: neither runs ahead of the ratio by more than a buffer.

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
        e, middle = self.error_buffer, self.samples_per_insert * self.min_size
        if isinstance(e, tuple):
            if len(e) != 2:
                raise ConfigError(f"Expected error_buffer as a number or a pair, got {e!r}")
            return Limits(self.samples_per_insert, self.min_size, *e)
        if not _number(e):
            raise ConfigError(f"Expected error_buffer as a number or a pair, got {e!r}")
        return Limits(self.samples_per_insert, self.min_size, middle - e, middle + e)


@dataclass(frozen=True, slots=True)
class MinSize:
    """No sample before so many rows are there; nothing else is limited.

    Attributes:
        min_size: Rows, at least 1.
    """

    min_size: int

    def __post_init__(self) -> None:
        self.limits()

    def limits(self) -> Limits:
        """The numbers of the formula."""
        return Limits(1.0, self.min_size, -math.inf, math.inf)


@dataclass(frozen=True, slots=True)
class Queue:
    """As many samples as inserts; inserts run ahead by at most `size` rows.

    Attributes:
        size: Rows, at least 1.
    """

    size: int

    def __post_init__(self) -> None:
        if not isinstance(self.size, int) or isinstance(self.size, bool) or self.size < 1:
            raise ConfigError(f"Expected a size of at least 1 row, got {self.size!r}")

    def limits(self) -> Limits:
        """The numbers of the formula."""
        return Limits(1.0, 1, 0.0, float(self.size))


Limiter = SampleToInsertRatio | MinSize | Queue


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def checked_limiter(limiter: Any) -> Limits | None:
    """The limits of a table's limiter, None for none.

    Raises:
        ConfigError: It is no limiter.
    """
    if limiter is None:
        return None
    if not isinstance(limiter, SampleToInsertRatio | MinSize | Queue):
        raise ConfigError(
            "Expected a conduit.SampleToInsertRatio, conduit.MinSize or conduit.Queue as limiter, got "
            f"{type(limiter).__name__}"
        )
    return limiter.limits()
