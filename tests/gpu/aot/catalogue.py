"""What is compiled: launches as wrappers ask for them, with the shapes of the documented workloads, and what each must keep to."""

from dataclasses import dataclass

import torch

import conduit
from conduit.kernels.gpu import (
    augment,
    draws,
    gather,
    philox,
    priorities,
    prioritized_draw,
    ragged,
    returns,
    transitions,
)
from conduit.kernels.gpu.launch import Launch, recorded
from conduit.kernels.spec.transforms import RandomShift, Transform

BATCH = 512


@dataclass(frozen=True)
class Case:
    """One launch and its bounds.

    Attributes:
        name: What it is.
        launch: As it was recorded.
        registers: At most so many per thread.
        wide: 128-bit loads or stores of rows that are multiples of 16 bytes.
        shared: It may use shared memory.
    """

    name: str
    launch: Launch
    registers: int
    wide: bool = False
    shared: bool = False


def zeros(*shape, dtype=torch.int64):
    return torch.empty(shape, dtype=dtype)


def flags(*shape):
    return zeros(*shape, dtype=torch.bool)


def reals(*shape, dtype=torch.float32):
    return zeros(*shape, dtype=dtype)


def field(source, transform, lanes=()):
    out = torch.empty((BATCH, *lanes, *source.shape[1:]), dtype=getattr(torch, transform.dtype))
    return gather.Gather(source, zeros(BATCH, *lanes), out, transform, "x")


IMAGES = torch.empty((100, 84, 84), dtype=torch.uint8)
SCALED = 1 / 255


def _gathers():
    bytes16 = torch.empty((100, 16), dtype=torch.uint8)
    cases = {
        "gather: 84x84 bytes": [field(IMAGES, Transform("uint8"))],
        "gather: 84x84 bytes to bfloat16": [field(IMAGES, Transform("bfloat16", SCALED))],
        "gather: 84x84 bytes to float16": [field(IMAGES, Transform("float16", SCALED))],
        "gather: 84x84 bytes to float32": [field(IMAGES, Transform("float32", SCALED))],
        "gather: 16 bytes": [field(bytes16, Transform("uint8"))],
        "gather: 8 float16": [field(reals(100, 8, dtype=torch.float16), Transform("float16"))],
        "gather: 4 float32": [field(reals(100, 4), Transform("float32"))],
        "gather: 2 int64": [field(zeros(100, 2), Transform("int64"))],
        "gather: 17 float32, rows of 20": [field(reals(100, 20)[:, :17], Transform("float32"))],
        "gather: 700 bytes, rows of 704, to bfloat16": [
            field(torch.empty((100, 704), dtype=torch.uint8)[:, :700], Transform("bfloat16", SCALED))
        ],
        "gather: batch of 6 fields": [
            field(IMAGES, Transform("bfloat16", SCALED), (4,)),
            field(IMAGES, Transform("bfloat16", SCALED), (4,)),
            field(reals(100, 8), Transform("float32")),
            field(zeros(100), Transform("int64")),
            field(reals(100), Transform("float32", low=-1.0, high=1.0)),
            field(flags(100), Transform("bool")),
        ],
    }
    for name, items in cases.items():
        with recorded() as launches:
            gather.gather(items)
        yield Case(name, launches[0], 32, wide="rows of" not in name)


def _frames():
    index, shift, state = zeros(BATCH, 4), zeros(BATCH, dtype=torch.int32), zeros(2)
    for transform in (Transform("uint8"), Transform("bfloat16", SCALED), Transform("float32", SCALED)):
        obs, following = (torch.empty((BATCH, 4, 84, 84), dtype=getattr(torch, transform.dtype)) for _ in range(2))
        with recorded() as launches:
            augment.frame_stacks(IMAGES, index, index, shift, obs, following, transform=transform, n_step=3)
            augment.moved_images(IMAGES, index, state, obs, transform=transform, shift=RandomShift(4), pick=0)
        yield Case(f"frames: stacks of 4 to {transform.dtype}", launches[0], 32, wide=True)
        yield Case(f"frames: random shift to {transform.dtype}", launches[1], 32, wide=True)


def _transitions():
    for window in (conduit.Transition(n_step=5), conduit.Transition(n_step=3, stack=4, newest="bootstrap")):
        stacked = {}
        if window.stack > 1:
            stacked = {name: zeros(BATCH, window.stack) for name in ("stack", "following_stack")}
            stacked["shift"] = zeros(BATCH, dtype=torch.int32)
        with recorded() as launches:
            transitions.transitions(
                zeros(BATCH), zeros(1000, 4, dtype=torch.int32), zeros(10), zeros(10), zeros(10), zeros(BATCH), reals(BATCH),
                zeros(BATCH), flags(BATCH), flags(BATCH), window=window, page_rows=100, reward=reals(1000),
                returns=reals(BATCH), **stacked,
            )  # fmt: skip
        yield Case(f"n-step of {window.n_step}, stack {window.stack}", launches[0], 64)
    with recorded() as launches:
        transitions.sums(
            zeros(BATCH), zeros(BATCH), zeros(10), reals(1000, 3), reals(BATCH, 3), window=conduit.Transition(n_step=5),
            page_rows=100,
        )  # fmt: skip
    yield Case("n-step of 5, rewards of 3 elements", launches[0], 64)


def _traces():
    for shape, what in (
        ((1, 128, 4096), "rollout 128 x 4096"),
        ((16, 128, 4096), "rollouts 16 x 128 x 4096"),
        ((64, 128), "64 sequences of 128"),
        ((4, 4096), "4 sequences of 4096"),
        ((8, 512, 4), "rollouts 8 x 512 x 4"),
    ):
        steps = [reals(*shape), reals(*shape), flags(*shape), flags(*shape)]
        made = [reals(*shape), reals(*shape), flags(*shape)]
        given = {"mask": flags(*shape), "is_first": flags(*shape), "bootstrap": reals(shape[0], *shape[2:])}
        given["final_values"] = reals(*shape)
        wide = len(shape) == 2
        with recorded() as launches:
            returns.trace(conduit.gae().rates, *steps, *made, **given)
            returns.trace(conduit.vtrace().rates, *steps, *made, log_ratios=reals(*shape), **given)
        yield Case(f"GAE: {what}", launches[0], 64, wide=wide, shared=True)
        if shape in ((1, 128, 4096), (64, 128)):
            yield Case(f"V-trace: {what}", launches[1], 64, wide=wide, shared=True)


def _priorities():
    tree = priorities.make_tree(1 << 20, "cpu")
    with recorded() as launches:
        priorities.update(
            tree, zeros(BATCH), reals(BATCH), zeros(BATCH, dtype=torch.uint32), rule=conduit.Priorities(alpha=0.6)
        )
        prioritized_draw.draw(tree, zeros(2), zeros(BATCH), reals(BATCH, dtype=torch.float64))
        prioritized_draw.weigh(reals(BATCH, dtype=torch.float64), reals(BATCH), beta=reals(1, dtype=torch.float64))
    names = ("leaves", "claim", "write", "sums of leaves", "sums of sums", "draw", "weights")
    for name, launch in zip(names, launches, strict=True):
        yield Case(
            f"priority: {name}",
            launch,
            64,
            wide=name.startswith(("sums", "draw")),
            shared=name in ("leaves", "weights"),
        )


def _ragged():
    for what, shape, dtype in (("int32 tokens", (), torch.int32), ("4 float32", (4,), torch.float32)):
        transform = Transform(str(dtype).removeprefix("torch."))
        arenas, spans, longest = zeros(10, 8192, *shape, dtype=dtype), zeros(100), 4096
        options = {"transform": transform, "page_rows": 10, "prompts": zeros(64)}
        with recorded() as launches:
            ragged.pad(
                spans, arenas, zeros(64), zeros(64, longest, *shape, dtype=dtype), flags(64, longest), zeros(64),
                loss_mask=flags(64, longest), **options,
            )  # fmt: skip
            ragged.pack(
                spans, arenas, zeros(64), zeros(64 * longest, *shape, dtype=dtype), zeros(65, dtype=torch.int32),
                zeros(64 * longest, dtype=torch.int32), longest=longest, loss_mask=flags(64 * longest), **options,
            )  # fmt: skip
        yield Case(f"ragged: pad {what}", launches[0], 48, wide=True)
        if shape == ():
            yield Case("ragged: starts", launches[1], 48, shared=True)
        # a packed token begins anywhere, so only items of 16 bytes move as such
        yield Case(f"ragged: pack {what}", launches[2], 48, wide=shape != ())


def _draws():
    with recorded() as launches:
        philox.indices(zeros(2), zeros(1), zeros(BATCH))
        philox.rows(zeros(2), zeros(101), zeros(100), zeros(1), zeros(BATCH), zeros(BATCH))
    yield Case("philox: indices", launches[0], 32)
    yield Case("philox: rows of 100 pages", launches[1], 40)
    pages = zeros(100)
    for window in (conduit.Transition(), conduit.Transition(n_step=5)):
        with recorded() as launches:
            draws.anchors(
                zeros(2), zeros(101), pages, zeros(1), zeros(1000, 4, dtype=torch.int32), pages, pages,
                zeros(100, 1, dtype=torch.int32), zeros(BATCH), zeros(1), window=window, page_rows=10,
            )  # fmt: skip
            draws.drawable(
                zeros(1000, dtype=torch.uint32), pages, pages, zeros(1000, 4, dtype=torch.int32), pages, pages,
                zeros(100, 1, dtype=torch.int32), zeros(1000, dtype=torch.uint32), window=window, page_rows=10,
            )  # fmt: skip
        yield Case(f"draws: anchors of {window.n_step} steps", launches[0], 64, shared=True)
        yield Case(f"draws: leaves of drawable rows, {window.n_step} steps", launches[1], 64)
    with recorded() as launches:
        keys = [zeros(BATCH) for _ in range(4)]
        draws.keys(zeros(BATCH), zeros(1000, 4, dtype=torch.int32), pages, pages, *keys, page_rows=10)
    yield Case("draws: keys", launches[0], 32)


CASES = [case for make in (_draws, _gathers, _frames, _transitions, _priorities, _traces, _ragged) for case in make()]
