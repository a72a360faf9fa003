"""What the kernels of returns are told of the estimator: rates and bars, without the names of any batch's arrays."""

from __future__ import annotations

from typing import NamedTuple


class Rates(NamedTuple):
    """The numbers of an estimator of advantages (conduit.kernels.ops.returns has the formulas).

    Attributes:
        gamma: Discount a step.
        lam: Decay of the trace, from 0 to 1.
        rho_bar: Largest importance ratio of the temporal differences.
        c_bar: Largest one of the trace.
        pg_rho_bar: Largest one of the advantages.
        corrected: Whether there are importance ratios: V-trace.
    """

    gamma: float
    lam: float
    rho_bar: float = 1.0
    c_bar: float = 1.0
    pg_rho_bar: float = 1.0
    corrected: bool = False
