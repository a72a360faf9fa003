"""Alarms: what ends a wait early, because what is waited for cannot come any more.

A wait that is about to sleep looks at them. A call that does not wait never does.
"""

from __future__ import annotations

from collections.abc import Callable

Alarm = Callable[[], None]
"""Raises when waiting is of no use, and returns otherwise. It is called from any thread, and must not block."""

_alarms: list[Alarm] = []


def add(alarm: Alarm) -> None:
    """Have waits in this process look at an alarm."""
    _alarms.append(alarm)


def remove(alarm: Alarm) -> None:
    """Have them look at it no more; idempotent."""
    if alarm in _alarms:
        _alarms.remove(alarm)


def look() -> None:
    """Let every alarm raise that has something to say."""
    for alarm in tuple(_alarms):
        alarm()
