"""Windows are always consecutive: rewards and observations count the steps of their environment, beside writers flat out."""

import subprocess
import sys
import time

import numpy as np
import pytest

import conduit
from conduit.store.format.table_spec import geometry, halo_ticks

SCHEMA = conduit.Schema(
    [
        conduit.Field("obs", "int64", (6,), observation=True),
        conduit.Field("action", "int64"),
        conduit.Field("reward", "float64"),
    ]
)
"""obs = (environment, number, ...): an environment numbers its steps, and its rewards are those numbers."""

EPISODE = 11
LIMITS = {"max_stack": 4, "max_n_step": 5, "max_length": 12}

WRITER = """
import sys, time, numpy as np, conduit
name, first, envs, mode, seconds, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], float(sys.argv[5]), int(sys.argv[6])
episode = 11
lead = envs or 1
with conduit.attach(name) as client:
    writer = client.writer("replay", num_envs=envs or None, autoreset=mode)
    until = time.monotonic() + seconds
    rng = np.random.default_rng(seed)
    number, closing = 0, np.zeros(lead, bool)
    print("ready", flush=True)
    while time.monotonic() < until:
        for _ in range(200):
            obs = np.empty((lead, 6), np.int64)
            obs[:, 0] = np.arange(first, first + lead)
            obs[:, 1:] = number
            ended = (rng.random(lead) < 1 / episode) & ~closing
            closing = ended & (mode == "next_step")
            cut = ended & (rng.random(lead) < 0.5)
            final = obs.copy()
            final[:, 1:] = number + 1
            values = dict(obs=obs, action=np.full(lead, number), reward=np.full(lead, float(number)))
            flags = dict(terminated=ended & ~cut, truncated=cut)
            if mode != "next_step":
                flags["final"] = final
            if not envs:
                values = {k: v[0] for k, v in values.items()}
                values = values | {"action": int(number), "reward": float(number)}
                flags = {k: (v[0] if k == "final" else bool(v[0])) for k, v in flags.items()}
                if mode != "next_step" and not ended[0]:
                    del flags["final"]
            writer.append(**values, **flags)
            number += 1
    print(number, flush=True)
    sys.stdin.readline()
"""


class Crew:
    """Writer processes; killed when the block is left."""

    def __init__(self, engine, modes, seconds):
        self.processes = []
        first = 0
        for seed, (envs, mode) in enumerate(modes):
            arguments = [engine.name, str(first), str(envs), mode, str(seconds), str(seed)]
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", WRITER, *arguments],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            first += envs or 1

    def __enter__(self):
        for process in self.processes:
            assert process.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()


def check_transitions(batch, n_step, stack, gamma):
    obs = batch["obs"] if stack > 1 else batch["obs"][:, None]
    after = batch["next_obs"] if stack > 1 else batch["next_obs"][:, None]
    assert (obs == np.concatenate([obs[..., :1], np.repeat(obs[..., 1:2], 5, -1)], -1)).all(), "torn"
    number = obs[:, -1, 1]
    used = batch["n_steps"] if n_step > 1 else np.ones(len(number), np.int64)
    assert ((used >= 1) & (used <= n_step)).all()
    ended = batch["terminated"] | batch["truncated"]
    assert (ended | (used == n_step)).all(), "a shorter window only where the episode ends"
    np.testing.assert_array_equal(after[:, -1, 0], obs[:, -1, 0])
    # a step's last observation: of the row after it, which in every mode is numbered one higher
    np.testing.assert_array_equal(after[:, -1, 1], number + used)
    if n_step > 1:
        want = sum(np.where(k < used, gamma**k * (number + k), 0.0) for k in range(n_step))
        np.testing.assert_allclose(batch["reward"], want, rtol=1e-12)
        np.testing.assert_allclose(batch["discount"], np.float32(gamma) ** used, rtol=1e-6)
    else:
        np.testing.assert_array_equal(batch["reward"], number)
    step = batch.steps
    for back in range(1, stack):
        np.testing.assert_array_equal(obs[:, -1 - back, 0], obs[:, -1, 0])
        np.testing.assert_array_equal(obs[:, -1 - back, 1], number - np.minimum(back, step))
        np.testing.assert_array_equal(after[:, -1 - back, 1], number + used - np.minimum(back, step + used))


def check_lanes(batch, across):
    """[B, L]: environments stay, numbers rise by one; flags end what they should."""
    obs, lengths = batch["obs"], batch["lengths"]
    lane = np.arange(obs.shape[1])
    there = lane < lengths[:, None]
    assert (obs[~there] == 0).all()
    np.testing.assert_array_equal(np.where(there, obs[..., 0], obs[:, :1, 0]), np.repeat(obs[:, :1, 0], len(lane), 1))
    np.testing.assert_array_equal(obs[..., 1][there], (obs[:, :1, 1] + lane)[there])
    np.testing.assert_array_equal(batch["reward"][there], obs[..., 1][there])
    ended = batch["terminated"] | batch["truncated"]
    if not across:
        assert not (ended & (lane < lengths[:, None] - 1)).any()
        assert ended[np.arange(len(obs)), lengths - 1][lengths < len(lane)].all()
        assert (batch["mask"] == there).all()
        assert not batch["is_first"][:, 1:].any()
    else:
        closing = there & ~batch["mask"]
        starts = batch["is_first"][:, 1:]
        before = np.where(closing[:, :-1], True, ended[:, :-1])
        assert (before[starts]).all(), "an episode begins only behind one that has ended"


def check_rollout(batch):
    obs = batch["obs"]
    ticks, envs = obs.shape[1:3]
    np.testing.assert_array_equal(obs[..., 0], np.broadcast_to(obs[:, :1, :1, 0] + np.arange(envs), obs.shape[:3]))
    np.testing.assert_array_equal(
        obs[..., 1], np.broadcast_to(obs[:, :1, :1, 1] + np.arange(ticks)[:, None], obs.shape[:3])
    )
    assert (obs[:, 0, 0, 1] % ticks == 0).all()


def check_batch(loader, rng):
    batch, window = loader.next(), loader.plan.window
    if isinstance(window, conduit.Transition):
        check_transitions(batch, window.n_step, window.stack, window.gamma)
    elif isinstance(window, conduit.Rollout):
        check_rollout(batch)
    else:
        check_lanes(batch, across=isinstance(window, conduit.Sequence) and window.across)
    if "weights" in batch:
        assert (np.isfinite(batch["weights"]) & (batch["weights"] > 0)).all()
        assert (batch["probabilities"] > 0).all()
        loader.update_priorities(batch.ids, rng.random(len(batch.ids)))


@pytest.mark.parametrize(
    ("modes", "page_rows", "capacity"),
    [
        ([(0, "disabled"), (0, "next_step")], 40, 400),
        ([(1, "next_step"), (3, "same_step")], 126, 1000),
        ([(4, "next_step"), (4, "same_step")], 160, 2000),
        ([(8, "next_step"), (0, "disabled"), (2, "same_step")], 333, 3000),
    ],
    ids=lambda value: "-".join(f"{e}{m}" for e, m in value) if isinstance(value, list) else str(value),
)
def test_windows_count_on_while_writers_run_flat_out(engine_name, modes, page_rows, capacity):
    """Small tables that are evicted all the time; every window of every batch is consecutive, whole and of one environment."""
    table = conduit.Table(SCHEMA, capacity, page_rows=page_rows, priorities=conduit.Priorities(), **LIMITS)
    widest = max(envs for envs, _ in modes)
    windows = [
        conduit.Transition(),
        conduit.Transition(n_step=5, gamma=0.9),
        conduit.Transition(n_step=3, gamma=0.9, stack=4),
        conduit.Sequence(12),
        conduit.Sequence(8, overlap=4, across=True),
        conduit.Episode(12),
        conduit.Rollout(6, max(1, widest)),
    ]
    with conduit.Engine.create(engine_name, {"replay": table}) as engine:
        loaders = [
            engine.loader(
                "replay", batch_size=32, window=window, sampling=sampling, format="numpy", seed=k, timeout=20.0
            )
            for k, window in enumerate(windows)
            for sampling in (None, conduit.Prioritized())
        ]
        with Crew(engine, modes, seconds=60.0):
            until = time.monotonic() + 3.0
            batches = 0
            rng = np.random.default_rng(0)
            while time.monotonic() < until or batches < len(loaders):
                for loader in loaders:
                    check_batch(loader, rng)
                    batches += 1
        assert engine._views["replay"].rows_evicted > 10 * capacity


@pytest.mark.parametrize("envs", [1, 4])
def test_windows_of_a_writer_that_was_killed_end_where_it_ended(engine_name, envs):
    """SIGKILL in mid-episode: what was committed can be drawn, nothing reaches beyond it."""
    table = conduit.Table(SCHEMA, 4000, page_rows=40 * envs, **LIMITS)
    with conduit.Engine.create(engine_name, {"replay": table}) as engine:
        with Crew(engine, [(envs, "next_step")], seconds=60.0) as crew:
            deadline = time.monotonic() + 20
            while engine._views["replay"].rows_written() < 2000 and time.monotonic() < deadline:
                time.sleep(0.002)
            crew.processes[0].kill()
            crew.processes[0].wait()
        assert engine.recover() >= 1
        newest = max(int(page[1]) for page in engine._views["replay"].pages() if page[0] & 15 == 3)
        assert newest > 0
        last = {}
        for window in (
            conduit.Transition(n_step=5, gamma=0.9),
            conduit.Transition(n_step=5, gamma=0.9, newest="bootstrap"),
            conduit.Sequence(12),
            conduit.Rollout(3, envs, stride=1),
        ):
            with engine.loader("replay", batch_size=512, window=window, format="numpy", min_rows=1) as loader:
                highest = 0
                for _ in range(60):
                    batch = loader.next()
                    highest = max(highest, int(batch["obs"].max()), int(batch.get("next_obs", batch["obs"]).max()))
                last[type(window).__name__ + getattr(window, "newest", "")] = highest
        total = engine._views["replay"].rows_written() // envs
        assert last["Rollout"] == total - 1
        # the newest row follows nothing where an episode has just begun
        assert total - 2 <= last["Transitionbootstrap"] <= total - 1
        assert last["Transitionwait"] <= total - 1


def test_the_last_rows_of_a_full_page_that_ends_its_stream_bootstrap_like_any_others(engine_name):
    table = conduit.Table(SCHEMA, 1000, page_rows=40, max_n_step=5)
    with conduit.Engine.create(engine_name, {"replay": table}) as engine:
        with engine.writer("replay") as writer:
            for number in range(40):
                writer.append(obs=np.full(6, number), action=number, reward=float(number))
        window = conduit.Transition(n_step=5, gamma=0.9, newest="bootstrap")
        with engine.loader("replay", batch_size=512, window=window, format="numpy", min_rows=1) as loader:
            batch = loader.next()
        assert set(batch["action"].tolist()) == set(range(39))
        assert batch["next_obs"].max() == 39
        assert (batch["n_steps"] == np.minimum(5, 39 - batch["action"])).all()


def test_a_loader_narrower_than_its_table_draws_newer_rows(engine_name):
    """Pages that are being written are drawn from up to what this loader's window needs, not what the widest would."""
    table = conduit.Table(SCHEMA, 1000, page_rows=100, **LIMITS)
    with conduit.Engine.create(engine_name, {"replay": table}) as engine, engine.writer("replay") as writer:
        number = 0
        for upto in (30, 97, 101, 250):
            while number < upto:
                writer.append(obs=np.full(6, number), action=number, reward=float(number))
                number += 1
            for window, newest in (
                (conduit.Transition(), upto - 2),
                (conduit.Transition(n_step=5), upto - 6),
                (conduit.Transition(n_step=5, newest="bootstrap"), upto - 2),
                (conduit.Sequence(3), upto - 3),
                (conduit.Sequence(12), upto - 12),
                (conduit.Rollout(1, 1), upto - 1),
            ):
                with engine.loader("replay", batch_size=1024, window=window, format="numpy", min_rows=1) as loader:
                    drawn = {n for _ in range(8) for n in loader.next()["obs"].reshape(1024, -1)[:, 1].tolist()}
                    assert drawn == set(range(newest + 1)), window


def test_an_atari_table_takes_a_seventh_of_observation_pairs(engine_name):
    """Single frames and no next observation: at most 1/7 of stacks of 4 stored twice."""
    schema = conduit.Schema(
        [
            conduit.Field("obs", "uint8", (84, 84), observation=True),
            conduit.Field("action", "int64"),
            conduit.Field("reward", "float32"),
        ]
    )
    rows = 20_000
    table = conduit.Table(schema, rows, max_stack=4, max_n_step=3)
    pages, page_rows, _ = geometry(table)
    halo = halo_ticks(table)
    per_row = sum(-(-f.row_bytes // 128) * 128 if f.row_bytes >= 128 else f.row_bytes for f in schema.fields) + 18
    own = pages * page_rows * per_row / ((pages - 1) * (page_rows - halo))
    pairs = 2 * 4 * 84 * 84 + 8 + 4 + 1
    assert own <= pairs / 7
