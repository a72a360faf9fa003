"""A plain numpy ring, private to its process, without checks: what one would write oneself. A roofline where it does less."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from perf.peers.adapter import Adapter, Arrays, main, one_thread, to_float
from perf.peers.cases import LENGTH, NAMES, ROLLOUT, STACK, Case, Rows, Tick


class NumpyRing(Adapter):
    name = "numpy"
    distributions = ("torch",)

    def start(self) -> None:
        one_thread()

    def cannot(self, case: Case) -> str | None:
        return "a plain ring has no priorities" if case.kind == "priorities" else None

    def open(self, case: Case) -> None:
        import torch

        self.case, load = case, case.workload
        self.rows, self.lanes, self.at, self.size = load.rows, load.lanes, 0, 0
        kinds = {part.name: (part.dtype, part.shape) for part in load.parts} | {"terminated": ("bool", ())}
        if case.kind == "tokens":
            kinds["lengths"] = ("int64", ())
        elif case.kind not in ("frames", "sequences", "rollout"):
            kinds["next_obs"] = kinds["obs"]
        if case.kind == "frames":
            kinds |= {"first": ("bool", ()), "final": kinds["obs"]}
        if case.kind == "rollout":
            self.columns = {n: np.full((ROLLOUT, self.lanes, *s), 1, d) for n, (d, s) in kinds.items()}
        else:
            self.columns = {n: np.full((self.rows, *s), 1, d) for n, (d, s) in kinds.items()}
        self.rng = np.random.default_rng()
        self.torch = torch

    def write(self, ticks: Sequence[Tick]) -> None:
        if self.case.kind == "tokens":
            self._write_tokens(ticks)
            return
        if self.case.kind in ("frames", "sequences"):
            self._write_frames(ticks)
            return
        obs, action, reward, terminated, following = (self.columns[name] for name in NAMES)
        rows, i = self.rows, self.at
        if self.case.workload.num_envs is None:
            for o, a, r, d, n in ticks:
                obs[i] = o
                action[i] = a
                reward[i] = r
                terminated[i] = d
                following[i] = n
                i += 1
                if i == rows:
                    i = 0
        else:
            lanes = self.lanes
            for o, a, r, d, n in ticks:
                j = i + lanes
                obs[i:j] = o
                action[i:j] = a
                reward[i:j] = r
                terminated[i:j] = d
                following[i:j] = n
                i = j if j < rows else 0
        self.at = i
        self.size = min(rows, self.size + len(ticks) * self.lanes)

    def _write_frames(self, ticks: Sequence[Tick]) -> None:
        columns, lanes = self.columns, self.lanes
        for o, a, r, d, n in ticks:
            i = self.at
            j = i + lanes
            columns["obs"][i:j] = o
            columns["action"][i:j] = a
            columns["reward"][i:j] = r
            columns["terminated"][i:j] = d
            if "final" in columns:
                columns["final"][i:j] = n
                before = columns["terminated"][i - lanes : i] if i else True
                columns["first"][i:j] = before
            self.at = j if j < self.rows else 0
        self.size = min(self.rows, self.size + len(ticks) * lanes)

    def _write_tokens(self, ticks: Sequence[Tick]) -> None:
        columns = self.columns
        for t, n, a, r, d in ticks:
            i = self.at
            columns["tokens"][i] = t
            columns["lengths"][i], columns["action"][i], columns["reward"][i], columns["terminated"][i] = n, a, r, d
            self.at = (i + 1) % self.rows
        self.size = min(self.rows, self.size + len(ticks))

    def fill(self, rows: Rows, case: Case) -> None:
        if case.kind in ("frames", "tokens", "rollout"):
            if case.kind != "rollout":
                self.write(rows.ticks(case.workload.num_envs))
            return
        flat = rows.flat()
        for name, column in self.columns.items():
            column[: len(flat[name])] = flat[name]
        self.size = len(flat["action"])
        self.at = self.size % self.rows

    def sample(self) -> Any:
        kind, columns, torch = self.case.kind, self.columns, self.torch
        size = self.case.workload.batch
        if kind == "frames":
            return self._stacks(self.rng.integers(STACK * self.lanes, self.size - self.lanes, size))
        if kind == "sequences":
            index = self.rng.integers(0, self.size - LENGTH, size)[:, None] + np.arange(LENGTH)
            return {n: torch.from_numpy(columns[n].take(index, 0)) for n in NAMES[:4]}
        index = self.rng.integers(0, self.size, size)
        batch = {name: torch.from_numpy(column.take(index, 0)) for name, column in columns.items()}
        if kind != "tokens":
            for name in ("obs", "next_obs"):
                batch[name] = to_float(batch[name])
        return batch

    def _stacks(self, index: np.ndarray) -> Any:
        columns, lanes, torch = self.columns, self.lanes, self.torch
        frames = np.repeat(index[:, None], STACK, 1)
        for k in range(STACK - 2, -1, -1):  # repeat an episode's first frame
            frames[:, k] = np.where(columns["first"][frames[:, k + 1]], frames[:, k + 1], frames[:, k + 1] - lanes)
        obs = columns["obs"][frames]
        ended = columns["terminated"][index]
        last = columns["obs"][np.minimum(index + lanes, self.rows - 1)]
        last[ended] = columns["final"][index[ended]]
        following = np.concatenate([obs[:, 1:], last[:, None]], 1)
        batch = {n: torch.from_numpy(columns[n][index]) for n in NAMES[1:4]}
        return batch | {"obs": to_float(torch.from_numpy(obs)), "next_obs": to_float(torch.from_numpy(following))}

    def rollout(self, ticks: Sequence[Tick]) -> Any:
        columns = self.columns
        for t, (o, a, r, d, _) in enumerate(ticks):
            columns["obs"][t] = o
            columns["action"][t] = a
            columns["reward"][t] = r
            columns["terminated"][t] = d
        return {name: self.torch.from_numpy(column) for name, column in columns.items()}

    def arrays(self, batch: Any) -> Arrays:
        names = {"first", "final"} | ({"terminated"} if self.case.kind == "tokens" else set())
        return {name: value.numpy() for name, value in batch.items() if name not in names}

    def close(self) -> None:
        self.columns = {}


if __name__ == "__main__":
    main(NumpyRing())
