"""Clients and engines that come and go, checkpoints, weights."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

import conduit
from conduit.store.segment.locks import held
from conduit.store.segment.names import SHM_DIRECTORY, shm_name
from conduit.testing.interrupted.scenario import SCHEMA, Scenario, check_rows
from conduit.testing.interrupted.writing import Writing


class Attach(Scenario):
    """Clients that come and go, by close and by being dropped."""

    def prepare(self) -> None:
        self.files = 0

    def operate(self) -> None:
        client = conduit.attach(self.name)
        client.close()
        second = conduit.attach(self.name)
        del second

    def check(self) -> None:
        self.engine.recover()
        alive = [one.number for one in self.engine._participants.list() if one.alive]
        assert alive == [0], f"seats {alive} are taken"
        for number in range(1, 8):
            assert not held(self._own_fd, number, 1), f"seat {number} is kept"
        with conduit.attach(self.name) as client, client.writer("t") as writer:
            self.put(writer)
        del client, writer
        check_rows(self.view)
        self.check_rest()
        self.check_files()

    def check_files(self) -> None:
        """See that no descriptor is left open."""
        files = len(list(Path("/proc/self/fd").iterdir()))
        self.files, before = files, self.files or files
        assert files <= before, f"{files - before} descriptors more"


class Create(Attach):
    """Engines that come and go."""

    def operate(self) -> None:
        with self._make():
            pass

    def _make(self) -> conduit.Engine:
        return conduit.Engine.create(f"{self.name}-b", {"t": conduit.Table(SCHEMA, capacity=24)})

    def check(self) -> None:
        self._make().close()
        self.check_files()
        assert not (SHM_DIRECTORY / shm_name(f"{self.name}-b")[1:]).exists(), "the name is left"


class Checkpoint(Writing):
    """Checkpoints, written while a writer goes on."""

    def prepare(self) -> None:
        super().prepare()
        self.put(self.writer, 20)
        self.folder = tempfile.TemporaryDirectory()

    def operate(self) -> None:
        self.engine.checkpoint(self.folder.name)

    def check(self) -> None:
        super().check()
        self.engine.checkpoint(self.folder.name)

    def close(self) -> None:
        super().close()
        self.folder.cleanup()


class Publish(Scenario):
    """Weights published and polled."""

    def prepare(self) -> None:
        self.weights = {"w": np.zeros(4, np.float32)}
        self.other = conduit.Engine.create(
            f"{self.name}-w", {"t": conduit.Table(SCHEMA, capacity=24)}, policies={"p": self.weights}
        )
        self.slot = self.other.policy("p")
        self.slot.publish(self.weights)

    def operate(self) -> None:
        self.slot.publish({"w": np.full(4, self.slot.version + 1, np.float32)})
        self.slot.poll()
        self.slot.wait(0) if self.slot.held < self.slot.version else None

    def check(self) -> None:
        version = self.slot.publish({"w": np.full(4, self.slot.version + 1, np.float32)})
        got = self.slot.poll()
        assert got is not None
        assert got.version == version
        assert (got.arrays["w"] == version).all()

    def close(self) -> None:
        self.other.close()
        super().close()
