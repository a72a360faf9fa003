"""What a learner has marked as rows to draw, and which rows the references say can be drawn."""

import numpy as np

import conduit
from conduit.kernels.reference import gather
from conduit.sampling.marks import BLOCK, SEEN_BYTES


def marks_in(memory, pages, rows):
    """What a learner knows: words of pages, block sums, group sums, and bool [pages, blocks * BLOCK], whether a row is marked."""
    blocks = -(-rows // BLOCK)
    groups = -(-blocks // BLOCK)
    parts = np.split(memory, np.cumsum([SEEN_BYTES // 8 * pages, pages * blocks, pages * groups]))
    bits = parts[3].view(np.uint32)[: pages * blocks].reshape(pages, blocks, 1) >> np.arange(BLOCK, dtype=np.uint32) & 1
    known, block_sums, group_sums = (part.reshape(pages, -1) for part in parts[:3])
    return known, block_sums, group_sums, bits.astype(bool).reshape(pages, -1)


def can_be_drawn(world, window, stream, tick, env):
    """Whether a row of a history (tests.plane.history), at a place that is offered, begins such a window."""
    steps = world.steps(stream, env)[0]
    if isinstance(window, conduit.Transition):
        bootstrap = window.newest == "bootstrap"
        return gather.n_step(steps, tick, window.n_step, 1.0, bootstrap=bootstrap) is not None
    if isinstance(window, conduit.Rollout):
        envs = [world.steps(stream, other)[0] for other in range(stream.envs)]
        ticks = window.ticks
        if stream.envs != window.num_envs or env or tick % (window.stride or ticks) or tick + ticks > len(steps):
            return False
        every = range(tick, tick + ticks)
        return not window.next_obs or all(gather.following(one, every) is not None for one in envs)
    if isinstance(window, conduit.Episode):
        rows = gather.episode(steps, tick, window.max_length)
    else:
        every = 1 if window.overlap is None else window.length - window.overlap
        place = tick if window.across else stream.ticks[tick][env].step
        rows = None
        if place % every == 0:
            rows = gather.sequence(steps, tick, window.length, across=window.across, pad=window.pad)
    return rows is not None and (not window.next_obs or gather.following(steps, rows) is not None)
