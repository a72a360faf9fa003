"""Token rows: responses of varying length from a small language model, stored without padding and delivered packed for learning.

Run it with `python examples/token_rows.py`; it takes a few seconds. The model is a table of logits, token by token, and stands for a
transformer: its input, packed tokens with `cu_seqlens` and `position_ids`, is the input of attention kernels for varying lengths.
It learns by policy gradient with advantages within the group of one prompt (GRPO); rows that are too many versions old are refused.
"""

import numpy as np
import torch

import conduit

VOCABULARY, END, WANTED = 12, 0, 7
LONGEST, GROUP = 40, 8

SCHEMA = conduit.Schema(
    [
        conduit.Field("tokens", "int32", (LONGEST + 1,), ragged=True),  # the prompt, one token here, and the response
        conduit.Field(
            "logprobs", "float32", (LONGEST + 1,), ragged=True
        ),  # of the policy that wrote it; 0 at the prompt
        conduit.Field("advantage", "float32"),
    ]
)


def respond(logits: np.ndarray, prompt: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A response by a table of logits: tokens with the prompt, and their log probabilities."""
    tokens, logprobs = [prompt], [0.0]
    while len(tokens) <= LONGEST and tokens[-1] != END:
        row = logits[tokens[-1]] - np.log(np.exp(logits[tokens[-1]]).sum())
        tokens.append(
            int(rng.choice(VOCABULARY, p=np.exp(row, dtype=np.float64) / np.exp(row, dtype=np.float64).sum()))
        )
        logprobs.append(float(row[tokens[-1]]))
    return np.array(tokens, np.int32), np.array(logprobs, np.float32)


def write_group(writer: conduit.Writer, logits: np.ndarray, rng: np.random.Generator) -> float:
    """A group of responses to one prompt, with their rewards, less the group's mean, as advantages; returns the mean."""
    prompt = int(rng.integers(1, VOCABULARY))
    responses = [respond(logits, prompt, rng) for _ in range(GROUP)]
    rewards = np.array([(tokens[1:] == WANTED).mean() for tokens, _ in responses])  # the share of the wanted token
    for (tokens, logprobs), advantage in zip(responses, rewards - rewards.mean(), strict=True):
        writer.append(tokens=tokens, logprobs=logprobs, advantage=np.float32(advantage), terminated=True)
    return float(rewards.mean())


def loss_of(model: torch.Tensor, batch: conduit.Batch) -> torch.Tensor:
    """The clipped policy gradient of packed tokens."""
    tokens, first = batch["tokens"].long(), batch["tokens_position_ids"] == 0
    lengths = torch.diff(batch["tokens_cu_seqlens"]).long()
    advantages = batch["advantage"].repeat_interleave(lengths)
    logprobs = model.log_softmax(-1)[tokens[:-1], tokens[1:]]
    ratio = (logprobs - batch["logprobs"][1:]).exp()
    gain = torch.minimum(ratio * advantages[1:], ratio.clamp(0.8, 1.2) * advantages[1:])
    return -gain[~first[1:]].mean()  # where a response begins, the token before it is another response's


def main() -> None:
    """Sample, learn, publish, in one process here; a sampler in another process would do the same through `conduit.attach`."""
    rng = np.random.default_rng(0)
    model = torch.zeros(VOCABULARY, VOCABULARY, requires_grad=True)
    optimizer = torch.optim.Adam([model], 0.1)
    table = conduit.Table.replay(SCHEMA, capacity=2_000, mean_lengths={"tokens": 12, "logprobs": 12})
    state = {"logits": model.detach()}
    with conduit.Engine.create("token-rows", {"responses": table}, policies={"policy": state}) as engine:
        slot = engine.policy("policy")
        slot.publish(state)
        writer = engine.writer("responses", policy=slot, keep_final=False)
        loader = engine.loader(
            "responses",
            batch_size=64,
            ragged="pack",
            fields=("tokens", "logprobs", "advantage"),
            max_staleness=2,
            policy=slot,
            min_rows=64,
            seed=0,
        )
        scores = []
        for _ in range(60):
            weights = slot.poll()
            scores.append(np.mean([write_group(writer, weights.arrays["logits"], rng) for _ in range(8)]))
            optimizer.zero_grad()
            loss_of(model, loader.next()).backward()
            optimizer.step()
            slot.publish({"logits": model.detach()})
        refused = sum(loader.stats.stale)
    print(
        f"share of the wanted token: {scores[0]:.2f} at first, {scores[-1]:.2f} at last; {refused} stale draws refused"
    )
    assert scores[-1] > 0.6


if __name__ == "__main__":
    main()
