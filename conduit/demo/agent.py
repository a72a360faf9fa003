"""The learner's network: a double DQN with a Huber loss, in torch.

Targets bootstrap after every row that is not terminated, also after a truncation by the time limit: the loader delivers the true final
observation as the next one.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np

from conduit import Batch
from conduit.demo.settings import Settings

Array = np.ndarray[Any, Any]


@contextmanager
def one_thread() -> Generator[None]:
    """Have torch compute on one thread meanwhile: this network gains nothing from more, and actors need the cores."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def module(inputs: int, hidden: int, outputs: int) -> Any:
    """The Q network, float32 [n, inputs] to [n, outputs]; its state dict is what `conduit.demo.network` reads."""
    from torch import nn

    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, outputs)
    )


class Agent:
    """Online and target network, and the optimizer.

    Args:
        inputs: Length of an observation.
        outputs: Number of actions.
        settings: Hyperparameters.
        seed: Of the first weights.
    """

    def __init__(self, inputs: int, outputs: int, settings: Settings, seed: int) -> None:
        import torch

        self._settings = settings
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._online = module(inputs, settings.hidden, outputs)
        self._target = module(inputs, settings.hidden, outputs)
        self._target.load_state_dict(self._online.state_dict())
        self._parameters = list(self._online.parameters())
        self._target_parameters = list(self._target.parameters())
        # A network this small spends its time in calls; one fused call for all parameters is a third of them.
        self._optimizer = torch.optim.Adam(self._parameters, lr=settings.learning_rate, fused=True)

    def update(self, batch: Batch) -> None:
        """One gradient step.

        Args:
            batch: torch tensors obs and next_obs float32 [B, inputs], action int64 [B], reward float32 [B],
                terminated bool [B].
        """
        import torch
        from torch.nn import functional, utils

        settings = self._settings
        with torch.no_grad():
            best = self._online(batch["next_obs"]).argmax(dim=1, keepdim=True)
            future = self._target(batch["next_obs"]).gather(1, best).squeeze(1)
            # Bootstrapped values can feed on themselves: some runs went off to a million and never came back. What is
            # above every possible return is wrong for certain, and without it the rest recovers.
            future = future.clamp(0.0, settings.highest_value)
            goal = batch["reward"] + settings.discount * future * ~batch["terminated"]
        value = self._online(batch["obs"]).gather(1, batch["action"].unsqueeze(1)).squeeze(1)
        loss = functional.smooth_l1_loss(value, goal)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        utils.clip_grad_norm_(self._parameters, settings.max_grad_norm)
        self._optimizer.step()
        with torch.no_grad():
            # torch exports no call that moves a list of tensors at once
            torch._foreach_lerp_(  # pyright: ignore[reportPrivateImportUsage]
                self._target_parameters, self._parameters, settings.target_rate
            )

    def state_dict(self) -> dict[str, Any]:
        """The online weights, torch tensors that later updates change in place: publish or copy them."""
        weights: dict[str, Any] = self._online.state_dict()
        return weights

    def arrays(self) -> dict[str, Array]:
        """The online weights as numpy views; later updates change them in place."""
        return {name: tensor.numpy() for name, tensor in self.state_dict().items()}
