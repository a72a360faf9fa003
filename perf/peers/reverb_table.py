"""DeepMind Reverb 0.14: tables in a server, here in the learner's process, and TensorFlow datasets that draw from them."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from perf.peers import feed
from perf.peers.adapter import Adapter, Arrays, main
from perf.peers.cases import ALPHA, BETA, LENGTH, NAMES, ROLLOUT, SCALE, Case, Rows, Tick

TABLE = "replay"
PERIOD = 40
"""Steps between the sequences that are made items."""


def _put(writers: Sequence[Any], tick: Tick) -> None:
    """One item per environment."""
    for lane, writer in enumerate(writers):
        writer.append({name: value[lane] for name, value in zip(NAMES, tick, strict=True)})
        writer.create_item(TABLE, 1.0, {name: writer.history[name][-1] for name in NAMES})


def _writer_process(address: str, ticks: list[Tick], lanes: int, count: Any, ready: Any) -> None:
    feed.end_with_parent()
    import reverb

    client = reverb.Client(address)
    writers = [client.trajectory_writer(num_keep_alive_refs=1) for _ in range(lanes)]
    _put(writers, ticks[0])
    for writer in writers:
        writer.flush()
    ready.release()
    while True:
        for tick in ticks:
            _put(writers, tick)
            for writer in writers:
                writer.flush(block_until_num_items=64)
            count.value += lanes


def _pinging_process(address: str, ticks: list[Tick], times: Any, ready: Any) -> None:
    feed.end_with_parent()
    import reverb

    with reverb.Client(address).trajectory_writer(num_keep_alive_refs=1) as writer:
        ready.release()
        for i, tick in enumerate(ticks):
            time.sleep(feed.PERIOD)
            o, a, r, d, n = tick
            step = (o[None], np.array([a]), np.array([r], np.float32), np.array([d]), n[None])
            times[i] = time.perf_counter_ns()
            _put([writer], step)
            writer.flush()
        time.sleep(60)


class Reverb(Adapter):
    name = "reverb"
    distributions = ("dm-reverb", "tensorflow")
    tensors = "TensorFlow tensors"
    fill_limit = 1 << 14

    def start(self) -> None:
        import reverb
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
        self.reverb, self.tf = reverb, tf

    def cannot(self, case: Case) -> str | None:
        if case.kind == "frames":
            return "items share frames, but cannot repeat a frame at an episode's start"
        return None

    def open(self, case: Case) -> None:
        self.case, load, reverb, tf = case, case.workload, self.reverb, self.tf
        kinds = {part.name: (part.dtype, part.shape) for part in load.parts} | {"terminated": ("bool", ())}
        lead: tuple[int, ...] = ()
        if case.kind == "tokens":
            kinds["lengths"] = ("int64", ())
        elif case.kind in ("sequences", "rollout"):
            lead = (LENGTH,) if case.kind == "sequences" else (ROLLOUT,)
        else:
            kinds["next_obs"] = kinds["obs"]
        self.names = tuple(kinds)
        signature = {n: tf.TensorSpec((*lead, *s), tf.as_dtype(np.dtype(d))) for n, (d, s) in kinds.items()}
        selectors = reverb.selectors
        queue = case.kind == "rollout"
        self.server = reverb.Server(
            tables=[
                reverb.Table(
                    TABLE,
                    sampler=selectors.Prioritized(ALPHA)
                    if case.kind == "priorities"
                    else selectors.Fifo()
                    if queue
                    else selectors.Uniform(),
                    remover=selectors.Fifo(),
                    max_size=4 * load.lanes if queue else load.rows,
                    max_times_sampled=1 if queue else 0,
                    rate_limiter=reverb.rate_limiters.MinSize(1),
                    signature=signature,
                )
            ]
        )
        self.address = f"localhost:{self.server.port}"
        self.client = reverb.Client(self.address)
        keep = {"sequences": LENGTH, "rollout": ROLLOUT}.get(case.kind, 1)
        self.writers = [self.client.trajectory_writer(num_keep_alive_refs=keep) for _ in range(load.lanes)]
        self.steps = 0
        self.batches: Any = None

    def write(self, ticks: Sequence[Tick]) -> None:
        writers, kind = self.writers, self.case.kind
        if kind == "tokens":
            writer = writers[0]
            for tokens, count, a, r, d in ticks:
                writer.append(
                    {"tokens": tokens, "lengths": count, "action": a, "reward": np.float32(r), "terminated": d}
                )
                writer.create_item(TABLE, 1.0, {name: writer.history[name][-1] for name in self.names})
        elif kind == "sequences":
            writer = writers[0]
            for tick in ticks:
                step = dict(zip(NAMES[:4], tick, strict=False))
                step["reward"] = np.float32(step["reward"])
                writer.append(step)
                self.steps += 1
                if self.steps >= LENGTH and self.steps % PERIOD == 0:
                    writer.create_item(TABLE, 1.0, {name: writer.history[name][-LENGTH:] for name in self.names})
        elif self.case.workload.num_envs is None:
            writer = writers[0]
            for o, a, r, d, n in ticks:
                writer.append({"obs": o, "action": a, "reward": np.float32(r), "terminated": d, "next_obs": n})
                writer.create_item(TABLE, 1.0, {name: writer.history[name][-1] for name in NAMES})
        else:
            for tick in ticks:
                _put(writers, tick)
        for writer in writers:
            writer.flush()

    def fill(self, rows: Rows, case: Case) -> None:
        if case.kind == "rollout":
            return
        ticks = rows.ticks(case.workload.num_envs)
        for start in range(0, len(ticks), 512):  # no more items in flight than a writer may have
            self.write(ticks[start : start + 512])

    def _dataset(self) -> Any:
        tf, load, kind = self.tf, self.case.workload, self.case.kind
        size = load.lanes if kind == "rollout" else load.batch
        data = self.reverb.TrajectoryDataset.from_table_signature(
            self.address, TABLE, max_in_flight_samples_per_worker=size if kind == "rollout" else 2 * size,
            num_workers_per_iterator=1,
        )  # fmt: skip
        data = data.batch(size)

        def ready(sample: Any) -> Any:
            batch = dict(sample.data)
            for name in ("obs", "next_obs"):
                if name in batch and batch[name].dtype != tf.float32:
                    factor = SCALE if batch[name].dtype == tf.uint8 else None
                    batch[name] = tf.cast(batch[name], tf.float32)
                    if factor is not None:
                        batch[name] *= np.float32(factor)
                if kind == "rollout" and name in batch:
                    batch[name] = tf.transpose(batch[name], (1, 0, 2))
            if kind == "rollout":
                for name in NAMES[1:4]:
                    batch[name] = tf.transpose(batch[name])
            if kind == "priorities":
                weights = tf.pow(sample.info.probability, -BETA)
                batch |= {"weights": weights / tf.reduce_max(weights), "key": sample.info.key}
            return batch

        return data.map(ready)

    def sample(self) -> Any:
        if self.batches is None:
            self.batches = iter(self._dataset())
        return next(self.batches)

    def rollout(self, ticks: Sequence[Tick]) -> Any:
        for tick in ticks:
            for lane, writer in enumerate(self.writers):
                writer.append({name: value[lane] for name, value in zip(NAMES[:4], tick, strict=False)})
        for writer in self.writers:
            writer.create_item(TABLE, 1.0, {name: writer.history[name][-ROLLOUT:] for name in self.names})
            writer.flush()
        return self.sample()

    def arrays(self, batch: Any) -> Arrays:
        names = {"key"} | ({"terminated"} if self.case.kind == "tokens" else set())
        found = {name: value.numpy() for name, value in batch.items() if name not in names}
        if self.case.kind == "rollout":  # items come in the order in which their writers were flushed
            order = found["action"][0].argsort()
            found = {name: value[:, order] for name, value in found.items()}
        return found

    def update(self, batch: Any, priorities: Any) -> None:
        keys = batch["key"].numpy()
        self.client.mutate_priorities(TABLE, dict(zip(keys.tolist(), np.asarray(priorities).tolist(), strict=True)))

    def concurrent(self, case: Case, rows: Rows, seconds: float) -> dict[str, float]:
        """Writer processes are clients of the server."""
        self.fill(Rows.of(case, 1, 1024), case)
        context = multiprocessing.get_context("spawn")
        counts = [context.Value("q", 0, lock=False) for _ in range(case.writers)]
        parts = feed.parts_of(rows, case, case.writers)
        lanes = case.workload.lanes
        given = [(self.address, part, lanes, count) for part, count in zip(parts, counts, strict=True)]
        with feed.processes(_writer_process, given):
            return feed.learn(
                seconds, lambda: 0, self.sample, case.workload.batch, lambda: sum(count.value for count in counts)
            )

    def visible(self, case: Case, rows: Rows, count: int) -> list[int]:
        """The learner asks the server for the table's size."""
        ticks = rows.ticks(None, count)
        sent = multiprocessing.get_context("spawn").RawArray("q", count)
        seen: list[int] = []
        with feed.processes(_pinging_process, [(self.address, ticks, sent)]):
            deadline = time.perf_counter() + 60
            while len(seen) < count and time.perf_counter() < deadline:
                size = self.client.server_info()[TABLE].current_size
                while len(seen) < size:
                    seen.append(time.perf_counter_ns())
        return (np.array(seen[:count], np.int64) - np.array(sent)[: min(count, len(seen))]).tolist()

    def close(self) -> None:
        self.batches = None
        self.writers = []
        self.client = None
        self.server.stop()


if __name__ == "__main__":
    main(Reverb())
