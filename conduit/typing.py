"""Types that Conduit's calls return and that no program constructs, for annotations.

`conduit.Client`, `Writer`, `Loader`, `Batch` and `Actor` are also returned, but most programs name them, so they are in `conduit` itself.

    what                                          returns
    --------------------------------------------  -------------------------------------------------------------
    `Client.table(name)`                          `TableHandle`: its `counts` are `Counts`, its `limiter` is a `RateLimiter`,
                                                  its `statistics` are `Statistics` (`read` returns `Moments`),
                                                  `episodes()` `Episodes`, `scan()` a `Scan` of `Steps`
    `Client.loader(sampling=Shuffled())`          `EpochLoader`
    `Client.mixed_loader`, `Client.dataset`       `MixedLoader`, `Dataset`
    `Loader.stats`, `Loader.plan`                 `LoaderStats`, `Plan`
    `Client.consumer`                             `Consumer`, which gives `Claim`; its `stats` are `ConsumerStats`
    `Client.policy`, `PolicySlot.poll`            `PolicySlot`, `Weights`
    `Writer.step`, `rollout`, `unchecked`         `StepView` (of the `with` block), `RolloutView`, `UncheckedView`
    `conduit.scale`, `conduit.cast`               `Transform`
    `conduit.launch`                              `Actors`, whose `status` is of `ActorStatus`
    `Engine.restored`                             `Restored`
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from conduit.kernels.spec.plan import Plan
from conduit.kernels.spec.transforms import Transform
from conduit.launching.actors import Actors, ActorStatus
from conduit.plane.deliver.claim import Claim
from conduit.plane.deliver.consumer import Consumer, ConsumerStats
from conduit.plane.deliver.episodes import Episodes
from conduit.plane.deliver.epochs import EpochLoader
from conduit.plane.deliver.loader import LoaderStats
from conduit.plane.deliver.mixed import MixedLoader
from conduit.plane.deliver.scan import Scan
from conduit.plane.deliver.steps import Steps
from conduit.plane.ingest.rollout import RolloutView
from conduit.plane.ingest.step import StepView
from conduit.plane.ingest.unchecked import UncheckedView
from conduit.plane.table import TableHandle
from conduit.store.pages.row_counts import Counts
from conduit.store.tables.limit_checks import RateLimiter
from conduit.store.tables.policy_weights import PolicySlot, Weights
from conduit.store.tables.statistics import Moments, Statistics

if TYPE_CHECKING:
    from conduit.plane.checkpoints import Restored
    from conduit.plane.deliver.dataset import Dataset

__all__ = [
    "ActorStatus",
    "Actors",
    "Claim",
    "Consumer",
    "ConsumerStats",
    "Counts",
    "Dataset",
    "Episodes",
    "EpochLoader",
    "LoaderStats",
    "MixedLoader",
    "Moments",
    "Plan",
    "PolicySlot",
    "RateLimiter",
    "Restored",
    "RolloutView",
    "Scan",
    "Statistics",
    "StepView",
    "Steps",
    "TableHandle",
    "Transform",
    "UncheckedView",
    "Weights",
]

# imported when first used: most processes read no checkpoint, and not all of them use torch
_LATE = {"Dataset": "conduit.plane.deliver.dataset", "Restored": "conduit.plane.checkpoints"}


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(importlib.import_module(_LATE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
