"""Hindsight: flip bits until they equal a goal. The reward is so sparse that Q-learning needs goals replaced by what was achieved.

Run it with `python examples/hindsight.py`; it takes a few seconds. It learns twice from the same kind of experience, with
`conduit.hindsight` in the loader and without.
"""

import gymnasium
import numpy as np

import conduit

BITS = 6
STEPS = 8  # of an episode; it ends earlier when the goal is reached
POWERS = 2 ** np.arange(BITS)


class BitFlip(gymnasium.Env):
    """An action flips one bit; it pays 1 when the bits are the goal, else nothing."""

    observation_space = gymnasium.spaces.Dict(
        {
            name: gymnasium.spaces.Box(0, 1, (BITS,), np.float32)
            for name in ("observation", "achieved_goal", "desired_goal")
        }
    )
    action_space = gymnasium.spaces.Discrete(BITS)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:  # noqa: ARG002 - Gymnasium's
        """Begin with random bits and a random goal."""
        super().reset(seed=seed)
        self.bits, self.goal = self.np_random.integers(0, 2, (2, BITS)).astype(np.float32)
        self.steps = 0
        return self.seen(), {}

    def step(self, action: int) -> tuple[dict, float, bool, bool, dict]:
        """Flip a bit."""
        self.bits[action] = 1 - self.bits[action]
        self.steps += 1
        there = np.array_equal(self.bits, self.goal)
        return self.seen(), float(there), there, self.steps == STEPS, {}

    def seen(self) -> dict[str, np.ndarray]:
        """The observation."""
        return {"observation": self.bits.copy(), "achieved_goal": self.bits.copy(), "desired_goal": self.goal.copy()}


def reached(achieved: np.ndarray, goals: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The reward and the end that a step would have had with another goal; `conduit.hindsight` calls this."""
    there = (achieved == goals).all(axis=-1)
    return there.astype(np.float32), there


def learn(name: str, ratio: float, episodes: int = 800) -> float:
    """Tabular Q-learning over (bits, goal), with a share of the goals relabeled; returns the greedy success rate."""
    rng, env = np.random.default_rng(0), BitFlip()
    env.reset(seed=0)
    q = np.zeros((2**BITS, 2**BITS, BITS), np.float32)
    schema = conduit.Schema.from_spaces(env.observation_space, env.action_space)
    # windows are one step longer than an episode: what its last step achieved stands in the observation behind it
    table = conduit.Table.replay(schema, capacity=20_000, max_length=STEPS + 1)
    with conduit.Engine.create(name, {"replay": table}) as engine, engine.writer("replay") as writer:
        loader = engine.loader(
            "replay",
            batch_size=256,
            min_rows=STEPS,
            batch_transforms=(conduit.hindsight(reached, ratio=ratio, max_length=STEPS),),
            format="numpy",
            seed=0,
        )
        for episode in range(episodes):
            play(env, q, rng, 0.3, writer)
            if episode >= 20:
                for _ in range(4):
                    improve(q, loader.next())
    return float(np.mean([play(env, q, rng, 0.0) for _ in range(200)]))


def play(
    env: BitFlip, q: np.ndarray, rng: np.random.Generator, exploring: float, writer: conduit.Writer | None = None
) -> bool:
    """One episode, written down if there is a writer; returns whether the goal was reached."""
    obs, ended = env.reset()[0], False
    while not ended:
        bits, goal = (int(obs[part] @ POWERS) for part in ("observation", "desired_goal"))
        greedy = rng.choice(np.flatnonzero(q[bits, goal] == q[bits, goal].max()))
        action = int(rng.integers(BITS) if rng.random() < exploring else greedy)
        after, reward, terminated, truncated, _ = env.step(action)
        ended = terminated or truncated
        if writer is not None:
            writer.append(
                obs=obs,
                action=action,
                reward=reward,
                terminated=terminated,
                truncated=truncated,
                final=after if ended else None,
            )
        obs = after
    return terminated


def improve(q: np.ndarray, batch: conduit.Batch) -> None:
    """One update; the loader has already relabeled the batch's goals, rewards and ends."""
    bits, goal = (batch[f"obs.{part}"] @ POWERS for part in ("observation", "desired_goal"))
    after, wanted = (batch[f"next_obs.{part}"] @ POWERS for part in ("observation", "desired_goal"))
    bits, goal, after, wanted = (one.astype(int) for one in (bits, goal, after, wanted))
    target = batch["reward"] + 0.95 * q[after, wanted].max(axis=1) * ~batch["terminated"]
    q[bits, goal, batch["action"]] += 0.5 * (target - q[bits, goal, batch["action"]])


def main() -> None:
    """With and without."""
    with_it, without = learn("hindsight-with", 0.8), learn("hindsight-without", 0.0)
    print(f"goals reached: {with_it:.0%} with hindsight, {without:.0%} without")
    assert with_it > without + 0.2


if __name__ == "__main__":
    main()
