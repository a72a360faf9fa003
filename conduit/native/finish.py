"""What is done when an object is gone: one compiled call, which no signal can cut short.

A destructor in Python may be interrupted at its first instruction, by Ctrl-C or by whatever a signal's handler raises. It is not
called again then, and what the object held would be held until the process ends. So whatever a process holds of a segment
(leases, claims, pages, reservations, locks, its seat) is noted in words by the compiled call that takes it, the words belong to an
object, and the object's end gives back by a compiled call what its words say. An object that was not finished holds nothing by its
words, and a hand-over that an exception interrupts is undone by the exception's own way out.
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
    """Have a kernel called when an object is collected; before the object comes to hold anything.

    Nothing is called at the interpreter's exit: the kernel gives back then what the process held.

    Args:
        thing: The object. What the kernel reaches by the words must live as long: it is called before the object's own
            attributes go.
        ending: Entry of a kernel of the words, as objects, and of one more object, which it leaves alone; or another function
            in C. It may be called for words that hold nothing.
        *words: Kept alive until then.
    """
    watched = weakref.ref(thing, functools.partial(ending, *words))
    _watched[id(watched)] = watched
    if len(_watched) > _limit[0]:
        for key, one in list(_watched.items()):
            if one() is None:
                _watched.pop(key, None)
        _limit[0] = 2 * len(_watched) + _LEAST
