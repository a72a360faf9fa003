"""Options and names that are wrong: refused where they are given, with the option and the remedy, and nothing is made."""

import numpy as np
import pytest

import conduit
from conduit import Field, Schema, Table
from conduit.errors import (
    Busy,
    CapacityError,
    Closed,
    ConfigError,
    EngineExists,
    EngineNotFound,
    FieldError,
    SchemaMismatch,
    SpaceTimeout,
)
from tests.plane.conftest import CARTPOLE

OBS = np.zeros(4, np.float32)


# tables


@pytest.mark.parametrize(
    ("options", "error", "expected"),
    [
        ({"capacity": 0}, CapacityError, "at least one row"),
        ({"capacity": -5}, CapacityError, "at least one row"),
        ({"capacity": 2.5}, CapacityError, "an int for rows, got 2.5"),
        ({"capacity": None}, CapacityError, "an int for rows, got None"),
        ({"capacity": True}, CapacityError, "an int for rows, got True"),
        ({"capacity": "much"}, CapacityError, "such as '2 GiB'.* got 'much'"),
        ({"capacity": "2 XB"}, CapacityError, "got '2 XB'"),
        ({"capacity": "1 KiB"}, CapacityError, "at least 4 pages of .*raise it or lower page_rows"),
        ({"capacity": 10**9, "page_rows": 10}, CapacityError, "at most 65536 pages.*raise page_rows to at least"),
        ({"capacity": 100, "page_rows": 2}, CapacityError, "page_rows of at least 3"),
        ({"capacity": 100, "page_rows": 4, "max_stack": 3}, CapacityError, r"page_rows of at least 5 \(a halo of 3"),
        ({"capacity": 100, "page_rows": 10.0}, CapacityError, "page_rows of at least 3.*got 10.0"),
        ({"capacity": 100, "max_stack": 0}, ConfigError, "max_stack of at least 1, got 0"),
        ({"capacity": 100, "max_n_step": 0}, ConfigError, "max_n_step of at least 1, got 0"),
        ({"capacity": 100, "max_n_step": 1.5}, ConfigError, "max_n_step of at least 1, got 1.5"),
        ({"capacity": 100, "num_envs": 0}, ConfigError, "num_envs of at least 1, got 0"),
        ({"capacity": 100, "kind": "stack"}, ConfigError, "kind 'replay' or 'queue', got 'stack'"),
        ({"capacity": 100, "rollout_length": 4}, ConfigError, "rollout_length for kind='queue' only"),
        ({"capacity": 100, "kind": "queue", "max_stack": 2}, ConfigError, "no max_stack for kind='queue'"),
        (
            {"capacity": 100, "kind": "queue", "max_times_sampled": 2},
            ConfigError,
            "no max_times_sampled for kind='queue'",
        ),
        ({"capacity": 100, "max_times_sampled": 0}, ConfigError, "max_times_sampled of at least 1"),
        ({"capacity": 100, "limiter": 3}, ConfigError, "SampleToInsertRatio"),
        ({"capacity": 100, "schema": {"obs": 1}}, ConfigError, "a conduit.Schema, got dict"),
    ],
    ids=str,
)
def test_a_table_that_cannot_work_is_refused(options, error, expected):
    with pytest.raises(error, match=expected):
        Table(**{"schema": CARTPOLE} | options)


def test_a_large_table_of_small_pages_can_be_made_and_attached_to(engine_name):
    """Its page count is near the most that there can be, and the halos must not be counted twice."""
    schema = Schema([Field("x", "uint8")])
    with conduit.Engine.create(engine_name, {"t": Table(schema, 300_000, page_rows=6)}) as engine:
        assert engine._views["t"].layout.pages == 60_001
        conduit.attach(engine_name).close()


# engines


@pytest.mark.parametrize("name", ["", "a/b", "a b", ".hidden", "x" * 101, 3, None])
def test_a_name_that_is_no_engine_name_is_refused(name):
    for call in (lambda: conduit.Engine.create(name, {"t": Table(CARTPOLE, 100)}), lambda: conduit.attach(name)):
        with pytest.raises(ConfigError, match="an engine name of 1 to 100 letters"):
            call()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"tables": {}}, "at least one table or policy"),
        ({"tables": {1: Table(CARTPOLE, 100)}}, "names of at least one letter for tables, got 1"),
        ({"tables": {"": Table(CARTPOLE, 100)}}, "names of at least one letter for tables, got ''"),
        ({"policies": {0: {"w": OBS}}}, "names of at least one letter for policies, got 0"),
        ({"max_participants": "many"}, "max_participants from 1 to 4095, got 'many'"),
        ({"tables": {"t": CARTPOLE}}, r"a conduit.Table, got Schema - at tables\['t'\]"),
        ({"max_participants": 0}, "max_participants from 1 to 4095, got 0"),
        ({"max_participants": 5000}, "max_participants from 1 to 4095, got 5000"),
        ({"backing": "file"}, "backing 'shm' or 'memfd', got 'file'"),
        ({"policies": {"p": {}}}, "at least one array"),
        ({"policies": {"p": {"w": "zero"}}}, r"an array or tensor, got str - at policy\['w'\]"),
        ({"policies": {"p": [1]}}, "a state dict"),
    ],
    ids=str,
)
def test_a_bad_option_of_an_engine_is_refused_and_nothing_is_made(engine_name, options, expected):
    with pytest.raises(ConfigError, match=expected):
        conduit.Engine.create(engine_name, **{"tables": {"t": Table(CARTPOLE, 100)}} | options)
    with pytest.raises(EngineNotFound):
        conduit.attach(engine_name)


def test_a_second_engine_of_the_same_name_is_refused(make):
    engine = make()
    with pytest.raises(EngineExists, match=r"its owner is alive; attach to it"):
        conduit.Engine.create(engine.name, {"t": Table(CARTPOLE, 100)})
    with pytest.raises(EngineExists, match="its owner is alive; attach to it"):
        conduit.Engine.adopt(engine.name)


def test_unknown_tables_and_policies_are_named_with_those_there_are(make):
    engine = make(policies={"policy": {"w": OBS}})
    for call in (
        lambda: engine.writer("reply"),
        lambda: engine.loader("reply", batch_size=1),
        lambda: engine.table("reply").schema,
    ):
        with pytest.raises(ConfigError, match=r"a table of engine 't[0-9-]+', got 'reply': did you mean `replay`\?"):
            call()
    with pytest.raises(ConfigError, match=r"a policy of engine .*policies=.* got 'actor', and there is only `policy`"):
        engine.policy("actor")
    assert engine.tables == ("replay",)
    assert engine.table("replay").schema == CARTPOLE


def test_a_closed_client_says_so_whatever_is_asked_of_it(make):
    engine = make(policies={"policy": {"w": OBS}})
    client = conduit.attach(engine.name)
    client.close()
    client.close()
    for call in (
        lambda: client.writer("replay"),
        lambda: client.loader("replay", batch_size=1),
        client.policy,
        lambda: client.table("replay").schema,
        client.recover,
    ):
        with pytest.raises(Closed, match=rf"an attached client of engine '{engine.name}', got one that was closed"):
            call()


# weights


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"w": np.zeros(4, np.float64)}, "`float32` of shape .4,., got `float64`.* - at `policy.w`"),
        ({"w": np.zeros(5, np.float32)}, r"got `float32` of shape \(5,\) - at `policy.w`"),
        ({"w": [0.0] * 4}, "`float32` of shape .4,., got list - at `policy.w`"),
        ({"v": OBS}, r"unknown \['v'\].* - at `policy`"),
    ],
    ids=["dtype", "shape", "list", "unknown"],
)
def test_weights_that_do_not_fit_their_slot_are_refused_and_nothing_is_published(make, change, expected):
    engine = make(policies={"policy": {"w": OBS, "b": OBS}})
    slot = engine.policy()
    slot.publish({"w": OBS + 1, "b": OBS})
    with pytest.raises(FieldError, match=expected):
        slot.publish({"w": OBS, "b": OBS} | change)
    with pytest.raises(FieldError, match=r"missing \['b'\]"):
        slot.publish({"w": OBS})
    assert slot.version == 1
    np.testing.assert_array_equal(slot.poll().arrays["w"], OBS + 1)


def test_a_policy_has_one_publisher_at_a_time(make):
    engine = make(policies={"policy": {"w": OBS}})
    client = conduit.attach(engine.name)
    engine.policy().publish({"w": OBS})
    with pytest.raises(Busy, match="the only publisher of policy 'policy'"):
        client.policy().publish({"w": OBS})
    engine.policy().close()
    assert client.policy().publish({"w": OBS}) == 2
    client.close()


# writers


@pytest.mark.parametrize(
    ("options", "error", "expected"),
    [
        ({"num_envs": 0}, ConfigError, "num_envs of at least 1, or None.*got 0"),
        ({"num_envs": True}, ConfigError, "num_envs of at least 1.*got True"),
        ({"num_envs": 2.0}, ConfigError, "num_envs of at least 1.*got 2.0"),
        (
            {"num_envs": 10**6, "autoreset": "same_step"},
            CapacityError,
            "for 1000000 environments.*create the table with page_rows=",
        ),
        (
            {"autoreset": "next"},
            ConfigError,
            "'next_step'.*'same_step'.*'disabled'.*got 'next'.*metadata\\['autoreset_mode'\\]",
        ),
        (
            {"num_envs": 2},
            ConfigError,
            "autoreset together with num_envs=2: 'next_step'.*'same_step'.*'disabled'.*metadata",
        ),
        ({"on_full": "drop"}, ConfigError, "on_full 'wait' or 'raise', got 'drop'"),
        ({"timeout": -1}, ConfigError, "a timeout of at least 0 seconds, got -1"),
        ({"timeout": "10"}, ConfigError, "a timeout of at least 0 seconds, got '10'"),
        ({"policy": "policy"}, ConfigError, "a PolicySlot as policy, got str"),
        ({"ingestion": 3}, ConfigError, "an? Ingestion as ingestion, got int"),
        ({"placement": "gpu"}, ConfigError, "a Placement as placement, got str"),
        ({"schema": {"obs": 1}}, ConfigError, "a conduit.Schema as schema, got dict"),
    ],
    ids=str,
)
def test_a_bad_option_of_a_writer_is_refused(make, unchanged, options, error, expected):
    engine = make()
    with unchanged(engine):
        if error is None:
            engine.writer("replay", **options)
            return
        with pytest.raises(error, match=expected):
            engine.writer("replay", **options)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ([*CARTPOLE.fields[:2], Field("reward", "float64")], "`reward` is float32.* and float64"),
        ([*CARTPOLE.fields[:2]], "`reward` is float32.* missing in the other"),
        ([*CARTPOLE.fields, Field("extra", "int8")], "`extra` is missing in this schema"),
        ([CARTPOLE["action"], CARTPOLE["obs"], CARTPOLE["reward"]], "the order differs: field 0 is `obs`"),
        ([Field("obs", "float32", (5,), True), *CARTPOLE.fields[1:]], r"`obs` is float32 \(4,\).*float32 \(5,\)"),
    ],
    ids=["dtype", "missing", "extra", "order", "shape"],
)
def test_a_schema_that_is_not_the_table_s_is_refused_with_both_fingerprints(make, fields, expected):
    engine = make()
    other = Schema(fields)
    with pytest.raises(SchemaMismatch, match=expected) as caught:
        engine.writer("replay", schema=other)
    assert CARTPOLE.fingerprint in str(caught.value)
    assert other.fingerprint in str(caught.value)
    engine.writer("replay", schema=Schema(CARTPOLE.fields)).close()


@pytest.mark.parametrize(("on_full", "error"), [("raise", Busy), ("wait", SpaceTimeout)])
@pytest.mark.parametrize("form", ["append", "step", "rollout", "unchecked"])
def test_a_table_without_a_free_page_is_waited_for_or_refused_and_the_call_may_be_repeated(
    make, unchanged, on_full, error, form
):
    engine = make(capacity=20, page_rows=8, max_length=2)
    view = engine._views["replay"]
    holders = [engine.writer("replay") for _ in range(view.layout.pages - 1)]
    row = {"obs": OBS, "action": 0, "reward": 0.0}
    for holder in holders:
        holder.append(**row)
    leased = engine.writer("replay")
    leased.append(**row)
    leased.close()
    lease = view.lease(view.layout.pages - 1)
    writer = engine.writer("replay", on_full=on_full, timeout=0.03)

    def write():
        if form == "append":
            writer.append(**row)
        elif form == "step":
            with writer.step() as step:
                step.obs, step.action, step.reward = OBS, 0, 0.0
        elif form == "rollout":
            with writer.rollout(2) as rollout:
                rollout.obs[:], rollout.action[:], rollout.reward[:] = 0, 0, 0
        else:
            with writer.unchecked() as unchecked:
                at = unchecked.row
                unchecked.obs[at], unchecked.action[at], unchecked.reward[at] = 0, 0, 0
                unchecked.commit()

    for _ in range(2):
        with (
            unchanged(engine),
            pytest.raises(
                error,
                match=r"a free page in table 'replay'.*of its \d pages of 8 rows \d are being written.*1 are leased.*writers=<.*>, at least \d",
            ),
        ):
            write()
    assert issubclass(error, BlockingIOError if on_full == "raise" else TimeoutError)
    lease.end()
    write()
    assert view.rows_evicted == 1


def test_attaching_waits_for_an_engine_as_long_as_it_is_told(engine_name):
    with pytest.raises(
        EngineNotFound, match=rf"a running engine named '{engine_name}'.*attach\(\.\.\., timeout=seconds\)"
    ):
        conduit.attach(engine_name, timeout=0.05)
    with pytest.raises(ConfigError, match="a timeout of at least 0 seconds"):
        conduit.attach(engine_name, timeout=-1)
