"""The argument `autoreset` of a writer: Gymnasium's three conventions for the start of the next episode, by any of their names."""

from __future__ import annotations

from enum import Enum
from typing import Literal, cast

from conduit.errors import ConfigError

Autoreset = Literal["next_step", "same_step", "disabled"]
MODES: tuple[Autoreset, ...] = ("next_step", "same_step", "disabled")

_MEANINGS = (
    "'next_step' (the call after an end brings the final observation, as in Gymnasium's vector environments by default), "
    "'same_step' (it brings the next episode's second step, the final observation comes beside the end) or 'disabled' (you "
    "reset yourself)"
)
_REMEDY = "pass autoreset=envs.metadata['autoreset_mode'] of a Gymnasium vector environment, or say it"


def autoreset_of(given: object, num_envs: int | None) -> Autoreset:
    """The autoreset mode of an argument: a name, a member of `gymnasium.vector.AutoresetMode`, or such a member's value.

    Args:
        given: The argument; without `num_envs`, None means "disabled".
        num_envs: Environments per call, or None.

    Raises:
        ConfigError: The argument is not a mode, or it is None with `num_envs`.
    """
    if given is None:
        if num_envs is None:
            return "disabled"
        raise ConfigError(f"Expected autoreset together with num_envs={num_envs}: {_MEANINGS}; {_REMEDY}")
    name = given.name if isinstance(given, Enum) else given
    if isinstance(name, str):
        # "next_step", NEXT_STEP and Gymnasium's value "NextStep" are one name
        plain = name.replace("_", "").lower()
        for mode in MODES:
            if mode.replace("_", "") == plain:
                return cast("Autoreset", str(mode))
    raise ConfigError(f"Expected autoreset {_MEANINGS}, got {given!r}: {_REMEDY}")
