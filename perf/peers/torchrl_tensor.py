"""TorchRL's TensorDictReplayBuffer over tensors in the process's memory, and over memory-mapped files."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from perf.peers.adapter import Adapter, Arrays, main, one_thread, to_float
from perf.peers.cases import ALPHA, BETA, EPS, LENGTH, NAMES, ROLLOUT, Case, Rows, Tick


class TorchRL(Adapter):
    name = "torchrl tensor"
    distributions = ("torchrl", "tensordict", "torch")
    memmap = False

    def start(self) -> None:
        import torch
        from tensordict import TensorDict
        from torchrl import data

        self.torch, self.data, self.TensorDict = torch, data, TensorDict
        self.folder: str | None = None
        one_thread()

    def cannot(self, case: Case) -> str | None:
        if case.kind == "frames":
            return "CatFrames stacks what a slice sampler draws, but has no place for an episode's final observation"
        return None

    def open(self, case: Case) -> None:
        self.case, load, data = case, case.workload, self.data
        rows = ROLLOUT * load.lanes if case.kind == "rollout" else load.rows
        if self.memmap:
            self.folder = tempfile.mkdtemp(prefix="conduit-perf-")
            storage = data.LazyMemmapStorage(rows, scratch_dir=self.folder)
        else:
            storage = data.LazyTensorStorage(rows)
        size = load.batch * LENGTH if case.kind == "sequences" else load.batch
        if case.kind == "priorities":
            self.buffer = data.TensorDictPrioritizedReplayBuffer(
                alpha=ALPHA, beta=BETA, eps=EPS, storage=storage, batch_size=size
            )
        elif case.kind == "sequences":
            sampler = data.SliceSampler(slice_len=LENGTH, traj_key="episode", strict_length=True)
            self.buffer = data.TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=size)
        else:
            shared = self.memmap and case.kind == "concurrent"
            self.buffer = data.TensorDictReplayBuffer(storage=storage, batch_size=size, shared=shared)

    def _tensordict(self, tick: Tick, count: int | None) -> Any:
        convert = self.torch.as_tensor
        if self.case.kind == "tokens":
            names: tuple[str, ...] = ("tokens", "lengths", *NAMES[1:4])
            return self.TensorDict({n: convert(v) for n, v in zip(names, tick, strict=True)}, [])
        o, a, r, d, n = (convert(value) for value in tick)
        following = {"obs": n, "reward": r, "done": d}
        if self.case.kind in ("sequences", "rollout"):
            del following["obs"]
            if self.case.kind == "sequences":  # the sampler marks the end of a slice as done, so flags have its shape
                following |= {"done": d[..., None], "terminated": d[..., None]}
                episode = self.torch.zeros(a.shape, dtype=self.torch.int64)
                return self.TensorDict({"obs": o, "action": a, "next": following, "episode": episode}, [])
        return self.TensorDict({"obs": o, "action": a, "next": following}, [] if count is None else [count])

    def write(self, ticks: Sequence[Tick]) -> None:
        lanes = self.case.workload.num_envs
        put = self.buffer.add if lanes is None else self.buffer.extend
        for tick in ticks:
            put(self._tensordict(tick, lanes))

    def fill(self, rows: Rows, case: Case) -> None:
        if case.kind == "rollout":
            return
        flat = rows.flat()
        names = (*NAMES,) if case.kind != "tokens" else ("tokens", "lengths", *NAMES[1:4])
        for start in range(0, len(flat["action"]), 1 << 12):
            piece = tuple(flat[name][start : start + (1 << 12)] for name in names)
            tensordict = self._tensordict(piece, len(piece[1]))
            tensordict.batch_size = [len(piece[1])]
            self.buffer.extend(tensordict)

    def sample(self) -> Any:
        return self._ready(self.buffer.sample())

    def _ready(self, drawn: Any) -> Any:
        kind = self.case.kind
        if kind == "tokens":
            return {name: drawn[name] for name in ("tokens", "lengths", "action", "reward")}
        batch = {"action": drawn["action"], "reward": drawn["next", "reward"], "terminated": drawn["next", "done"]}
        batch["obs"] = to_float(drawn["obs"])
        if kind == "sequences":
            batch["terminated"] = drawn["next", "terminated"]
            return {n: v.view(-1, LENGTH, *v.shape[1:]) for n, v in batch.items()}
        if kind != "rollout":
            batch["next_obs"] = to_float(drawn["next", "obs"])
        if kind == "priorities":
            batch |= {"weights": drawn[self._weight(drawn)], "index": drawn["index"]}
        return batch

    @staticmethod
    def _weight(drawn: Any) -> str:
        return "priority_weight" if "priority_weight" in drawn.keys() else "_weight"  # noqa: SIM118 -- a TensorDict

    def rollout(self, ticks: Sequence[Tick]) -> Any:
        self.buffer.empty()
        self.write(ticks)
        lanes = self.case.workload.lanes
        batch = self._ready(self.buffer[:])
        return {name: value.view(ROLLOUT, lanes, *value.shape[1:]) for name, value in batch.items()}

    def arrays(self, batch: Any) -> Arrays:
        found = {name: value.numpy() for name, value in batch.items() if name != "index"}
        axes = 2 if self.case.kind in ("rollout", "sequences") else 1
        return {
            n: v.reshape(v.shape[:axes]) if n in ("action", "reward", "terminated", "weights", "lengths") else v
            for n, v in found.items()
        }

    def update(self, batch: Any, priorities: Any) -> None:
        self.buffer.update_priority(batch["index"], self.torch.from_numpy(np.asarray(priorities, np.float32)))

    def close(self) -> None:
        self.buffer = None
        if self.folder is not None:
            shutil.rmtree(Path(self.folder), ignore_errors=True)
            self.folder = None


if __name__ == "__main__":
    main(TorchRL())
