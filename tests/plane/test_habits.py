"""What people bring from other libraries is refused with what is passed in its place."""

import numpy as np
import pytest

import conduit
from conduit.errors import FieldError

OBS = np.zeros(4, np.float32)
GOOD = {"obs": OBS, "action": 1, "reward": 0.5}
NESTED = conduit.Schema.from_example({"obs": {"x": np.zeros(2, np.float32)}, "action": 0, "reward": 0.0})
NESTED_ROW = {"obs": {"x": np.zeros(2, np.float32)}, "action": 0, "reward": 0.0}

NEXT = r"got 'next_obs': a table holds steps, .*final=<observation after the last step> - at `next_obs`"
DONE = r"got 'done': there are two ends: pass terminated=.* and truncated=.* - at `done`"


@pytest.mark.parametrize(("name", "told"), [("next_obs", NEXT), ("done", DONE)])
def test_a_next_observation_or_a_done_is_refused_with_what_stands_for_it_in_every_form_of_writing(
    make, unchanged, name, told
):
    engine = make()
    writer = engine.writer("replay")
    writer.append(**GOOD)
    with unchanged(engine):
        with pytest.raises(FieldError, match=told):
            writer.append(**GOOD, **{name: OBS})
        with pytest.raises(FieldError, match=told):
            writer.extend({"obs": OBS[None], "action": np.zeros(1, np.int64), "reward": np.zeros(1), name: OBS[None]})
        with pytest.raises(FieldError, match=told), writer.step() as row:
            setattr(row, name, True)
        with pytest.raises(FieldError, match=told), writer.step() as row:
            getattr(row, name)[:] = 0
    with pytest.raises(FieldError, match=told):
        make(NESTED).writer("replay").append(**NESTED_ROW, **{name: OBS})


def test_a_field_of_such_a_name_is_a_field(make):
    schema = conduit.Schema.from_example({"obs": OBS, "new_obs": OBS, "done": False})
    engine = make(schema)
    writer = engine.writer("replay")
    writer.append(obs=OBS, new_obs=OBS, done=True)
    with writer.step() as row:
        row.obs, row.new_obs, row.done = OBS, OBS, True
    with pytest.raises(FieldError, match="did you mean `new_obs`"):
        writer.append(obs=OBS, new_ob=OBS, done=True)


def test_values_of_many_environments_without_num_envs_are_told_how_to_open_the_writer(make):
    writer = make().writer("replay")
    told = r"Expected shape \(4,\), got \(8, 4\) of float32: are these 8 environments\? Open the writer with num_envs=8"
    with pytest.raises(FieldError, match=told):
        writer.append(obs=np.zeros((8, 4), np.float32), action=np.zeros(8, np.int64), reward=np.zeros(8))
    with pytest.raises(FieldError, match=r"got \(8,\) of int64: are these 8 environments\?.* - at `action`"):
        writer.append(obs=OBS, action=np.zeros(8, np.int64), reward=0.0)
    with pytest.raises(FieldError, match=r"got \(8,\) of bool: are these 8 environments\?.* - at `terminated`"):
        writer.append(**GOOD, terminated=np.zeros(8, bool))
    # of another shape nothing is guessed
    with pytest.raises(FieldError, match=r"Expected shape \(4,\), got \(8, 5\) - at `obs`"):
        writer.append(obs=np.zeros((8, 5), np.float32), action=1, reward=0.0)


def test_values_without_the_axis_of_environments_are_told_what_the_writer_was_opened_with(make):
    writer = make().writer("replay", num_envs=3, autoreset="same_step")
    row = {"action": np.zeros(3, np.int64), "reward": np.zeros(3)}
    with pytest.raises(
        FieldError, match=r"got \(4,\) of float32: the writer has num_envs=3, so that values have an axis of 3"
    ):
        writer.append(obs=OBS, **row)
    with pytest.raises(FieldError, match=r"got \(2, 4\) of float32: the writer has num_envs=3 - at `obs`"):
        writer.append(obs=np.zeros((2, 4), np.float32), **row)
