"""What type checkers make of the public API; read by mypy and pyright in test_typing.py, and never run.

`# is T`: the type that both reveal. `# error: code`: an error that both must report on that line; the code is mypy's.
"""

from collections.abc import Sequence
from typing import reveal_type

import numpy as np

import conduit
from conduit.contracts.placement import Placement, Pool, Request

schema = conduit.Schema([conduit.Field("obs", "float32", (4,), observation=True), conduit.Field("action", "int64")])
reveal_type(schema)  # is conduit.schema.Schema
reveal_type(schema["obs"].shape)  # is tuple[int, ...]
reveal_type(schema.difference(schema))  # is str | None
reveal_type(conduit.Schema.from_example({"obs": 1.0}))  # is conduit.schema.Schema

table = conduit.Table(schema, "2 GiB", num_envs=8)
conduit.Table(schema, capacity=1.5)  # error: arg-type
conduit.Table(schema, 100, kind="stack")  # error: arg-type
reveal_type(conduit.Table.replay(schema, 100, max_n_step=3))  # is conduit.store.format.table_spec.Table
reveal_type(conduit.Table.queue(schema, "1 GiB", rollout_length=16))  # is conduit.store.format.table_spec.Table
conduit.Table.queue(schema, 100, max_n_step=3)  # error: call-arg
conduit.Table.replay(schema, 100, rollout_length=16)  # error: call-arg
conduit.Table.replay(schema, 100, max_n_step="3")  # error: arg-type

with conduit.Engine.create("name", tables={"replay": table}, policies={"policy": {"w": np.zeros(3)}}) as engine:
    reveal_type(engine)  # is conduit.plane.engine.Engine
    reveal_type(engine.tables)  # is tuple[str, ...]
conduit.Engine.create("name", tables={"replay": schema})  # error: dict-item
conduit.Engine.create("name", tables={"replay": table}, backing="file")  # error: arg-type
reveal_type(conduit.Engine.adopt("name"))  # is conduit.plane.engine.Engine

with conduit.attach("name", timeout=3) as client:
    reveal_type(client)  # is conduit.plane.client.Client

writer = client.writer("replay", num_envs=8, autoreset="same_step", timeout=None)
reveal_type(writer)  # is conduit.plane.ingest.writer.Writer
writer.append(obs=np.zeros((8, 4)), action=[0] * 8, terminated=np.zeros(8, bool), final=None)
client.writer("replay", autoreset="SAME_STEP")  # error: arg-type
client.writer("replay", 8)  # error: call-arg
client.writer("replay", on_full="drop")  # error: arg-type
reveal_type(writer.version)  # is int
writer.version = "3"  # error: assignment

with writer.step() as row:
    reveal_type(row)  # is conduit.plane.ingest.step.StepView
    row.obs[:] = 0
    row["action"][:] = 1
    row.set_final(0, np.zeros(4))
with writer.rollout(16, max_finals=4) as rollout:
    reveal_type(rollout)  # is conduit.plane.ingest.rollout.RolloutView
    reveal_type(rollout.ticks)  # is int
with writer.unchecked() as unchecked:
    reveal_type(unchecked.row)  # is int
    reveal_type(unchecked.commit())  # is int

loader = client.loader("replay", batch_size=256, transform={"obs": conduit.scale(1 / 255)}, format="numpy")
reveal_type(loader)  # is conduit.plane.deliver.loader.Loader
client.loader("replay", 256)  # error: call-overload
client.loader("replay", batch_size=256, format="jax")  # error: call-overload
client.loader("replay", batch_size=256, transform={"obs": 1 / 255})  # error: dict-item
for batch in loader:
    reveal_type(batch)  # is conduit.plane.deliver.batch.Batch
    reveal_type(batch["obs"])  # is Any
    reveal_type(batch.nest())  # is dict[str, Any]
    for name in batch:
        reveal_type(name)  # is str
reveal_type(loader.stats.waited_s)  # is float
reveal_type(loader.plan.fingerprint)  # is str

prioritized = client.loader("replay", batch_size=256, sampling=conduit.Prioritized(beta=0.4))
for step in range(100):
    prioritized.beta = min(1.0, 0.4 + 0.6 * step / 100)
reveal_type(prioritized.beta)  # is float
sampler = prioritized.sampler
reveal_type(sampler)  # is conduit.sampling.uniform.Uniform | conduit.sampling.prioritized.PrioritizedSampler
reveal_type(sampler.batch)  # is int
sampler.beta = 0.5
prioritized.beta = "1"  # error: assignment
epochs = client.loader("replay", batch_size=256, sampling=conduit.Shuffled(epochs=3))
reveal_type(epochs)  # is conduit.plane.deliver.epochs.EpochLoader
reveal_type(len(epochs))  # is int
reveal_type(epochs.epoch)  # is int
reveal_type(epochs.sampler)  # is conduit.sampling.shuffled.ShuffledSampler
reveal_type(prioritized)  # is conduit.plane.deliver.loader.Loader
len(prioritized)  # error: arg-type
client.loader("replay", batch_size=256, sampling="shuffled")  # error: call-overload
mixed = client.mixed_loader({"replay": 0.75, "demos": 0.25}, batch_size=64)
reveal_type(mixed.beta)  # is dict[str, float]
mixed.beta = 0.5
mixed.beta = {"replay": 0.5}
mixed.beta = "1"  # error: assignment

table_now = client.table("replay")
reveal_type(table_now)  # is conduit.plane.table.TableHandle
reveal_type(table_now.rows)  # is int
reveal_type(table_now.sampleable(conduit.Transition(n_step=3)))  # is int
table_now.sampleable("transitions")  # error: arg-type

consumer = client.consumer("rollouts", partial="drop")
reveal_type(consumer)  # is conduit.plane.deliver.consumer.Consumer
client.consumer("rollouts", partial="keep")  # error: arg-type
reveal_type(consumer.poll())  # is conduit.plane.deliver.claim.Claim | None
for claim in consumer:
    reveal_type(claim)  # is conduit.plane.deliver.claim.Claim
    reveal_type(claim["obs"])  # is Any
    reveal_type(claim.bootstrap)  # is dict[str, Any] | None
    reveal_type(claim.ticks)  # is int
    claim.ack()
reveal_type(consumer.stats.acknowledged)  # is int

slot = client.policy()
reveal_type(slot)  # is conduit.store.tables.policy_weights.PolicySlot
reveal_type(slot.publish({"w": np.zeros(3)}))  # is int
weights = slot.poll()
reveal_type(weights)  # is conduit.store.tables.policy_weights.Weights | None
_ = weights.arrays  # error: union-attr
if weights is not None:
    reveal_type(weights.version)  # is int


class Bursts(conduit.Ingestion):
    def publish_every(self, table: str, num_envs: int) -> int:
        return 4


class First(Placement):
    def choose(self, request: Request, pools: Sequence[Pool]) -> Pool:
        return pools[0]


class Wrong(conduit.Ingestion):
    def publish_every(self, table: str) -> int:  # error: override
        return 4


client.writer("replay", ingestion=Bursts(), placement=First())
conduit.Ingestion()  # error: abstract

try:
    loader.next(timeout=0.0)
except conduit.errors.DataTimeout as error:
    reveal_type(error.at)  # is str | None
