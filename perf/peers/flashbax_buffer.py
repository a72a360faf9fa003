"""flashbax: buffers as pure functions of JAX arrays, jitted, with their state donated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from perf.peers.adapter import Adapter, Arrays, main
from perf.peers.cases import ALPHA, BETA, LENGTH, NAMES, ROLLOUT, SCALE, Case, Rows, Tick


class Flashbax(Adapter):
    name = "flashbax"
    distributions = ("flashbax", "jax", "jaxlib")
    tensors = "JAX arrays on the CPU, integers of 32 bits"
    fill_limit = 1 << 17

    def start(self) -> None:
        import flashbax
        import jax
        import jax.numpy as jnp

        self.flashbax, self.jax, self.jnp = flashbax, jax, jnp

    def cannot(self, case: Case) -> str | None:
        return "stores the stacks that a wrapper makes" if case.kind == "frames" else None

    def open(self, case: Case) -> None:
        self.case, load, fbx, jax = case, case.workload, self.flashbax, self.jax
        rows, size, vector = load.rows, load.batch, load.num_envs is not None
        names = ("tokens", "lengths", *NAMES[1:4]) if case.kind == "tokens" else NAMES
        if case.kind in ("sequences", "rollout"):
            names = NAMES[:4]
        self.names = names
        kinds = {part.name: (part.dtype, part.shape) for part in load.parts}
        kinds |= {"terminated": ("bool", ()), "lengths": ("int64", ())}
        kinds["next_obs"] = kinds.get("obs", ("", ()))
        example = {n: jax.numpy.zeros(kinds[n][1], np.dtype(kinds[n][0])) for n in names}
        if case.kind == "priorities":
            self.buffer = fbx.make_prioritized_item_buffer(
                rows, size, size, add_sequences=False, add_batches=vector, priority_exponent=ALPHA
            )
        elif case.kind == "sequences":
            self.buffer = fbx.make_trajectory_buffer(
                add_batch_size=1, sample_batch_size=size, sample_sequence_length=LENGTH, period=1,
                min_length_time_axis=LENGTH, max_length_time_axis=rows,
            )  # fmt: skip
        elif case.kind == "rollout":
            self.buffer = fbx.make_trajectory_queue(
                max_length_time_axis=2 * ROLLOUT, add_batch_size=load.lanes, add_sequence_length=1,
                sample_sequence_length=ROLLOUT,
            )  # fmt: skip
        else:
            self.buffer = fbx.make_item_buffer(rows, 1, size, add_sequences=False, add_batches=vector)
        self.state = self.buffer.init(example)
        self.add = jax.jit(self.buffer.add, donate_argnums=0)
        self.key = jax.random.PRNGKey(0)
        self.draw = jax.jit(self._drawn)
        self.held = 0

    def _drawn(self, state: Any, key: Any) -> Any:
        key, mine = self.jax.random.split(key)
        drawn = self.buffer.sample(state, mine)
        batch = {name: self._float(name, value) for name, value in drawn.experience.items()}
        if self.case.kind == "priorities":
            probabilities = drawn.probabilities * self.held_as_float(state)
            weights = probabilities**-BETA
            batch |= {"weights": weights / weights.max(), "index": drawn.indices}
        return batch, key

    def held_as_float(self, state: Any) -> Any:
        """Rows in the buffer, inside a jitted function."""
        rows = self.case.workload.rows
        return self.jnp.where(state.is_full, rows, state.current_index).astype(self.jnp.float32)

    def _float(self, name: str, value: Any) -> Any:
        if name not in ("obs", "next_obs"):
            return value
        if value.dtype == self.jnp.uint8:
            return value.astype(self.jnp.float32) * np.float32(SCALE)
        return value.astype(self.jnp.float32)

    def _tick(self, tick: Tick) -> dict[str, Any]:
        lead = {"sequences": (None, None), "rollout": (slice(None), None)}.get(self.case.kind, ())
        return {n: np.asarray(v)[lead] if lead else v for n, v in zip(self.names, tick, strict=False)}

    def write(self, ticks: Sequence[Tick]) -> None:
        state, add = self.state, self.add
        for tick in ticks:
            state = add(state, self._tick(tick))
        self.state = self.jax.block_until_ready(state)

    def fill(self, rows: Rows, case: Case) -> None:
        if case.kind == "rollout":
            return
        if case.kind == "sequences":
            flat = rows.flat()
            for start in range(0, len(flat["action"]), 1 << 12):
                piece = {n: flat[n][None, start : start + (1 << 12)] for n in self.names}
                self.state = self.add(self.state, piece)
            return
        if case.workload.num_envs is not None:
            flat = rows.flat()
            for start in range(0, len(flat["action"]), 1 << 10):
                self.state = self.add(self.state, {n: flat[n][start : start + (1 << 10)] for n in self.names})
        else:
            self.write(rows.ticks(None))
        self.jax.block_until_ready(self.state)

    def sample(self) -> Any:
        batch, self.key = self.draw(self.state, self.key)
        return self.jax.block_until_ready(batch)

    def rollout(self, ticks: Sequence[Tick]) -> Any:
        state, add = self.state, self.add
        for tick in ticks:
            state = add(state, self._tick(tick))
        self.state, drawn = self.take(state)
        return self.jax.block_until_ready(drawn)

    @property
    def take(self) -> Any:
        """Jitted once per case: the oldest rollout, time first."""
        if getattr(self, "_take_of", None) is not self.buffer:

            def take(state: Any) -> Any:
                state, drawn = self.buffer.sample(state)
                return state, {n: self.jnp.swapaxes(v, 0, 1) for n, v in drawn.experience.items()}

            self._take_of, self._take = self.buffer, self.jax.jit(take, donate_argnums=0)
        return self._take

    def arrays(self, batch: Any) -> Arrays:
        names = {"index"} | ({"terminated"} if self.case.kind == "tokens" else set())
        return {name: np.asarray(value) for name, value in batch.items() if name not in names}

    def update(self, batch: Any, priorities: Any) -> None:
        if getattr(self, "_set_of", None) is not self.buffer:
            self._set_of = self.buffer
            self._set = self.jax.jit(self.buffer.set_priorities, donate_argnums=0)
        self.state = self.jax.block_until_ready(
            self._set(self.state, batch["index"], np.asarray(priorities, np.float32))
        )

    def close(self) -> None:
        self.state = self.buffer = None
        self.jax.clear_caches()


if __name__ == "__main__":
    main(Flashbax())
