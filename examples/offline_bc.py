"""Behavior cloning from files: save an expert's episodes, load them into a frozen table, and learn from them in shuffled epochs.

Run it with `python examples/offline_bc.py`; it takes a few seconds. Other programs can read the same files (docs/offline.md). The
same call loads a Minari dataset, Parquet or D4RL's HDF5.
"""

import tempfile
from pathlib import Path

import gymnasium
import numpy as np
import torch

import conduit
from conduit import offline

EPISODES, EPOCHS, BATCH = 20, 5, 256


def expert(obs: np.ndarray) -> int:
    """The expert: push to the side to which the pole falls; it balances to the end."""
    return int(obs[2] + 0.3 * obs[3] + 0.05 * obs[0] + 0.1 * obs[1] > 0)


def record(folder: Path) -> offline.Saved:
    """Play the expert, with a fifth of its moves replaced by random ones, and save the actions that it chose."""
    env, rng = gymnasium.make("CartPole-v1"), np.random.default_rng(0)
    schema = conduit.Schema.from_spaces(env.observation_space, env.action_space)
    with conduit.Engine.create("offline-record", {"expert": conduit.Table.replay(schema, 20_000)}) as engine:
        with engine.writer("expert") as writer:
            for seed in range(EPISODES):
                obs, ended = env.reset(seed=seed)[0], False
                while not ended:
                    meant = expert(obs)
                    played = meant if rng.random() > 0.2 else int(rng.integers(2))
                    after, reward, terminated, truncated, _ = env.step(played)
                    ended = terminated or truncated
                    final = after if ended else None
                    flags = {"terminated": terminated, "truncated": truncated}
                    writer.append(obs=obs, action=meant, reward=reward, **flags, final=final)
                    obs = after
        return offline.save(engine, "expert", folder)


def clone(folder: Path) -> torch.nn.Module:
    """Train a network on the files, epoch by epoch."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2))
    optimizer = torch.optim.Adam(network.parameters(), 5e-3)
    with conduit.Engine.create("offline-clone", {"expert": offline.table_for(folder)}) as engine:
        loaded = offline.load(engine, "expert", folder, freeze=True)
        sampling = conduit.Shuffled(epochs=EPOCHS)
        loader = engine.loader("expert", batch_size=BATCH, sampling=sampling, fields=("obs", "action"), seed=0)
        for epoch in range(EPOCHS):
            losses, seen = [], 0
            for batch in loader:  # every step once
                loss = torch.nn.functional.cross_entropy(network(batch["obs"]), batch["action"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                seen += len(batch["action"])
            assert seen == loaded.rows
            print(f"epoch {epoch + 1}: loss {np.mean(losses):.3f}")
    return network


def score(network: torch.nn.Module) -> float:
    """Mean return of the clone over ten episodes."""
    env, total = gymnasium.make("CartPole-v1"), 0.0
    for seed in range(1000, 1010):
        obs, ended = env.reset(seed=seed)[0], False
        while not ended:
            with torch.no_grad():
                action = int(network(torch.as_tensor(obs)).argmax())
            obs, reward, terminated, truncated, _ = env.step(action)
            total, ended = total + float(reward), terminated or truncated
    return total / 10


def main() -> None:
    """Record, clone, play."""
    with tempfile.TemporaryDirectory() as folder:
        saved = record(Path(folder) / "expert")
        print(f"saved {saved.rows:,} steps of {saved.episodes} episodes")
        result = score(clone(Path(folder) / "expert"))
    print(f"the clone's mean return is {result:.0f} of 500")
    assert result > 300


if __name__ == "__main__":
    main()
