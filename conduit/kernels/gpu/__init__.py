"""The kernels of batches on a GPU, in Triton: one module per family, its host wrappers, and their slow reference.

    launch            what is shared: checks before a launch, the launch itself, recording instead of launching
    philox            uniform indices and rows, the same as the CPU draws under the same seed
    transitions       from anchor rows along links to n-step returns, flags and frame rows
    draws             anchors drawn until each begins a window, and the keys of rows
    elements          one element's conversion
    gather            all fields of a batch in one launch: copy, cast, scale
    augment           frame stacks, each frame read once; images at random shifts
    priorities        leaves of priorities, sums of them and updates, in integers
    prioritized_draw  draws in proportion to the leaves, and importance weights
    returns           GAE and V-trace, sequential or as a scan
    batch_returns     a batch's tensors as these take them
    ragged            values of varying lengths, padded or packed

What all of them must compute is in conduit.kernels.reference, in plain numpy.
Importing one of them imports Triton; nothing that runs on the CPU does. They take tensors that lie on the device and write into
tensors that the caller made, so that a launch allocates nothing, waits for nothing and can be captured in a CUDA graph: what
changes from batch to batch (seeds, counts, sums) is read from device memory. docs/kernels.md has the choices and figures.
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
