"""The kernels of batches on a GPU, in Triton: one module per family, its host wrappers, and their slow reference.

    launch            shared by all: checks before a launch, the launch itself, recording instead of launching
    philox            uniform indices and rows, the same as the CPU draws with the same seed
    transitions       from anchor rows along links to n-step returns, flags and frame rows
    draws             anchors drawn until each begins a window, and the keys of rows
    elements          one element's conversion
    gather            all fields of a batch in one launch: copy, cast, scale
    augment           frame stacks, each frame read once; images at random shifts
    priorities        leaves of priorities, sums of them and updates, in integers
    prioritized_draw  draws in proportion to the leaves, and importance weights
    returns           GAE and V-trace, sequential or as a scan
    batch_returns     converts a batch's tensors for `returns`
    ragged            values of varying lengths, padded or packed

conduit.kernels.reference specifies all of them in plain numpy. Importing one of these modules imports Triton; no module for the CPU
does. The kernels take tensors on the device and write into tensors that the caller made. They read numbers that change from batch to
batch (seeds, counts, sums) from device memory. So a launch allocates nothing, waits for nothing, and can be captured in a CUDA graph.
docs/kernels.md has the choices and figures.
"""

from __future__ import annotations

from conduit.errors import MissingExtra

try:
    import triton
except ImportError as error:
    raise MissingExtra("The GPU kernels need Triton 3.6 or newer: pip install 'conduit-rl[gpu]'") from error

OLDEST = (3, 6)
"""The oldest Triton that the kernels work with."""

if tuple(int(part) for part in triton.__version__.split(".")[:2]) < OLDEST:
    raise MissingExtra(
        f"The GPU kernels need Triton 3.6 or newer, got {triton.__version__}: pip install 'conduit-rl[gpu]', or a torch that "
        "brings one (2.11 or newer)"
    )
