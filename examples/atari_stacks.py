"""Actors of an Atari-like game write each 84x84 frame once; the loader makes stacks of four, equal to those of Gymnasium's wrapper.

Run it with `python examples/atari_stacks.py`; it takes a few seconds. The game is a small stand-in for ALE, which is a separate
package. With ALE, the actor's environment is `AtariPreprocessing(gym.make("ALE/Pong-v5", frameskip=1))`, and nothing else changes.

These paddings correspond, before an episode's fourth frame:
    padding="repeat", the default   gymnasium.wrappers.FrameStackObservation(env, 4), its padding_type="reset": the first frame again
    padding="zero"                  FrameStackObservation(env, 4, padding_type="zero"), and ale-py's own vector environment: black frames
So an agent acts and learns on the same stacks, while the table holds a frame once instead of eight times (4 in obs, 4 in next_obs).
"""

from collections.abc import Iterator

import gymnasium
import numpy as np
from gymnasium.wrappers import FrameStackObservation, TimeLimit

import conduit

STACK = 4
EPISODES = 20  # of each actor


class Catch(gymnasium.Env):
    """A ball falls from a random column, a paddle moves below it: a stand-in for an Atari game, 84x84 grey bytes."""

    observation_space = gymnasium.spaces.Box(0, 255, (84, 84), np.uint8)
    action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:  # noqa: ARG002 - Gymnasium's
        """Begin with a ball on top."""
        super().reset(seed=seed)
        self.ball = np.array([0, self.np_random.integers(0, 78)])
        self.paddle = 36
        return self.frame(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Move the paddle left, not or right; the ball falls six pixels."""
        self.paddle = int(np.clip(self.paddle + 6 * (int(action) - 1), 0, 72))
        self.ball[0] += 6
        landed = self.ball[0] >= 72
        caught = landed and abs(self.ball[1] - self.paddle) < 9
        return self.frame(), float(caught) - float(landed and not caught), bool(landed), False, {}

    def frame(self) -> np.ndarray:
        """What is seen now."""
        pixels = np.zeros((84, 84), np.uint8)
        pixels[self.ball[0] : self.ball[0] + 6, self.ball[1] : self.ball[1] + 6] = 255
        pixels[78:, self.paddle : self.paddle + 12] = 128
        return pixels


def make(seed: int) -> gymnasium.Env:
    """The environment of an episode; every other one is cut short by a time limit."""
    return TimeLimit(Catch(), 8 if seed % 2 else 100)


def play(env: gymnasium.Env, seed: int) -> Iterator[tuple]:
    """The steps of one episode, (obs, action, reward, terminated, truncated, next obs); the same ones for the same seed."""
    rng = np.random.default_rng(seed)
    obs, ended = env.reset(seed=seed)[0], False
    while not ended:
        action = int(rng.integers(3))
        after, reward, terminated, truncated, _ = env.step(action)
        yield obs, action, reward, terminated, truncated, after
        obs, ended = after, terminated or truncated


def act(actor: conduit.Actor, engine: str) -> None:
    """An actor: it writes single frames."""
    with conduit.attach(engine, timeout=10.0) as client, client.writer("replay") as writer:
        for seed in range(actor.index * 1000, actor.index * 1000 + EPISODES):
            for obs, action, reward, terminated, truncated, after in play(make(seed), seed):
                writer.append(
                    obs=obs,
                    action=action,
                    reward=reward,
                    seed=seed,
                    terminated=terminated,
                    truncated=truncated,
                    final=after if terminated or truncated else None,
                )


def main() -> None:
    """Two actors fill a table; batches with either padding are compared with the wrapper's stacks."""
    schema = conduit.Schema.from_example({"obs": np.zeros((84, 84), np.uint8), "action": 0, "reward": 0.0, "seed": 0})
    table = conduit.Table.replay(schema, capacity=4_000, max_stack=STACK)
    with conduit.Engine.create("atari-stacks", {"replay": table}) as engine:
        with conduit.launch(act, 2, args=("atari-stacks",)) as actors:
            actors.join(timeout=120.0)
        for padding, wrapper in (("repeat", "reset"), ("zero", "zero")):
            window = conduit.Transition(stack=STACK, padding=padding)
            with engine.loader("replay", batch_size=64, window=window, format="numpy", seed=0) as loader:
                starts, rows = compare(loader, wrapper)
            print(f"padding={padding}: {rows} samples, {starts} of them padded, are what padding_type={wrapper} shows")
    print(f"stored: {84 * 84} bytes a step instead of {2 * STACK * 84 * 84}")


def compare(loader: conduit.Loader, padding_type: str) -> tuple[int, int]:
    """Play the episodes of a few batches again through the wrapper; returns the numbers of padded samples and of samples."""
    shown, starts, rows = {}, 0, 0
    for _ in range(4):
        batch = loader.next()
        for row, (seed, step) in enumerate(zip(batch["seed"].tolist(), batch.steps.tolist(), strict=True)):
            if seed not in shown:
                env = FrameStackObservation(make(seed), STACK, padding_type=padding_type)
                shown[seed] = [(obs, after) for obs, *_, after in play(env, seed)]
            obs, after = shown[seed][step]
            assert np.array_equal(batch["obs"][row], obs)
            assert np.array_equal(batch["next_obs"][row], after)
            starts, rows = starts + (step < STACK - 1), rows + 1
    return starts, rows


if __name__ == "__main__":
    main()
