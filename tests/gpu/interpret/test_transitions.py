"""Transitions resolved along links: against the reference, and against what a loader on the CPU delivers."""

import numpy as np
import pytest
import torch

import conduit
from conduit.errors import ConfigError, FieldError
from conduit.kernels.gpu import transitions
from conduit.kernels.reference import device as reference
from conduit.kernels.spec.transforms import Transform
from conduit.store.format import words as w
from conduit.store.format.columns import META_DTYPE

PAGE_ROWS = 24
SCHEMA = conduit.Schema(
    [
        conduit.Field("obs", "int64", (), observation=True),
        conduit.Field("reward", "float32"),
    ]
)


class Made:
    """Outputs of `transitions`, and how to make them."""

    def __init__(self, out, batch, window, reward_dtype=torch.float32):
        self.window = window
        self.following, self.used = out(batch, torch.int64), out(batch, torch.int64)
        self.discounts = out(batch, torch.float32)
        self.terminated, self.truncated = (out(batch, torch.uint8).view(torch.bool) for _ in range(2))
        self.returns = out(batch, reward_dtype)
        self.stacks = {}
        if window.stack > 1:
            self.stacks = {name: out((batch, window.stack), torch.int64) for name in ("stack", "following_stack")}
            self.stacks["shift"] = out(batch, torch.int32)

    def run(self, rows, meta, committed, over, envs, reward, page_rows=PAGE_ROWS, transform=None):
        outputs = (self.following, self.discounts, self.used, self.terminated, self.truncated)
        transitions.transitions(
            rows, meta, committed, over, envs, *outputs, window=self.window, page_rows=page_rows, reward=reward,
            returns=self.returns, reward_transform=transform, **self.stacks,
        )  # fmt: skip
        return self


def any_pages(rng, pages, envs):
    """Meta of pages in which anything may be: links in and out of place, all flags, any step."""
    meta = np.zeros(pages * PAGE_ROWS, META_DTYPE)
    links = rng.choice([0, 1, envs, envs, envs, envs, 5, PAGE_ROWS, 2**27 - 1], len(meta))
    flags = np.zeros(len(meta), np.int64)
    for flag, share in (
        (w.TERMINATED, 0.1),
        (w.TRUNCATED, 0.1),
        (w.FIRST, 0.1),
        (w.FINAL, 0.05),
        (w.KEPT, 0.15),
        (w.DELETED, 0.1),
    ):
        flags |= flag * (rng.random(len(meta)) < share)
    meta["link"] = (links << w.LINK_SHIFT | flags).astype(np.uint32)
    meta["step"] = rng.integers(0, 6, len(meta))
    return meta


WINDOWS = [
    conduit.Transition(),
    conduit.Transition(n_step=3, gamma=0.97),
    conduit.Transition(n_step=5, gamma=0.9, newest="bootstrap", stack=3),
    conduit.Transition(n_step=2, gamma=1.0, stack=4, padding="zero"),
    conduit.Transition(n_step=1, stack=2, newest="bootstrap"),
]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("transform", [None, Transform("float32", 0.3, -0.1, -0.2, 0.2)], ids=["raw", "clipped"])
def test_whatever_meta_says_equals_the_reference(out, device, window, transform):
    rng = np.random.default_rng(5)
    for envs in (1, 3):
        meta = any_pages(rng, 30, envs)
        committed = rng.choice([PAGE_ROWS, PAGE_ROWS, 17, 3], 30)
        over = rng.random(30) < 0.5
        reward = rng.normal(size=len(meta)).astype(np.float32)
        rows = np.concatenate(
            [[-1], np.flatnonzero(np.arange(len(meta)) % PAGE_ROWS < np.repeat(committed, PAGE_ROWS))]
        )
        made = Made(out, len(rows), window).run(
            device(rows),
            device(meta.view(np.int32).reshape(-1, 4)),
            device(committed),
            device(over.astype(np.int64)),
            device(np.full(30, envs)),
            device(reward),
            transform=transform,
        )
        summand = reward.astype(np.float64)
        if transform is not None:
            summand = np.clip(summand * transform.factor + transform.offset, transform.low, transform.high)
        anchors = 0
        for i, row in enumerate(rows.tolist()):
            first = row // PAGE_ROWS * PAGE_ROWS
            page = first, first + int(committed[row // PAGE_ROWS]), first + PAGE_ROWS
            want = (
                None
                if row < 0
                else reference.resolved(meta, summand, row, page, envs, window, bool(over[row // PAGE_ROWS]))
            )
            anchors += want is not None
            if want is None:
                missing = [-1] * window.stack
                want = reference.Resolved(-1, 0.0, 0.0, 0, False, False, missing, missing)
            assert made.following[i] == want.following
            assert made.used[i] == want.used
            assert made.returns[i] == np.float32(want.reward)
            assert made.discounts[i] == np.float32(want.discount)
            assert (bool(made.terminated[i]), bool(made.truncated[i])) == (want.terminated, want.truncated)
            if window.stack > 1:
                assert made.stacks["stack"][i].tolist() == want.stack
                assert made.stacks["following_stack"][i].tolist() == want.following_stack
        assert anchors > 50


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize(("autoreset", "envs"), [("next_step", 2), ("same_step", 3), ("disabled", 1)])
def test_a_batch_equals_the_loaders_bit_for_bit(out, device, engine_name, window, autoreset, envs):
    """Episodes of all lengths over pages that were reused, with kept finals, halos, and a page that is being written."""
    rng = np.random.default_rng(9)
    table = conduit.Table(SCHEMA, 400, page_rows=64, max_stack=4, max_n_step=5, num_envs=envs)
    serial = 0
    with (
        conduit.Engine.create(engine_name, {"replay": table}) as engine,
        engine.writer("replay", num_envs=None if envs == 1 else envs, autoreset=autoreset) as writer,
    ):
        closing = np.zeros(envs, bool)
        for _ in range(700 // envs):
            obs = np.arange(serial, serial + envs)
            serial += envs
            ends = (rng.random((2, envs)) < 0.12) & ~closing
            ends[1] &= ~ends[0]
            values = {"obs": obs, "reward": rng.normal(size=envs).astype(np.float32)}
            values |= {"terminated": ends[0], "truncated": ends[1]}
            done = ends.any(0)
            if autoreset != "next_step" and done.any():
                values["final"] = obs + 10_000
            if envs == 1:
                values = {name: value[0].item() for name, value in values.items()}
            writer.append(**values)
            closing = done if autoreset == "next_step" else closing
        compare(out, device, engine, window)


def compare(out, device, engine, window):
    view = engine._views["replay"]
    assert view.rows_evicted > 0
    with engine.loader("replay", batch_size=64, window=window, min_rows=1, format="numpy", seed=3) as loader:
        batch = loader.next()
        rows = batch.ids & ((1 << 40) - 1)
        blocks = view.segment.words
        pages = [(view.layout.blocks + 128 * page) // 8 for page in range(view.layout.pages)]
        committed = np.array([blocks[page + w.PAGE_COMMITTED // 8] for page in pages])
        over = np.array(
            [blocks[page] & w.KIND_MASK == w.SEALED and blocks[page + w.PAGE_ENDED // 8] == w.ENDED for page in pages]
        )
        envs = np.array([blocks[page + w.PAGE_ENVS // 8] for page in pages])
        made = Made(out, 64, window).run(
            device(rows),
            device(np.array(view.meta).view(np.int32).reshape(-1, 4)),
            device(committed),
            device(over.astype(np.int64)),
            device(envs),
            device(np.array(view.columns["reward"])),
            page_rows=view.layout.page_rows,
        )
        obs = np.array(view.columns["obs"])
        for name in ("terminated", "truncated"):
            np.testing.assert_array_equal(getattr(made, name).cpu(), batch[name])
        np.testing.assert_array_equal(made.returns.cpu(), batch["reward"])
        if window.n_step > 1:
            np.testing.assert_array_equal(made.discounts.cpu(), batch["discount"])
            np.testing.assert_array_equal(made.used.cpu(), batch["n_steps"])
        if window.stack == 1:
            np.testing.assert_array_equal(obs[made.following.cpu()], batch["next_obs"])
            return
        for name, output in (("stack", "obs"), ("following_stack", "next_obs")):
            index = made.stacks[name].cpu().numpy()
            np.testing.assert_array_equal(np.where(index < 0, 0, obs[index]), batch[output])
        stack, following = (made.stacks[name].cpu().numpy() for name in ("stack", "following_stack"))
        for i, behind in enumerate(made.stacks["shift"].tolist()):
            assert stack[i, behind:].tolist() == following[i, : window.stack - behind].tolist()


def test_what_does_not_go_together_is_refused(out, device):
    zeros, meta = device(np.zeros(4, np.int64)), device(np.zeros((8, 4), np.int32))
    made = Made(out, 4, conduit.Transition(stack=2))
    reward = device(np.zeros(8, np.float32))
    with pytest.raises(FieldError, match=r"Expected shape \[8\], got \[7\] - at `reward`"):
        made.run(zeros, meta, zeros, zeros, zeros, reward[:7])
    with pytest.raises(FieldError, match=r"Expected shape \[any, 4\], got \[4, 8\] - at `meta`"):
        made.run(zeros, meta.view(4, 8), zeros, zeros, zeros, reward)
    with pytest.raises(ConfigError, match="Expected page_rows of at least 1"):
        made.run(zeros, meta, zeros, zeros, zeros, reward, page_rows=0)
    made.stacks.pop("shift")
    with pytest.raises(ConfigError, match="Expected stack, following_stack and shift for a window that stacks"):
        made.run(zeros, meta, zeros, zeros, zeros, reward)
    with pytest.raises(ConfigError, match="Expected both reward and returns, or neither"):
        made.run(zeros, meta, zeros, zeros, zeros, None)


def test_no_anchors_launch_nothing(out, device):
    none = device(np.zeros(0, np.int64))
    made = Made(out, 0, conduit.Transition(n_step=3))
    made.run(
        none, device(np.zeros((8, 4), np.int32)), device([8]), device([0]), device([1]), device(np.zeros(8, np.float32))
    )


@pytest.mark.parametrize("shape", [(), (3,), (2, 20)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("transform", [None, (conduit.scale(0.3), conduit.clip(-0.2, 0.2))], ids=["raw", "clipped"])
def test_sums_of_rewards_of_any_shape_equal_the_loaders_bit_for_bit(out, device, engine_name, shape, dtype, transform):
    """Beside another reward, so that the loader does not sum up on its way; rows of some shapes are padded in memory."""
    rng = np.random.default_rng(3)
    schema = conduit.Schema(
        [
            conduit.Field("obs", "int64", observation=True),
            conduit.Field("reward.a", dtype, shape),
            conduit.Field("reward.b", "float32"),
        ]
    )
    table = conduit.Table(schema, 300, page_rows=64, max_n_step=4)
    window = conduit.Transition(n_step=4, gamma=0.9, newest="bootstrap")
    with conduit.Engine.create(engine_name, {"replay": table}) as engine, engine.writer("replay") as writer:
        for serial in range(250):
            ended = bool(rng.random() < 0.15)
            reward = {"a": rng.normal(size=shape).astype(dtype)[()], "b": 0.0}
            writer.append(obs=serial, reward=reward, terminated=ended, final=0 if ended else None)
        view = engine._views["replay"]
        given = {} if transform is None else {"reward.a": transform}
        options = {"batch_size": 64, "window": window, "min_rows": 1, "format": "numpy", "transform": given}
        with engine.loader("replay", **options) as loader:
            batch = loader.next()
            done = next(item.transform for item in loader.plan.returns if item.name == "reward.a")
        envs = device(np.ones(view.layout.pages, np.int64))
        made = out((64, *shape), getattr(torch, batch["reward.a"].dtype.name))
        column = np.array(view.columns["reward.a"])
        transitions.sums(
            device(batch.ids & ((1 << 40) - 1)), device(batch["n_steps"]), envs, device(column), made, window=window,
            page_rows=view.layout.page_rows, transform=done,
        )  # fmt: skip
        np.testing.assert_array_equal(made.cpu(), batch["reward.a"])


def test_sums_of_no_anchors_are_zeros(out, device):
    rows, used = device(np.array([-1, 3, -1])), device(np.array([0, 2, 0]))
    made = out((3, 2), torch.float32)
    reward = device(np.arange(16, dtype=np.float32).reshape(8, 2))
    transitions.sums(rows, used, device([1]), reward, made, window=conduit.Transition(n_step=3, gamma=1.0), page_rows=8)
    assert made.tolist() == [[0, 0], [6 + 8, 7 + 9], [0, 0]]
    with pytest.raises(FieldError, match=r"Expected shape \[3, 2\], got \[3, 3\] - at `returns`"):
        transitions.sums(
            rows, used, device([1]), reward, out((3, 3), torch.float32), window=conduit.Transition(), page_rows=8
        )
    with pytest.raises(ConfigError, match="Expected page_rows of at least 1"):
        transitions.sums(rows, used, device([1]), reward, made, window=conduit.Transition(), page_rows=0)
