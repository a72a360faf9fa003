"""GAE and V-trace on the device, by the rules of conduit.kernels.ops.returns: in float32, or in float64 for float64 inputs.

Both are a linear recurrence backwards in time, carried_t = b_t + a_t * carried_{t+1}. A program takes one tile [ticks, columns] after
the other, from the end to the beginning, and passes a carry from tile to tile. The shape of the batch decides the shape of the tile,
and so one of two forms:

    sequential    a tile of one tick: each thread walks through the time of its own column, and threads exchange nothing. For
                  batches with enough columns to fill a GPU.
    scan          tiles of many ticks, within which the recurrence is a parallel scan, so that the ticks of a tile are read at
                  once. For all other batches: rollouts [8, 32], sequences and episodes [512, 1] with 16-byte loads.

V-trace's advantage needs the next step's target; its scan runs over the steps shifted by one.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from conduit.errors import ConfigError, FieldError
from conduit.kernels.gpu.launch import LARGEST_PART, as_words, check, dtype_of, launch, power_of_two, tiles
from conduit.kernels.spec.returns import Rates

MANY_COLUMNS = 1 << 15
"""Least number of columns (environments of all samples) for the sequential form."""
LONGEST_TILE = 512
"""Most ticks of a tile of one column."""


@triton.jit
def _compose(a_late, b_late, a_early, b_early):
    """The composition of two maps x -> a * x + b: first the later steps' map, then the earlier steps' map."""
    return a_late * a_early, a_early * b_late + b_early


@triton.jit
def _cells(
    rewards,
    values,
    terminated,
    truncated,
    present,
    firsts,
    last_value,
    finals,
    ratios,
    start,
    step,
    t,
    length,
    inside,
    gamma,
    decay,
    rho_bar,
    c_bar,
    TICKS: tl.constexpr,
    ENVS: tl.constexpr,
    WIDE: tl.constexpr,
    GAMMA: tl.constexpr,
    DECAY: tl.constexpr,
):
    """Steps `t` of some columns, at `start` + `step`: a and b of the recurrence, and the other values that the outputs need.

    Loads are masked only by the array's end, which is a compile-time constant, so that they stay wide. Steps that do not count are left
    out after the load, whatever their memory holds.

    Returns:
        a, b, delta, ratio, value, whether the step has an advantage, whether there is a step at all, whether the next step follows it.
    """
    whole = inside & (t < TICKS)
    more = inside & (t < TICKS - 1)
    here = whole & (t < length)
    behind = here & (t + 1 < length)
    value = tl.load(values + start + step, mask=whole, other=0.0)
    after = tl.load(values + start + ENVS + step, mask=more, other=0.0)
    is_terminated = tl.load(terminated + start + step, mask=whole, other=0) != 0
    is_truncated = tl.load(truncated + start + step, mask=whole, other=0) != 0
    goes_on = behind
    closing = behind & (t < 0)
    if present is not None:
        there = tl.load(present + start + ENVS + step, mask=more, other=0) != 0
        closing = behind & (there == 0)
        goes_on = behind & there
        here = here & (tl.load(present + start + step, mask=whole, other=0) != 0)
    if firsts is not None:
        goes_on = goes_on & (tl.load(firsts + start + ENVS + step, mask=more, other=1) == 0)
    follows = here & goes_on & (is_terminated == 0) & (is_truncated == 0)
    cut = here & is_truncated & (is_terminated == 0)
    known = (cut & closing) | follows
    after = tl.where(known, after, 0.0)
    if finals is not None:
        after = tl.where(cut, tl.load(finals + start + step, mask=whole, other=0.0), after)
        known = known | cut
    if last_value is not None:
        open_end = here & (t + 1 == length) & (is_terminated == 0) & (known == 0)
        after = tl.where(open_end, last_value, after)
        known = known | open_end
    used = known | (here & is_terminated)
    delta = tl.load(rewards + start + step, mask=whole, other=0.0)
    if WIDE:
        # a rate that is passed as a launch argument has float32's precision
        delta = delta + GAMMA * after - value
        a = tl.where(follows, value * 0.0 + DECAY, 0.0)
    else:
        delta = delta + gamma * after - value
        a = tl.where(follows, decay, 0.0)
    delta = tl.where(used, delta, 0.0)
    b = delta
    ratio = delta * 0.0 + 1.0
    if ratios is not None:
        ratio = tl.exp(tl.where(used, tl.load(ratios + start + step, mask=whole, other=0.0), 0.0))
    a = a * tl.minimum(ratio, c_bar)
    b = b * tl.minimum(ratio, rho_bar)
    return a, b, delta, ratio, value, used, here, follows


@triton.jit(do_not_specialize=["columns"])
def _trace(
    rewards,
    values,
    terminated,
    truncated,
    present,
    firsts,
    lengths,
    bootstrap,
    finals,
    ratios,
    advantages,
    targets,
    advantage_mask,
    columns,
    gamma,
    decay,
    rho_bar,
    c_bar,
    pg_bar,
    CORRECTED: tl.constexpr,
    TICKS: tl.constexpr,
    ENVS: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    WIDE: tl.constexpr,
    GAMMA: tl.constexpr,
    DECAY: tl.constexpr,
):
    column = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)[None, :]
    inside = column < columns
    sample = column // ENVS
    begin = sample * (TICKS * ENVS) + (column - sample * ENVS)
    length = TICKS
    if lengths is not None:
        length = tl.minimum(tl.load(lengths + sample, mask=inside, other=0), TICKS).to(tl.int32)
    last_value = None
    if bootstrap is not None:
        last_value = tl.load(bootstrap + column, mask=inside, other=0.0)
    row = tl.arange(0, BT)[:, None]
    carry = tl.zeros((1, BN), tl.float64 if WIDE else tl.float32)
    tiles: tl.constexpr = (TICKS + BT - 1) // BT
    for back in range(tiles):
        begins = (tiles - 1 - back) * BT
        t = begins + row
        start = begin + begins.to(tl.int64) * ENVS
        a, b, delta, ratio, value, used, here, follows = _cells(
            rewards, values, terminated, truncated, present, firsts, last_value, finals, ratios,
            start, row * ENVS, t, length, inside, gamma, decay, rho_bar, c_bar, TICKS, ENVS,
            WIDE, GAMMA, DECAY,
        )  # fmt: skip
        if BT == 1:
            behind = carry
            carried = b + a * behind
            carry = carried
        elif CORRECTED:
            a_next, b_next, _, _, _, _, _, _ = _cells(
                rewards, values, terminated, truncated, present, firsts, last_value, finals, ratios,
                start + ENVS, row * ENVS, t + 1, length, inside, gamma, decay, rho_bar, c_bar, TICKS, ENVS,
                WIDE, GAMMA, DECAY,
            )  # fmt: skip
            product, total = tl.associative_scan((a_next, b_next), 0, _compose, reverse=True)
            behind = product * carry + total
            carried = b + a * behind
            carry = tl.sum(tl.where(row == 0, behind, 0.0), 0)[None, :]
        else:
            product, total = tl.associative_scan((a, b), 0, _compose, reverse=True)
            carried = product * carry + total
            behind = carried
            carry = tl.sum(tl.where(row == 0, carried, 0.0), 0)[None, :]
        advantage = carried
        if CORRECTED:
            next_ = tl.where(follows, behind, 0.0)
            advantage = tl.minimum(ratio, pg_bar) * (delta + (GAMMA * next_ if WIDE else gamma * next_))
        whole = inside & (t < TICKS)
        out = start + row * ENVS
        tl.store(advantages + out, tl.where(used, advantage, 0.0), mask=whole)
        tl.store(targets + out, tl.where(here, value, 0.0) + tl.where(used, carried, 0.0), mask=whole)
        tl.store(advantage_mask + out, used.to(tl.uint8), mask=whole)


def tile_of(batch: int, ticks: int, envs: int) -> tuple[int, int, int]:
    """Ticks and columns of a tile, and warps of a program."""
    if envs == 1:
        length = min(power_of_two(ticks), LONGEST_TILE)
        return length, 1, max(1, length // 128)
    if batch * envs >= MANY_COLUMNS and envs >= 32:
        return 1, 128, 4
    columns = min(power_of_two(envs), 32)
    threads = 256 if columns == 32 else 128
    return threads // columns, columns, threads // 32


def trace(
    rates: Rates,
    reward: Any,
    values: Any,
    terminated: Any,
    truncated: Any,
    advantages: Any,
    targets: Any,
    advantage_mask: Any,
    *,
    mask: Any = None,
    is_first: Any = None,
    lengths: Any = None,
    bootstrap: Any = None,
    final_values: Any = None,
    log_ratios: Any = None,
) -> None:
    """Advantages and targets of consecutive steps, in one launch; conduit.kernels.ops.returns has the rules for ends.

    Args:
        rates: The estimator's rates.
        reward: float32 [B, T] or [B, T, N]; or float64, and then all other real inputs are float64 too.
        values: The same dtype and shape: V of each step's observation.
        terminated: bool, the same shape.
        truncated: bool, the same shape.
        advantages: float32, the same shape, overwritten.
        targets: float32, the same shape, overwritten: GAE's returns, V-trace's targets.
        advantage_mask: bool, the same shape, overwritten: steps that have an advantage.
        mask: bool, the same shape, True for rows that are steps; None: all.
        is_first: bool, the same shape, first steps of episodes; None: the steps after an end.
        lengths: int64 [B], steps of each sample; None: T.
        bootstrap: Real [B] or [B, N], V of the observation after the last step.
        final_values: Real, the same shape as `reward`, V of the true final observation, read at truncated steps only.
        log_ratios: Real, the same shape; V-trace only, None: on policy.

    Raises:
        FieldError: Wrong tensors.
        ConfigError: `log_ratios` is given for GAE.
    """
    if not hasattr(reward, "dim") or reward.dim() not in (2, 3):
        raise FieldError(
            f"Expected a tensor [B, T] or [B, T, N], got {getattr(reward, 'shape', reward)!r}", at="reward"
        )
    shape = tuple(reward.shape)
    batch, ticks, envs = (*shape, 1)[:3]
    optional = ("mask", "is_first", "lengths", "bootstrap", "final_values", "log_ratios")
    real = dtype_of(reward) if dtype_of(reward) == "float64" else "float32"
    for name, tensor, dtype, wanted in (
        ("reward", reward, real, shape),
        ("values", values, real, shape),
        ("terminated", terminated, "bool", shape),
        ("truncated", truncated, "bool", shape),
        ("advantages", advantages, "float32", shape),
        ("targets", targets, "float32", shape),
        ("advantage_mask", advantage_mask, "bool", shape),
        ("mask", mask, "bool", shape),
        ("is_first", is_first, "bool", shape),
        ("lengths", lengths, "int64", (batch,)),
        ("bootstrap", bootstrap, real, (batch, *shape[2:])),
        ("final_values", final_values, real, shape),
        ("log_ratios", log_ratios, real, shape),
    ):
        if tensor is not None or name not in optional:
            check(tensor, name, dtype, wanted, like=reward)
    if log_ratios is not None and not rates.corrected:
        raise ConfigError("Expected log_ratios with conduit.vtrace only, got them with conduit.gae")
    if max(ticks, 16, batch) * envs > LARGEST_PART:
        raise FieldError(
            f"Expected at most {LARGEST_PART} steps per sample, and fewer environments by far, got {shape}", at="reward"
        )
    if reward.numel() == 0:
        return
    rows, columns, num_warps = tile_of(batch, ticks, envs)
    bars = (rates.rho_bar, rates.c_bar, rates.pg_rho_bar)
    launch(
        _trace,
        tiles(batch * envs, columns),
        reward,
        values,
        as_words(terminated),
        as_words(truncated),
        None if mask is None else as_words(mask),
        None if is_first is None else as_words(is_first),
        lengths,
        bootstrap,
        final_values,
        log_ratios,
        advantages,
        targets,
        as_words(advantage_mask),
        batch * envs,
        float(rates.gamma),
        float(rates.gamma * rates.lam),
        *(float(bar) for bar in bars),
        num_warps=num_warps,
        max_registers=None if real == "float64" else 64,
        CORRECTED=int(rates.corrected),
        TICKS=ticks,
        ENVS=envs,
        BT=rows,
        BN=columns,
        WIDE=int(real == "float64"),
        GAMMA=float(rates.gamma) if real == "float64" else 0.0,
        DECAY=float(rates.gamma * rates.lam) if real == "float64" else 0.0,
    )
