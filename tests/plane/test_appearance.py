"""What things say of themselves: `repr`, completion, and the help of a generated `append`."""

import inspect
import os
import threading

import numpy as np
import pytest

import conduit
from conduit.errors import FieldError, UnknownName

NESTED = conduit.Schema(
    [
        conduit.Field("obs.camera", "uint8", (2, 3), observation=True),
        conduit.Field("obs.pose.0", "float32", (3,), observation=True),
        conduit.Field("obs.pose.1", "float32", (2,), observation=True),
        conduit.Field("action", "int64"),
        conduit.Field("reward", "float32", casting="same_kind"),
    ]
)
OBS = {"camera": np.zeros((2, 3), np.uint8), "pose": (np.zeros(3, np.float32), np.ones(2, np.float32))}
ROW = {"obs": OBS, "action": 3, "reward": 1.0}
POLICIES = {"policy": {"w": np.zeros(3, np.float32)}}


@pytest.fixture
def things(engine_name):
    """Everything that has a `repr`, by name, of an open engine; the engine comes first."""
    options = {"page_rows": 64, "statistics": ("reward",), "priorities": conduit.Priorities()}
    tables = {
        "replay": conduit.Table(NESTED, 400, limiter=conduit.MinSize(2), **options),
        "demos": conduit.Table(NESTED, 400, page_rows=64),
        "queue": conduit.Table.queue(NESTED, 400),
    }
    with conduit.Engine.create(engine_name, tables, policies=POLICIES) as engine:
        writers = {name: engine.writer(name) for name in tables}
        for _ in range(12):
            for writer in writers.values():
                writer.append(**ROW)
        slot = engine.policy()
        slot.publish(POLICIES["policy"])
        loader = engine.loader("replay", batch_size=4, sampling=conduit.Prioritized(), format="numpy", name="mine")
        uniform = engine.loader("demos", batch_size=4, format="numpy")
        consumer = engine.consumer("queue", format="numpy")
        scan = engine.table("replay").scan()
        found = {
            "Engine": engine,
            "Client": conduit.attach(engine_name),
            "TableHandle": engine.table("replay"),
            "Writer": writers["replay"],
            "Loader": loader,
            "Uniform": uniform.sampler,
            "PrioritizedSampler": loader.sampler,
            "MixedLoader": engine.mixed_loader({"replay": 1, "demos": 1}, batch_size=4, format="numpy"),
            "Consumer": consumer,
            "Claim": consumer.next(),
            "PolicySlot": slot,
            "Weights": slot.poll(),
            "RateLimiter": engine.table("replay").limiter,
            "Statistics": engine.table("replay").statistics,
            "Scan": scan,
            "Steps": next(iter(scan)),
            "Batch": loader.next(),
            "RolloutView": writers["replay"].rollout(2),
            "UncheckedView": writers["demos"].unchecked(),
            "StepView": writers["queue"].step().__enter__(),
            "StepBlock": writers["queue"].step(),
        }
        yield found
        found["Client"].close()


SAYS = {
    "Engine": "open: replay 12 of 512 rows, demos 12 of 512 rows, queue 12 of",
    "Client": "open: replay 12 of 512 rows",
    "TableHandle": "'replay' of engine {name}, replay, 0.3 MiB, open: 12 of 512 rows",
    "Writer": "'replay' of engine {name}, autoreset='disabled', stream 0, 12 ticks, open",
    "Loader": "'replay' of engine {name}, name='mine', batch_size=4, Transition(n_step=1",
    "Uniform": "batch 0, 0 candidate rows",
    "PrioritizedSampler": "beta=0.4, batch 1, 11 candidate rows",
    "MixedLoader": "engine {name}, batch_size=4, batch 0, open: replay 12 of 512 rows, demos 12 of 512 rows",
    "Consumer": "'queue' of engine {name}, 1 claims of 12 rows, open: 12 of",
    "Claim": "'queue' of engine {name}, stream 0, ticks 0 to 12, 1 environment, held: obs.camera, obs.pose.0, obs.pose.1, action",
    "PolicySlot": "'policy' of engine {name}, version 1, held 1, 1 arrays, open",
    "Weights": "version 1: w: (3,) float32",
    "RateLimiter": "min_size=2, min_diff=-inf, max_diff=inf, open: 12 inserted, 4 sampled, 12 there",
    "Statistics": "'replay' of engine {name}, open: reward",
    "Scan": "'replay' of engine {name}, 12 rows, 0 missing, open",
    "Steps": "12 steps, 0 final observations: obs.camera: (2, 3) uint8",
    "Batch": "obs.camera: (4, 2, 3) uint8",
    "RolloutView": "'replay' of engine {name}, open: obs.camera",
    "UncheckedView": "'demos' of engine {name}, open: obs.camera",
    "StepView": "'queue' of engine {name}, open: obs.camera",
    "StepBlock": "StepView('queue' of engine {name}, not begun",
}
ENDED = {
    **dict.fromkeys(("Writer", "Loader", "MixedLoader", "Consumer", "PolicySlot", "RateLimiter"), "closed"),
    **dict.fromkeys(("Engine", "TableHandle", "Statistics", "Scan", "UncheckedView"), "closed"),
    "Client": "engine closed",
    "Claim": "given back",
    "RolloutView": "over",
    "StepView": "over",
}


def test_a_thing_says_what_it_is_of_how_much_is_there_and_whether_it_is_open(things):
    assert things.keys() == SAYS.keys()
    for kind, thing in things.items():
        text = repr(thing)
        assert text.startswith(f"{kind}("), text
        assert SAYS[kind].format(name=repr(things["Engine"].name)) in text, text


def test_a_closed_thing_says_so_and_so_does_one_that_another_thread_asks(things):
    things["Engine"].close()
    found = {}

    def ask():
        found.update({kind: repr(thing) for kind, thing in things.items()})

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(30)
    assert found.keys() == things.keys()
    for kind, word in ENDED.items():
        assert word in found[kind], found[kind]
        assert " open" not in found[kind], found[kind]


def test_a_forked_child_may_look_at_everything_it_has_inherited(things):
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = "\n".join(map(repr, things.values()))
            os.write(send, text.encode())
        finally:
            os._exit(0)
    os.close(send)
    with os.fdopen(receive) as pipe:
        said = pipe.read().splitlines()
    os.waitpid(pid, 0)
    assert len(said) == len(things)
    for kind, line in zip(things, said, strict=True):
        assert line.startswith(f"{kind}("), line
    assert "forked" in said[list(things).index("Engine")]
    assert "forked" in said[list(things).index("Loader")]


@pytest.mark.parametrize(
    "kind",
    [
        conduit.Engine,
        conduit.typing.TableHandle,
        conduit.Writer,
        conduit.Loader,
        conduit.typing.MixedLoader,
        conduit.typing.Consumer,
        conduit.typing.Claim,
        conduit.typing.PolicySlot,
        conduit.typing.RateLimiter,
        conduit.typing.Scan,
        conduit.Batch,
    ],
)
def test_a_thing_that_is_half_made_can_be_looked_at(kind):
    assert repr(object.__new__(kind)) == f"{kind.__name__}(not open)"


def test_names_are_offered_for_completion(things):
    batch, claim, rollout, unchecked = (things[name] for name in ("Batch", "Claim", "RolloutView", "UncheckedView"))
    for thing in (batch, claim, rollout, unchecked):
        assert {"obs", "action", "reward", "terminated"} <= set(dir(thing))
        assert {"obs.camera", "obs.pose.0", "terminated"} <= set(thing._ipython_key_completions_())
        assert {"camera", "pose"} <= set(dir(thing.obs))
        assert thing.obs._ipython_key_completions_() == ["camera", "pose.0", "pose.1"]
    assert {"next_obs", "ids", "nest"} <= set(dir(batch))


def test_nested_fields_are_reached_by_attribute_by_name_and_part_by_part(things):
    for thing in (things["Batch"], things["Claim"], things["RolloutView"], things["UncheckedView"]):
        expected = thing["obs.pose.1"]
        ways = (
            thing.obs.pose[1],
            thing.obs.pose["1"],
            thing["obs"]["pose.1"],
            thing.obs["pose"][1],
            thing["obs.pose"]["1"],
        )
        for found in ways:
            assert np.shares_memory(np.asarray(found), np.asarray(expected))
        assert list(thing.obs) == ["camera", "pose"]
        assert len(thing.obs) == 2
        assert "camera" in thing.obs
        assert "depth" not in thing.obs
        assert repr(thing.obs) == "Nested(obs: camera, pose.0, pose.1)"
    assert things["Batch"].next_obs.camera.shape == (4, 2, 3)


def test_nested_values_are_assigned_in_a_step_by_attribute_and_whole(make):
    engine = make(NESTED)
    writer = engine.writer("replay")
    view = engine._views["replay"]
    with writer.step() as row:
        row.obs = OBS
        row.obs.camera = np.full((2, 3), 7, np.uint8)
        row.obs.pose[0] = [1.0, 2.0, 3.0]
        row.obs["pose"][1][:] = 4
        row.action, row.reward = 1, 0.5
    assert (view.columns["obs.camera"][0] == 7).all()
    assert view.columns["obs.pose.0"][0].tolist() == [1, 2, 3]
    assert view.columns["obs.pose.1"][0].tolist() == [4, 4]
    with pytest.raises(FieldError, match=r"Expected `uint8`.* - at `obs.camera`"), writer.step() as row:
        row.obs.camera = np.zeros((2, 3))
    with pytest.raises(FieldError, match=r"Expected a tuple of 2"), writer.step() as row:
        row.obs.pose = np.zeros(3, np.float32)
    assert view.rows_visible() == 1


def test_what_is_delivered_is_not_assigned_to(things):
    with pytest.raises(FieldError, match="there to be read"):
        things["Batch"].obs["camera"] = 0
    with pytest.raises(FieldError, match="there to be read"):
        things["Claim"].obs.camera = 0


@pytest.mark.parametrize("kind", ["Batch", "Claim", "RolloutView", "UncheckedView"])
def test_a_name_that_is_not_there_is_an_error_of_every_spelling_with_the_nearest_name(things, kind):
    thing = things[kind]
    assert not hasattr(thing, "pin_memory")
    for ask in (lambda: thing.obz, lambda: thing["obz"]):
        with pytest.raises(UnknownName, match="got 'obz': did you mean `obs`"):
            ask()
    for ask in (lambda: thing.obs.camra, lambda: thing["obs.camra"], lambda: thing["obs"]["camra"]):
        with pytest.raises(KeyError, match=r"got 'obs.camra': did you mean `obs.camera`"):
            ask()
        with pytest.raises(AttributeError):
            ask()


def test_a_mapping_answers_for_names_that_are_not_there(things):
    for thing in (things["Batch"], things["Claim"]):
        assert "obz" not in thing
        assert "obs" in thing
        assert "obs.camera" in thing
        assert thing.get("obz") is None


def test_the_help_of_append_has_this_schema_s_fields(make):
    schema = conduit.Schema(
        [
            conduit.Field("obs", "uint8", (84, 84), observation=True),
            conduit.Field("tokens", "int32", (16,), ragged=True),
            conduit.Field("gain", "float32", reward=True),
        ]
    )
    engine = make(schema)
    plain = inspect.getdoc(engine.writer("replay").append)
    vector = inspect.getdoc(engine.writer("replay", num_envs=2, autoreset="same_step").append)
    for line in ("obs: uint8 [84, 84], observation.", "tokens: int32 [length up to 16].", "gain: float32 [], reward."):
        assert line in plain
    for line in (
        "obs: uint8 [num_envs, 84, 84]",
        "a list of num_envs such arrays",
        "gain: float32 [num_envs], reward.",
    ):
        assert line in vector
    signature = inspect.signature(engine.writer("replay").append)
    assert str(signature) == "(*, obs, tokens, gain, terminated=False, truncated=False, final=None, priority=None)"


def test_append_has_a_signature_whatever_its_fields_are_called(make):
    names = ("obs", "class", "fields", "priority", "x.y")
    schema = conduit.Schema([conduit.Field(name, "float32") for name in names])
    append = make(schema).writer("replay").append
    assert str(inspect.signature(append)) == (
        "(*, obs, fields, priority, x, terminated=False, truncated=False, final=None, **_fields)"
    )
    append(**{"obs": 1.0, "class": 2.0, "fields": 3.0, "priority": 4.0, "x": {"y": 5.0}})
