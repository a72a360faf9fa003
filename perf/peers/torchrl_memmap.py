"""TorchRL over memory-mapped files; with several writer processes it is the buffer itself that they share."""

from __future__ import annotations

import multiprocessing
from typing import Any

from perf.peers import feed
from perf.peers.adapter import main
from perf.peers.cases import Case, Rows, Tick
from perf.peers.torchrl_tensor import TorchRL


def _writer_process(buffer: Any, ticks: list[Tick], count: Any, ready: Any) -> None:
    feed.end_with_parent()
    import torch
    from tensordict import TensorDict

    torch.set_num_threads(1)
    convert = torch.as_tensor
    ready.release()
    while True:
        for tick in ticks:
            o, a, r, d, n = (convert(value) for value in tick)
            buffer.extend(TensorDict({"obs": o, "action": a, "next": {"obs": n, "reward": r, "done": d}}, [len(a)]))
            count.value += len(a)


class TorchRLMemmap(TorchRL):
    name = "torchrl memmap"
    memmap = True

    def concurrent(self, case: Case, rows: Rows, seconds: float) -> dict[str, float]:
        """Its buffer made with shared=True: writer processes extend it themselves."""
        self.fill(Rows.of(case, 1, 4096), case)
        self.sample()
        context = multiprocessing.get_context("spawn")
        counts = [context.Value("q", 0, lock=False) for _ in range(case.writers)]
        parts = feed.parts_of(rows, case, case.writers)
        given = [(self.buffer, part, count) for part, count in zip(parts, counts, strict=True)]
        with feed.processes(_writer_process, given):
            return feed.learn(
                seconds, lambda: 0, self.sample, case.workload.batch, lambda: sum(count.value for count in counts)
            )


if __name__ == "__main__":
    main(TorchRLMemmap())
