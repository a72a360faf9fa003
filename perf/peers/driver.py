"""The near side of the protocol: adapters as processes, one of which works at a time.

Whoever's turn it is not is stopped (SIGSTOP), with all its threads, so that no prefetching thread works in another's time.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from perf.peers.cases import LENGTH, LONGEST, ROLLOUT, SCALE, STACK, Case, Rows
from perf.workloads import Columns

ROOT = Path(__file__).resolve().parents[2]
ANSWER = 600.0
"""Seconds that any answer may take; filling a slow library's table is the longest."""


class Refused(RuntimeError):
    """An adapter answered with an error, or not at all."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A library that can take part.

    Attributes:
        name: In results.
        module: Its adapter.
        requirements: Pinned; what `setup` installs. Empty: runs in Conduit's own environment.
        python: Interpreter version that it needs, or any from 3.11 on.
        roofline: Does less than a buffer for several processes; shown, and not counted among the peers.
        note: For readers.
    """

    name: str
    module: str
    requirements: tuple[str, ...] = ()
    python: str = ""
    roofline: bool = False
    note: str = ""

    @property
    def folder(self) -> str:
        """Name of its virtual environment."""
        return self.name.split()[0]


_TORCH = "torch==2.13.0"
# its compiled half loads with the torch that it was built for only
_TORCHRL = ("torchrl==0.14.1", "tensordict==0.14.3", "numpy==2.4.6", "torch==2.14.1")
PEERS: Mapping[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer("conduit", "conduit_engine"),
        Peer("numpy", "numpy_ring", roofline=True, note="a private ring without checks"),
        Peer("cpprb", "cpprb_buffer", ("cpprb==11.0.0", "numpy==2.4.6", _TORCH)),
        Peer("sb3", "sb3", ("stable-baselines3==2.9.2", "numpy==2.4.6", _TORCH), note="Stable-Baselines3"),
        Peer("tianshou", "tianshou_buffer", ("tianshou==2.0.1", "numpy==2.4.6", _TORCH)),
        Peer("torchrl tensor", "torchrl_tensor", _TORCHRL),
        Peer("torchrl memmap", "torchrl_memmap", _TORCHRL),
        Peer("rllib", "rllib", ("ray[rllib]==2.60.0", _TORCH), note="episode buffers of Ray RLlib"),
        Peer(
            "reverb",
            "reverb_table",
            ("dm-reverb==0.14.0", "tensorflow==2.15.1", "numpy<2", "setuptools<80"),
            python="3.11",
            note="its server runs in the learner's process",
        ),
        Peer(
            "flashbax", "flashbax_buffer", ("flashbax==0.1.3", "jax[cpu]"), note="JAX, jitted and donated, on the CPU"
        ),
        Peer("pufferlib", "pufferlib_buffer", ("pufferlib==3.0.0", _TORCH)),
    )
}


def interpreter(peer: Peer, venvs: Path) -> Path:
    """The Python of a peer's environment."""
    return venvs / peer.folder / "bin" / "python" if peer.requirements else Path(sys.executable)


def missing(peer: Peer, venvs: Path) -> str | None:
    """Why a peer cannot take part; None if it can."""
    if interpreter(peer, venvs).exists():
        return None
    failed = venvs / peer.folder / "failed"
    if failed.exists():
        return f"does not install: {failed.read_text().strip().splitlines()[-1][:200]}"
    return f"no environment in {venvs}: python -m perf.peers.setup {peer.name.split()[0]}"


_families = itertools.count()


def _end_family(family: str) -> None:
    """Kills what a peer has left: helpers of some libraries leave the process's group, but keep its environment."""
    token = f"CONDUIT_PEER={family}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if token in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)


def _environment(family: str, root: Path = ROOT) -> dict[str, str]:
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1")
    threads |= {"NPROC": "1", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}  # JAX's
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu", "RAY_DEDUP_LOGS": "0", "PYTHONWARNINGS": "ignore"}
    # no user's own site-packages, and nothing of pytest's or coverage's in the child
    return {
        **os.environ,
        **threads,
        **quiet,
        "PYTHONPATH": str(root),
        "PYTHONNOUSERSITE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "CONDUIT_PEER": family,
    }


@dataclass
class Process:
    """A running adapter.

    Attributes:
        peer: Which.
        root: The tree whose code it runs.
        facts: Its answer to hello: versions.
    """

    peer: Peer
    venvs: Path
    log: Path | None = None
    root: Path = ROOT
    facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._family = f"{os.getpid()}-{next(_families)}"
        self._log = self.log.open("ab") if self.log is not None else None
        self._process = subprocess.Popen(
            [str(interpreter(self.peer, self.venvs)), "-m", f"perf.peers.{self.peer.module}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log if self._log is not None else subprocess.DEVNULL,
            cwd=self.root,
            env=_environment(self._family, self.root),
            start_new_session=True,  # its writers are stopped and killed with it
        )
        try:
            self.facts = self.ask("hello")
        except BaseException:
            self.kill()
            raise

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """One question and its answer; `arrays` are in it, a list of {name: array}."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(ANSWER, self.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
            if not line:
                raise Refused(f"{self.peer.name} ended with status {process.wait()} when asked to {op}")
            said: dict[str, Any] = json.loads(line)
            if not said.pop("ok"):
                raise Refused(said["error"])
            said["arrays"] = [
                {one["name"]: self._array(one["dtype"], one["shape"]) for one in told}
                for told in said.get("arrays", ())
            ]
        except (BrokenPipeError, ValueError) as error:
            raise Refused(f"{self.peer.name} broke off when asked to {op}: {error}") from error
        finally:
            timer.cancel()
        return said

    def _array(self, dtype: str, shape: list[int]) -> np.ndarray:
        assert self._process.stdout is not None
        count = np.dtype(dtype).itemsize * int(np.prod(shape, dtype=np.int64))
        return np.frombuffer(self._process.stdout.read(count), dtype).reshape(shape)

    @contextlib.contextmanager
    def turn(self) -> Any:
        """Lets the process work for the length of a block."""
        self._signal(signal.SIGCONT)
        try:
            yield self
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """Ends the process and its children; idempotent."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        _end_family(self._family)

    def close(self) -> None:
        """Asks it to leave, and sees to it."""
        self._signal(signal.SIGCONT)
        with contextlib.suppress(Exception):
            assert self._process.stdin is not None
            self._process.stdin.write(b'{"op": "quit"}\n')
            self._process.stdin.close()
            self._process.wait(5.0)
        self.kill()
        if self._process.stdout is not None:
            self._process.stdout.close()
        if self._log is not None:
            self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def cold_start(peer: Peer, venvs: Path) -> dict[str, float]:
    """Seconds from starting a process to its first batch, and what it took."""
    family = f"{os.getpid()}-{next(_families)}"
    begun = time.perf_counter()
    done = subprocess.run(
        [str(interpreter(peer, venvs)), "-m", f"perf.peers.{peer.module}", "cold"],
        capture_output=True,
        cwd=ROOT,
        env=_environment(family),
        timeout=180,
        check=False,
    )
    wall = time.perf_counter() - begun
    _end_family(family)
    if done.returncode:
        raise Refused(done.stderr.decode(errors="replace").strip().splitlines()[-1])
    said = json.loads(done.stdout.splitlines()[-1])
    return {"wall_s": wall, "cpu_s": said["cpu_s"], "peak_mb": said["peak_mb"]}


# -- what is handed out must be what was written


def compare(case: Case, rows: Rows, batches: list[Columns]) -> int:
    """Holds batches to the rows; returns how many rows were compared.

    Raises:
        AssertionError: A delivered row is not the row that was written, or a batch has another shape or dtype.
    """
    check = {"sequences": _sequences, "rollout": _rollout, "tokens": _tokens, "frames": _frames}.get(
        case.kind, _transitions
    )
    flat = rows.flat()
    compared = sum(check(case, flat, batch) for batch in batches)
    if case.kind in ("batch", "frames"):
        drawn = np.concatenate([batch["action"] for batch in batches])
        distinct = len(np.unique(drawn))
        least = 0.5 * min(len(drawn), 0.6 * len(flat["action"]))
        assert distinct > least, f"{distinct} distinct rows among {len(drawn)} draws of {len(flat['action'])} rows"
    return compared


def _same(name: str, got: np.ndarray, want: np.ndarray) -> None:
    assert got.shape == want.shape, f"{name}: expected {want.shape}, got {got.shape}"
    if want.dtype == np.uint8:
        assert got.dtype == np.float32, f"{name}: expected float32, got {got.dtype}"
        np.testing.assert_allclose(got, want * np.float32(SCALE), rtol=3e-7, err_msg=name)
    elif want.dtype == np.float64:
        assert got.dtype == np.float32, f"{name}: expected float32, got {got.dtype}"
        np.testing.assert_array_equal(got, want.astype(np.float32), err_msg=name)
    else:
        np.testing.assert_array_equal(got, want, err_msg=name)


def _transitions(case: Case, flat: Columns, batch: Columns) -> int:
    index = batch["action"].astype(np.int64)
    assert index.shape == (case.workload.batch,), f"action: got {index.shape}"
    for name in ("obs", "reward", "terminated", "next_obs"):
        _same(name, batch[name], flat[name][index])
    if case.kind == "priorities":
        weights = batch["weights"]
        assert weights.shape == index.shape
        assert np.isfinite(weights).all()
        assert (weights > 0).all()
    return len(index)


def _frames(case: Case, flat: Columns, batch: Columns) -> int:
    index, lanes = batch["action"].astype(np.int64), case.workload.lanes
    ended = flat["terminated"].astype(bool)
    for i, row in enumerate(index.tolist()):
        stack = [row]
        while len(stack) < STACK:
            before = stack[0] - lanes
            stack.insert(0, stack[0] if before < 0 or ended[before] else before)
        frames = flat["obs"][stack]
        _same("obs", batch["obs"][i], frames)
        _same("next_obs", batch["next_obs"][i], np.concatenate([frames[1:], flat["next_obs"][row][None]]))
    for name in ("reward", "terminated"):
        _same(name, batch[name], flat[name][index])
    return len(index)


def _sequences(case: Case, flat: Columns, batch: Columns) -> int:
    index = batch["action"].astype(np.int64)
    assert index.shape == (case.workload.batch, LENGTH), f"action: got {index.shape}"
    assert (np.diff(index, axis=1) == 1).all(), "a sequence has a gap"
    for name in ("obs", "reward", "terminated"):
        _same(name, batch[name], flat[name][index])
    return index.size


def _rollout(case: Case, flat: Columns, batch: Columns) -> int:
    index, lanes = batch["action"].astype(np.int64), case.workload.lanes
    assert index.shape == (ROLLOUT, lanes), f"action: got {index.shape}"
    assert (index == index[0, 0] + np.arange(index.size).reshape(index.shape)).all(), "a rollout has a gap"
    for name in ("obs", "reward", "terminated"):
        _same(name, batch[name], flat[name][index])
    return index.size


def _tokens(case: Case, flat: Columns, batch: Columns) -> int:
    index = batch["action"].astype(np.int64)
    assert index.shape == (case.workload.batch,), f"action: got {index.shape}"
    width = batch["tokens"].shape[1]
    assert width == LONGEST or width == flat["lengths"][index].max(), f"tokens: got {batch['tokens'].shape}"
    for name in ("lengths", "reward"):
        _same(name, batch[name], flat[name][index])
    _same("tokens", batch["tokens"], flat["tokens"][index][:, :width])
    return len(index)


def turn_order(round_number: int, names: list[str]) -> list[str]:
    """Whose turn it is, in an order that rotates from round to round."""
    shift = round_number % max(1, len(names))
    return [*names[shift:], *names[:shift]]
