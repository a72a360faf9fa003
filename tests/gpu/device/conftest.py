"""Batches on a device: host memory and Triton's interpreter, or a GPU where there is one.

Run as `TRITON_INTERPRET=1 python -m pytest tests/gpu/device`; with CONDUIT_GPU_TESTS=1 instead, on the CUDA device.
"""

import os

import numpy as np
import pytest

import conduit
from conduit.plane.device.cuda import CudaDevice
from conduit.plane.device.host import HostDevice
from tests.gpu.interpret.conftest import overflow_is_an_error  # noqa: F401 - a fixture of every test

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
host_only = pytest.mark.skipif(not INTERPRETED, reason="of host memory as a device")

SCHEMA = conduit.Schema(
    [
        conduit.Field("obs", "uint8", (32, 33), observation=True),
        conduit.Field("pose", "float32", (3,), observation=True),
        conduit.Field("action", "int64"),
        conduit.Field("reward", "float32"),
    ]
)
"""Images of 1,056 bytes, wide enough to be read from registered memory; `action` counts all rows ever written."""
SMALL = conduit.Schema(
    [
        conduit.Field("obs", "float32", (4,), observation=True),
        conduit.Field("action", "int64"),
        conduit.Field("reward", "float32"),
    ]
)


@pytest.fixture
def device():
    return HostDevice(1 << 26) if INTERPRETED else CudaDevice("cuda")


class Source:
    """Writes rows whose values follow from a counter, in episodes of random lengths."""

    def __init__(self, engine, table="replay", envs=None, seed=0):
        self.engine = engine
        self.schema = engine.table(table).schema
        self.envs = envs
        self.writer = engine.writer(table, num_envs=envs, autoreset="same_step" if envs else None)
        self.rng = np.random.default_rng(seed)
        self.rows = 0

    def _values(self, counter):
        values = {}
        for field in self.schema.fields:
            image = (np.arange(field.row_bytes // field.itemsize) + 3 * counter).reshape(field.shape)
            values[field.name] = image.astype(field.numpy_dtype)
        values["action"] = np.int64(counter)
        return values

    def __call__(self, ticks):
        lanes = self.envs or 1
        for _ in range(ticks):
            rows = [self._values(self.rows + lane) for lane in range(lanes)]
            self.rows += lanes
            ends = self.rng.random((2, lanes)) < 0.06
            ends[1] &= ~ends[0]
            names = [field.name for field in self.schema.fields if field.observation]
            if self.envs:
                values = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
                flags = {"terminated": ends[0], "truncated": ends[1]}
                final = {name: values[name] + values[name].dtype.type(1) for name in names}
            else:
                values, flags = rows[0], {"terminated": bool(ends[0, 0]), "truncated": bool(ends[1, 0])}
                final = {name: values[name] + values[name].dtype.type(1) for name in names}
            if ends.any():
                flags["final"] = final[names[0]] if len(names) == 1 else final
            self.writer.append(**values, **flags)
        return self


@pytest.fixture
def make(engine_name):
    """Create an engine with a table `replay`: `make(schema, capacity, **options of the table)`; closed after the test."""
    made = []

    def create(schema=SCHEMA, capacity=300, **options):
        table = conduit.Table(schema, capacity, **{"page_rows": 48, **options})
        made.append(conduit.Engine.create(f"{engine_name}-{len(made)}", {"replay": table}))
        return made[-1]

    yield create
    for engine in made:
        engine.close()
