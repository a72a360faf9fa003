"""What goes to other processes: batches as copies, clients as attachments; what belongs to its process is refused by name."""

import contextlib
import copy
import itertools
import multiprocessing
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import conduit
from conduit import Field, Schema
from conduit.errors import Closed, ConfigError, EngineNotFound, ReadOnly, Unsendable
from conduit.testing.puppets import Puppet

ROOT = Path(__file__).resolve().parents[2]

SCHEMA = Schema(
    [
        Field("obs.image", "uint8", (2, 3), observation=True),
        Field("obs.speed", "bfloat16", observation=True),
        Field("action", "int64"),
        Field("reward", "float32", reward=True),
        Field("tokens", "int32", (5,), ragged=True),
    ]
)
KEYS = ("ids", "versions", "episodes", "steps")


def row(k):
    obs = {"image": np.full((2, 3), abs(k), np.uint8), "speed": float(k)}
    return {"obs": obs, "action": k, "reward": float(k), "tokens": np.arange(abs(k) % 6, dtype=np.int32)}


def fill(engine, rows=60):
    with engine.writer("replay", keep_final=False) as writer:
        for k in range(rows):
            writer.append(**row(k), terminated=k == 30)


@pytest.fixture(params=["torch", "numpy"])
def loader(make, request):
    engine = make(SCHEMA)
    fill(engine)
    return engine.loader("replay", batch_size=16, seed=3, format=request.param, ragged="pack", on_busy="error")


def same(left, right):
    assert list(left) == list(right)
    assert left.reward_names == right.reward_names == ("reward",)
    pairs = [(left[name], right[name]) for name in left] + [(getattr(left, key), getattr(right, key)) for key in KEYS]
    for mine, theirs in pairs:
        assert type(mine) is type(theirs)
        assert mine.dtype == theirs.dtype
        equal = torch.equal if isinstance(mine, torch.Tensor) else np.array_equal
        assert equal(mine, theirs)


COPIES = {
    "clone": lambda batch: batch.clone(),
    "deepcopy": copy.deepcopy,
    **{f"pickle {n}": lambda batch, n=n: pickle.loads(pickle.dumps(batch, n)) for n in (2, 5)},
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_holds_the_same_and_no_buffer(loader, copied):
    batches = []
    for _ in range(5):
        batch = loader.next()
        batches.append((batch["action"].tolist(), copied(batch)))
        same(batches[-1][1], batch)
        del batch
    assert loader.stats.allocated == 0
    for actions, batch in batches:
        assert isinstance(batch, conduit.Batch)
        assert batch["action"].tolist() == actions
        assert batch.nest()["obs"]["image"].shape == (16, 2, 3)
        same(copied(batch), batch)
        batch.release()


def test_a_shallow_copy_of_a_batch_is_the_batch(loader):
    batch = loader.next()
    assert copy.copy(batch) is batch


def test_a_pickled_batch_outlives_its_engine_and_needs_none(loader, make, tmp_path):
    batch = loader.next()
    path = tmp_path / "batch"
    path.write_bytes(pickle.dumps(batch))
    program = (
        "import pickle, sys\n"
        "batch = pickle.load(open(sys.argv[1], 'rb'))\n"
        "print(type(batch['action']).__name__, batch['action'].tolist(), batch.ids.tolist(), batch.reward_names)\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True, cwd=ROOT, timeout=60
    )
    kind = type(batch["action"]).__name__
    assert said.stdout.strip() == f"{kind} {batch['action'].tolist()} {batch.ids.tolist()} ('reward',)"


def test_batches_come_out_of_other_processes_as_they_were(make):
    engine = make(SCHEMA)
    fill(engine)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    queue = context.Queue()
    process = context.Process(target=send, args=(theirs, queue, conduit.attach(engine.name)))
    process.start()
    try:
        for sent in (ours, queue):
            wanted = engine.loader("replay", batch_size=8, seed=5)
            for _ in range(6):
                assert sent is queue or ours.poll(60)
                same(ours.recv() if sent is ours else queue.get(timeout=60), wanted.next())
    finally:
        # torch hands descriptors over, which the sender must not close before they are taken
        ours.send(None)
        process.join(60)
    assert process.exitcode == 0


def send(connection, queue, client):
    addresses = set()
    loader = client.loader("replay", batch_size=8, seed=5, on_busy="error")
    for batch in itertools.islice(loader, 6):
        connection.send(batch)
        addresses.add(batch["action"].data_ptr())
    assert len(addresses) == 3, "what is sent is a copy: the buffers stay the loader's"
    loader = client.loader("replay", batch_size=8, seed=5, buffers=7)  # a queue's thread sends later
    for batch in itertools.islice(loader, 6):
        queue.put(batch)
    assert connection.poll(60)


def test_a_batch_moves_to_another_device_with_its_ids_and_stays_where_it_is_on_its_own(make):
    engine = make(SCHEMA)
    fill(engine)
    loader = engine.loader("replay", batch_size=16)
    batch = loader.next()
    assert batch.to("cpu") is batch
    assert batch.to(torch.device("cpu"), non_blocking=True) is batch
    # the one device beside the processor that every machine has: tensors without contents
    moved = batch.to("meta", non_blocking=True)
    assert list(moved) == list(batch)
    assert {value.device.type for value in moved.values()} == {"meta"}
    assert {getattr(moved, key).device.type for key in KEYS} == {"meta"}
    assert moved["action"].shape == batch["action"].shape
    assert moved.to("meta") is moved
    assert batch.clone().to("cpu")["action"].tolist() == batch["action"].tolist()


def test_a_numpy_batch_says_that_it_moves_to_no_device(make):
    engine = make(SCHEMA)
    fill(engine)
    batch = engine.loader("replay", batch_size=16, format="numpy").next()
    for device in ("cpu", "cuda"):
        with pytest.raises(ConfigError, match=r'batch of torch tensors.*numpy.*format="torch"'):
            batch.to(device)


def assign(batch):
    batch["action"] = 0


def delete(batch):
    del batch["action"]


def assign_attribute(batch):
    batch.action = 0


def assign_ids(batch):
    batch.ids = 0


def delete_attribute(batch):
    del batch.ids


@pytest.mark.parametrize("change", [assign, delete, assign_attribute, assign_ids, delete_attribute])
def test_a_batch_takes_no_assignment_and_says_what_does(loader, change):
    batch = loader.next()
    with pytest.raises(ReadOnly, match=r"the loader owns the batch") as told:
        change(batch)
    assert isinstance(told.value, TypeError)
    if change is not delete_attribute:
        assert "dict(batch)" in str(told.value)
    own = dict(batch)
    own["action"] = own["action"] * 2
    assert (own["action"] == batch["action"] * 2).all()


def test_a_copy_of_a_batch_takes_entries_and_what_is_copied_from_it_has_them(loader):
    batch = loader.next()
    own = batch.clone()
    own["double"] = own["action"] * 2
    own["action"] = own["action"] + 1
    del own["reward"]
    assert "double" not in batch
    assert (own["action"] == batch["action"] + 1).all()
    for again in (copy.copy(own), own.clone(), pickle.loads(pickle.dumps(own)), copy.deepcopy(own)):
        assert list(again) == list(own)
        assert (again["double"] == batch["action"] * 2).all()
        again["more"] = 1
        assert "more" not in own
    with pytest.raises(ReadOnly):
        own.ids = 0


def attached(own, client, table):
    own.client, own.again = client, pickle.loads(pickle.dumps(client))
    with own.again.writer(table, keep_final=False) as writer:
        writer.append(**row(-1))
    return client.name, len({client._participants.number, own.again._participants.number})


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_a_client_that_is_sent_to_a_process_attaches_again_there(make, method):
    engine = make(SCHEMA)
    fill(engine)
    with conduit.attach(engine.name) as client, Puppet(method) as puppet:
        name, seats = puppet.do(attached, client, "replay")
        assert (name, seats) == (engine.name, 2)
        assert engine.loader("replay", batch_size=64, format="numpy", min_rows=1).next()["action"].min() >= -1
        assert engine._views["replay"].counts().inserted == 61


def test_a_client_is_pickled_by_cloudpickle_too(make):
    cloudpickle = pytest.importorskip("cloudpickle")
    with conduit.attach(make(SCHEMA).name) as client, pickle.loads(cloudpickle.dumps(client)) as again:
        assert again.tables == client.tables
        assert again is not client


def test_a_client_whose_engine_is_gone_says_so_where_it_arrives(make):
    engine = make(SCHEMA)
    client = conduit.attach(engine.name)
    sent = pickle.dumps(client)
    client.close()
    with pytest.raises(Closed):
        pickle.dumps(client)
    engine.close()
    with pytest.raises(EngineNotFound, match=engine.name):
        pickle.loads(sent)


def test_what_belongs_to_its_process_is_neither_copied_nor_pickled_and_says_what_is_sent_instead(engine_name):
    queue = conduit.Table.queue(SCHEMA, 100)
    ratio = conduit.Table(SCHEMA, 1000, limiter=conduit.MinSize(1), statistics=("reward",))
    tables = {"replay": ratio, "queue": queue}
    with conduit.Engine.create(engine_name, tables, policies={"policy": {"w": np.zeros(1)}}) as engine:
        fill(engine)
        with engine.writer("queue", keep_final=False) as writer:
            writer.append(**row(0))
        client = conduit.attach(engine_name)
        consumer = client.consumer("queue")
        things = {
            r"conduit\.attach\('.*'\)": engine,
            r"client\.writer\(table": client.writer("replay"),
            r"client\.loader\(table": client.loader("replay", batch_size=4),
            r"client\.mixed_loader\(tables": client.mixed_loader({"replay": 1}, batch_size=4),
            r"client\.consumer\(table": consumer,
            r"value\.clone\(\)": consumer.next(),
            r"client\.policy\(name": client.policy(),
            r"client\.table\(name\)\.limiter": client.table("replay").limiter,
            r"client\.table\(name\)\.statistics": client.table("replay").statistics,
            r"client\.table\(name\)\.scan": client.table("replay").scan(),
            r"client\.table\(name": client.table("replay"),
        }
        for (remedy, thing), copied in itertools.product(things.items(), (pickle.dumps, copy.copy, copy.deepcopy)):
            with pytest.raises(Unsendable, match=remedy) as told:
                copied(thing)
            assert isinstance(told.value, TypeError)
        with contextlib.suppress(ImportError):
            import cloudpickle

            with pytest.raises(Unsendable):
                cloudpickle.dumps(engine)
        client.close()
