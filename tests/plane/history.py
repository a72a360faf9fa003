"""Drawn histories of a table (episodes, page turns, evictions, deaths), written for real and kept in the model beside it.

What a window must hold follows from the model's streams and the references of conduit.kernels.reference.gather; which pages may be
drawn from follows from its pages (tests.plane.model).
"""

from __future__ import annotations

import itertools
import os

import numpy as np
from hypothesis import strategies as st

import conduit
from conduit.errors import Busy
from conduit.kernels.reference.gather import Steps
from tests.plane.model import Full, Model

SCHEMA = conduit.Schema(
    [
        conduit.Field("obs", "int64", (), observation=True),
        conduit.Field("pixels", "uint8", (130,), observation=True),  # rows of 256 bytes: padded
        conduit.Field("action", "int32", (2,)),
        conduit.Field("reward", "float32"),
    ]
)
ROW_BITS = 40

_numbers = itertools.count()
_RAMP = np.arange(130)


def reward_of(serial):
    """Rewards that follow from the row's number; multiples of 1/64, so that float32 holds them."""
    return ((np.asarray(serial) * 2654435761 >> 7) % 2048 - 1000) / 64


def pixels_of(serial):
    return ((np.asarray(serial)[..., None] + _RAMP) % 251).astype(np.uint8)


def observation(serial):
    serial = np.asarray(serial, np.int64)
    return {"obs": serial, "pixels": pixels_of(serial)}


def fields(serial):
    serial = np.asarray(serial, np.int64)
    action = np.stack([serial, -serial], -1).astype(np.int32)
    return {**observation(serial), "action": action, "reward": reward_of(serial).astype(np.float32)}


MODES = [
    (None, "disabled", True),
    (None, "disabled", False),
    (None, "next_step", True),
    (2, "next_step", True),
    (2, "same_step", True),
    (3, "same_step", False),
    (3, "next_step", True),
]


class History:
    """A table with one writer per mode, and the model of both.

    Args:
        reach: (max_stack, max_n_step, max_length) of the table.
        modes: (num_envs, autoreset, keep_final) of each writer.
        pages: Pages of the table.
        spare: Rows per page beyond the least.
        priorities: The table's, or None.
    """

    def __init__(self, reach, modes, pages, spare, priorities=None):
        stack, n_step, length = reach
        self.history, self.future = stack - 1, max(n_step, length - 1)
        envs = max(mode[0] or 1 for mode in modes)
        rows = envs * (2 * (self.history + self.future) + 4) + spare
        table = conduit.Table(
            SCHEMA,
            (pages - 1) * rows,
            page_rows=rows,
            max_stack=stack,
            max_n_step=n_step,
            # windows that cross episodes may be as long as any: each writer has pages of its own
            max_length=self.future + 1,
            priorities=priorities,
        )
        self.name = f"t{os.getpid()}-history{next(_numbers)}"
        self.engine = conduit.Engine.create(self.name, {"replay": table}, policies={"policy": {"w": np.zeros(1)}})
        self.view = self.engine._views["replay"]
        self.model = Model(self.view.layout.pages, rows, self.history, self.future)
        self.rows = rows
        self.serial = 0
        self.modes = modes
        self.pairs = [self._open(mode) for mode in modes]

    def _open(self, mode):
        envs, autoreset, keep = mode
        client = conduit.attach(self.name)
        writer = client.writer("replay", num_envs=envs, autoreset=autoreset, keep_final=keep, on_full="raise")
        return client, writer, self.model.open(writer.stream, envs or 1, autoreset, keep, 1)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for client, _, _ in self.pairs:
            client.close()
        self.engine.close()

    def _serials(self, count):
        self.serial += count
        return list(range(self.serial - count, self.serial))

    def do(self, number, what, ticks, ends):
        """One operation: "write" ticks whose ends are the bits of `ends`, "cut", "close" or "die"; the last two reopen."""
        number %= len(self.pairs)
        client, writer, stream = self.pairs[number]
        if what == "write":
            for tick in range(ticks):
                if not self._tick(writer, stream, ends >> (3 * tick % 50)):
                    return
        elif what == "cut":
            writer.cut()
            self.model.cut(stream)
        elif what == "close":
            writer.close()
            self.model.close(stream)
            client.close()
            self.pairs[number] = self._open(self.modes[number])
        else:
            client._participants.forget()
            self.model.kill([stream])
            self.engine.recover()
            client.close()
            self.pairs[number] = self._open(self.modes[number])

    def _tick(self, writer, stream, ends):
        lead = () if writer.num_envs is None else (stream.envs,)
        serials = self._serials(stream.envs)
        flags = [((ends >> 2 * env) & 7 in (1, 3), (ends >> 2 * env) & 7 in (2, 3)) for env in range(stream.envs)]
        flags = [flag if stream.may_end(env) else (False, False) for env, flag in enumerate(flags)]
        finals = [None] * stream.envs
        given = None
        # an episode's last observation may be missing where the writer does not insist
        if stream.explicit and (stream.strict or ends & 64 == 0):
            finals = self._serials(stream.envs)
            given = observation(np.array(finals).reshape(lead))
        terminated, truncated = (np.array(flag).reshape(lead) for flag in zip(*flags, strict=True))
        if not lead:
            terminated, truncated = bool(terminated), bool(truncated)
        reserve = stream.envs if stream.explicit else 0
        try:
            writer.append(
                **fields(np.array(serials).reshape(lead)), terminated=terminated, truncated=truncated, final=given
            )
        except Busy:
            try:
                self.model.reserve(stream, stream.envs, reserve)
            except Full:
                return False
            raise
        self.model.reserve(stream, stream.envs, reserve)
        self.model.commit(stream, [(s, *f, final) for s, f, final in zip(serials, flags, finals, strict=True)])
        self.model.after_commit(stream, 1, reserve)
        return True

    # -- what may be drawn

    def steps(self, stream, env):
        """A stream's environment as the references see it, and the serials of its rows and of the finals beside them."""
        rows = [tick[env] for tick in stream.ticks[: stream.published]]
        steps = Steps(
            reward=reward_of([row.serial for row in rows]).astype(np.float64),
            terminated=np.array([row.terminated for row in rows], bool),
            truncated=np.array([row.truncated for row in rows], bool),
            first=np.array([row.first for row in rows], bool),
            closing=np.array([row.closing for row in rows], bool),
            kept=np.array([row.final is not None for row in rows], bool),
            handed=stream.explicit,
            over=not stream.open,
        )
        return steps, [row.serial for row in rows], [row.final for row in rows]

    def places(self, need, short=True):
        """{row id: (stream, tick, environment)} of every row that a window of `need` ticks behind it could be drawn at.

        A page that is being written offers rows up to the window's own need, and where the window ends with its episode
        (`short`) up to the newest row that is complete so; a sealed one that its stream left hands the last ticks, as many as
        the widest window needs, to the page behind it.
        """
        found = {}
        for stream in self.model.streams:
            rows = (stream.published - (need if stream.open else 0)) * stream.envs
            if stream.open and short:
                rows = max(rows, self._complete(stream))
            for at in range(rows):
                tick, env = divmod(at, stream.envs)
                last = len(stream.places) - 1
                page, generation = next(
                    (p, g) for k, (p, g, end) in enumerate(stream.places) if k == last or tick < end - self.future
                )
                if not page.is_live() or page.generation != generation:
                    continue
                row = self.model.pages.index(page) * self.rows + (tick - page.start) * stream.envs + env
                key = (generation << ROW_BITS) | row
                assert key not in found
                found[key] = (stream, tick, env)
        return found

    def _complete(self, stream):
        """Rows of a stream up to the newest one that ended its episode and is complete, that one included."""
        for at in reversed(range(stream.published * stream.envs)):
            tick, env = divmod(at, stream.envs)
            row = stream.ticks[tick][env]
            if row.closing:
                return at - stream.envs + 1
            if stream.explicit and (row.terminated or row.final is not None):
                return at + 1
        return 0


operations = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(["write", "write", "write", "write", "cut", "close", "die"]),
        st.integers(1, 12),
        st.integers(0, 2**60),
    ),
    min_size=1,
    max_size=14,
)
"""What happens to a table: (writer, what, ticks, ends)."""
