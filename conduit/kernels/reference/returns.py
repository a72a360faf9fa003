"""The specification of the kernels over whole batches, in plain Python and float64, from the definitions and not by recursion."""

from __future__ import annotations

import numpy as np

from conduit.kernels.reference.gather import Array, philox


def successors(batch: dict[str, Array], column: dict[str, Array | None]) -> list[tuple[str, float]]:
    """How each step of one environment continues: ("ended" | "next" | "known" | "unknown" | "absent", value of its successor).

    Args:
        batch: [T] terminated, truncated, mask, is_first, values; steps from "length" on are absent.
        column: final_values [T] and bootstrap [], or None.
    """
    found: list[tuple[str, float]] = []
    length = int(batch["length"])
    for t in range(len(batch["mask"])):
        is_last = t == length - 1
        behind = None if t + 1 >= length else t + 1
        if t >= length or not batch["mask"][t]:
            found.append(("absent", 0.0))
        elif batch["terminated"][t]:
            found.append(("ended", 0.0))
        elif batch["truncated"][t] and column["final_values"] is not None:
            found.append(("known", float(column["final_values"][t])))
        elif batch["truncated"][t] and behind is not None and not batch["mask"][behind]:
            found.append(("known", float(batch["values"][behind])))
        elif not batch["truncated"][t] and behind and batch["mask"][behind] and not batch["is_first"][behind]:
            found.append(("next", float(batch["values"][behind])))
        elif is_last and column["bootstrap"] is not None:
            found.append(("known", float(column["bootstrap"])))
        else:
            found.append(("unknown", 0.0))
    return found


def advantages(
    batch: dict[str, Array], column: dict[str, Array | None], gamma: float, lam: float
) -> tuple[Array, Array, Array]:
    """GAE of one environment as its definition's sum, not as a recursion: A_t = sum_k (gamma * lam)^k * delta_{t+k}.

    Args:
        batch: As for `successors`, and "reward".
        column: As for `successors`.
        gamma: Discount per step.
        lam: Decay of the trace.

    Returns:
        float64 [T] advantages and returns, bool [T] steps that have them.
    """
    kinds = successors(batch, column)
    ticks = len(kinds)
    delta = np.zeros(ticks)
    for t, (kind, after) in enumerate(kinds):
        if kind in ("ended", "next", "known"):
            delta[t] = float(batch["reward"][t]) + gamma * after - float(batch["values"][t])
    out, returns, used = np.zeros(ticks), np.zeros(ticks), np.zeros(ticks, bool)
    for t, (kind, _) in enumerate(kinds):
        if kind == "absent":
            continue
        returns[t] = float(batch["values"][t])
        if kind == "unknown":
            continue
        used[t] = True
        k = t
        while True:
            out[t] += (gamma * lam) ** (k - t) * delta[k]
            if kinds[k][0] != "next" or kinds[k + 1][0] == "unknown":
                break
            k += 1
        returns[t] += out[t]
    return out, returns, used


def corrected(
    batch: dict[str, Array], column: dict[str, Array | None], gamma: float, lam: float, bars: tuple[float, float, float]
) -> tuple[Array, Array, Array]:
    """V-trace of one environment as the sum of Espeholt et al. (2018), eq. 1.

    Args:
        batch: As for `advantages`, and "log_ratios".
        column: As for `successors`.
        gamma: Discount per step.
        lam: Decay of the trace.
        bars: rho_bar, c_bar, pg_rho_bar.

    Returns:
        float64 [T] policy gradient advantages and targets, bool [T] steps that have them.
    """
    kinds = successors(batch, column)
    ticks = len(kinds)
    ratios = np.exp(np.asarray(batch["log_ratios"], np.float64))
    rho, c, pg = (np.minimum(bar, ratios) for bar in bars)
    value, reward = (np.asarray(batch[name], np.float64) for name in ("values", "reward"))
    targets, used = np.zeros(ticks), np.zeros(ticks, bool)
    for t, (kind, _) in enumerate(kinds):
        if kind == "absent":
            continue
        targets[t] = value[t]
        if kind == "unknown":
            continue
        used[t] = True
        k, product = t, 1.0
        while True:
            targets[t] += product * rho[k] * (reward[k] + gamma * kinds[k][1] - value[k])
            if kinds[k][0] != "next" or kinds[k + 1][0] == "unknown":
                break
            product *= gamma * lam * c[k]
            k += 1
    out = np.zeros(ticks)
    for t, (kind, after) in enumerate(kinds):
        if used[t]:
            out[t] = pg[t] * (reward[t] + gamma * (targets[t + 1] if kind == "next" else after) - value[t])
    return out, targets, used


def rewards_to_come(batch: dict[str, Array], gamma: float) -> Array:
    """Returns-to-go of one environment: float64 [T]."""
    length = int(batch["length"])
    out = np.zeros(len(batch["mask"]))
    for t in range(length):
        if not batch["mask"][t]:
            continue
        k = t
        while True:
            out[t] += gamma ** (k - t) * float(batch["reward"][k])
            ended = batch["terminated"][k] or batch["truncated"][k]
            if ended or k + 1 >= length or not batch["mask"][k + 1] or batch["is_first"][k + 1]:
                break
            k += 1
    return out


def standardised(values: Array, mask: Array, eps: float) -> Array:
    """(x - mean) / (deviation + eps) where `mask` is true, x elsewhere; float64."""
    out = values.astype(np.float64)
    chosen = out[mask]
    if chosen.size:
        out[mask] = (chosen - chosen.mean()) / (chosen.std() + eps)
    return out


def hindsight_places(draw: tuple[int, int], lengths: Array, length: int, strategy: str, ratio: float) -> Array:
    """For each step the step whose achieved goal replaces its goal, or -1: int64 [B, length]."""
    places = np.full((len(lengths), length), -1, np.int64)
    for sample, steps in enumerate(np.minimum(lengths, length).tolist()):
        for t in range(steps):
            first, second = philox(*draw, (1 << 63) | (1 << 62) | (sample * length + t))
            if first >> 2 >= round(ratio * 2**62):
                continue
            low = {"future": t, "final": steps - 1, "episode": 0}[strategy]
            places[sample, t] = low + (second * (steps - low) >> 64)
    return places
