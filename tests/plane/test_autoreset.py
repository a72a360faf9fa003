"""How environments reset has to be said where it cannot be guessed, and what a mode has no room for is refused at the call."""

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

import conduit
from conduit.errors import ConfigError, FieldError

ENVS = 4
SCHEMA = conduit.Schema([conduit.Field("obs", "float32", (2,), observation=True), conduit.Field("reward", "float32")])


@pytest.fixture
def engine(engine_name):
    table = conduit.Table(SCHEMA, capacity=4000, num_envs=ENVS)
    with conduit.Engine.create(engine_name, {"replay": table}) as engine:
        yield engine


def tick(t, ends=False, envs=ENVS):
    return {
        "obs": np.full((envs, 2), t, np.float32),
        "reward": np.full(envs, t, np.float32),
        "terminated": np.broadcast_to(ends, envs).copy(),
    }


def committed(engine):
    return engine._views["replay"].counts().inserted


@pytest.mark.parametrize("num_envs", [1, 8])
def test_several_environments_need_a_mode_and_the_error_names_all_three(engine, num_envs):
    with pytest.raises(ConfigError, match=r"'next_step'.*'same_step'.*'disabled'.*envs.metadata\['autoreset_mode'\]"):
        engine.writer("replay", num_envs=num_envs)
    assert engine.writer("replay").autoreset == "disabled"


@pytest.mark.parametrize(
    ("given", "mode"),
    [
        ("next_step", "next_step"),
        ("same_step", "same_step"),
        ("disabled", "disabled"),
        (AutoresetMode.NEXT_STEP, "next_step"),
        (AutoresetMode.SAME_STEP, "same_step"),
        (AutoresetMode.DISABLED, "disabled"),
        (AutoresetMode.NEXT_STEP.value, "next_step"),
        (AutoresetMode.SAME_STEP.name, "same_step"),
    ],
    ids=str,
)
def test_a_mode_is_taken_by_every_name_that_gymnasium_has_for_it(engine, given, mode):
    assert engine.writer("replay", num_envs=2, autoreset=given).autoreset == mode


@pytest.mark.parametrize("given", ["", "step", "next", 1, True, object])
def test_what_names_no_mode_is_refused(engine, given):
    with pytest.raises(ConfigError, match=r"'next_step'.*'same_step'.*'disabled'.*got"):
        engine.writer("replay", num_envs=2, autoreset=given)


def by_append(writer, ticks):
    for one in ticks:
        writer.append(**one)


def by_converted_append(writer, ticks):
    for one in ticks:
        writer.append(**{**one, "reward": one["reward"].tolist()})


def by_step(writer, ticks):
    for one in ticks:
        with writer.step() as row:
            for name, value in one.items():
                row[name] = value


def by_rollout(writer, ticks):
    with writer.rollout(len(ticks)) as rollout:
        for t, one in enumerate(ticks):
            for name, value in one.items():
                rollout[name][t] = value


def by_unchecked(writer, ticks):
    with writer.unchecked() as unchecked:
        row = unchecked.row
        for one in ticks:
            for name, value in one.items():
                unchecked[name][row : row + ENVS] = value
            row = unchecked.commit()
            if row >= unchecked.rows:
                row = unchecked.row


def by_extend(writer, ticks):
    stacked = {name: np.stack([one[name] for one in ticks]) for name in ticks[0]}
    writer.extend({name: stacked[name] for name in ("obs", "reward")}, terminated=stacked["terminated"])


FORMS = {form.__name__: form for form in (by_append, by_converted_append, by_step, by_rollout, by_unchecked, by_extend)}
FIRST = np.arange(ENVS) == 0
LAST = np.arange(ENVS) == ENVS - 1


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("ended", [FIRST, LAST, np.ones(ENVS, bool)], ids=["first", "last", "all"])
def test_two_ends_in_a_row_are_refused_with_the_mode_that_fits_and_nothing_is_written(engine, form, ended):
    writer = engine.writer("replay", num_envs=ENVS, autoreset="next_step")
    by_append(writer, [tick(0), tick(1, ended)])
    assert committed(engine) == 2 * ENVS
    env = int(np.flatnonzero(ended)[0])
    with pytest.raises(FieldError, match=f"two ends in a row - at environment {env}.*'same_step'.*'disabled'"):
        form(writer, [tick(2, ended)])
    assert committed(engine) == 2 * ENVS
    # the writer goes on where it was
    form(writer, [tick(2), tick(3, ended), tick(4), tick(5)])
    assert committed(engine) == 6 * ENVS


@pytest.mark.parametrize("form", [by_rollout, by_extend], ids=["rollout", "extend"])
def test_ends_in_a_row_within_one_call_are_found_too(engine, form):
    writer = engine.writer("replay", num_envs=ENVS, autoreset="next_step")
    with pytest.raises(FieldError, match="at environment 3, tick 2"):
        form(writer, [tick(0), tick(1, LAST), tick(2, LAST), tick(3)])
    assert committed(engine) == 0
    form(writer, [tick(0, FIRST), tick(1, LAST), tick(2, FIRST), tick(3, LAST), tick(4, FIRST)])
    assert committed(engine) == 5 * ENVS


def test_an_end_right_behind_a_cut_or_a_reset_is_one_step_long_and_accepted(engine):
    writer = engine.writer("replay", num_envs=ENVS, autoreset="next_step")
    writer.append(**tick(0, True))
    writer.cut()
    writer.append(**tick(1, True))
    engine.table("replay").reset()
    for form in FORMS.values():
        form(writer, [tick(2, True), tick(3)])
    assert committed(engine) == (2 + 2 * len(FORMS)) * ENVS


@pytest.mark.parametrize("mode", ["same_step", "disabled"])
def test_where_episodes_may_be_one_step_long_every_row_is_drawn(engine, mode):
    with engine.writer("replay", num_envs=ENVS, autoreset=mode) as writer:
        for t in range(50):
            writer.append(**tick(t, True), final=np.full((ENVS, 2), -t, np.float32))
    with engine.loader("replay", batch_size=4000, min_rows=1, format="numpy") as loader:
        batch = loader.next()
    assert sorted(set(batch["reward"].tolist())) == list(range(50))
    np.testing.assert_array_equal(batch["next_obs"], -batch["obs"])
