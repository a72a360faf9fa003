"""What the loaders behind one mixed loader share: the arrays of each batch, of which each fills its own slots."""

from __future__ import annotations

from collections.abc import Sequence

from conduit.errors import ConfigError
from conduit.kernels.spec.plan import Computed, Plan
from conduit.plane.deliver.buffers import Buffer, spans_of


class Share:
    """The memory of the first loader, for those behind it.

    Attributes:
        extra: Arrays that every batch has beside what the tables give.
        buffers: The first loader's, once it is there.
    """

    def __init__(self, extra: tuple[Computed, ...]) -> None:
        self.extra = extra
        self.buffers: Sequence[Buffer] = ()
        self._first: tuple[str, Plan] | None = None

    def admit(self, table: str, plan: Plan, count: int) -> list[Buffer | None]:
        """The buffers whose memory a loader is to fill, or as many None for the first one.

        Raises:
            ConfigError: Its batches would have other arrays than the first one's; names the first difference.
        """
        if self._first is None:
            self._first = table, plan
            return [None] * count
        name, first = self._first
        mine, theirs = _described(plan), _described(first)
        for output in [*theirs, *mine]:
            if mine.get(output) != theirs.get(output):
                raise ConfigError(
                    f"Expected tables {name!r} and {table!r} to give the same outputs, got {theirs.get(output, 'none')} and "
                    f"{mine.get(output, 'none')}: leave it out by fields=, or convert it by transform= - at `{output}`"
                )
        if plan.names != first.names:
            raise ConfigError(
                f"Expected tables {name!r} and {table!r} to give their outputs in the same order, got {first.names} and "
                f"{plan.names}: name them by fields="
            )
        return list(self.buffers)


def _described(plan: Plan) -> dict[str, str]:
    """{output: dtype and shape in a batch} as text."""
    described = {name: f"{dtype.name} {shape}" for name, (dtype, shape) in spans_of(plan).items()}
    brains = {item.name for item in plan.outputs if item.transform.dtype == "bfloat16"}
    brains |= {item.name for item in plan.ragged if item.transform.dtype == "bfloat16"}
    return {name: text.replace("uint16", "bfloat16") if name in brains else text for name, text in described.items()}
