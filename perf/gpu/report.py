"""The table and the bars of perf/gpu_check.py; standard library only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from perf.gpu.found import Found


@dataclass(frozen=True)
class Bar:
    """A bar of the project: what was measured against it.

    Attributes:
        what: In words.
        least: The bar.
        value: What was measured, None where it was not.
        most: The bar is an upper one.
    """

    what: str
    least: float
    value: float | None
    most: bool = False

    @property
    def reached(self) -> bool | None:
        """None where nothing was measured."""
        if self.value is None:
            return None
        return self.value <= self.least if self.most else self.value >= self.least

    def __str__(self) -> str:
        word = {True: "ok", False: "SHORT", None: "not measured"}[self.reached]
        value = "-" if self.value is None else f"{self.value:.3g}"
        return f"{word:>12}  {self.what}: {value} ({'at most' if self.most else 'at least'} {self.least:g})"


def bars(found: Sequence[Found]) -> list[Bar]:
    """The project's bars with a GPU."""

    def pick(begin: str, value: Callable[[Found], float | None]) -> float | None:
        return next((value(one) for one in found if one.name.startswith(begin) and one.call_us is not None), None)

    def times(other: str) -> Callable[[Found], float | None]:
        return lambda one: one.others[other] / one.call_us if other in one.others and one.call_us else None

    def best(one: Found) -> float | None:
        return one.device_us or one.call_us

    atari = next(
        (one.name for one in found if one.name.startswith("Atari") and one.name.endswith("to bfloat16")), "Atari"
    )
    single = pick("Atari", lambda one: None)
    frames = next((best(one) for one in found if one.name.endswith("from registered host memory")), None)
    stacks = next((best(one) for one in found if one.name.endswith("stacked storage")), None)
    single = stacks / frames if frames and stacks else single
    over_bus = next((one.share for one in found if one.name.endswith("from registered host memory")), None)
    waits = pick("loader, Atari, pool", lambda one: one.share)
    return [
        Bar(
            "Atari batch to bfloat16 out of device memory, share of the copy rate",
            0.75,
            pick(atari, lambda one: one.share),
        ),
        Bar("the same, times as fast as torch eager indexing", 3, pick(atari, times("torch eager"))),
        Bar("the same from registered host memory, share of the rate of a copy from the host", 0.80, over_bus),
        Bar("single frames, times as fast as stacked storage", 1.5, single),
        Bar("prioritized draw and update, times as fast as torch cumsum", 5, pick("priorities", times("torch cumsum"))),
        Bar("GAE 128 x 4096, times as fast as a torch loop", 50, pick("GAE", times("torch loop"))),
        Bar("loader end to end, share of the step that the learner waits", 0.03, waits, most=True),
    ]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def table(found: Sequence[Found]) -> str:
    """All measurements, one a line."""
    lines = [
        f"{'':<66} {'device us':>10} {'call us':>10} {'MB':>8} {'GB/s':>7} {'share':>6} {'launches':>8}  others, us a call",
    ]
    for one in found:
        size = None if not one.bytes else one.bytes / 1e6
        others = ", ".join(f"{label} {value:.4g}" for label, value in one.others.items())
        lines.append(
            f"{one.name[:66]:<66} {_number(one.device_us, '.2f'):>10} {_number(one.call_us, '.2f'):>10} {_number(size, '.2f'):>8} "
            f"{_number(one.rate, '.0f'):>7} {_number(one.share, '.2f'):>6} {one.launches or '-':>8}  {others}"
            + (f"  [{one.note}]" if one.note else "")
        )
    return "\n".join(lines)
