"""The parameters of an advantage estimator as kernels take them: rates and bounds, without the names of a batch's arrays."""

from __future__ import annotations

from typing import NamedTuple


class Rates(NamedTuple):
    """The parameters of an advantage estimator (conduit.kernels.ops.returns has the formulas).

    Attributes:
        gamma: Discount per step.
        lam: Decay of the trace, from 0 to 1.
        rho_bar: Upper bound of the importance ratios in the temporal differences.
        c_bar: Upper bound of the importance ratios in the trace.
        pg_rho_bar: Upper bound of the importance ratios in the advantages.
        corrected: True for V-trace, which has importance ratios.
    """

    gamma: float
    lam: float
    rho_bar: float = 1.0
    c_bar: float = 1.0
    pg_rho_bar: float = 1.0
    corrected: bool = False
