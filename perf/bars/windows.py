"""Windows: the samples of batches, and prioritized draws.

Every ratio is of two costs of the same run, methods interleaved round-robin, in CPU time of this process (all its threads).
What Conduit delivers is compared with what was written before a group is timed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from conduit.kernels.reference import gather
from perf import subjects
from perf.bars import Bar, at_least, at_most, unmeasured
from perf.baselines import PrioritizedRing, StepRing, cpprb_absent
from perf.measure import CLOCK_WORDS, Comparison, Method, Spread, compare, time_text
from perf.rooflines import memcpy
from perf.workloads import ATARI, CARTPOLE, PIXELS, Log, Workload, ticks

TITLE = "n-step, stacks, sequences, ragged fields, priorities"

TRANSITION = ("obs", "next_obs", "action", "reward", "terminated", "weights")
"""What a learner reads from a batch."""

conduit = subjects.conduit
PRIORITIES = conduit.Priorities(alpha=0.6, eps=1e-6)
GAMMA = 0.99


def _times(result: Comparison) -> str:
    parts = ", ".join(f"{name} {time_text(result.cost(name))}" for name in result.costs)
    return f"{CLOCK_WORDS[result.clock]}: {parts}"


def prioritized() -> Iterator[Bar]:
    """Prioritized sample of 256 with weights, and update of 256, 2^20 rows."""
    names = ("prioritized sample of 256 with weights, 2^20 rows", "update of 256 priorities, 2^20 rows")
    factors = (3.0, 10.0)
    rng = np.random.default_rng()
    size, burst = CARTPOLE.batch, 16
    absent = cpprb_absent()
    with contextlib.ExitStack() as stack:
        client, _ = stack.enter_context(subjects.engine(CARTPOLE, priorities=PRIORITIES))
        writer = stack.enter_context(subjects.filler(client, CARTPOLE))
        log = subjects.fill(writer, CARTPOLE, rng, rows=CARTPOLE.rows * 15 // 16)
        loader = stack.enter_context(
            client.loader(
                subjects.TABLE,
                batch_size=size,
                sampling=conduit.Prioritized(),
                seed=0,
                format="numpy",
                buffers=burst + 2,
            )
        )
        compared = subjects.check_batches(loader, log, batches=10, buffers=burst + 2)
        errors = rng.random((burst, size))
        held: list[Any] = []

        def draw(count: int = burst) -> None:
            held.clear()
            for _ in range(count):
                batch = loader.next()
                _ = [batch[name] for name in TRANSITION]
                held.append(batch)

        def put_back() -> None:
            for batch, values in zip(held, errors, strict=False):
                loader.update_priorities(batch.ids, values)

        # a learner updates what it has just drawn, one batch at a time
        sampling = [Method("conduit", draw, prepare=put_back, units=burst)]
        updating = [Method("conduit", put_back, prepare=lambda: draw(1))]
        if absent is None:
            flat = {name: c.reshape(-1, *c.shape[2:]) for name, c in log.columns.items()}
            ring = PrioritizedRing(CARTPOLE, flat, log.expected(flat["action"])["next_obs"], PRIORITIES.alpha)
            drawn: list[Any] = []

            def theirs(count: int = burst) -> None:
                drawn.clear()
                drawn.extend(ring.sample(0.4) for _ in range(count))

            def put_back_theirs() -> None:
                for batch, values in zip(drawn, errors, strict=False):
                    ring.update(batch["indexes"], values)

            sampling.append(Method("cpprb", theirs, prepare=put_back_theirs, units=burst))
            updating.append(Method("cpprb", put_back_theirs, prepare=lambda: theirs(1)))
        for _ in range(40):
            draw()
            put_back()
        results = [
            compare(methods, clock="process", seconds=9.0, precision=0.01, least_rounds=60)
            for methods in (sampling, updating)
        ]
        held.clear()
        starts = []
        for seed in range(9):
            with client.loader(
                subjects.TABLE, batch_size=size, sampling=conduit.Prioritized(), seed=seed, format="numpy"
            ) as fresh:
                begun = time.perf_counter_ns()
                fresh.next()
                starts.append((time.perf_counter_ns() - begun) * (1 << 20) / fresh.sampler.candidates)
    for name, factor, result in zip(names, factors, results, strict=True):
        notes = [f"{compared} rows compared before; updates and samples by turns", _times(result)]
        if absent is not None:
            yield Bar(name, absent, f">= {factor:g}x of cpprb 11", ok=False, notes=tuple(notes))
        else:
            yield at_least(name, result.speed("conduit", "cpprb"), factor, " of cpprb 11", *notes)
    spread = Spread.of(starts)
    note = "wall time of a fresh loader's first batch, per 2^20 rows; sums are made from the leaves"
    yield Bar("a learner that starts", time_text(spread), "<= 2 ms per million rows", spread.median < 2e6, (note,))


def image_transitions() -> Iterator[Bar]:
    """n-step(5) + stack(4) + float32 images, 256 rows, over the plain image batch."""
    rng = np.random.default_rng()
    transform = {"obs": conduit.scale(1 / 255, dtype="float32")}
    window = conduit.Transition(n_step=5, gamma=GAMMA, stack=4)
    with contextlib.ExitStack() as stack:
        plain_client, _ = stack.enter_context(subjects.engine(PIXELS))
        plain_writer = stack.enter_context(subjects.filler(plain_client, PIXELS))
        subjects.fill(plain_writer, PIXELS, rng, rows=PIXELS.rows * 7 // 8)
        client, _ = stack.enter_context(subjects.engine(ATARI, max_n_step=5, max_stack=4))
        writer = stack.enter_context(subjects.filler(client, ATARI))
        log = subjects.fill(writer, ATARI, rng, rows=ATARI.rows * 7 // 8)
        plain = stack.enter_context(
            plain_client.loader(subjects.TABLE, batch_size=PIXELS.batch, transform=transform, seed=0)
        )
        loader = stack.enter_context(
            client.loader(subjects.TABLE, batch_size=ATARI.batch, transform=transform, window=window, seed=0)
        )
        compared = _check_stacks(loader, log, window)
        held: list[Any] = [None, None]

        def plain_batch() -> None:
            held[0] = plain.next()

        def windowed_batch() -> None:
            held[1] = loader.next()

        result = compare(
            [Method("plain", plain_batch), Method("n-step and stack", windowed_batch)],
            clock="process",
            seconds=15.0,
            precision=0.005,
            least_rounds=100,
        )
        held.clear()
    share = Spread.of(result.costs["n-step and stack"] / result.costs["plain"])
    name = "n-step(5) + stack(4) + float32, 256 rows"
    notes = (f"{compared} rows compared before; 84x84 frames against stored stacks 4x84x84", _times(result))
    yield at_most(name, share, 1.25, " of the plain image batch", *notes)


def _check_stacks(loader: Any, log: Log, window: Any) -> int:
    """Hold n-step stacks to the log; returns the rows compared."""
    batch = loader.next()
    numbers = subjects.as_numpy(batch["action"])
    lanes = log.workload.lanes
    frames = log.columns["obs"]
    ended = log.columns["terminated"].astype(bool)
    for i, number in enumerate(numbers.tolist()):
        tick, lane = divmod(number, lanes)
        total, used = 0.0, 0
        for k in range(window.n_step):
            total += GAMMA**k * float(log.columns["reward"][tick + k, lane])
            used += 1
            if ended[tick + k, lane]:
                break
        np.testing.assert_allclose(float(batch["reward"][i]), total, rtol=1e-5, atol=1e-5)
        assert int(batch["n_steps"][i]) == used
        rows = [tick]
        while len(rows) < window.stack:
            before = rows[0] - 1
            rows.insert(0, rows[0] if before < 0 or ended[before, lane] else before)
        np.testing.assert_allclose(
            subjects.as_numpy(batch["obs"])[i], frames[rows, lane] * np.float64(1 / 255), rtol=1e-6
        )
        last = tick + used - 1
        after = log.finals["obs"][last, lane] if ended[last, lane] and log.finals else frames[last + 1, lane]
        np.testing.assert_allclose(subjects.as_numpy(batch["next_obs"])[i, -1], after * np.float64(1 / 255), rtol=1e-6)
    return len(numbers)


def n_step_alone() -> Iterator[Bar]:
    """n-step(5) alone, small rows, 256."""
    rng = np.random.default_rng()
    window = conduit.Transition(n_step=5, gamma=GAMMA)
    with contextlib.ExitStack() as stack:
        client, _ = stack.enter_context(subjects.engine(CARTPOLE, max_n_step=5))
        writer = stack.enter_context(subjects.filler(client, CARTPOLE))
        log = subjects.fill(writer, CARTPOLE, rng, rows=CARTPOLE.rows * 15 // 16)
        loader = stack.enter_context(
            client.loader(
                subjects.TABLE,
                batch_size=CARTPOLE.batch,
                window=window,
                seed=0,
                format="numpy",
                fields=["obs", "action", "reward", "next_obs", "terminated", "discount"],
            )
        )
        ring = StepRing(CARTPOLE, log, window.n_step, GAMMA)
        compared = 0
        assert set(loader.next()) == set(ring.sample(rng)), "both make the same arrays"
        for _ in range(10):
            batch = loader.next()
            want = ring.gather(np.asarray(batch["action"]))
            for name, value in want.items():
                np.testing.assert_allclose(batch[name], value, rtol=1e-5, atol=1e-5, err_msg=name)
            compared += len(batch["action"])
        held: list[Any] = [None]

        def conduit_batch() -> None:
            for _ in range(16):
                held[0] = loader.next()

        def numpy_batch() -> None:
            for _ in range(16):
                held[0] = ring.sample(rng)

        result = compare(
            [Method("conduit", conduit_batch, units=16), Method("numpy", numpy_batch, units=16)],
            clock="process",
            seconds=9.0,
            precision=0.01,
            least_rounds=60,
        )
        held.clear()
    notes = (f"{compared} rows compared before", _times(result))
    yield at_least("n-step(5) alone, small rows, 256", result.speed("conduit", "numpy"), 5.0, " of numpy", *notes)


def sequences() -> Iterator[Bar]:
    """Sequences of 80, batch 64, 84x84 uint8 to float32."""
    rng = np.random.default_rng()
    length, size = 80, 64
    frame = ATARI.parts[0].shape
    transform = {"obs": conduit.scale(1 / 255, dtype="float32")}
    with contextlib.ExitStack() as stack:
        client, _ = stack.enter_context(subjects.engine(ATARI, max_length=length))
        writer = stack.enter_context(subjects.filler(client, ATARI))
        log = subjects.fill(writer, ATARI, rng, rows=ATARI.rows * 7 // 8)
        window = conduit.Sequence(length, across=True)
        loader = stack.enter_context(
            client.loader(
                subjects.TABLE, batch_size=size, window=window, transform=transform, seed=0, fields=["obs", "action"]
            )
        )
        batch = loader.next()
        numbers = subjects.as_numpy(batch["action"])
        tick, lane = np.divmod(numbers, ATARI.lanes)
        assert (tick == tick[:, :1] + np.arange(length)).all()
        assert (lane == lane[:, :1]).all()
        for i in range(0, size, 7):
            want = log.columns["obs"][tick[i], lane[i]] * np.float64(1 / 255)
            np.testing.assert_allclose(subjects.as_numpy(batch["obs"])[i], want, rtol=1e-6)
        del batch
        out_bytes = size * length * int(np.prod(frame)) * 4
        held: list[Any] = [None]

        def conduit_batch() -> None:
            held[0] = loader.next()

        result = compare(
            [Method("conduit", conduit_batch), memcpy(out_bytes)],
            clock="process",
            seconds=15.0,
            precision=0.01,
            least_rounds=30,
        )
        held.clear()
    share = Spread.of(result.costs["conduit"] / result.costs["memcpy"])
    rate = out_bytes / result.cost("memcpy").median
    name = "sequences of 80, batch 64, 84x84 uint8 to float32"
    notes = (f"{size * length} rows compared before; memcpy here: {rate:.1f} GB/s of output bytes", _times(result))
    yield at_most(name, share, 1.2, " of a memcpy of the output", *notes)


def ragged() -> Iterator[Bar]:
    """Packed batch of 64 ragged int32 rows of 200 to 4,000 tokens."""
    name, bar = "packed batch of 64 ragged int32 rows of 200 to 4,000 tokens", "<= 1.3x of a memcpy of its bytes"
    try:
        from perf.ragged import packed_batch_ratio
    except ImportError as error:
        yield unmeasured(name, bar, f"perf.ragged.packed_batch_ratio is missing: {error}")
        return
    ratio, text = packed_batch_ratio()
    yield Bar(name, f"{ratio:.2f}x", bar, ratio <= 1.3, (text,))


def distribution(draws: int = 5_000_000) -> Iterator[Bar]:
    """Prioritized draws against exact probabilities."""
    rng = np.random.default_rng()
    rule = conduit.Priorities(alpha=0.6, eps=0.0)
    workload = CARTPOLE.sized(1 << 14)
    with subjects.engine(workload, priorities=rule) as (client, _), subjects.filler(client, workload) as writer:
        rows = 1 << 13
        columns = ticks(workload, rows // workload.lanes + 1, rng)
        for row in subjects.rows_of(workload, columns):
            writer.append(**dict(zip(("obs", "action", "reward", "terminated"), row, strict=True)))
        priorities = rng.pareto(1.5, rows)
        priorities[rng.permutation(rows)[: rows // 4]] = 0.0
        for stratified in (False, True):
            with client.loader(
                subjects.TABLE,
                batch_size=8192,
                sampling=conduit.Prioritized(stratified=stratified),
                format="numpy",
                seed=5,
                min_rows=1,
                fields=["action"],
            ) as loader:
                if not stratified:
                    ids = np.full(rows, -1, np.int64)
                    while (ids < 0).any():
                        batch = loader.next()
                        ids[batch["action"]] = batch.ids
                    assert loader.update_priorities(ids, priorities) == 0
                counts = np.zeros(rows, np.int64)
                for _ in range(-(-draws // 8192)):
                    counts += np.bincount(loader.next()["action"], minlength=rows)
            exact = gather.probabilities(priorities, rule.alpha, rule.eps)
            some = exact > 0
            expected = counts.sum() * exact[some]
            chi = float(((counts[some] - expected) ** 2 / expected).sum())
            freedom = int(some.sum()) - 1
            score = ((chi / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / np.sqrt(2 / (9 * freedom))
            zeros = int(counts[~some].sum())
            # stratified draws vary less than independent ones: only too much is wrong
            ok = zeros == 0 and score < 4 and (stratified or score > -4)
            yield Bar(
                f"prioritized draws, {'stratified' if stratified else 'independent'}, {counts.sum() / 1e6:.1f} M",
                f"chi-square {chi:.0f} at {freedom} degrees of freedom ({score:+.1f} sigma), "
                f"{zeros} draws of {int((~some).sum())} zero-priority rows",
                "within 4 sigma, 0 draws",
                ok,
            )


def memory() -> Iterator[Bar]:
    """Bytes per transition of an Atari table: single frames, no next observation."""
    from conduit.plane.observe import inspect

    rng = np.random.default_rng()
    workload = Workload("84x84, one environment", ATARI.parts, rows=1 << 14)
    with (
        subjects.engine(workload, max_stack=4, max_n_step=3) as (client, name),
        subjects.filler(client, workload) as writer,
    ):
        subjects.fill(writer, workload, rng, rows=workload.rows, ends=1 / 800)
        table = inspect.inspect(name).tables[0]
    pairs = 2 * 4 * 84 * 84 + sum(part.row_bytes for part in ATARI.parts[1:]) + 1
    share = table.bytes_per_transition / pairs
    note = f"{table.bytes_per_transition:.0f} bytes per transition, halos and kept finals counted; {pairs} with obs and next_obs"
    yield Bar("Atari table (84x84, stack 4)", f"1/{1 / share:.1f} of obs+next_obs", "<= 1/7", share <= 1 / 7, (note,))


GROUPS = (prioritized, image_transitions, n_step_alone, sequences, ragged, distribution, memory)
