"""TorchRL over memory-mapped files; with several writer processes the files are shared."""

from __future__ import annotations

from perf.peers.adapter import main
from perf.peers.torchrl_tensor import TorchRL


class TorchRLMemmap(TorchRL):
    name = "torchrl memmap"
    memmap = True


if __name__ == "__main__":
    main(TorchRLMemmap())
