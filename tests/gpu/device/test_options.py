"""What is refused when a loader on a device is opened, and what it holds while it is open."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import conduit
from conduit.contracts.device import Event
from conduit.errors import Closed, ConfigError, DeviceError, LostDevice, MissingDevice, NoPinnedMemory, SchemaMismatch
from conduit.plane.device.cuda import CudaDevice
from conduit.plane.device.graphs import Draws
from conduit.plane.device.registration import Registration
from conduit.testing.invariants import slots_in_use
from tests.gpu.device.conftest import SCHEMA, SMALL, Source, host_only

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "cuda:-1", "CUDA", "rocm:0", ""])
def test_a_wrong_device_string_is_refused(make, name):
    engine = make(SMALL)
    with pytest.raises(ConfigError, match="Expected device 'cpu', 'cuda' or 'cuda:0' and so on, got"):
        engine.loader("replay", batch_size=4, device=name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_cuda_is_refused_with_what_is_needed(make):
    engine = make(SMALL)
    with pytest.raises(
        MissingDevice, match=r"Expected a CUDA device for device='cuda', torch finds none .*use device='cpu'"
    ):
        engine.loader("replay", batch_size=4, device="cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_gpu_that_is_not_there_is_refused(make):
    engine = make(SMALL)
    with pytest.raises(MissingDevice, match="Expected one of"):
        engine.loader("replay", batch_size=4, device="cuda:99")


def test_options_that_do_not_go_together_are_refused(make, device):
    engine = make(SMALL)
    for options, message in (
        ({"pool": "1 MiB"}, "Expected pool only with a device such as 'cuda', got '1 MiB' with device='cpu'"),
        ({"device": 3}, "Expected device 'cpu', 'cuda' or 'cuda:0' and so on, got 3"),
        ({"device": device, "format": "numpy"}, "Expected format='torch' for batches on"),
        ({"device": device, "batch_transforms": [conduit.gae()]}, "Expected a window of consecutive steps"),
        ({"device": device, "shard": (2, 2)}, r"Expected shard=\(rank, world\) with 0 <= rank < world, got \(2, 2\)"),
        ({"shard": 3}, r"Expected shard=\(rank, world\)"),
        ({"shard": (True, 2)}, r"Expected shard=\(rank, world\)"),
    ):
        with pytest.raises(ConfigError, match=message):
            engine.loader("replay", batch_size=4, **options)


def test_a_plan_that_was_made_for_another_schema_is_refused(make, device):
    engine, other = make(SMALL), make(SCHEMA)
    Source(engine)(50)
    with (
        engine.loader("replay", batch_size=4, device=device, pool="1 MiB") as loader,
        other.loader("replay", batch_size=4, format="numpy") as stranger,
        pytest.raises(SchemaMismatch, match=r"Expected a plan that was made for this table's schema .* - at `obs`"),
    ):
        Draws(device, engine._views["replay"], stranger.plan, loader.residence, 0, 0)


@host_only
def test_a_tables_memory_is_registered_once_and_given_back_by_the_last_loader(make, device):
    engine = make()
    Source(engine)(60)
    view = engine._views["replay"]
    one, other = (engine.loader("replay", batch_size=2, device=device, pool=pool) for pool in (None, "1 MiB"))
    (size,) = device.registered.values()
    assert size >= sum(column.nbytes for column in view.columns.values())
    one.next()
    one.close()
    assert len(device.registered) == 1
    other.close()
    other.close()
    assert device.registered == {}
    registration = Registration(device, view)
    assert len(device.registered) == 1
    del registration
    assert device.registered == {}


@host_only
@pytest.mark.parametrize("pool", [None, "1 MiB"])
def test_a_loader_that_is_dropped_lets_memory_and_leases_go(make, device, pool):
    engine = make(capacity=400, page_rows=100)
    Source(engine)(150)
    loader = engine.loader("replay", batch_size=4, device=device, pool=pool)
    batch = loader.next()
    before = batch["obs"].clone()
    del loader
    assert device.registered == {}
    assert slots_in_use(engine._views["replay"]) == 0
    assert torch.equal(batch["obs"], before)


@host_only
def test_no_bytes_are_never_registered(device):
    assert "cannot be registered" in device.register(4096, 0)


def test_a_closed_loader_is_closed_and_its_batches_stay(make, device):
    engine = make()
    Source(engine)(60)
    for pool in (None, "1 MiB"):
        with engine.loader("replay", batch_size=2, device=device, pool=pool) as loader:
            batch = loader.next()
            before = batch["obs"].clone()
        with pytest.raises(Closed):
            loader.next()
        assert torch.equal(batch["obs"], before)
        batch.release()


@host_only
def test_a_device_that_is_lost_is_an_error_of_its_own(make, device, monkeypatch):
    """CUDA reports it at any later call, as a RuntimeError of torch: no batch is handed out behind it."""

    def lost(*_):
        raise LostDevice(
            "Expected cpu to go on working, it reported: CUDA error: an illegal memory access was encountered"
        )

    engine = make()
    Source(engine)(60)
    with engine.loader("replay", batch_size=2, device=device) as loader:
        loader.next()
        with monkeypatch.context() as patch:
            patch.setattr(type(device), "upload", lost)
            with pytest.raises(LostDevice, match="illegal memory access"):
                loader.next()
        assert loader.stats.batches == 1
        assert loader.sampler.batch == 1


def test_what_torch_reports_of_a_cuda_device_is_said_in_the_products_words():
    from conduit.plane.device.cuda import _guarded

    with (
        pytest.raises(
            LostDevice, match=r"Expected cuda:0 to go on working, it reported: CUDA error: .*start a new process"
        ),
        _guarded("cuda:0"),
    ):
        raise RuntimeError("CUDA error: unspecified launch failure")
    for error in (
        torch.OutOfMemoryError("CUDA out of memory"),
        LostDevice("CUDA error"),
        RuntimeError("of the user's"),
        ValueError("CUDA"),
    ):
        with pytest.raises(type(error), match=str(error)) as raised, _guarded("cuda:0"):
            raise error
        assert raised.value is error


def test_a_device_that_is_only_full_is_not_lost():
    from conduit.plane.device.cuda import _guarded

    with (
        pytest.raises(DeviceError, match=r"cuda:0 to have enough free memory.*goes on working") as raised,
        _guarded("cuda:0"),
    ):
        raise RuntimeError("CUDA error: out of memory")
    assert not isinstance(raised.value, LostDevice)


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"), NoPinnedMemory),
        (RuntimeError("CUDA error: operation not permitted"), NoPinnedMemory),
        (MemoryError("no memory"), NoPinnedMemory),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), LostDevice),
        (RuntimeError("CUDA error: unspecified launch failure"), LostDevice),
    ],
    ids=str,
)
def test_a_failed_pinned_allocation_is_an_error_of_its_own(monkeypatch, said, error):
    """What torch's allocator raises, without a GPU to raise it."""

    def failing(*_, **__):
        raise said

    device = object.__new__(CudaDevice)
    device.place = "cuda:0"
    monkeypatch.setattr(torch, "empty", failing)
    with pytest.raises(error) as raised:
        device.pinned(1 << 20)
    assert isinstance(raised.value, LostDevice) == (error is LostDevice)
    if error is NoPinnedMemory:
        assert isinstance(raised.value, MemoryError)
        assert re.search(r"(?s)1,048,576 bytes of host memory.*ulimit -l.*batch_size or buffers", str(raised.value))


@host_only
def test_a_loader_of_a_device_that_was_lost_still_lets_its_name_and_memory_go(make, device):
    class Lost(Event):
        def passed(self):
            return False

        def wait(self):
            raise LostDevice("Expected cpu to go on working")

    engine = make()
    Source(engine)(60)
    loader = engine.loader("replay", batch_size=2, device=device, pool="1 MiB", name="learner")
    loader.next()
    loader._ring.buffers[0]._event = Lost()
    with pytest.raises(LostDevice):
        loader.close()
    assert device.registered == {}
    engine.loader("replay", batch_size=2, device=device, name="learner").close()


PROBE = """
import sys, numpy as np, conduit
schema = conduit.Schema([conduit.Field("obs", "float32", (4,), observation=True)])
with conduit.Engine.create(sys.argv[1], {"replay": conduit.Table(schema, 100)}) as engine:
    with engine.writer("replay") as writer:
        for n in range(20):
            writer.append(obs=np.zeros(4, np.float32))
    with engine.loader("replay", batch_size=4, format="numpy", device="cpu") as loader:
        loader.next()
assert "triton" not in sys.modules and "torch" not in sys.modules
"""


def test_a_loader_on_the_cpu_imports_neither_triton_nor_torch(engine_name):
    done = subprocess.run(
        [sys.executable, "-c", PROBE, engine_name], capture_output=True, text=True, cwd=ROOT, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_registered_memory_is_read_under_its_own_address():
    device = CudaDevice("cuda")
    host = torch.arange(1 << 20, dtype=torch.int64)
    assert device.register(host.data_ptr(), host.nbytes) == ""
    seen = device.mapped(host.data_ptr(), host.nbytes)
    assert seen.is_cuda
    assert torch.equal(seen.view(torch.int64).cpu(), host)
    device.unregister(host.data_ptr())


def test_a_table_that_counts_deliveries_is_refused(make, device):
    engine = make(SMALL, max_times_sampled=3)
    with pytest.raises(ConfigError, match="without max_times_sampled for batches on"):
        engine.loader("replay", batch_size=4, device=device)
