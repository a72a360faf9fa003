"""Conduit: an experience data plane for reinforcement learning.

Actors write steps straight into shared memory, and learners pull batches that are ready to train on. The code is divided into
rooms; each imports only rooms that stand above it:

    errors  numbers  field  arrays  nesting  infer_fields  schema  clock  alarms  forking    shared by all rooms
    contracts    the contracts of the replaceable parts: ingestion, placement, delivery, sampler, device
    native       the base of kernels; native.compile declares them, builds them ahead of time, or compiles them at first use
    store        the storage of rows: format, pages, segment, tables, ingest, checkpoint
    kernels      how rows become batches: spec, reference, cpu, gpu, ops
    sampling     which windows a batch is made of
    plane        the engine and its control points: ingest (Writer), deliver (Loader, Consumer), device; observe
    offline  launching  demo  cli    the rooms on top; they use the plane, never the store

This package has the names that programs construct and call. The types that calls return, for annotations, are in
conduit.typing; errors are in conduit.errors.

Importing this package starts no thread, sets no environment variable, and imports neither torch nor numba.
"""

from conduit import errors as errors
from conduit import typing as typing
from conduit.contracts.delivery import Delivery as Delivery
from conduit.contracts.ingestion import Ingestion as Ingestion
from conduit.field import Field as Field
from conduit.kernels.cpu.priorities import sequence_priority as sequence_priority
from conduit.kernels.ops.hindsight import hindsight as hindsight
from conduit.kernels.ops.normalize_advantages import normalize_advantages as normalize_advantages
from conduit.kernels.ops.returns import gae as gae
from conduit.kernels.ops.returns import vtrace as vtrace
from conduit.kernels.ops.returns_to_go import returns_to_go as returns_to_go
from conduit.kernels.spec.batch_transforms import BatchTransform as BatchTransform
from conduit.kernels.spec.batch_transforms import Contents as Contents
from conduit.kernels.spec.batch_transforms import apply as apply
from conduit.kernels.spec.plan import Computed as Computed
from conduit.kernels.spec.transforms import cast as cast
from conduit.kernels.spec.transforms import clip as clip
from conduit.kernels.spec.transforms import normalize as normalize
from conduit.kernels.spec.transforms import one_hot as one_hot
from conduit.kernels.spec.transforms import random_shift as random_shift
from conduit.kernels.spec.transforms import scale as scale
from conduit.kernels.spec.windows import Episode as Episode
from conduit.kernels.spec.windows import Rollout as Rollout
from conduit.kernels.spec.windows import Sequence as Sequence
from conduit.kernels.spec.windows import Transition as Transition
from conduit.launching.actor import Actor as Actor
from conduit.launching.launch import launch as launch
from conduit.plane.attach import attach as attach
from conduit.plane.client import Client as Client
from conduit.plane.deliver.batch import Batch as Batch
from conduit.plane.deliver.loader import Loader as Loader
from conduit.plane.engine import Engine as Engine
from conduit.plane.ingest.policy import CommitEvery as CommitEvery
from conduit.plane.ingest.writer import Writer as Writer
from conduit.sampling.prioritized import Prioritized as Prioritized
from conduit.sampling.shuffled import Shuffled as Shuffled
from conduit.schema import Schema as Schema
from conduit.store.format.limit_specs import Limits as Limits
from conduit.store.format.limit_specs import MinSize as MinSize
from conduit.store.format.limit_specs import SampleToInsertRatio as SampleToInsertRatio
from conduit.store.format.table_spec import Priorities as Priorities
from conduit.store.format.table_spec import Table as Table

__version__ = "0.1.0"

__all__ = [
    "Actor",
    "Batch",
    "BatchTransform",
    "Client",
    "CommitEvery",
    "Computed",
    "Contents",
    "Delivery",
    "Engine",
    "Episode",
    "Field",
    "Ingestion",
    "Limits",
    "Loader",
    "MinSize",
    "Priorities",
    "Prioritized",
    "Rollout",
    "SampleToInsertRatio",
    "Schema",
    "Sequence",
    "Shuffled",
    "Table",
    "Transition",
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
    "normalize",
    "normalize_advantages",
    "one_hot",
    "random_shift",
    "returns_to_go",
    "scale",
    "sequence_priority",
    "typing",
    "vtrace",
]
