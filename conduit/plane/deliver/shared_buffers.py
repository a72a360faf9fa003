"""The memory that the parts of a mixed loader share: the arrays of each batch. Each part fills its own slots of them."""

from __future__ import annotations

from collections.abc import Sequence

from conduit.errors import ConfigError
from conduit.kernels.spec.plan import Computed, Plan
from conduit.plane.deliver.buffers import Buffer, spans_of


class Share:
    """The first part's buffers, whose memory the other parts share.

    Attributes:
        extra: Arrays that every batch has beside the outputs of the tables.
        buffers: The first part's buffers, once it is open.
    """

    def __init__(self, extra: tuple[Computed, ...]) -> None:
        self.extra = extra
        self.buffers: Sequence[Buffer] = ()
        self._first: tuple[str, Plan] | None = None

    def admit(self, table: str, plan: Plan, count: int) -> list[Buffer | None]:
        """The buffers whose memory a part has to share; for the first part as many None.

        Raises:
            ConfigError: The part's batches have other arrays than the first part's; names the first difference.
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
