"""Names of step fields in other libraries, such as `next_obs` and `done`, and what a writer is passed in their place."""

from __future__ import annotations

from collections.abc import Iterable

from conduit.errors import FieldError

_NEXT = [
    "next_obs",
    "next_observation",
    "next_observations",
    "next_state",
    "next_states",
    "obs_next",
    "observation_next",
    "new_obs",
    "new_observation",
    "obs_tp1",
    "s_next",
]
_DONE = ["done", "dones", "terminal", "terminals", "is_terminal", "episode_end", "ended"]
_MEANINGS = {
    **dict.fromkeys(
        _NEXT,
        "a table holds steps, and a loader forms the next observation from the row behind: pass what the step saw and no more; where "
        "an episode ends, autoreset='next_step' appends the last observation as a row, and the other modes take it as "
        "final=<observation after the last step>",
    ),
    **dict.fromkeys(
        _DONE,
        "there are two ends: pass terminated=<the task ended the episode, nothing follows> and truncated=<it was cut off, by a limit "
        "of time for instance>, as Gymnasium has them",
    ),
}


def explained(error: FieldError, names: Iterable[object]) -> FieldError:
    """An error about unknown names; for a name that other libraries use, it also says what to pass in its place.

    Args:
        error: The error that was raised.
        names: The unknown names.
    """
    for name in names:
        meaning = _MEANINGS.get(str(name).rpartition(".")[2])
        if meaning is not None:
            return type(error)(f"Expected a field of the schema, got {name!r}: {meaning}", at=str(name))
    return error
