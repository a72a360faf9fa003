"""Every kind of window against the float64 reference, over drawn episodes, page turns, evictions, cuts and deaths."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import conduit
from conduit.errors import ConfigError, DataTimeout
from conduit.kernels.reference import gather
from conduit.kernels.spec import windows
from tests.plane.history import MODES, History, fields, observation, operations, pixels_of

GAMMA = 0.97


def draw_all(loader, wanted, draws):
    """Draw until every one of `wanted` has surely come; returns {row id: {output: value}}."""
    got = {}
    for _ in range(draws):
        try:
            batch = loader.next(timeout=0.0)
        except DataTimeout:
            assert not wanted, "nothing to draw"
            return {}
        assert wanted, "drew what is no window"
        keys = batch.ids.tolist()
        for i, key in enumerate(keys):
            if key not in got:
                got[key] = {name: np.array(batch[name][i]) for name in batch}
                got[key]["step"], got[key]["episode"] = batch.steps[i], batch.episodes[i]
        batch.release()
        if got.keys() >= wanted.keys():
            break
    assert got.keys() == wanted.keys()
    return got


def check(world, window, reference_of):
    """Hold a window's loader to what `reference_of(streams' steps, stream, tick, env)` wants of each anchor."""
    bootstraps = isinstance(window, conduit.Transition) and window.newest == "bootstrap"
    need = 1 if bootstraps else windows.need(window)[1]
    short = isinstance(window, conduit.Transition | conduit.Episode)
    short = short or (isinstance(window, conduit.Sequence) and window.pad and not window.across)
    known = {}
    wanted = {}
    for key, (stream, tick, env) in world.places(need, short).items():
        for one in range(stream.envs):
            if (stream.number, one) not in known:
                known[stream.number, one] = world.steps(stream, one)
        want = reference_of(known, stream, tick, env)
        if want is not None:
            wanted[key] = (stream, tick, env, want)
    size = 256 if len(wanted) < 40 else 1024
    with world.engine.loader("replay", batch_size=size, window=window, min_rows=1, format="numpy", seed=7) as loader:
        got = draw_all(loader, wanted, draws=60)
    for key, values in got.items():
        stream, tick, env, want = wanted[key]
        row = stream.ticks[tick][env]
        assert values["step"] == row.step
        assert values["episode"] == (stream.number << 32) | row.episode
        for name, value in want.items():
            if name in ("reward", "discount") and isinstance(value, float):
                np.testing.assert_allclose(values[name], value, rtol=1e-6, atol=1e-6, err_msg=name)
            else:
                np.testing.assert_array_equal(values[name], value, err_msg=name)
        assert want.keys() <= values.keys()
    return len(got)


def serials_of(rows, serials, finals):
    """Serials of rows as the references name them, -1 for zeros."""
    return np.array([-1 if r == -1 else finals[-2 - r] if r < -1 else serials[r] for r in rows], np.int64)


def stacked(rows, serials, finals):
    names = serials_of(rows, serials, finals)
    zero = names < 0
    return {"obs": np.where(zero, 0, names), "pixels": np.where(zero[:, None], 0, pixels_of(names)).astype(np.uint8)}


def transition_of(window):
    def want(known, stream, tick, env):
        steps, serials, finals = known[stream.number, env]
        reached = gather.n_step(steps, tick, window.n_step, window.gamma, bootstrap=window.newest == "bootstrap")
        if reached is None:
            return None
        repeat = window.padding == "repeat"
        if window.stack > 1:
            here = stacked(gather.frames(steps, tick, window.stack, repeat=repeat), serials, finals)
            rows = gather.following_frames(steps, reached, window.stack, repeat=repeat)
            after = stacked(rows, serials, finals)
        else:
            here = observation(serials[tick])
            after = observation(finals[reached.last] if reached.kept else serials[reached.following])
        out = here | {f"next_{name}": value for name, value in after.items()}
        out["action"] = fields(serials[tick])["action"]
        out["terminated"] = steps.terminated[reached.last]
        out["truncated"] = steps.truncated[reached.last]
        if window.n_step > 1:
            out |= {"reward": reached.reward, "discount": reached.discount, "n_steps": reached.used}
        else:
            out["reward"] = fields(serials[tick])["reward"]
        return out

    return want


def lanes_of(steps, serials, rows):
    """Every field and flag of a row of lanes, ZEROS as zeros."""
    rows = np.array(rows)
    there = rows >= 0
    names = np.where(there, np.array(serials)[rows], 0)
    out = {}
    for name, value in fields(names).items():
        out[name] = np.where(there.reshape(-1, *[1] * (value.ndim - 1)), value, 0).astype(value.dtype)
    for name, flags in (("terminated", steps.terminated), ("truncated", steps.truncated), ("is_first", steps.first)):
        out[name] = there & flags[rows]
    out["mask"] = there & ~steps.closing[rows]
    return out


def following_of(window, steps, serials, finals, rows):
    """The next observations of a row of lanes, {} where none are asked for, None where a step has none."""
    if not window.next_obs:
        return {}
    after = gather.following(steps, rows)
    if after is None:
        return None
    return {f"next_{name}": value for name, value in stacked(after, serials, finals).items()}


def sequence_of(window):
    every = 1 if window.overlap is None else window.length - window.overlap

    def want(known, stream, tick, env):
        steps, serials, finals = known[stream.number, env]
        position = tick if window.across else stream.ticks[tick][env].step
        if position % every:
            return None
        rows = gather.sequence(steps, tick, window.length, across=window.across, pad=window.pad)
        after = None if rows is None else following_of(window, steps, serials, finals, rows)
        if after is None:
            return None
        out = lanes_of(steps, serials, rows) | after
        out["loss_mask"] = out["mask"] & (np.arange(window.length) >= window.burn_in)
        out["lengths"] = sum(row >= 0 for row in rows)
        return out

    return want


def episode_of(window):
    def want(known, stream, tick, env):
        steps, serials, finals = known[stream.number, env]
        rows = gather.episode(steps, tick, window.max_length)
        after = None if rows is None else following_of(window, steps, serials, finals, rows)
        if after is None:
            return None
        return lanes_of(steps, serials, rows) | after | {"lengths": sum(row >= 0 for row in rows)}

    return want


def rollout_of(window):
    def want(known, stream, tick, env):
        if stream.envs != window.num_envs or env != 0:
            return None
        envs = [known[stream.number, one] for one in range(stream.envs)]
        rows = gather.rollout([steps for steps, _, _ in envs], tick, window.ticks, window.stride or window.ticks)
        if rows is None:
            return None
        each = []
        for steps, serials, finals in envs:
            column = [row[0] for row in rows]
            after = following_of(window, steps, serials, finals, column)
            if after is None:
                return None
            each.append(lanes_of(steps, serials, column) | after)
        return {name: np.stack([one[name] for one in each], 1) for name in each[0]}

    return want


REFERENCES = {
    conduit.Transition: transition_of,
    conduit.Sequence: sequence_of,
    conduit.Episode: episode_of,
    conduit.Rollout: rollout_of,
}


@st.composite
def windows_within(draw, stack, n_step, length):
    """A window that fits a table made for (stack, n_step, length)."""
    future = max(n_step, length - 1)
    kind = draw(st.sampled_from(list(REFERENCES)))
    if kind is conduit.Transition:
        return conduit.Transition(
            n_step=draw(st.integers(1, future)),
            gamma=draw(st.sampled_from([GAMMA, 1.0, 0.0])),
            stack=draw(st.integers(1, stack)),
            padding=draw(st.sampled_from(["zero", "repeat"])),
            newest=draw(st.sampled_from(["wait", "bootstrap"])),
        )
    following = draw(st.booleans())
    longest = draw(st.integers(1, future + (0 if following else 1)))
    if kind is conduit.Sequence:
        return conduit.Sequence(
            longest,
            burn_in=draw(st.integers(0, longest - 1)),
            overlap=draw(st.none() | st.integers(0, longest - 1)),
            across=draw(st.booleans()),
            pad=draw(st.booleans()),
            next_obs=following,
        )
    if kind is conduit.Episode:
        return conduit.Episode(longest, next_obs=following)
    envs, stride = draw(st.sampled_from([1, 2, 3])), draw(st.none() | st.integers(1, 4))
    return conduit.Rollout(longest, envs, stride=stride, next_obs=following)


@st.composite
def scenes(draw):
    reach = draw(st.sampled_from([(1, 1, 1), (1, 3, 1), (3, 1, 1), (4, 5, 1), (2, 2, 6), (1, 1, 5)]))
    return {
        "reach": reach,
        "modes": draw(st.lists(st.sampled_from(MODES), min_size=1, max_size=3)),
        "pages": draw(st.integers(4, 7)),
        "spare": draw(st.integers(0, 9)),
        "operations": draw(operations),
        "windows": draw(st.lists(windows_within(*reach), min_size=1, max_size=4)),
    }


@settings(max_examples=120)
@given(scenes())
def test_any_window_of_any_history_is_what_the_reference_says(scene):
    with History(scene["reach"], scene["modes"], scene["pages"], scene["spare"]) as world:
        for operation in scene["operations"]:
            world.do(*operation)
        for window in scene["windows"]:
            check(world, window, REFERENCES[type(window)](window))


WINDOWS = [
    conduit.Transition(),
    conduit.Transition(n_step=3, gamma=GAMMA),
    conduit.Transition(n_step=5, gamma=GAMMA, newest="bootstrap"),
    conduit.Transition(n_step=1, stack=4),
    conduit.Transition(n_step=5, gamma=GAMMA, stack=4, padding="zero"),
    conduit.Transition(n_step=2, gamma=0.5, stack=2, newest="bootstrap"),
    conduit.Sequence(6, burn_in=2),
    conduit.Sequence(4, overlap=2, pad=False),
    conduit.Sequence(5, overlap=3, across=True),
    conduit.Episode(6),
    conduit.Rollout(4, 2),
    conduit.Rollout(3, 2, stride=2),
    conduit.Sequence(5, burn_in=2, next_obs=True),
    conduit.Sequence(4, overlap=1, across=True, next_obs=True),
    conduit.Episode(5, next_obs=True),
    conduit.Rollout(4, 2, stride=1, next_obs=True),
]


@pytest.mark.parametrize("autoreset", ["next_step", "same_step", "disabled"])
@pytest.mark.parametrize("envs", [None, 1, 2, 3])
@pytest.mark.parametrize("spare", [0, 1, 40])
def test_every_window_in_every_autoreset_mode_over_many_pages(autoreset, envs, spare):
    rng = np.random.default_rng(spare)
    with History((4, 5, 6), [(envs, autoreset, True)] * 2, 5, spare) as world:
        for number in range(48):
            ends = int(sum(int(b) << 3 * k for k, b in enumerate(rng.choice([0, 0, 0, 4, 1, 2, 3], 18))))
            world.do(number, "write", int(rng.integers(1, 16)), ends)
            if number in (7, 21):
                world.do(number, "cut", 0, 0)
            if number == 13:
                world.do(0, "die", 0, 0)
        drawn = [check(world, window, REFERENCES[type(window)](window)) for window in WINDOWS]
        assert all(drawn[:9]), drawn
        assert world.model.evicted > 0


def test_one_step_windows_equal_the_plain_loader_bit_for_bit():
    """N = 1 is the plain table: same draws, same bytes, whatever gamma, padding or the newest rows' rule."""
    with History((4, 5, 6), [(2, "next_step", True), (None, "disabled", True)], 6, 10) as world:
        for number in range(30):
            world.do(number, "write", 7, 0b1000110000001010000100000)
        options = {"batch_size": 64, "min_rows": 1, "format": "numpy", "seed": 3}
        for window in (conduit.Transition(n_step=1), conduit.Transition(1, 0.5, 1, "zero", "bootstrap")):
            with (
                world.engine.loader("replay", **options) as plain,
                world.engine.loader("replay", window=window, **options) as windowed,
            ):
                for _ in range(20):
                    one, other = plain.next(), windowed.next()
                    assert list(one) == list(other)
                    for name in one:
                        assert one[name].dtype == other[name].dtype
                        assert one[name].tobytes() == other[name].tobytes(), name
                    for key in ("ids", "versions", "episodes", "steps"):
                        assert getattr(one, key).tobytes() == getattr(other, key).tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_returns_are_summed_in_float64_and_rounded_once(dtype, engine_name):
    """5 steps of rewards that float32 sums would lose: the result is the float64 sum, rounded to the column's dtype."""
    schema = conduit.Schema([conduit.Field("obs", "int64", (), observation=True), conduit.Field("reward", dtype)])
    table = conduit.Table(schema, 4096, max_n_step=5)
    rng = np.random.default_rng(1)
    rewards = (rng.standard_normal(600) * 10.0 ** rng.integers(-3, 4, 600)).astype(dtype)
    with conduit.Engine.create(engine_name, {"replay": table}) as engine, engine.writer("replay") as writer:
        for t, reward in enumerate(rewards):
            writer.append(obs=t, reward=reward if dtype == "float32" else float(reward))
        window = conduit.Transition(n_step=5, gamma=0.99)
        transform = {"reward": conduit.scale(0.5, offset=0.25, dtype=dtype)}
        for given_, single in (
            (None, rewards.astype(np.float64)),
            (transform, rewards.astype(np.float64) * 0.5 + 0.25),
        ):
            with engine.loader("replay", batch_size=512, window=window, format="numpy", transform=given_) as loader:
                batch = loader.next()
                assert batch["reward"].dtype == dtype
                assert batch["discount"].dtype == np.float32
                want = [sum(0.99**k * single[t + k] for k in range(5)) for t in batch["obs"]]
                np.testing.assert_allclose(
                    batch["reward"], want, rtol=2e-7 if dtype == "float32" else 1e-14, atol=1e-12
                )
                np.testing.assert_array_equal(batch["discount"], np.float32(0.99**5))


@pytest.mark.parametrize(
    ("window", "outputs"),
    [
        (conduit.Sequence(3), ["obs"]),
        (conduit.Sequence(3), ["mask", "obs"]),
        (conduit.Episode(3), ["reward"]),
        (conduit.Rollout(2, 1), ["is_first"]),
        (conduit.Transition(n_step=3), ["obs"]),
        (conduit.Transition(n_step=3), ["discount"]),
        (conduit.Transition(n_step=3, stack=3), ["next_obs"]),
        (conduit.Transition(stack=3), ["reward", "terminated"]),
    ],
)
def test_outputs_can_be_left_out(window, outputs):
    """What is not asked for is not written anywhere."""
    with History((3, 3, 3), [(None, "disabled", True)], 5, 20) as world:
        for _ in range(12):
            world.do(0, "write", 8, 0b001000000)
        options = {"batch_size": 32, "min_rows": 1, "format": "numpy", "seed": 5, "window": window}
        with (
            world.engine.loader("replay", **options) as every,
            world.engine.loader("replay", fields=outputs, **options) as few,
        ):
            whole, part = every.next(), few.next()
            assert list(part) == outputs
            for name in outputs:
                np.testing.assert_array_equal(part[name], whole[name])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: conduit.Transition(n_step=0), "n_step of at least 1"),
        (lambda: conduit.Transition(n_step=True), "n_step of at least 1"),
        (lambda: conduit.Transition(gamma=1.5), "gamma from 0 to 1"),
        (lambda: conduit.Transition(gamma=float("nan")), "gamma from 0 to 1"),
        (lambda: conduit.Transition(stack=0), "stack of at least 1"),
        (lambda: conduit.Transition(padding="edge"), "'zero', 'repeat'"),
        (lambda: conduit.Transition(newest="drop"), "'wait', 'bootstrap'"),
        (lambda: conduit.Sequence(0), "length of at least 1"),
        (lambda: conduit.Sequence(4, burn_in=4), "burn_in below the length 4"),
        (lambda: conduit.Sequence(4, overlap=4), "overlap from 0 to 3"),
        (lambda: conduit.Episode(0), "max_length of at least 1"),
        (lambda: conduit.Rollout(4, 0), "num_envs of at least 1"),
        (lambda: conduit.Rollout(4, 1, stride=0), "stride of at least 1"),
    ],
)
def test_windows_that_make_no_sense_are_refused_where_they_are_written(make, said):
    with pytest.raises(ConfigError, match=said):
        make()


@pytest.mark.parametrize(
    ("window", "said"),
    [
        (conduit.Transition(stack=3), "max_stack=3"),
        (conduit.Transition(n_step=4), "max_n_step=4"),
        (conduit.Sequence(5), "max_length=5"),
        (conduit.Rollout(9, 1), "max_length=9"),
        (conduit.Episode(6), "max_length=6"),
        (conduit.Sequence(4, next_obs=True), "max_length=5.*next_obs=True they need one tick more"),
        (conduit.Episode(4, next_obs=True), "max_length=5"),
        (conduit.Rollout(4, 1, next_obs=True), "max_length=5"),
        ("sequence", "Transition, Sequence, Episode, Rollout"),
    ],
)
def test_windows_wider_than_the_table_are_refused_with_the_remedy(window, said):
    with (
        History((2, 3, 4), [(None, "disabled", True)], 4, 0) as world,
        pytest.raises(ConfigError, match=said),
    ):
        world.engine.loader("replay", batch_size=1, window=window)


class TestSequencePriority:
    def test_it_is_the_reference_s(self):
        rng = np.random.default_rng(0)
        errors = rng.standard_normal((40, 9))
        mask = rng.random((40, 9)) < 0.6
        mask[3] = False
        errors[~mask] = np.nan
        for eta in (0.0, 0.3, 0.9, 1.0):
            got = conduit.sequence_priority(errors, mask, eta)
            np.testing.assert_allclose(got, gather.sequence_priority(errors, mask, eta), rtol=1e-12)
        whole = np.ones((4, 5), bool)
        want = gather.sequence_priority(np.ones((4, 5)) * 2, whole, 0.9)
        np.testing.assert_allclose(conduit.sequence_priority(np.full((4, 5), -2)), want)

    def test_torch_comes_out_as_it_went_in(self):
        torch = pytest.importorskip("torch")
        errors = torch.randn(6, 2, 7, requires_grad=True)
        mask = torch.rand(6, 2, 7) < 0.5
        got = conduit.sequence_priority(errors, mask)
        assert got.dtype == torch.float32
        assert got.shape == (6, 2)
        assert not got.requires_grad
        want = gather.sequence_priority(errors.detach().numpy().reshape(12, 7), mask.numpy().reshape(12, 7), 0.9)
        np.testing.assert_allclose(got.reshape(12), want, rtol=1e-5)
        assert conduit.sequence_priority(torch.ones(3, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16

    def test_what_does_not_fit_is_refused(self):
        with pytest.raises(ConfigError, match="eta from 0 to 1"):
            conduit.sequence_priority(np.ones((2, 3)), eta=1.1)
        with pytest.raises(ValueError, match="mask of the same shape"):
            conduit.sequence_priority(np.ones((2, 3)), np.ones((3, 2), bool))
        with pytest.raises(ValueError, match="got \\(\\)"):
            conduit.sequence_priority(np.float64(1.0))
