"""Alarms: functions that end a wait early by an exception, because the wait cannot succeed any more.

A wait calls all alarms before it sleeps. A call that does not wait calls none.
"""

from __future__ import annotations

from collections.abc import Callable

Alarm = Callable[[], None]
"""Raises when waiting is of no use, and returns otherwise. It is called from any thread, and must not block."""

_alarms: list[Alarm] = []


def add(alarm: Alarm) -> None:
    """Make waits in this process call an alarm."""
    _alarms.append(alarm)


def remove(alarm: Alarm) -> None:
    """Make waits no longer call an alarm; idempotent."""
    if alarm in _alarms:
        _alarms.remove(alarm)


def look() -> None:
    """Call every alarm."""
    for alarm in tuple(_alarms):
        alarm()
