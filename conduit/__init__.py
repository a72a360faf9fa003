"""Conduit: an experience data plane for reinforcement learning.

Actors write steps straight into shared memory, learners pull ready batches. The layers, each importing only what stands
above it:

    errors  numbers  field  arrays  nesting  schema  clock  alarms  forking    what everything shares
    declare  jit  native  compiler    kernels: how they are declared, built ahead of time, and compiled where they were not
    store        where rows are: segment, words, protocol, participants, leases, weights
    kernels      how rows become batches: plans, CPU kernels, the slow reference
    sampling     which windows a batch is made of
    plane        the engine and its control points: ingestion (Writer), placement, delivery (Loader, Consumer)
    offline  launching  demo  cli    what stands on top; they use the plane, never the store

Importing this package starts no thread, sets no environment variable, and imports neither torch nor numba.
"""

from conduit import errors as errors
from conduit.kernels.batchwise import BatchTransform as BatchTransform
from conduit.kernels.batchwise import apply as apply
from conduit.kernels.leaves import sequence_priority as sequence_priority
from conduit.kernels.relabel import hindsight as hindsight
from conduit.kernels.returns import gae as gae
from conduit.kernels.returns import normalise_advantages as normalise_advantages
from conduit.kernels.returns import returns_to_go as returns_to_go
from conduit.kernels.returns import vtrace as vtrace
from conduit.kernels.transforms import Transform as Transform
from conduit.kernels.transforms import cast as cast
from conduit.kernels.transforms import clip as clip
from conduit.kernels.transforms import normalise as normalise
from conduit.kernels.transforms import one_hot as one_hot
from conduit.kernels.transforms import random_shift as random_shift
from conduit.kernels.transforms import scale as scale
from conduit.kernels.windows import Episode as Episode
from conduit.kernels.windows import Rollout as Rollout
from conduit.kernels.windows import Sequence as Sequence
from conduit.kernels.windows import Transition as Transition
from conduit.launching.actor import Actor as Actor
from conduit.launching.actors import Actors as Actors
from conduit.launching.launch import launch as launch
from conduit.plane.attaching import attach as attach
from conduit.plane.batch import Batch as Batch
from conduit.plane.claim import Claim as Claim
from conduit.plane.client import Client as Client
from conduit.plane.consuming import Consumer as Consumer
from conduit.plane.delivery import Delivery as Delivery
from conduit.plane.delivery import Loader as Loader
from conduit.plane.engine import Engine as Engine
from conduit.plane.episodes import Episodes as Episodes
from conduit.plane.epochs import EpochLoader as EpochLoader
from conduit.plane.ingestion import CommitEvery as CommitEvery
from conduit.plane.ingestion import Ingestion as Ingestion
from conduit.plane.limiting import RateLimiter as RateLimiter
from conduit.plane.mixing import MixedLoader as MixedLoader
from conduit.plane.placement import Placement as Placement
from conduit.plane.placement import Pool as Pool
from conduit.plane.placement import Request as Request
from conduit.plane.scanning import Scan as Scan
from conduit.plane.steps import Steps as Steps
from conduit.plane.table import TableHandle as TableHandle
from conduit.plane.writer import Writer as Writer
from conduit.sampling.prioritised import Prioritised as Prioritised
from conduit.sampling.shuffled import Shuffled as Shuffled
from conduit.schema import Field as Field
from conduit.schema import Schema as Schema
from conduit.store.counting import Counts as Counts
from conduit.store.declaration import Priorities as Priorities
from conduit.store.declaration import Table as Table
from conduit.store.limits import Limits as Limits
from conduit.store.limits import MinSize as MinSize
from conduit.store.limits import Queue as Queue
from conduit.store.limits import SampleToInsertRatio as SampleToInsertRatio
from conduit.store.statistics import Moments as Moments
from conduit.store.statistics import Statistics as Statistics
from conduit.store.weights import PolicySlot as PolicySlot
from conduit.store.weights import Weights as Weights

__version__ = "0.1.0"

__all__ = [
    "Actor",
    "Actors",
    "Batch",
    "BatchTransform",
    "Claim",
    "Client",
    "CommitEvery",
    "Consumer",
    "Counts",
    "Delivery",
    "Engine",
    "Episode",
    "Episodes",
    "EpochLoader",
    "Field",
    "Ingestion",
    "Limits",
    "Loader",
    "MinSize",
    "MixedLoader",
    "Moments",
    "Placement",
    "PolicySlot",
    "Pool",
    "Priorities",
    "Prioritised",
    "Queue",
    "RateLimiter",
    "Request",
    "Rollout",
    "SampleToInsertRatio",
    "Scan",
    "Schema",
    "Sequence",
    "Shuffled",
    "Statistics",
    "Steps",
    "Table",
    "TableHandle",
    "Transform",
    "Transition",
    "Weights",
    "Writer",
    "__version__",
    "apply",
    "attach",
    "cast",
    "clip",
    "errors",
    "gae",
    "hindsight",
    "launch",
    "normalise",
    "normalise_advantages",
    "one_hot",
    "random_shift",
    "returns_to_go",
    "scale",
    "sequence_priority",
    "vtrace",
]
