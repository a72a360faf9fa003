"""Finalizers of objects: one compiled call, which a signal cannot interrupt.

A destructor in Python may be interrupted at its first instruction, by Ctrl-C or by any exception of a signal handler. Python does not
call it again, and the process would hold the object's resources until it ends. So all that a process holds of a segment (leases, claims,
pages, reservations, locks, its seat) is noted in words by the compiled call that takes it. The words belong to an object, and when the
object goes, a compiled call gives back what the words note. The words of a half-constructed object note nothing. If an exception
interrupts the transfer from one object to another, the objects' finalizers run as the exception unwinds.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.int64]]

_watched: dict[int, weakref.ref[Any]] = {}
_LEAST = 64
_limit = [_LEAST]


def when_gone(thing: Any, ending: Callable[..., object], *words: Array) -> None:
    """Register a kernel to be called when an object is collected; call this before the object holds anything.

    It is not called at the interpreter's exit: when the process ends, its kernel locks go, and other processes recover what it held.

    Args:
        thing: The object. Memory that the kernel reaches through the words must live as long as the object; the kernel is called
            before the object's own attributes go.
        ending: Entry of a kernel, or another C function. Its arguments are the words, as objects, and one more object, which it
            ignores. It must accept words that note nothing.
        *words: Arrays, kept alive until the call.
    """
    watched = weakref.ref(thing, functools.partial(ending, *words))
    _watched[id(watched)] = watched
    if len(_watched) > _limit[0]:
        for key, one in list(_watched.items()):
            if one() is None:
                _watched.pop(key, None)
        _limit[0] = 2 * len(_watched) + _LEAST
