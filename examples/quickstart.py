"""Q-learning on a corridor: an actor process writes steps, this process learns from batches and sends the table back.

Run it with `python examples/quickstart.py`; it takes about a second once everything is imported.
"""

import numpy as np

import conduit

CELLS = 8  # a walk from the middle; it pays 1 at the right end, and stops there, at the left end, or after 40 steps
LIMIT = 40
VERSIONS = 40  # of the table

SCHEMA = conduit.Schema.from_example(
    {"obs": np.zeros(CELLS, np.float32), "action": 0, "reward": 0.0}
)  # `reward` is what returns sum up


def one_hot(cell: int) -> np.ndarray:
    """The observation of a cell, float32 [CELLS]."""
    return np.eye(CELLS, dtype=np.float32)[cell]


def act(actor: conduit.Actor, engine: str) -> None:
    """The actor: one environment; a random action in one step of three, else the best action by the newest Q-table."""
    rng = np.random.default_rng(actor.seed(0))
    with conduit.attach(engine, timeout=10.0) as client:
        policy = client.policy("policy")
        with client.writer("replay", policy=policy) as writer:  # rows carry the version that acted
            q = np.zeros((CELLS, 2), np.float32)
            cell, step = CELLS // 2, 0
            while not actor.stopping:
                if (weights := policy.poll()) is not None:  # None while nothing newer was published
                    q = weights.arrays["q"]
                action = int(rng.integers(2) if rng.random() < 1 / 3 else q[cell].argmax())
                after, step = cell + (1 if action else -1), step + 1
                terminated, truncated = after in (0, CELLS - 1), step == LIMIT
                writer.append(
                    obs=one_hot(cell),
                    action=action,
                    reward=float(after == CELLS - 1),
                    terminated=terminated,
                    truncated=truncated,
                    final=one_hot(after) if terminated or truncated else None,  # next_obs of an episode's last step
                )
                cell, step = (CELLS // 2, 0) if terminated or truncated else (after, step)


def main() -> None:
    """The learner: it owns the engine; leaving the block removes everything from memory."""
    q = np.zeros((CELLS, 2), np.float32)
    with conduit.Engine.create(
        "quickstart", tables={"replay": conduit.Table.replay(SCHEMA, capacity=10_000)}, policies={"policy": {"q": q}}
    ) as engine:
        policy = engine.policy("policy")
        # format="torch", the default, gives the same batches as tensors; the first one waits for rows.
        with (
            conduit.launch(act, 1, args=("quickstart",)) as actors,
            engine.loader("replay", batch_size=64, min_rows=500, seed=0, format="numpy") as loader,
        ):
            ended = None
            for update in range(1, 50 * VERSIONS + 1):
                batch = loader.next()
                actors.check()  # raises the actor's error if it keeps dying
                cell, action = batch["obs"].argmax(axis=1), batch["action"]
                future = q[batch["next_obs"].argmax(axis=1)].max(axis=1)
                goal = batch["reward"] + 0.9 * future * ~batch["terminated"]
                np.add.at(q, (cell, action), 0.1 * (goal - q[cell, action]))
                if update % 50 == 0:
                    policy.publish({"q": q})
                if update % 500 == 1:
                    ended = engine.table("replay").episodes(since=ended)  # each once, whichever actor played it
                    print(
                        f"update {update:5,}: {ended.total:6,} episodes, the new ones' mean return {ended.mean_return:.2f}"
                    )
    moves = "".join("<>"[best] for best in q[1:-1].argmax(axis=1))
    print(
        f"policy {moves}, value of the start {q[CELLS // 2].max():.2f}, newest rows of version {batch.versions.max()}"
    )


if __name__ == "__main__":
    main()
