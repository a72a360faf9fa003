"""GAE and V-trace against the sums of their definitions, in both forms."""

import numpy as np
import pytest
import torch

import conduit
from conduit.errors import ConfigError, FieldError
from conduit.kernels.gpu import batch_returns, returns
from conduit.kernels.reference import returns as reference

BARS = (1.3, 0.9, 1.1)


def batch_of(seed, shape, *, lengths):
    """Any flags whatever; values of steps that do not count are NaN."""
    rng = np.random.default_rng(seed)
    batch = {name: rng.normal(size=shape).astype(np.float32) for name in ("reward", "values", "finals", "log_ratios")}
    batch["bootstrap"] = rng.normal(size=(shape[0], *shape[2:])).astype(np.float32)
    for name, share in (("terminated", 0.1), ("truncated", 0.1), ("is_first", 0.1), ("absent", 0.1)):
        batch[name] = rng.random(shape) < share
    batch["mask"] = ~batch.pop("absent")
    batch["lengths"] = rng.integers(0, shape[1] + 1, shape[0]) if lengths else np.full(shape[0], shape[1])
    return batch


def wanted(batch, kind, *, mask, is_first, bootstrap, finals, ratios):
    """The reference's three arrays, column by column."""
    shape = batch["reward"].shape
    made = [np.zeros(shape), np.zeros(shape), np.zeros(shape, bool)]
    for column in np.ndindex(batch["bootstrap"].shape):
        at = (column[0], slice(None), *column[1:])
        names = ("reward", "values", "terminated", "truncated", "mask", "is_first", "log_ratios")
        part = {name: batch[name][at].copy() for name in names} | {"length": batch["lengths"][column[0]]}
        if not mask:
            part["mask"][:] = True
        if not is_first:
            part["is_first"][:] = False
            part["is_first"][1:] = (part["terminated"] | part["truncated"])[:-1]
        if not ratios:
            part["log_ratios"][:] = 0.0
        given = {
            "final_values": batch["finals"][at] if finals else None,
            "bootstrap": batch["bootstrap"][column] if bootstrap else None,
        }
        if isinstance(kind, conduit.kernels.ops.returns.Gae):
            arrays = reference.advantages(part, given, kind.gamma, kind.lam)
        else:
            arrays = reference.corrected(part, given, kind.gamma, kind.lam, BARS)
        for whole, array in zip(made, arrays, strict=True):
            whole[at] = array
    return made


def run(out, device, batch, kind, **options):
    shape = batch["reward"].shape
    flags = out(shape, torch.uint8).view(torch.bool)
    made = [out(shape, torch.float32), out(shape, torch.float32), flags]
    names = {"mask": "mask", "is_first": "is_first", "bootstrap": "bootstrap", "final_values": "finals"}
    names |= {"log_ratios": "log_ratios", "lengths": "lengths"}
    given = {to: device(batch[name]) for to, name in names.items() if options.get(to, True)}
    if isinstance(kind, conduit.kernels.ops.returns.Gae):
        given.pop("log_ratios", None)
    steps = [device(batch[name]) for name in ("reward", "values", "terminated", "truncated")]
    returns.trace(kind.rates, *steps, *made, **given)
    return made


SHAPES = [
    pytest.param((3, 7), id="sequences"),
    pytest.param((2, 40), id="sequences of several tiles"),
    pytest.param((1, 1), id="one step"),
    pytest.param((2, 19, 3), id="a few environments"),
    pytest.param((1, 11, 33), id="rollout"),
    pytest.param((2, 6, 40), id="sequential"),
]
KINDS = [conduit.gae(0.97, 0.9), conduit.vtrace(0.97, lam=0.95, rho_bar=BARS[0], c_bar=BARS[1], pg_rho_bar=BARS[2])]


@pytest.mark.parametrize("kind", KINDS, ids=["gae", "vtrace"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("given", ["everything", "nothing", "lengths and finals", "mask and bootstrap"])
def test_steps_equal_the_sum_of_the_definition(out, device, monkeypatch, kind, shape, given):
    if shape == (2, 6, 40):
        monkeypatch.setattr(returns, "MANY_COLUMNS", 64)
        assert returns.tile_of(*shape)[0] == 1
    if shape == (2, 40):
        monkeypatch.setattr(returns, "LONGEST_TILE", 16)
    everything = given == "everything"
    options = {
        "mask": everything or "mask" in given,
        "is_first": everything,
        "bootstrap": everything or "bootstrap" in given,
        "final_values": everything or "finals" in given,
        "log_ratios": everything,
        "lengths": everything or "lengths" in given,
    }
    batch = batch_of(3, shape, lengths=options["lengths"])
    part = {name: options[name] for name in ("mask", "is_first", "bootstrap")}
    want = wanted(batch, kind, finals=options["final_values"], ratios=options["log_ratios"], **part)
    if options["mask"]:
        # what does not count may be anything
        batch["reward"][~batch["mask"]] = np.nan
        batch["log_ratios"][~batch["mask"]] = np.nan
    made = run(out, device, batch, kind, **options)
    np.testing.assert_array_equal(made[2].cpu(), want[2])
    for got, array in zip(made[:2], want[:2], strict=True):
        np.testing.assert_allclose(got.cpu(), array, rtol=1e-5, atol=1e-5)


def test_with_lambda_one_the_advantage_is_the_return_less_the_value(out, device):
    """Not of the reference, which could share a mistake: one episode, discounted from its end."""
    rng = np.random.default_rng(8)
    reward, values = (rng.normal(size=(1, 50)).astype(np.float32) for _ in range(2))
    flags = np.zeros((1, 50), bool)
    batch = {
        "reward": reward,
        "values": values,
        "terminated": flags,
        "truncated": flags,
        "bootstrap": np.array([2.0], np.float32),
    }
    advantages, targets, used = run(
        out,
        device,
        batch,
        conduit.gae(0.9, 1.0),
        mask=False,
        is_first=False,
        final_values=False,
        lengths=False,
        log_ratios=False,
    )
    carried, want = 2.0, np.zeros(50)
    for t in range(49, -1, -1):
        carried = reward[0, t] + 0.9 * carried
        want[t] = carried
    assert used.all()
    np.testing.assert_allclose(targets[0].cpu(), want, rtol=1e-5)
    np.testing.assert_allclose(advantages[0].cpu(), want - values[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (2, 5, 0)])
def test_no_steps_launch_nothing(out, device, shape):
    run(out, device, batch_of(1, shape, lengths=False), KINDS[0])


def test_what_cannot_be_is_refused(out, device):
    batch = batch_of(1, (2, 5), lengths=False)
    steps = [device(batch[name]) for name in ("reward", "values", "terminated", "truncated")]
    made = [out((2, 5), torch.float32), out((2, 5), torch.float32), out((2, 5), torch.uint8).view(torch.bool)]
    with pytest.raises(ConfigError, match=r"Expected log_ratios with conduit\.vtrace only"):
        returns.trace(KINDS[0].rates, *steps, *made, log_ratios=device(batch["log_ratios"]))
    with pytest.raises(FieldError, match=r"Expected shape \[2\], got \[2, 1\] - at `bootstrap`"):
        run(out, device, batch | {"bootstrap": np.zeros((2, 1), np.float32)}, KINDS[0])
    with pytest.raises(FieldError, match="Expected `float32`, got `float64` - at `values`"):
        run(out, device, batch | {"values": np.zeros((2, 5))}, KINDS[0])
    with pytest.raises(FieldError, match=r"Expected a tensor \[B, T\] or \[B, T, N\]"):
        run(out, device, batch | {"reward": np.zeros(5, np.float32)}, KINDS[0])


@pytest.mark.parametrize("shape", [(1, 4), (2, 9, 3), (2, 700)], ids=str)
@pytest.mark.parametrize(
    "kind",
    [conduit.gae(1.0, 0.0), conduit.gae(0.99, 0.9), conduit.vtrace(1.0, lam=0.5)],
    ids=["delta", "gae", "vtrace"],
)
def test_large_float64_values_are_subtracted_before_anything_is_rounded(out, device, shape, kind):
    rng = np.random.default_rng(3)
    values = 1e8 + 2.5 * np.arange(np.prod(shape)).reshape(shape)
    reward = rng.normal(size=shape).astype(np.float32)
    flags = {name: rng.random(shape) < 0.05 for name in ("terminated", "truncated")}
    bootstrap = 1e8 + rng.normal(size=(shape[0], *shape[2:]))
    batch = {"reward": device(reward), **{name: device(flag) for name, flag in flags.items()}}
    made = batch_returns.advantages_of(
        kind.rates,
        batch,
        {
            "values": device(values),
            "bootstrap": device(bootstrap),
            "final_values": device(values + 1),
            "log_ratios": None,
        },
        None,
        reward="reward",
        target="target",
    )
    want = kind({"reward": reward, **flags}, values=values, bootstrap=bootstrap, final_values=values + 1)
    assert made["advantages"].dtype == torch.float32
    np.testing.assert_allclose(made["advantages"].cpu(), want["advantages"], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(made["advantage_mask"].cpu(), want["advantage_mask"])


def test_returns_to_go_of_float64_rewards_are_summed_as_they_are(out, device):
    reward = np.array([[1e8 + 0.5, -1e8, 0.25, 0.125]])
    flags = {name: device(np.zeros((1, 4), bool)) for name in ("terminated", "truncated")}
    made = out((1, 4), torch.float32)
    batch_returns.returns_to_go(1.0, "reward", {"reward": device(reward), **flags}, made)
    assert made[0, 0].item() == 0.875
