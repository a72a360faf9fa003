"""The kernels, one by one, each beside torch's way of doing the same."""

from __future__ import annotations

import torch

import conduit
from conduit.kernels.gpu import augment, draws, gather, philox, prioritized_draw, ragged, returns, transitions
from conduit.kernels.gpu import priorities as priority
from conduit.kernels.spec.transforms import RandomShift, Transform
from conduit.store.format import words as w
from perf.gpu.measuring import Bench, close

SCALE = 1 / 255
HEIGHT = WIDTH = 84
_BYTES = {"uint8": 1, "bfloat16": 2, "float16": 2, "float32": 4}


class Frames:
    """Single frames on the device or in registered host memory, and the rows of a batch of stacks of 4, 1 step apart."""

    def __init__(self, bench: Bench, source: torch.Tensor, batch: int) -> None:
        self.source, self.batch = source, batch
        anchors = torch.randint(4, len(source) - 4, (batch,), device=bench.device)
        self.stack = anchors[:, None] + torch.arange(-3, 1, device=bench.device)
        self.following = self.stack + 1
        self.shift = torch.ones(batch, dtype=torch.int32, device=bench.device)
        self.read = 5 * batch * source[0].numel()

    def outputs(self, dtype: str, bench: Bench) -> list[torch.Tensor]:
        shape = (self.batch, 4, *self.source.shape[1:])
        return [torch.full(shape, 77, dtype=getattr(torch, dtype), device=bench.device) for _ in range(2)]

    def make(self, transform: Transform, obs: torch.Tensor, following: torch.Tensor) -> None:
        augment.frame_stacks(
            self.source, self.stack, self.following, self.shift, obs, following, transform=transform, n_step=1
        )

    def torch_way(self, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
        kind = getattr(torch, dtype)
        stacks = self.source[self.stack], self.source[self.following]
        return stacks if dtype == "uint8" else tuple((stack.float() * SCALE).to(kind) for stack in stacks)


def images(bench: Bench, rows: int) -> torch.Tensor:
    """Random frames; rows are 7,056 bytes, 7,168 apart, as in a table."""
    size = (rows, HEIGHT, WIDTH) if not bench.interpret else (rows, 8, 10)
    stride = -(-size[1] * size[2] // 128) * 128
    memory = torch.randint(0, 256, (rows, stride), dtype=torch.uint8, device=bench.device)
    return memory.as_strided(size, (stride, size[2], 1))


def atari(bench: Bench) -> None:
    """Stacks of 4 of observation and next observation, 512 samples."""
    source = Frames(bench, images(bench, bench.size(200_000, 40)), bench.size(512, 3))
    for dtype in ("bfloat16", "uint8", "float32"):
        transform = Transform(dtype) if dtype == "uint8" else Transform(dtype, SCALE)
        made = source.outputs(dtype, bench)

        def check(made: list[torch.Tensor] = made, dtype: str = dtype) -> None:
            for have, want in zip(made, source.torch_way(dtype), strict=True):
                close(have, want, dtype)

        bench.measure(
            f"Atari {source.batch}, stacks of 4 to {dtype}",
            lambda transform=transform, made=made: source.make(transform, *made),
            moved=source.read + sum(one.nbytes for one in made),
            check=check,
            others={"torch eager": lambda dtype=dtype: source.torch_way(dtype)},
            compiled=(lambda: source.torch_way("bfloat16")) if dtype == "bfloat16" else None,
        )
    state = philox.make_state(1, 0, bench.device)
    index, out = source.stack[:, 3:].contiguous(), source.outputs("bfloat16", bench)[0][:, :1].contiguous()
    bench.measure(
        f"random shift of {source.batch} images to bfloat16",
        lambda: augment.moved_images(
            source.source, index, state, out, transform=Transform("bfloat16", SCALE), shift=RandomShift(2), pick=0
        ),
        moved=source.batch * source.source[0].numel() + out.nbytes,
    )


def rows_of_small_fields(bench: Bench) -> None:
    """CartPole: five arrays in one launch."""
    rows, batch = bench.size(1 << 20, 64), bench.size(4096, 9)
    device = bench.device
    obs = torch.randn(rows, 4, device=device)
    action, reward = torch.randint(0, 2, (rows,), device=device), torch.randn(rows, device=device)
    at = torch.randint(0, rows - 1, (batch,), device=device)
    after = at + 1
    made = {
        "obs": (obs, at, torch.empty(batch, 4, device=device)),
        "next_obs": (obs, after, torch.empty(batch, 4, device=device)),
        "action": (action, at, torch.empty(batch, dtype=torch.int64, device=device)),
        "reward": (reward, at, torch.empty(batch, device=device)),
    }
    items = [
        gather.Gather(source, index, out, Transform(str(out.dtype).removeprefix("torch.")), name)
        for name, (source, index, out) in made.items()
    ]

    def torch_way() -> list[torch.Tensor]:
        return [source[index] for source, index, _ in made.values()]

    def check() -> None:
        for (_, _, have), want in zip(made.values(), torch_way(), strict=True):
            close(have, want)

    moved = 2 * sum(out.nbytes for *_, out in made.values()) + 8 * batch
    others = {"torch eager": torch_way}
    bench.measure(
        f"CartPole {batch}", lambda: gather.gather(items), moved=moved, check=check, others=others, compiled=torch_way
    )


def sequences(bench: Bench) -> None:
    """64 sequences of 80 frames to float32."""
    source = images(bench, bench.size(100_000, 40))
    batch, length = bench.size(64, 2), bench.size(80, 3)
    index = torch.randint(0, len(source) - length, (batch, 1), device=bench.device) + torch.arange(
        length, device=bench.device
    )
    out = torch.empty((batch, length, *source.shape[1:]), device=bench.device)
    item = gather.Gather(source, index, out, Transform("float32", SCALE), "obs")

    def torch_way() -> torch.Tensor:
        return source[index].float() * SCALE

    bench.measure(
        f"sequences, {batch} of {length} frames to float32",
        lambda: gather.gather([item]),
        moved=out.nbytes + out.numel(),
        check=lambda: close(out, torch_way()),
        others={"torch eager": torch_way},
        compiled=torch_way,
    )


def steps(bench: Bench) -> None:
    """Uniform draws and n-step returns."""
    pages, page_rows, batch = bench.size(256, 3), bench.size(4096, 40), bench.size(4096, 20)
    device, rows = bench.device, pages * page_rows
    meta = torch.zeros(rows, 4, dtype=torch.int32, device=device)
    meta[:, 3] = 1 << w.LINK_SHIFT
    numbers = torch.arange(pages, device=device)
    starts = torch.arange(pages + 1, device=device) * (page_rows - 8)
    listed = torch.full((1,), pages, device=device)
    committed, envs = (
        torch.full((pages,), page_rows, device=device),
        torch.ones(pages, dtype=torch.int64, device=device),
    )
    over = torch.zeros(pages, dtype=torch.int64, device=device)
    gone = torch.zeros(pages, -(-page_rows // 32), dtype=torch.int32, device=device)
    state = philox.make_state(3, 0, device)
    at, given_up = (torch.zeros(n, dtype=torch.int64, device=device) for n in (batch, 1))
    window = conduit.Transition(n_step=5, gamma=0.99)
    bench.measure(
        f"draw of {batch} anchors of 5 steps",
        lambda: draws.anchors(
            state,
            starts,
            numbers * page_rows,
            listed,
            meta,
            committed,
            over,
            gone,
            at,
            given_up,
            window=window,
            page_rows=page_rows,
        ),
        check=lambda: close((at % page_rows < page_rows - 8).float(), torch.ones(batch)),
    )
    reward = torch.randn(rows, device=device)
    after, used = (torch.zeros(batch, dtype=torch.int64, device=device) for _ in range(2))
    summed, discount = (torch.zeros(batch, device=device) for _ in range(2))
    terminated, truncated = (torch.zeros(batch, dtype=torch.bool, device=device) for _ in range(2))
    gammas = 0.99 ** torch.arange(5, device=device)

    def torch_way() -> torch.Tensor:
        return (reward[at[:, None] + torch.arange(5, device=device)] * gammas).sum(1)

    bench.measure(
        f"n-step(5) of {batch}",
        lambda: transitions.transitions(
            at, meta, committed, over, envs, after, discount, used, terminated, truncated,
            window=window, page_rows=page_rows, reward=reward, returns=summed,
        ),
        check=lambda: close(summed, torch_way()),
        others={"torch eager, no ends": torch_way},
    )  # fmt: skip


def priorities(bench: Bench) -> None:
    """Draw and update of 4096 among 2^20 rows."""
    rows, batch, device = bench.size(1 << 20, 300), bench.size(4096, 12), bench.device
    rule = conduit.Priorities(alpha=0.6)
    tree = priority.make_tree(rows, device)
    # torch computes little in uint32: the same bits, as int32
    tree.leaves.view(torch.int32)[:rows] = torch.randint(1, 1 << 20, (rows,), device=device, dtype=torch.int32)
    priority.build(tree)
    state = philox.make_state(3, 0, device)
    at, chances = (
        torch.zeros(batch, dtype=torch.int64, device=device),
        torch.zeros(batch, dtype=torch.float64, device=device),
    )
    leaves = torch.zeros(batch, dtype=torch.uint32, device=device)
    values = torch.rand(batch, device=device)
    plain = tree.leaves.view(torch.int32)[:rows].float()

    def ours() -> None:
        prioritized_draw.draw(tree, state, at, chances)
        priority.update(tree, at, values, leaves, rule=rule)
        philox.advance(state)

    def check() -> None:
        assert int(tree.total) == int(tree.leaves.view(torch.int32).long().sum())
        assert bool((chances > 0).all())

    def torch_way() -> torch.Tensor:
        sums = plain.cumsum(0)
        found = torch.searchsorted(sums, torch.rand(batch, device=device) * sums[-1])
        plain[found.clamp_(max=rows - 1)] = (values + 1e-6) ** 0.6
        return found

    name = f"priorities, draw and update of {batch} of {rows}"
    bench.measure(name, ours, check=check, others={"torch cumsum": torch_way}, compiled=torch_way)


def traces(bench: Bench) -> None:
    """GAE and V-trace of 128 steps of 4096 environments."""
    shape, device = (1, bench.size(128, 6), bench.size(4096, 5)), bench.device
    reward, values = torch.randn(shape, device=device), torch.randn(shape, device=device)
    last = torch.randn(shape[0], shape[2], device=device)
    terminated = torch.rand(shape, device=device) < 0.02
    truncated = torch.zeros(shape, dtype=torch.bool, device=device)
    made = [torch.empty(shape, device=device) for _ in range(2)] + [torch.empty(shape, dtype=torch.bool, device=device)]
    flags = (reward, values, terminated, truncated)

    def loop() -> torch.Tensor:
        out, carry = torch.empty_like(reward), torch.zeros_like(last)
        for t in range(shape[1] - 1, -1, -1):
            after = last if t == shape[1] - 1 else values[:, t + 1]
            alive = (~terminated[:, t]).float()
            carry = reward[:, t] + 0.99 * after * alive - values[:, t] + 0.99 * 0.95 * alive * carry
            out[:, t] = carry
        return out

    def check() -> None:
        torch.testing.assert_close(made[0], loop(), rtol=1e-4, atol=1e-4)

    moved = sum(one.nbytes for one in (*flags, *made))
    bench.measure(
        f"GAE {shape[1]} x {shape[2]}",
        lambda: returns.trace(conduit.gae().rates, *flags, *made, bootstrap=last),
        moved=moved,
        check=check,
        others={"torch loop": loop},
    )
    ratios = 0.1 * torch.randn(shape, device=device)
    bench.measure(
        f"V-trace {shape[1]} x {shape[2]}",
        lambda: returns.trace(conduit.vtrace().rates, *flags, *made, bootstrap=last, log_ratios=ratios),
        moved=moved + ratios.nbytes,
    )


def tokens(bench: Bench) -> None:
    """64 rows of 200 to 4000 int32 tokens, padded and packed."""
    rows, longest, device = bench.size(64, 3), bench.size(4000, 20), bench.device
    lengths = torch.randint(longest // 20, longest + 1, (rows,), device=device)
    starts = torch.arange(rows, device=device) * longest
    spans = starts | (lengths << 32)
    arenas = torch.randint(0, 50_000, (1, rows * longest), dtype=torch.int32, device=device)
    index = torch.arange(rows, device=device)
    padded = torch.zeros(rows, longest, dtype=torch.int32, device=device)
    mask, found = torch.zeros(rows, longest, dtype=torch.bool, device=device), torch.zeros_like(index)
    options = {"transform": Transform("int32"), "page_rows": rows}
    moved = 4 * int(lengths.sum()) + padded.nbytes + mask.nbytes

    def want() -> torch.Tensor:
        inside = torch.arange(longest, device=device) < lengths[:, None]
        return torch.where(inside, arenas.view(rows, longest), 0)

    bench.measure(
        f"pad {rows} x {longest} tokens",
        lambda: ragged.pad(spans, arenas, index, padded, mask, found, **options),
        moved=moved,
        check=lambda: close(padded, want()),
        others={"torch eager": want},
    )
    packed = torch.zeros(rows * longest, dtype=torch.int32, device=device)
    ends = torch.zeros(rows + 1, dtype=torch.int32, device=device)
    places = torch.zeros_like(packed)
    bench.measure(
        f"pack {rows} x {longest} tokens",
        lambda: ragged.pack(spans, arenas, index, packed, ends, places, longest=longest, **options),
        moved=12 * int(lengths.sum()),
        check=lambda: close(ends[1:], lengths.cumsum(0)),
    )


EVERY = (atari, rows_of_small_fields, sequences, steps, priorities, traces, tokens)
"""Measurements of kernels, the most telling first."""
