"""Steps on whole batches of a device: what they make is what a loader on the CPU makes."""

import numpy as np
import pytest
import torch

import conduit
from conduit.errors import ConfigError, FieldError
from tests.gpu.device.conftest import SMALL, Source

WINDOWS = {
    "sequences": conduit.Sequence(6, next_obs=True),
    "episodes": conduit.Episode(7, next_obs=True),
    "rollouts": conduit.Rollout(6, 3, next_obs=True),
}


def critic(batch):
    """Values of a step's observation and of the one behind it, as any function of them."""
    batch["value"] = torch.sin(batch["obs"].float()).sum(-1)
    batch["final_value"] = torch.cos(batch["next_obs"].float()).sum(-1)
    batch["log_ratio"] = 0.1 * torch.cos(batch["obs"].float()).sum(-1)
    return batch


STEPS = {
    "gae": (conduit.apply(critic), conduit.gae(0.9, 0.8), conduit.normalize_advantages()),
    "gae with finals": (conduit.apply(critic), conduit.gae(0.9, 0.8, final_values="final_value")),
    "vtrace": (conduit.apply(critic), conduit.vtrace(0.9, lam=0.9, log_ratios="log_ratio", final_values="final_value")),
    "returns": (conduit.returns_to_go(0.95),),
}


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("pool", ["1 MiB", None], ids=["pool", "made by the host"])
def test_they_make_what_a_loader_on_the_cpu_makes(make, device, window, steps, pool):
    envs = 3 if window == "rollouts" else None
    options = {"page_rows": 96, "num_envs": 3} if envs else {}
    engine = make(SMALL, max_length=8, **options)
    Source(engine, envs=envs)(90)
    asked = {"batch_size": 4, "seed": 3, "window": WINDOWS[window], "batch_transforms": STEPS[steps]}
    with (
        engine.loader("replay", **asked) as loader,
        engine.loader("replay", device=device, pool=pool, **asked) as other,
    ):
        for _ in range(3):
            want, have = loader.next(), other.next()
            assert list(want) == list(have)
            for name, array in want.items():
                got = have[name].cpu()
                assert got.dtype == array.dtype, name
                torch.testing.assert_close(
                    got, array, rtol=2e-5, atol=2e-5, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
                )


def test_advantages_of_a_critic_on_the_device_lie_where_the_batch_lies(make, device):
    engine = make(SMALL, max_length=8)
    Source(engine)(90)
    window = WINDOWS["sequences"]
    with engine.loader("replay", batch_size=4, window=window, device=device, pool="1 MiB", seed=1) as loader:
        batch = loader.next()
    weight = torch.linspace(-1, 1, 4, device=batch["obs"].device, requires_grad=True)
    values = batch["obs"].float() @ weight
    kind = conduit.gae(0.9, 0.8)
    given = {"values": values, "bootstrap": None, "final_values": None, "log_ratios": None}
    made = kind._launch(batch, given, None)
    host = {name: value.cpu() for name, value in batch.items()}
    want = kind(host, values=values.detach().cpu())
    for name, array in want.items():
        assert made[name].device == batch["obs"].device
        assert not made[name].requires_grad
        torch.testing.assert_close(made[name].cpu(), array, rtol=2e-5, atol=2e-5)
    if batch["obs"].is_cuda:
        torch.testing.assert_close(kind(batch, values=values)["advantages"], made["advantages"])
    with pytest.raises(FieldError, match=r"Expected shape \[4, 6\], got \[2, 6\] - at `values`"):
        kind._launch(batch, given | {"values": values[:2]}, None)


def reward_of(achieved, desired):
    return -np.abs(achieved - desired).sum(-1)


def test_a_step_that_only_the_host_can_do_is_refused_when_the_loader_is_opened(make, device):
    schema = conduit.Schema(
        [
            conduit.Field("obs.achieved_goal", "float32", (2,), observation=True),
            conduit.Field("obs.desired_goal", "float32", (2,), observation=True),
            conduit.Field("reward", "float32"),
        ]
    )
    engine = make(schema, max_length=8)
    steps = (conduit.hindsight(reward_of),)
    with pytest.raises(ConfigError, match="got one that runs on the host: use device='cpu'"):
        engine.loader("replay", batch_size=4, window=conduit.Episode(6), device=device, batch_transforms=steps)


def test_a_graph_of_draws_takes_none(make, device):
    engine = make(SMALL)
    Source(engine)(40)
    with (
        engine.loader(
            "replay", batch_size=4, device=device, pool="1 MiB", batch_transforms=(conduit.apply(same),)
        ) as loader,
        pytest.raises(ConfigError, match="without max_staleness and batch_transforms"),
    ):
        loader.draws()


def same(batch):
    return batch
