"""Learning curves of the examples over seeds, each beside the same algorithm over plain numpy buffers.

`python examples/curves.py` writes what docs/learning.md shows: per example a JSON file with every evaluation, and a picture
of mean and spread. `--redraw` makes pictures and verdicts from the files. The criterion was chosen before the runs: learning
is the same within noise when neither of two numbers per run differs between the buffers beyond chance: the mean of all
evaluations of a run, and the mean of its last five. The test is an exact two-sided permutation test over all ways to divide the
runs into two groups (p > 0.05). Runs that are killed half-way and resumed from their checkpoints are compared with the numpy
buffers in the same way.
"""

import argparse
import importlib
import itertools
import json
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class Curve:
    """How an example is shown: its title, the range of returns, and whether it is also run killed and resumed."""

    title: str
    bottom: float = 0
    top: float = 500
    resumed: bool = False


EXAMPLES = {
    "dqn_per_nstep": Curve("DQN, 3-step returns, prioritized, CartPole-v1"),
    "r2d2_cartpole": Curve("Recurrent Q-learning, prioritized sequences, CartPole-v1 without velocities"),
    "ppo_cartpole": Curve("PPO, rollouts through a queue, CartPole-v1"),
    "sac_pendulum": Curve("SAC, samples per insert limited, Pendulum-v1", bottom=-1700, top=0, resumed=True),
}
COLORS = {"conduit": "#1f5fa8", "resumed": "#2c8c5a", "numpy": "#e0812f"}
LABELS = {"conduit": "Conduit", "resumed": "Conduit, killed and resumed", "numpy": "plain numpy buffers"}
LAST = 5
FOLDER = Path(__file__).resolve().parents[1] / "docs" / "learning"


def machine() -> dict[str, Any]:
    """The machine of the runs."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    return {"cpu": model, "cores": os.cpu_count(), **versions}


def resumed(name: str, seed: int, steps: int) -> Iterator[tuple[int, float]]:
    """An example as a command, killed half-way with its children and started again from its checkpoints; its evaluations."""
    scores: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, f"{name}.py", "--seed", str(seed), "--steps", str(steps), "--checkpoints", folder]
        for until in (steps // 2, steps):
            with subprocess.Popen(  # noqa: S603 - the interpreter and a script beside this one
                command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent, start_new_session=True
            ) as process:
                for line in process.stdout or ():
                    found = re.match(r"step +([\d,]+) +mean return +(-?[\d.]+)", line)
                    if found:
                        scores[int(found[1].replace(",", ""))] = float(found[2])
                        if until < steps and max(scores) >= until:
                            os.killpg(process.pid, signal.SIGKILL)
    yield from sorted(scores.items())


def runs(name: str) -> dict[str, Any]:
    """{buffer: function from a seed and steps to the evaluations of a run}."""
    own, plain = importlib.import_module(name), importlib.import_module(f"reference.{name}_numpy")
    found = {"conduit": own.train, "numpy": plain.train}
    if EXAMPLES[name].resumed:
        found["resumed"] = lambda seed, steps: resumed(name, seed, steps)
    return found


def _cpu_seconds() -> float:
    """Of this process and its children, whatever else the machine does."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def measure(name: str, seeds: Sequence[int], steps: int | None, path: Path) -> None:
    """Run an example with every seed over every buffer, one run at a time; the file grows with each."""
    steps = steps or importlib.import_module(name).STEPS
    result: dict[str, Any] = {"example": name, "machine": machine(), "steps": steps, "runs": []}
    for seed, (buffer, train) in itertools.product(seeds, runs(name).items()):
        begun = _cpu_seconds()
        evaluations = list(train(seed, steps))
        seconds = round(_cpu_seconds() - begun, 1)
        result["runs"].append({"buffer": buffer, "seed": seed, "cpu_seconds": seconds, "evaluations": evaluations})
        path.write_text(json.dumps(result).replace('{"buffer"', '\n{"buffer"') + "\n")
        print(name, buffer, seed, f"{seconds} s, mean {np.mean([score for _, score in evaluations]):.1f}", flush=True)


def permutation(first: np.ndarray, second: np.ndarray) -> float:
    """Two-sided p of the difference of means, over all ways to part the values into groups of these sizes."""
    every = np.concatenate([first, second])
    parts = np.array(list(itertools.combinations(range(len(every)), len(first))))
    sums = every[parts].sum(axis=1)
    means = sums / len(first) - (every.sum() - sums) / len(second)
    return float(np.mean(np.abs(means) >= abs(first.mean() - second.mean()) - 1e-9))


def scores_of(result: dict[str, Any]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Steps [evaluations], and the scores of each buffer [seeds, evaluations]."""
    scores: dict[str, list[list[float]]] = {}
    for run in result["runs"]:
        scores.setdefault(run["buffer"], []).append([score for _, score in run["evaluations"]])
    steps = np.array([step for step, _ in result["runs"][0]["evaluations"]])
    return steps, {buffer: np.array(one) for buffer, one in scores.items()}


def judge(result: dict[str, Any], buffer: str = "conduit") -> dict[str, Any]:
    """For each number of a run: mean and standard deviation over a buffer and over numpy's, difference and p; is all the same?"""
    _, scores = scores_of(result)
    verdict: dict[str, Any] = {}
    for what, part in (("all evaluations", slice(None)), (f"last {LAST}", slice(-LAST, None))):
        first, second = (scores[one][:, part].mean(axis=1) for one in (buffer, "numpy"))
        error = np.sqrt(first.var(ddof=1) / len(first) + second.var(ddof=1) / len(second))
        verdict[what] = {
            **{
                name: [round(float(one.mean()), 1), round(float(one.std(ddof=1)), 1)]
                for name, one in ((buffer, first), ("numpy", second))
            },
            "difference": round(float(first.mean() - second.mean()), 1),
            "standard_error": round(float(error), 1),
            "p": round(permutation(first, second), 3),
        }
    return verdict | {"same": all(one["p"] > 0.05 for one in verdict.values())}


def draw(result: dict[str, Any], path: Path) -> None:
    """All buffers in one picture: the mean over seeds, a standard deviation around it, and every run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps, scores = scores_of(result)
    shown = EXAMPLES[result["example"]]
    figure = Figure(figsize=(8, 4.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for buffer, one in scores.items():
        mean, spread = one.mean(axis=0), one.std(axis=0, ddof=1)
        axes.plot(steps, one.T, color=COLORS[buffer], linewidth=0.6, alpha=0.35)
        axes.fill_between(
            steps, mean - spread, np.minimum(mean + spread, shown.top), color=COLORS[buffer], alpha=0.18, lw=0
        )
        axes.plot(steps, mean, color=COLORS[buffer], linewidth=2.2, label=f"{LABELS[buffer]}, mean of {len(one)} seeds")
    axes.axhline(shown.top, color="#9aa4af", linewidth=1, linestyle="--", zorder=1)
    axes.set(
        xlim=(0, steps[-1]),
        ylim=(shown.bottom, shown.top + 0.03 * (shown.top - shown.bottom)),
        xlabel="environment steps",
        ylabel="mean return of 20 evaluation episodes",
    )
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e4e8ec", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(loc="lower right", frameon=False)
    axes.set_title(shown.title, fontsize=11, fontweight="bold", loc="left")
    figure.savefig(path)


def main() -> None:
    """Measure, judge, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("examples", nargs="*", default=list(EXAMPLES), help="which ones (default: all)")
    parser.add_argument("--seeds", type=int, default=5, help="how many (default %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default %(default)s)")
    parser.add_argument("--steps", type=int, help="environment steps per run (default: the example's)")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the results")
    parser.add_argument("--redraw", action="store_true", help="take the runs from the files")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.examples:
        path = options.out / f"{name}.json"
        if not options.redraw:
            measure(name, range(options.first, options.first + options.seeds), options.steps, path)
        result = json.loads(path.read_text())
        draw(result, path.with_suffix(".png"))
        for buffer in ("conduit", "resumed") if EXAMPLES[name].resumed else ("conduit",):
            print(name, buffer, json.dumps(judge(result, buffer), indent=1))


if __name__ == "__main__":
    main()
