"""Several agents: a row holds one step of all agents, so a learner sees the team; both agents learn from the team's reward.

Run it with `python examples/several_agents.py`; it takes a second or two. The game has PettingZoo's parallel form: it takes and returns
dicts by agent. For agents that come and go at different times, or that are independent of each other, use `num_envs` (each agent is then
an environment) or a table for each agent.
"""

import numpy as np

import conduit

AGENTS = ("scout", "porter")
CELLS = 4


class Meeting:
    """A hidden place for each agent; the scout sees the porter's, the porter the scout's. Both get the team's reward."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def reset(self) -> dict[str, np.int64]:
        """New places."""
        self.places = dict(zip(AGENTS, self.rng.integers(0, CELLS, 2).tolist(), strict=True))
        return {"scout": np.int64(self.places["porter"]), "porter": np.int64(self.places["scout"])}

    def step(self, actions: dict[str, int]) -> tuple[dict[str, np.int64], dict[str, float]]:
        """Each agent says where the other's place is, and both get the number of right answers as their reward."""
        right = float(actions["scout"] == self.places["porter"]) + float(actions["porter"] == self.places["scout"])
        return self.reset(), dict.fromkeys(AGENTS, right)


def main() -> None:
    """Value decomposition: the team's value is the sum of the agents' values, learned from joint rows."""
    game, rng = Meeting(0), np.random.default_rng(0)
    one = {"obs": dict.fromkeys(AGENTS, 0), "action": dict.fromkeys(AGENTS, 0), "reward": dict.fromkeys(AGENTS, 0.0)}
    schema = conduit.Schema.from_example(one)  # obs.scout, obs.porter, action.scout, ..., reward.porter
    assert schema.reward_names == ("reward.scout", "reward.porter")
    values = {agent: np.zeros((CELLS, CELLS), np.float32) for agent in AGENTS}
    with conduit.Engine.create("several-agents", {"replay": conduit.Table.replay(schema, capacity=5_000)}) as engine:
        writer = engine.writer("replay")
        loader = engine.loader("replay", batch_size=64, min_rows=64, format="numpy", seed=0)
        obs, scores = game.reset(), []
        for step in range(3_000):
            actions = {
                agent: int(rng.integers(CELLS) if rng.random() < 0.2 else values[agent][obs[agent]].argmax())
                for agent in AGENTS
            }
            after, rewards = game.step(actions)
            writer.append(obs=obs, action=actions, reward=rewards, terminated=True, final=after)  # games of one step
            scores.append(rewards["scout"])
            obs = after
            if step >= 64:
                batch = loader.next()
                rows = {agent: (batch[f"obs.{agent}"], batch[f"action.{agent}"]) for agent in AGENTS}
                error = batch["reward.scout"] - sum(values[agent][rows[agent]] for agent in AGENTS)
                for agent in AGENTS:
                    np.add.at(values[agent], rows[agent], 0.02 * error)
    first, last = np.mean(scores[:200]), np.mean(scores[-200:])
    print(
        f"team's reward, of 2: {first:.2f} in the first 200 games, {last:.2f} in the last (a fifth of the moves explores)"
    )
    assert all(values[agent].argmax(axis=1).tolist() == list(range(CELLS)) for agent in AGENTS)


if __name__ == "__main__":
    main()
