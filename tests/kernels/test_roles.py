"""Observations and rewards are roles of fields: windows make of them what they are, and refuse where none is declared."""

import numpy as np
import pytest

import conduit
from conduit.errors import ConfigError, FieldError, SchemaError
from conduit.kernels.spec.make_plan import make_plan

Field = conduit.Field
GAMMA = 0.9
SPECS = (
    Field("obs", "int64", observation=True),
    Field("gain.task", "float32", reward=True),
    Field("gain.parts", "float64", (3,), reward=True),
    Field("gain.grid", "float32", (2, 20), reward=True),
    Field("plain", "float32"),
)
SCHEMA = conduit.Schema(SPECS)
ROWS = 300


def rewards_of(serial):
    rng = np.random.default_rng(serial)
    return {
        "gain.task": np.float32(rng.normal()),
        "gain.parts": rng.normal(size=3),
        "gain.grid": rng.normal(size=(2, 20)).astype(np.float32),
    }


@pytest.fixture
def engine(engine_name):
    """Episodes of 1 to 9 steps, ended either way, or cut."""
    rng = np.random.default_rng(5)
    table = conduit.Table(SCHEMA, 600, page_rows=64, max_n_step=4, max_stack=3)
    with conduit.Engine.create(engine_name, {"t": table}) as engine:
        engine.ends = {}
        with engine.writer("t") as writer:
            for serial in range(ROWS):
                kind = rng.choice(["", "", "", "", "terminated", "truncated", "cut"])
                ends = {kind: True, "final": 10_000 + serial} if kind in ("terminated", "truncated") else {}
                writer.append(**{"obs": serial, "plain": serial / 2, **rewards_of(serial), **ends})
                engine.ends[serial] = kind
                if kind == "cut":
                    writer.cut()
        yield engine


def sums(serial, used):
    total = dict.fromkeys(rewards_of(0), 0.0)
    for k in range(used):
        for name, value in rewards_of(serial + k).items():
            total[name] = total[name] + GAMMA**k * np.asarray(value, np.float64)
    return total


@pytest.mark.parametrize("newest", ["wait", "bootstrap"])
@pytest.mark.parametrize("stack", [1, 3])
def test_every_reward_is_summed_up_by_itself_in_any_shape(engine, newest, stack):
    window = conduit.Transition(n_step=4, gamma=GAMMA, newest=newest, stack=stack)
    seen = set()
    with engine.loader("t", batch_size=400, window=window, format="numpy", min_rows=1) as loader:
        batch = loader.next()
    assert batch.reward_names == ("gain.task", "gain.parts", "gain.grid")
    assert batch["gain.parts"].dtype == np.float64
    for slot in range(400):
        serial = int(np.ravel(batch["obs"][slot])[-1])
        used = int(batch["n_steps"][slot])
        ends = [engine.ends[serial + k] for k in range(used)]
        assert not any(ends[:-1])
        want = sums(serial, used)
        for name, value in want.items():
            np.testing.assert_allclose(batch[name][slot], value, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(batch["discount"][slot], GAMMA**used, rtol=1e-6)
        assert batch["plain"][slot] == serial / 2
        seen.add(used)
    assert seen == {1, 2, 3, 4}


def test_a_reward_of_several_is_the_same_bit_for_bit_as_alone(engine):
    transform = {"gain.task": (conduit.scale(0.3), conduit.clip(-0.2, 0.2)), "gain.parts": conduit.cast("float32")}
    options = {"batch_size": 300, "window": conduit.Transition(n_step=3, gamma=GAMMA), "format": "numpy", "seed": 4}
    with (
        engine.loader("t", transform=transform, **options) as together,
        engine.loader("t", transform=transform, fields=("obs", "gain.task"), **options) as alone,
        engine.loader("t", fields=("obs", "gain.parts"), **options) as whole,
    ):
        for _ in range(5):
            batch, lone, vectors = together.next(), alone.next(), whole.next()
            assert np.array_equal(batch["obs"], lone["obs"])
            assert np.array_equal(batch["gain.task"], lone["gain.task"])
            assert np.abs(batch["gain.task"]).max() <= 0.2 * (1 + GAMMA + GAMMA**2)
            assert batch["gain.parts"].dtype == np.float32
            assert np.array_equal(batch["gain.parts"], vectors["gain.parts"].astype(np.float32))


@pytest.mark.parametrize("name", ["rewards", "rew", "cost", "gain.a"])
def test_a_reward_of_any_name_is_summed_up_where_it_is_declared_and_refused_where_it_is_not(engine_name, name):
    fields = [Field("obs", "float32", (2,), observation=True), Field("action", "float32", (2,))]
    window = conduit.Transition(n_step=3, gamma=1.0)
    for declared in (False, True):
        schema = conduit.Schema([*fields, Field(name, "float32", reward=declared)])
        with conduit.Engine.create(
            f"{engine_name}-{declared}", {"t": conduit.Table(schema, 100, max_n_step=3)}
        ) as engine:
            with engine.writer("t") as writer:
                for _ in range(50):
                    writer.append(**{"obs": np.zeros(2, np.float32), "action": np.zeros(2, np.float32), name: 1.0})
            options = {"batch_size": 4, "window": window, "format": "numpy"}
            if declared:
                with engine.loader("t", **options) as loader:
                    batch = loader.next()  # the newest ones have fewer steps once their stream has ended
                    assert batch[name].tolist() == batch["n_steps"].tolist()
                    assert batch["n_steps"].max() == 3
                continue
            message = rf"Expected a reward to sum up over n_step=3 steps, got none.*{name}.*reward=.*fields="
            with pytest.raises(ConfigError, match=message):
                engine.loader("t", **options)
            with pytest.raises(ConfigError, match=message):
                engine.loader("t", fields=("obs", "next_obs", name), **options)
            with engine.loader("t", fields=("obs", "action", "next_obs", "discount"), **options) as loader:
                assert loader.next()["discount"].tolist() == [1.0] * 4
            with engine.loader("t", batch_size=4, format="numpy") as loader:
                assert loader.next()[name].tolist() == [1.0] * 4


def test_a_reward_below_the_name_reward_needs_no_declaration():
    nested = conduit.Schema.from_example({"obs": np.zeros(2), "reward": {"a": 0.0, "b": 0.0}, "action": 0})
    assert nested.reward_names == ("reward.a", "reward.b")
    assert conduit.Schema.from_example({"obs": 0.0, "reward": 0.0}).reward_names == ("reward",)
    assert conduit.Schema.from_example({"obs": 0.0, "rewards": 0.0}).reward_names == ()
    chosen = conduit.Schema.from_example({"obs": 0.0, "reward": 0.0, "task": {"x": 0.0}}, reward="task")
    assert chosen.reward_names == ("task.x",)
    assert chosen["task.x"].reward
    assert not chosen["reward"].reward
    assert conduit.Schema([Field("reward", "float32", observation=True)]).reward_names == ()
    with pytest.raises(SchemaError, match=r"Expected names of rewards, got 'rew'.*did you mean `reward`"):
        conduit.Schema.from_example({"obs": 0.0, "reward": 0.0}, reward="rew")


def test_a_declared_reward_is_in_the_document_and_the_fingerprint_and_a_guessed_one_is_not():
    plain = conduit.Schema([Field("obs", "float32", observation=True), Field("reward", "float32")])
    declared = conduit.Schema([Field("obs", "float32", observation=True), Field("reward", "float32", reward=True)])
    assert b'"reward":true' not in plain.to_json()
    assert b'"reward":true' in declared.to_json()
    assert plain.fingerprint != declared.fingerprint
    assert plain.fingerprint == "63e5a0fac77cf4b9"  # as it was before there were roles of rewards
    assert conduit.Schema.from_json(declared.to_json()) == declared
    assert "reward (by its name)" in str(plain)
    assert "float32 (), reward" in str(declared)
    assert "reward_names=('reward',)" in repr(plain)
    assert "an observation or a reward, got both" in _error(lambda: Field("x", "int8", observation=True, reward=True))


def _error(make):
    with pytest.raises(SchemaError) as info:
        make()
    return str(info.value)


STATE = conduit.Schema(
    [Field("state", "float32", (2,)), Field("reward", "float32"), Field("tokens", "int32", (4,), ragged=True)]
)


@pytest.mark.parametrize(
    ("window", "fields", "needs"),
    [
        (None, None, "a Transition, which comes with what follows it"),
        (conduit.Transition(n_step=3), None, "a Transition"),
        (conduit.Transition(stack=2), None, "stack=2"),
        (conduit.Transition(stack=2), ("state",), "stack=2"),
        (conduit.Transition(newest="bootstrap"), ("state",), "newest='bootstrap'"),
        (conduit.Sequence(3, next_obs=True), None, "next_obs=True"),
        (conduit.Rollout(3, 1, next_obs=True), ("state",), "next_obs=True"),
        (conduit.Episode(3, next_obs=True), None, "next_obs=True"),
    ],
    ids=str,
)
def test_a_window_that_needs_an_observation_is_refused_where_none_is_declared(window, fields, needs):
    with pytest.raises(ConfigError, match=rf"Expected an observation for {needs}.*'state'.*observation="):
        make_plan(STATE, 4, window, fields=fields)


def test_without_an_observation_outputs_that_are_named_are_delivered():
    assert make_plan(STATE, 4, fields=("state", "reward", "terminated")).names == ("state", "reward", "terminated")
    assert make_plan(STATE, 4, conduit.Sequence(3), fields=("state", "mask")).names == ("state", "mask")
    assert "state" in make_plan(STATE, 4, conduit.Transition(n_step=2), fields=("state", "reward")).names


def test_the_next_one_of_what_is_no_observation_is_refused_with_the_role():
    schema = conduit.Schema([Field("obs", "int8", observation=True), Field("state", "int8")])
    with pytest.raises(ConfigError, match="declare 'state' with observation=True"):
        make_plan(schema, 4, fields=("obs", "next_state"))
    with pytest.raises(ConfigError, match="open it with next_obs=True"):
        make_plan(schema, 4, conduit.Sequence(2), fields=("obs", "next_obs"))


@pytest.mark.parametrize("dtype", ["int32", "float16", "bfloat16", "bool"])
def test_a_reward_that_is_no_float_of_32_or_64_bits_is_not_summed_up(dtype):
    schema = conduit.Schema([Field("obs", "int8", observation=True), Field("reward", dtype)])
    with pytest.raises(ConfigError, match=r"`float32` or `float64` as reward.*casting='same_kind' - at `reward`"):
        make_plan(schema, 4, conduit.Transition(n_step=2))
    assert make_plan(schema, 4, conduit.Transition(n_step=2), fields=("obs", "discount")).returns == ()


def test_a_ragged_reward_is_not_summed_up():
    schema = conduit.Schema([Field("obs", "int8", observation=True), Field("reward", "float32", (4,), ragged=True)])
    with pytest.raises(ConfigError, match=r"ragged: leave it out by fields=\(...\) - at `reward`"):
        make_plan(schema, 4, conduit.Transition(n_step=2))


STEPS = (conduit.gae(values="value"), conduit.vtrace(values="value"), conduit.returns_to_go())


@pytest.mark.parametrize("step", STEPS, ids=lambda step: type(step).__name__)
def test_steps_on_whole_batches_take_the_reward_by_its_role(engine_name, step):
    """A field that is only called `reward` is not taken where another one is declared."""
    schema = conduit.Schema(
        [
            Field("obs", "float32", observation=True),
            Field("value", "float32"),
            Field("reward", "float32"),
            Field("task", "float32", reward=True),
        ]
    )
    tables = {
        "t": conduit.Table(schema, 100, max_length=4),
        "q": conduit.Table.queue(schema, 100, rollout_length=4),
    }
    with conduit.Engine.create(engine_name, tables) as engine:
        for table in tables:
            with engine.writer(table) as writer:
                for t in range(8):
                    writer.append(obs=0.0, value=0.0, reward=100.0, task=float(t))
        options = {"batch_size": 1, "window": conduit.Rollout(4, 1), "format": "numpy"}
        with engine.loader("t", **options) as loader:
            plain = loader.next()
        told = conduit.returns_to_go(reward="task") if isinstance(step, type(conduit.returns_to_go())) else None
        with engine.loader("t", batch_transforms=(step,), **options) as loader:
            batch = loader.next()
        names = [name for name in batch if name not in plain]
        if told is None:
            values = np.zeros((1, 4, 1), np.float32)
            made = step(plain, values=values)
            for name in names:
                assert np.array_equal(made[name], batch[name])
            assert 0 < np.abs(batch["advantages"]).max() < 30
        else:
            assert 0 < batch["returns_to_go"].max() < 30
        with engine.consumer("q", format="numpy") as consumer, consumer.next() as claim:
            if told is None:
                made = step(claim.batch(), values=values)
                assert 0 < np.abs(made["advantages"]).max() < 30
        with engine.consumer("q", format="numpy", batch_transforms=(step,)) as consumer, consumer.next() as claim:
            assert all(np.abs(claim[name]).max() < 30 for name in names)


def test_steps_refuse_a_batch_without_a_reward_or_with_several():
    fields = [Field("obs", "float32", observation=True), Field("value", "float32")]
    window = conduit.Rollout(4, 1)
    from conduit.kernels.spec.batch_transforms import with_batch_transforms

    for more in ([Field("rew", "float32")], [Field("reward.a", "float32"), Field("reward.b", "float32")]):
        plan = make_plan(conduit.Schema([*fields, *more]), 4, window)
        for step in STEPS:
            with pytest.raises(ConfigError, match=r"one field of the batch to be the reward, got \[.*reward='...'"):
                with_batch_transforms(plan, (step,))
        name = more[0].name
        assert with_batch_transforms(plan, (conduit.returns_to_go(reward=name),)).batchwise[0].reward == name
        left_out = make_plan(conduit.Schema([*fields, *more]), 4, window, fields=("obs", "value", "mask"))
        with pytest.raises(ConfigError, match="list it in fields="):
            with_batch_transforms(left_out, (conduit.gae(),))


def test_a_batch_of_a_loader_that_lacks_its_marks_is_refused_by_a_called_step(engine_name):
    schema = conduit.Schema.from_example({"obs": 0.0, "reward": 0.0})
    with conduit.Engine.create(engine_name, {"t": conduit.Table(schema, 100, max_length=4)}) as engine:
        with engine.writer("t") as writer:
            for _ in range(8):
                writer.append(obs=0.0, reward=1.0)
        fields = ("obs", "reward", "terminated", "truncated")
        loader = engine.loader("t", batch_size=1, window=conduit.Rollout(4, 1), format="numpy", fields=fields)
        with loader, pytest.raises(FieldError, match=r"list it in fields=.* - at `mask`"):
            conduit.gae()(loader.next(), values=np.zeros((1, 4, 1), np.float32))


def test_status_shows_the_roles(engine_name):
    from conduit.plane.observe.inspect import inspect

    schema = conduit.Schema(
        [Field("state", "float32", observation=True), Field("reward", "float32"), Field("a", "int8")]
    )
    with conduit.Engine.create(engine_name, {"t": conduit.Table(schema, 100)}):
        (table,) = inspect(engine_name).tables
        assert table.observation_names == ("state",)
        assert table.reward_names == ("reward",)


@pytest.mark.parametrize("start", [-3, 0, 5, 2**62])
def test_classes_may_begin_anywhere(engine_name, start):
    schema = conduit.Schema([Field("obs", "int64", observation=True), Field("action", "int64")])
    with conduit.Engine.create(engine_name, {"t": conduit.Table(schema, 100)}) as engine:
        with engine.writer("t") as writer:
            for t in range(20):
                writer.append(obs=t, action=start + t % 4)
        options = {"batch_size": 16, "format": "numpy"}
        with engine.loader("t", transform={"action": conduit.one_hot(4, start=start)}, **options) as loader:
            batch = loader.next()
            assert (batch["action"].argmax(1) == batch["obs"] % 4).all()
            assert (batch["action"].sum(1) == 1).all()
        for wrong in (start - 1, start + 1):
            loader = engine.loader("t", transform={"action": conduit.one_hot(4, start=wrong)}, **options)
            with loader, pytest.raises(FieldError, match=rf"classes from {wrong} to {wrong + 3}, .*start="):
                loader.next()
    with pytest.raises(ConfigError, match=r"integer of 64 bits as the first class, got 0\.5"):
        conduit.one_hot(3, start=0.5)


def test_a_space_that_begins_elsewhere_is_delivered_as_unit_vectors(engine_name):
    spaces = pytest.importorskip("gymnasium.spaces")
    space = spaces.Discrete(3, start=7)
    schema = conduit.Schema.from_spaces(spaces.Box(0, 1, (2,)), space)
    with conduit.Engine.create(engine_name, {"t": conduit.Table(schema, 100)}) as engine:
        with engine.writer("t") as writer:
            for t in range(9):
                writer.append(obs=np.zeros(2, np.float32), action=np.int64(7 + t % 3), reward=0.0)
        one_hot = conduit.one_hot(int(space.n), start=int(space.start))
        with engine.loader("t", batch_size=8, transform={"action": one_hot}, format="numpy") as loader:
            batch = loader.next()
            assert (batch["action"].argmax(1) == batch.steps % 3).all()


def test_a_space_of_several_rewards_makes_their_fields():
    spaces = pytest.importorskip("gymnasium.spaces")
    schema = conduit.Schema.from_spaces(spaces.Discrete(3), spaces.Discrete(2), spaces.Box(-1, 1, (4,)))
    assert schema["reward"] == Field("reward", "float32", (4,), casting="same_kind")
    assert schema.reward_names == ("reward",)


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (lambda s: s.Sequence(s.Box(0, 1, (2,))), r"ragged field, `Schema\(\[..., Field\('obs', dtype, \(max_length"),
        (lambda s: s.Text(5), r"ragged field.*np\.frombuffer\(text\.encode\(\), np\.uint8\)"),
        (lambda s: s.Graph(s.Box(0, 1, (2,)), None), r"Field\('obs\.nodes', dtype, .*edge_links"),
        (lambda s: s.OneOf((s.Discrete(2), s.Discrete(3))), r"which of its spaces it is and a value of each"),
        (lambda s: s.Space((1,), np.float32), r"store numbers of fixed shape"),
    ],
    ids=["Sequence", "Text", "Graph", "OneOf", "other"],
)
def test_a_space_that_has_no_fields_names_a_remedy_that_works(make, remedy):
    spaces = pytest.importorskip("gymnasium.spaces")
    with pytest.raises(SchemaError, match=remedy):
        conduit.Schema.from_spaces(make(spaces), spaces.Discrete(2))
