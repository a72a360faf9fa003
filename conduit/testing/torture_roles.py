"""The roles of processes in conduit.testing.torture: each works with one small table until it is killed.

Writers use each form of writing; readers check every value of every row that validation let pass; lease holders look three times at
pages that must not change.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from conduit.errors import Overwritten
from conduit.native.jit import entry
from conduit.plane.client import Client
from conduit.plane.deliver.loader import Loader
from conduit.store.format.table_spec import Table
from conduit.testing import optimism, rows

Array = np.ndarray[Any, Any]

WRITTEN, TORN_BEFORE, TORN_AFTER, VALID, OVERWRITTEN, DELIVERED, REDRAWN, LEASES, LEASED_ROWS = range(9)
"""Words of a role's statistics; four of them lie as optimism.gather_and_look fills them."""
STATISTICS = 16

_PAGES, _PAGE_ROWS = 24, 40
_ENVS = 4
_BATCH = 64
_PAUSE = 0.0004


def small_table() -> Table:
    """A table that is overwritten many times a second; its halo is 3 ticks."""
    return Table(rows.SCHEMA, capacity=(_PAGES - 1) * _PAGE_ROWS, page_rows=_PAGE_ROWS, max_stack=2, max_n_step=2)


class MadeStep:
    """Values of one step, made by the compiled functions of `rows`."""

    def __init__(self) -> None:
        self.obs = np.zeros(rows.WORDS, np.int64)
        self.final = np.zeros(rows.WORDS, np.int64)
        self._write = entry(rows.write_observation)
        self._action, self._reward = entry(rows.action_of), entry(rows.reward_of)
        self._addresses = self.obs.ctypes.data, self.final.ctypes.data

    def make(self, environment: int, number: int) -> tuple[int, float, int]:
        """Fill `obs`, and `final` where the step ends its episode; returns action, reward and the end (0, 1, 2)."""
        end = self._write(self._addresses[0], environment, number)
        if end:
            self._write(self._addresses[1], environment, -1 - number)
        return self._action(environment, number), self._reward(environment, number), end


def append_steps(client: Client, statistics: Array, life: int) -> None:
    """Single steps of one environment by `append`, final observations handed over."""
    writer = client.writer("replay")
    step = MadeStep()
    for number in range(1 << 62):
        action, reward, end = step.make(life * _ENVS, number)
        writer.append(
            obs=step.obs,
            action=action,
            reward=reward,
            terminated=end == 1,
            truncated=end == 2,
            final=step.final if end else None,
        )
        statistics[WRITTEN] += 1


def bare_steps(client: Client, statistics: Array, life: int) -> None:
    """Single steps by the unchecked handle: stores into the page, then a commit."""
    step = MadeStep()
    with client.writer("replay").unchecked() as unchecked:
        obs, actions, rewards, commit = unchecked.obs, unchecked.action, unchecked.reward, unchecked.commit
        terminated, truncated = unchecked.terminated, unchecked.truncated
        row = unchecked.row
        for number in range(1 << 62):
            action, reward, end = step.make(life * _ENVS, number)
            obs[row, : rows.WORDS // 2] = step.obs[: rows.WORDS // 2]
            obs[row, rows.WORDS // 2 :] = step.obs[rows.WORDS // 2 :]
            actions[row] = action
            rewards[row] = reward
            if end:
                (terminated if end == 1 else truncated)[row] = True
                unchecked.set_final(step.final)
            row = commit()
            if row >= unchecked.rows:
                row = unchecked.row
            statistics[WRITTEN] += 1


def append_ticks(client: Client, statistics: Array, life: int) -> None:
    """Four environments per `append`, final observations in the row after the end."""
    writer = client.writer("replay", num_envs=_ENVS, autoreset="next_step")
    obs = np.zeros((_ENVS, rows.WORDS), np.int64)
    action, reward = np.zeros(_ENVS, np.int64), np.zeros(_ENVS)
    ends = np.zeros((2, _ENVS), bool)
    write = entry(rows.write_ticks)
    addresses = [array.ctypes.data for array in (obs, action, reward, ends[0], ends[1])]
    for number in range(1 << 62):
        write(*addresses, life * _ENVS, _ENVS, number, 1)
        writer.append(obs=obs, action=action, reward=reward, terminated=ends[0], truncated=ends[1])
        statistics[WRITTEN] += _ENVS


def roll_out(client: Client, statistics: Array, life: int) -> None:
    """Rollouts of 12 ticks of 2 environments, filled in place by compiled code; every fifth is aborted first."""
    writer = client.writer("replay", num_envs=2, autoreset="next_step")
    write = entry(rows.write_ticks)
    number = 0
    for count in range(1 << 62):
        rollout = writer.rollout(12)
        views = (rollout.obs, rollout.action, rollout.reward, rollout.terminated, rollout.truncated)
        write(*(view.ctypes.data for view in views), life * _ENVS, 2, number, 12)
        if count % 5 == 0:
            rollout.abort()
            continue
        rollout.commit()
        number += 12
        statistics[WRITTEN] += 24


def _wait_for_rows(loader: Loader, timeout: float = 20.0) -> None:
    loader.next(timeout=timeout).release()


def read_in_parts(client: Client, statistics: Array, life: int) -> None:
    """Draw, let writers overwrite what was drawn, gather, look for torn rows, validate, look again."""
    loader = client.loader("replay", batch_size=_BATCH, seed=life, format="numpy")
    _wait_for_rows(loader)
    buffer = loader._ring.buffers[0]
    torn = np.zeros(_BATCH, np.uint8)
    arrays = [buffer.arrays[name] for name in ("obs", "next_obs", "action", "reward")]
    arguments = [array.ctypes.data for array in (*arrays, torn, statistics[TORN_BEFORE:])]
    draw, gather_and_look = entry(optimism.draw), entry(optimism.gather_and_look)
    for number in range(1 << 62):
        loader.sampler.batch = number
        if draw(buffer.job_address) < 0:
            time.sleep(_PAUSE)
            continue
        if number % 2:
            time.sleep(_PAUSE)
        gather_and_look(buffer.job_address, *arguments)


def load_batches(client: Client, statistics: Array, life: int) -> None:
    """Batches of a loader, as users get them."""
    loader = client.loader("replay", batch_size=_BATCH, seed=life, format="numpy", timeout=20.0)
    torn = np.zeros(_BATCH, np.uint8)
    find = entry(rows.find_torn_transitions)
    names = ("obs", "next_obs", "action", "reward", "terminated", "truncated")
    for batch in loader:
        statistics[TORN_AFTER] += find(*(batch[name].ctypes.data for name in names), _BATCH, torn.ctypes.data)
        statistics[DELIVERED] += _BATCH
        statistics[REDRAWN] = loader.stats.redrawn


def hold_leases(client: Client, statistics: Array, life: int) -> None:
    """Hold pages and see three times that nothing in them changes."""
    view = client._views["replay"]
    chance = random.Random(life)
    find = entry(rows.find_torn_rows)
    names = ("obs", "action", "reward", "terminated", "truncated")
    torn = np.zeros(_PAGE_ROWS, np.uint8)
    while True:
        try:
            lease = view.lease(chance.randrange(view.layout.pages))
        except Overwritten:
            time.sleep(_PAUSE)
            continue
        with lease:
            columns = [lease.column(name) for name in names]
            first = columns[0].copy()
            for _ in range(3):
                addresses = (column.ctypes.data for column in columns)
                statistics[TORN_AFTER] += find(*addresses, lease.rows, torn.ctypes.data)
                statistics[TORN_AFTER] += int((columns[0] != first).any(axis=1).sum())
                statistics[LEASED_ROWS] += lease.rows
                time.sleep(_PAUSE)
        statistics[LEASES] += 1


ROLES: tuple[Callable[[Client, Array, int], None], ...] = (
    append_steps,
    bare_steps,
    append_ticks,
    roll_out,
    read_in_parts,
    load_batches,
    hold_leases,
)
