"""`Loader`: what a batch holds, when it comes, and what is said when it does not."""

import gc
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

import conduit
from conduit import Field, Schema
from conduit.errors import Closed, ConfigError, DataTimeout, MissingExtra
from tests.plane.conftest import CARTPOLE

NESTED = Schema(
    [
        Field("obs.camera", "uint8", (3, 50), observation=True),
        Field("obs.pose.0", "float32", (), observation=True),
        Field("obs.pose.1", "float64", (2,), observation=True),
        Field("action.0", "int64"),
        Field("action.1", "bool"),
        Field("brain", "bfloat16", (3,)),
        Field("reward", "float32"),
    ]
)


def fill(writer, ticks, start=0):
    """CartPole rows whose values say which row they are; episodes of 10 steps."""
    for k in range(start, start + ticks):
        obs = np.full(4, k, np.float32)
        ended = k % 10 == 9
        writer.append(obs=obs, action=k, reward=k / 2, terminated=ended, final=obs + 0.5 if ended else None)


def check(batch):
    obs = np.asarray(batch["obs"])
    k = np.asarray(batch["action"])
    ended = k % 10 == 9
    np.testing.assert_array_equal(obs, np.repeat(k[:, None], 4, 1))
    np.testing.assert_array_equal(np.asarray(batch["reward"]), (k / 2).astype(np.float32))
    np.testing.assert_array_equal(np.asarray(batch["terminated"]), ended)
    np.testing.assert_array_equal(np.asarray(batch["next_obs"]), obs + np.where(ended, 0.5, 1)[:, None])
    assert not np.asarray(batch["truncated"]).any()
    np.testing.assert_array_equal(np.asarray(batch.steps), k % 10)


# contents


@pytest.mark.parametrize("kind", ["torch", "numpy"])
@pytest.mark.parametrize("batch_size", [1, 3, 256, 1000])
def test_a_batch_holds_transitions_as_they_were_written(make, kind, batch_size):
    engine = make()
    with engine.writer("replay") as writer:
        writer.version = 3
        fill(writer, 500)
        writer.version = 4
        fill(writer, 301, start=500)
    with engine.loader("replay", batch_size=batch_size, min_rows=1, format=kind, seed=3) as loader:
        tensor = torch.Tensor if kind == "torch" else np.ndarray
        for _ in range(5):
            batch = loader.next()
            check(batch)
            assert list(batch) == ["obs", "action", "reward", "next_obs", "terminated", "truncated"]
            assert len(batch) == 6
            assert all(isinstance(value, tensor) for value in batch.values())
            assert all(value.shape[0] == batch_size for value in batch.values())
            assert str(batch["obs"].dtype).endswith("float32")
            assert str(batch["terminated"].dtype).endswith("bool")
            k = np.asarray(batch["action"])
            for key in (batch.ids, batch.versions, batch.episodes, batch.steps):
                assert isinstance(key, tensor)
                assert str(key.dtype).endswith("int64")
            np.testing.assert_array_equal(np.asarray(batch.versions), np.where(k < 500, 3, 4))
            np.testing.assert_array_equal(np.asarray(batch.episodes), (writer.stream << 32) + k // 10)
            rows = np.asarray(batch.ids) & ((1 << 40) - 1)
            np.testing.assert_array_equal(engine._views["replay"].columns["action"][rows], k)
            assert loader.valid(batch.ids).all()
        stats = loader.stats
        assert (stats.batches, stats.rows, stats.redrawn) == (5, 5 * batch_size, 0)
        assert "obs: " in repr(batch)


def test_iterating_gives_batches_without_end(make):
    engine = make()
    fill(engine.writer("replay"), 50)
    seen = 0
    for batch in engine.loader("replay", batch_size=8):
        check(batch)
        seen += 1
        if seen == 20:
            break
    assert seen == 20


def nested_row(k):
    return {
        "obs": {"camera": np.full((3, 50), k, np.uint8), "pose": (np.float32(k), np.full(2, k / 3))},
        "action": (k, k % 2 == 0),
        "brain": torch.full((3,), k, dtype=torch.bfloat16),
        "reward": float(k),
    }


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_nested_fields_come_back_nested(make, kind):
    engine = make(NESTED)
    with engine.writer("replay") as writer:
        for k in range(100):
            writer.append(**nested_row(k))
    loader = engine.loader("replay", batch_size=32, format=kind)
    batch = loader.next()
    nested = batch.nest()
    assert set(nested) == {"obs", "next_obs", "action", "brain", "reward", "terminated", "truncated"}
    k = np.asarray(nested["reward"]).astype(int)
    for prefix, values in (("obs", k), ("next_obs", k + 1)):
        camera, pose = nested[prefix]["camera"], nested[prefix]["pose"]
        assert isinstance(pose, tuple)
        assert camera.shape == (32, 3, 50)
        np.testing.assert_array_equal(np.asarray(camera)[:, 1, 1], values)
        np.testing.assert_array_equal(np.asarray(pose[0]), values)
        np.testing.assert_array_equal(np.asarray(pose[1]), np.repeat(values[:, None] / 3, 2, 1))
    np.testing.assert_array_equal(np.asarray(nested["action"][0]), k)
    np.testing.assert_array_equal(np.asarray(nested["action"][1]), k % 2 == 0)
    if kind == "torch":
        assert nested["brain"].dtype == torch.bfloat16
        np.testing.assert_array_equal(nested["brain"].float().numpy(), np.repeat(k[:, None], 3, 1))
    else:
        assert nested["brain"].dtype == np.uint16
        np.testing.assert_array_equal((nested["brain"].astype(np.uint32) << 16).view(np.float32)[:, 0], k)
    assert batch["obs.camera"] is nested["obs"]["camera"]


def test_fields_chooses_what_is_delivered_in_its_order(make):
    engine = make()
    fill(engine.writer("replay"), 50)
    loader = engine.loader("replay", batch_size=8, fields=["truncated", "next_obs", "reward"], format="numpy")
    batch = loader.next()
    assert list(batch) == ["truncated", "next_obs", "reward"]
    np.testing.assert_array_equal(batch["next_obs"][:, 0] % 1, np.where(batch["reward"] % 5 == 4.5, 0.5, 0))
    only = engine.loader("replay", batch_size=8, fields=["terminated"]).next()
    assert list(only) == ["terminated"]
    assert only.nest().keys() == {"terminated"}
    assert only.ids.shape == (8,)


def test_transforms_apply_to_the_observation_and_to_what_follows_it(make):
    engine = make(NESTED)
    with engine.writer("replay") as writer:
        for k in range(60):
            writer.append(**nested_row(k))
    transform = {
        "obs.camera": conduit.scale(1 / 255),
        "obs": conduit.cast("float16"),
        "action.0": conduit.cast("int32"),
        "reward": conduit.scale(2.0, offset=1.0, dtype="float64"),
    }
    batch = engine.loader("replay", batch_size=32, transform=transform, format="torch").next()
    k = (batch["reward"] - 1) / 2
    for prefix, values in (("obs", k), ("next_obs", k + 1)):
        assert batch[f"{prefix}.camera"].dtype == torch.float32
        wanted = values.float() * torch.tensor(1 / 255)
        torch.testing.assert_close(batch[f"{prefix}.camera"][:, 2, 49], wanted, rtol=0, atol=0)
        assert batch[f"{prefix}.pose.0"].dtype == batch[f"{prefix}.pose.1"].dtype == torch.float16
        torch.testing.assert_close(batch[f"{prefix}.pose.0"], values.half(), rtol=0, atol=0)
    assert batch["action.0"].dtype == torch.int32
    assert batch["reward"].dtype == torch.float64


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_every_output_is_contiguous_and_begins_at_a_multiple_of_128_bytes(make, kind):
    engine = make(NESTED)
    with engine.writer("replay") as writer:
        for k in range(20):
            writer.append(**nested_row(k))
    batch = engine.loader("replay", batch_size=7, format=kind).next()
    for value in (*batch.values(), batch.ids, batch.versions):
        if kind == "torch":
            assert value.is_contiguous()
            assert value.data_ptr() % 128 == 0
        else:
            assert value.flags.c_contiguous
            assert value.ctypes.data % 128 == 0


# the sequence of batches


def keys(loader, count):
    return [tuple(loader.next().ids.tolist()) for _ in range(count)]


def test_the_same_rows_and_seed_give_the_same_batches_and_another_seed_gives_others(make):
    engine = make()
    fill(engine.writer("replay"), 400)
    client = conduit.attach(engine.name)
    sequences = {
        (seed, who): keys((engine, client)[who].loader("replay", batch_size=64, seed=seed), 10)
        for seed in (0, 1, -5, 2**63, 2**64 - 1)
        for who in (0, 1)
    }
    for seed in (0, 1, -5, 2**63, 2**64 - 1):
        assert sequences[seed, 0] == sequences[seed, 1]
    distinct = {tuple(sequence) for sequence in sequences.values()}
    assert len(distinct) == 5
    assert len({batch for sequence in sequences.values() for batch in sequence}) == 50
    client.close()


def test_the_number_of_the_batch_can_be_set_to_repeat_and_to_skip(make):
    engine = make()
    fill(engine.writer("replay"), 400)
    loader = engine.loader("replay", batch_size=64, seed=9)
    first = keys(loader, 6)
    assert loader.sampler.batch == 6
    loader.sampler.batch = 2
    assert keys(loader, 4) == first[2:]
    again = engine.loader("replay", batch_size=64, seed=9)
    again.sampler.batch = 5
    assert keys(again, 1) == first[5:]


def test_a_failed_call_takes_nothing_away_from_later_ones(make):
    engine = make()
    writer = engine.writer("replay")
    fill(writer, 300)
    wanted = keys(engine.loader("replay", batch_size=32, seed=1), 3)
    loader = engine.loader("replay", batch_size=32, seed=1, buffers=2, on_busy="error")
    got = keys(loader, 1)
    held = [loader.next(), loader.next()]
    with pytest.raises(conduit.errors.BuffersBusy):
        loader.next()
    got += [tuple(batch.ids.tolist()) for batch in held]
    assert got == wanted


def test_the_batch_size_does_not_depend_on_the_table_s_size(make):
    engine = make(capacity=27, page_rows=10)
    fill(engine.writer("replay"), 5)
    batch = engine.loader("replay", batch_size=5000, min_rows=4).next()
    check(batch)
    assert set(batch["action"].tolist()) == {0, 1, 2, 3}


# ids


def test_ids_name_their_rows_until_these_are_overwritten(make):
    engine = make(capacity=20, page_rows=10)
    writer = engine.writer("replay")
    fill(writer, 25)
    loader = engine.loader("replay", batch_size=200, min_rows=1, format="torch")
    batch = loader.next()
    assert loader.valid(batch.ids).all()
    assert loader.valid(batch.ids.numpy().reshape(20, 10)).shape == (20, 10)
    ids, k = batch.ids.clone(), batch["action"].clone()
    fill(writer, 8, start=25)
    living = set(engine.loader("replay", batch_size=2000, min_rows=1).next()["action"].tolist())
    np.testing.assert_array_equal(loader.valid(ids), [value in living for value in k.tolist()])
    assert 0 < loader.valid(ids).sum() < 200
    fill(writer, 100, start=33)
    assert not loader.valid(ids).any()


def test_ids_that_are_none_of_this_table_s_are_not_valid(make):
    engine = make()
    fill(engine.writer("replay"), 20)
    loader = engine.loader("replay", batch_size=4)
    loader.next()
    strange = [-1, -(2**63), 2**63 - 1, 2**40 - 1, (1 << 40) | (2**40 - 1), 1 << 62, 5 << 40, 0]
    assert not loader.valid(strange).any()
    assert loader.valid([]).shape == (0,)
    assert loader.valid(1 << 40)  # generation 1, row 0


# waiting


def test_an_empty_table_is_waited_for_and_the_error_says_for_what(make):
    engine = make()
    for timeout in (0, 0.05):
        loader = engine.loader("replay", batch_size=4, timeout=timeout)
        begun = time.monotonic()
        with pytest.raises(
            DataTimeout, match=rf"at least 4 sampleable rows in table 'replay', got 0 within {timeout} s"
        ):
            loader.next()
        assert time.monotonic() - begun >= timeout
        assert isinstance(DataTimeout(""), TimeoutError)
        assert loader.stats.batches == 0
    assert loader.stats.waited_s >= 0.05
    with pytest.raises(DataTimeout, match=r"within 0\.01 s"):
        loader.next(timeout=0.01)


def test_min_rows_are_waited_for_before_the_first_batch(make):
    engine = make()
    writer = engine.writer("replay")
    default, many, one = (
        engine.loader("replay", batch_size=8, min_rows=least, timeout=0, fields=["action"]) for least in (None, 21, 1)
    )
    fill(writer, 1)  # the newest row has no next observation yet
    for loader in (default, many, one):
        with pytest.raises(DataTimeout):
            loader.next()
    fill(writer, 1, start=1)
    assert one.next()["action"].tolist() == [0] * 8
    fill(writer, 6, start=2)
    with pytest.raises(DataTimeout, match=r"at least 8 sampleable rows.* got 7"):
        default.next()
    fill(writer, 1, start=8)
    default.next()
    with pytest.raises(DataTimeout, match=r"at least 21.* got 8"):
        many.next()
    fill(writer, 13, start=9)
    many.next()


def test_a_waiting_loader_is_woken_by_rows(make):
    engine = make()
    client = conduit.attach(engine.name)
    thread = threading.Timer(0.1, lambda: fill(client.writer("replay"), 40))
    thread.start()
    batch = engine.loader("replay", batch_size=16, timeout=20).next()
    thread.join()
    check(batch)
    client.close()


def test_rows_that_are_no_transitions_are_not_waited_through(make):
    """Truncated rows without a final observation are candidates that are always rejected."""
    engine = make()
    writer = engine.writer("replay", keep_final=False)
    for k in range(40):
        writer.append(obs=np.zeros(4, np.float32), action=k, reward=0.0, truncated=True)
    with pytest.raises(DataTimeout):
        engine.loader("replay", batch_size=4, timeout=0).next()
    fill(writer, 2)
    batch = engine.loader("replay", batch_size=4, timeout=0).next()
    assert batch["action"].tolist() == [0] * 4


@pytest.mark.parametrize("what", ["loader", "client", "engine"])
def test_a_closed_loader_says_what_closed_and_its_batches_stay_valid(make, what):
    engine = make()
    client = conduit.attach(engine.name)
    fill(client.writer("replay"), 100)
    loader = client.loader("replay", batch_size=32)
    batch = loader.next()
    {"loader": loader, "client": client, "engine": engine}[what].close()
    with pytest.raises(Closed, match="clos"):
        loader.next()
    loader.close()
    loader.close()
    check(batch)
    assert loader.stats.batches == 1
    client.close()
    check(batch)


def test_an_engine_that_closes_ends_a_wait(make):
    engine = make()
    client = conduit.attach(engine.name)
    threading.Timer(0.1, engine.close).start()
    with pytest.raises(Closed, match="closed by its owner"):
        client.loader("replay", batch_size=1, timeout=20).next()
    client.close()


def test_a_writer_and_a_loader_keep_the_client_they_came_from(make):
    engine = make(capacity=60, page_rows=20)
    writer = conduit.attach(engine.name).writer("replay")
    loader = conduit.attach(engine.name).loader("replay", batch_size=32, min_rows=1)
    unchecked = conduit.attach(engine.name).writer("replay").unchecked()
    gc.collect()
    assert engine.recover() == 0
    fill(writer, 500)
    check(loader.next())
    row = unchecked.row
    for k in range(50):
        unchecked.obs[row], unchecked.action[row], unchecked.reward[row] = k, k, k / 2
        row = unchecked.commit()
    unchecked.close()
    assert engine.recover() == 0
    assert len(np.unique(engine._views["replay"].pages()[:, 6])) == 2
    del writer, loader, unchecked
    gc.collect()
    # whoever lets go of the last of them leaves the engine, and nothing has to be recovered
    assert engine.recover() == 0
    assert (engine._views["replay"].pages()[:, 0] & 15 != 2).all()


WITHOUT_TORCH = """
import sys
import numpy as np
import conduit

with conduit.attach(sys.argv[1]) as client:
    with client.writer("replay") as writer:
        for k in range(50):
            writer.append(obs=np.full(4, k, np.float32), action=k, reward=0.0, truncated=k == 20, final=np.zeros(4, np.float32))
    batch = client.loader("replay", batch_size=8, format="numpy", transform={"obs": conduit.cast("bfloat16")}).next()
    assert batch["obs"].dtype == np.uint16 and batch.ids.shape == (8,)
    print(sorted({"torch", "gymnasium", "rich", "triton"} & sys.modules.keys()))
"""


def test_writing_and_reading_numpy_batches_never_imports_torch(make):
    engine = make()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT_TORCH, engine.name],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_without_torch_the_error_says_what_to_install_or_to_ask_for(make, monkeypatch):
    engine = make()
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtra, match=r"pip install 'conduit-rl\[torch\]', or ask for format=\"numpy\""):
        engine.loader("replay", batch_size=1)
    engine.loader("replay", batch_size=1, format="numpy")


# options


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"batch_size": 0}, "batch_size of at least 1, got 0"),
        ({"batch_size": 2.0}, "batch_size of at least 1, got 2.0"),
        ({"batch_size": True}, "batch_size of at least 1, got True"),
        ({"format": "jax"}, "format 'torch' or 'numpy', got 'jax'"),
        ({"on_busy": "block"}, "on_busy 'allocate', 'error' or 'wait', got 'block'"),
        ({"buffers": 1}, "at least 2 buffers.* got 1"),
        ({"seed": 0.5}, r"an int as seed, got 0\.5"),
        ({"timeout": -1}, "a timeout of at least 0 seconds, got -1"),
        ({"timeout": float("nan")}, "a timeout of at least 0 seconds, got nan"),
        ({"timeout": "soon"}, "a timeout of at least 0 seconds, got 'soon'"),
        ({"min_rows": 0}, "min_rows from 1 to"),
        ({"min_rows": 10**9}, "min_rows from 1 to the table's [0-9]+ rows, got 1000000000"),
        ({"min_rows": 2.5}, "min_rows from 1 to"),
        ({"fields": ["observation"]}, r"Expected outputs, got 'observation', and there is only `obs`.* - at fields"),
        ({"fields": ["next_reward"]}, "got 'next_reward'"),
        ({"fields": ["obs", "obs"]}, "each output once"),
        ({"fields": []}, "at least one"),
        (
            {"transform": {"observation": conduit.scale(2.0)}},
            r"fields of the schema, got 'observation'.* `obs`.* - at transform",
        ),
        ({"fields": "obs"}, "a list of outputs, got 'obs'"),
        ({"transform": conduit.scale(2.0)}, "a mapping of fields to transforms, got Transform - at transform"),
        ({"transform": {"obs": 1 / 255}}, r"conduit.scale.* got float - at transform\['obs'\]"),
        ({"transform": {"obs": conduit.cast("uint8")}}, r"a float dtype for a field of `float32`.*transform\['obs'\]"),
        ({"transform": {"action": conduit.cast("bool")}}, r"a number for a field of `int64`.*transform\['action'\]"),
    ],
    ids=str,
)
def test_a_bad_option_is_refused_when_the_loader_is_opened(make, options, expected):
    engine = make(CARTPOLE)
    with pytest.raises(ConfigError, match=expected):
        engine.loader("replay", **{"batch_size": 4} | options)


@pytest.mark.parametrize("sampling", [None, conduit.Prioritized()])
def test_ranks_of_a_shard_deliver_the_batches_of_one_loader_in_turn(make, sampling):
    engine = make(priorities=conduit.Priorities())
    with engine.writer("replay") as writer:
        fill(writer, 200)
    options = {"batch_size": 16, "seed": 5, "sampling": sampling, "format": "numpy"}
    with engine.loader("replay", **options) as whole:
        wanted = [whole.next().ids.copy() for _ in range(6)]
    for rank in range(3):
        with engine.loader("replay", shard=(rank, 3), name=f"rank-{rank}", **options) as loader:
            np.testing.assert_array_equal(loader.next().ids, wanted[rank])
        # a named loader goes on where it was
        with engine.loader("replay", shard=(rank, 3), name=f"rank-{rank}", **options) as loader:
            np.testing.assert_array_equal(loader.next().ids, wanted[rank + 3])
