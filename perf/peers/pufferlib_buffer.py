"""PufferLib 3: experience lies in the trainer's own tensors; there is no buffer that others can write to or draw from."""

from __future__ import annotations

from collections.abc import Sequence

from perf.peers.adapter import Adapter, main
from perf.peers.cases import Case, Tick


class PufferLib(Adapter):
    name = "pufferlib"
    distributions = ("pufferlib",)

    def cannot(self, case: Case) -> str | None:
        return "its experience tensors belong to its trainer; there is no buffer to write to or to draw from"

    def open(self, case: Case) -> None:
        raise NotImplementedError

    def write(self, ticks: Sequence[Tick]) -> None:
        raise NotImplementedError


if __name__ == "__main__":
    main(PufferLib())
