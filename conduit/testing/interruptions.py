"""The scenarios of interrupted operations, by name (conduit.testing.interrupted)."""

from __future__ import annotations

from collections.abc import Callable

from conduit.testing.interrupted.lives import Attach, Checkpoint, Create, Publish
from conduit.testing.interrupted.reading import Consume, Load, Mix, OpenConsumers, Produce, Read, Rollouts
from conduit.testing.interrupted.scenario import Scenario
from conduit.testing.interrupted.writing import (
    Append,
    AppendExactly,
    ChangeLimits,
    CountStatistics,
    Extend,
    HoldBack,
    Limited,
    OpenWriters,
    Remove,
    WriteBare,
    WriteRollouts,
    WriteSteps,
)

SCENARIOS: dict[str, Callable[[str], Scenario]] = {
    one.__name__: one
    for one in (
        Append,
        AppendExactly,
        WriteSteps,
        WriteRollouts,
        WriteBare,
        Extend,
        HoldBack,
        OpenWriters,
        CountStatistics,
        Limited,
        ChangeLimits,
        Remove,
        Load,
        Mix,
        Read,
        Produce,
        Consume,
        OpenConsumers,
        Rollouts,
        Attach,
        Create,
        Checkpoint,
        Publish,
    )
}
