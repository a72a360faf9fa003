"""Dict observations: a robot with a camera and joints. The environment's observations are written as they are, and batches are nested.

Run it with `python examples/dict_observations.py`; it takes a second or two.
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import conduit

NUM_ENVS = 4


class Robot(gymnasium.Env):
    """A drawn stand-in for a simulator: the camera shows the joint angle, and an episode has 20 steps."""

    observation_space = Dict(
        {
            "camera": Box(0, 255, (16, 16, 3), np.uint8),
            "joints": Dict({"position": Box(-1, 1, (6,), np.float32), "velocity": Box(-1, 1, (6,), np.float32)}),
            "mode": Discrete(3),
        }
    )
    action_space = Box(-1, 1, (6,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:  # noqa: ARG002 - Gymnasium's
        """Begin at rest."""
        super().reset(seed=seed)
        self.position, self.velocity, self.steps = np.zeros(6, np.float32), np.zeros(6, np.float32), 0
        return self.seen(), {}

    def step(self, action: np.ndarray) -> tuple[dict, float, bool, bool, dict]:
        """Push the joints."""
        self.velocity = np.clip(0.9 * self.velocity + 0.1 * action, -1, 1).astype(np.float32)
        self.position = np.clip(self.position + 0.1 * self.velocity, -1, 1).astype(np.float32)
        self.steps += 1
        return self.seen(), float(-abs(self.position).sum()), False, self.steps == 20, {}

    def seen(self) -> dict[str, Any]:
        """The observation."""
        camera = np.full((16, 16, 3), int(127.5 * (self.position[0] + 1)), np.uint8)
        joints = {"position": self.position.copy(), "velocity": self.velocity.copy()}
        return {"camera": camera, "joints": joints, "mode": self.steps % 3}


def main() -> None:
    """Write 100 steps of four environments, and look at a batch."""
    envs = SyncVectorEnv([Robot] * NUM_ENVS, autoreset_mode=AutoresetMode.SAME_STEP)
    schema = conduit.Schema.from_spaces(envs.single_observation_space, envs.single_action_space)
    print(schema)  # obs.camera, obs.joints.position, ...: one column each
    table = conduit.Table.replay(schema, capacity=2_000, num_envs=NUM_ENVS)
    with conduit.Engine.create("dict-observations", {"replay": table}) as engine:
        writer = engine.writer("replay", num_envs=NUM_ENVS, autoreset=envs.metadata["autoreset_mode"])
        obs, _ = envs.reset(seed=0)
        envs.action_space.seed(0)
        for _ in range(100):
            action = envs.action_space.sample()
            after, reward, terminated, truncated, infos = envs.step(action)
            final = infos.get("final_obs")  # the true last observations, of the environments that ended in this step
            writer.append(
                obs=obs, action=action, reward=reward, terminated=terminated, truncated=truncated, final=stacked(final)
            )
            obs = after
        loader = engine.loader(
            "replay",
            batch_size=256,
            # a transform is given for a field by its dotted name, and holds for the next observation, too
            transform={"obs.camera": conduit.scale(1 / 255), "obs.mode": conduit.one_hot(3)},
            seed=0,
        )
        batch = loader.next()
    observation, following = batch.nest()["obs"], batch.nest()["next_obs"]
    assert observation["camera"].shape == (256, 16, 16, 3)
    assert observation["camera"].max() <= 1
    assert observation["mode"].shape == (256, 3)
    # the dynamics hold between every row and its next one, also where an episode was cut and the environment reset
    moved = observation["joints"]["position"] + 0.1 * following["joints"]["velocity"]
    assert (moved - following["joints"]["position"]).abs().max() < 1e-6
    print(f"{int(batch['truncated'].sum())} of 256 samples end an episode; each has its true next observation")


def stacked(finals: np.ndarray | None) -> dict[str, Any] | None:
    """Gymnasium's array of last observations, None where an environment goes on, as one observation with a leading axis."""
    if finals is None:
        return None
    blank = next(one for one in finals if one is not None)

    def put(*parts: Any) -> Any:
        if isinstance(parts[0], dict):
            return {name: put(*(part[name] for part in parts)) for name in parts[0]}
        return np.stack(parts)

    return put(*(blank if one is None else one for one in finals))


if __name__ == "__main__":
    main()
