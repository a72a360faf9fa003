"""The next batches of a restored engine are those of the engine that went on, also while writers are open."""

from contextlib import ExitStack

import numpy as np
import pytest

import conduit
from conduit.testing.invariants import check_each_row_is_drawn_from_one_page

SCHEMA = conduit.Schema(
    [
        conduit.Field("obs", "float32", (3,), observation=True),
        conduit.Field("tokens", "int32", (9,), ragged=True),
        conduit.Field("action", "int64"),
        conduit.Field("reward", "float32"),
    ]
)
ROWS = 32
FIXED = ("obs", "action", "reward")  # ragged fields come by single steps only

LOADERS = {
    "uniform": {},
    "two steps": {"window": conduit.Transition(n_step=2, gamma=0.9)},
    "three steps": {"window": conduit.Transition(n_step=3, gamma=0.9)},
    "short windows": {"window": conduit.Transition(n_step=3, gamma=0.9, newest="bootstrap")},
    "stacks": {"window": conduit.Transition(stack=2), "fields": FIXED},
    "prioritized": {"sampling": conduit.Prioritized()},
    "prioritized, three steps": {"window": conduit.Transition(n_step=3), "sampling": conduit.Prioritized()},
    "sequences": {"window": conduit.Sequence(3), "fields": FIXED},
    "sequences by priority": {
        "window": conduit.Sequence(4, overlap=2),
        "sampling": conduit.Prioritized(),
        "fields": FIXED,
    },
    "episodes": {"window": conduit.Episode(4), "fields": FIXED},
    "packed": {"ragged": "pack"},
}
ROLLOUTS = {
    "rollouts": {"window": conduit.Rollout(2, 4, stride=1), "fields": FIXED},
    "rollouts by priority": {"window": conduit.Rollout(3, 4), "sampling": conduit.Prioritized(), "fields": FIXED},
}


def _write(writer, ticks, envs, seed, ends):
    rng = np.random.default_rng(seed)
    lead = () if envs is None else (envs,)
    for _ in range(ticks):
        ended = rng.random(lead) < ends
        lengths = rng.integers(0, 9, lead)
        tokens = (
            np.arange(lengths, dtype=np.int32)
            if envs is None
            else [np.arange(length, dtype=np.int32) for length in lengths]
        )
        writer.append(
            obs=rng.random((*lead, 3), np.float32),
            tokens=tokens,
            action=rng.integers(0, 9, lead),
            reward=rng.random(lead, np.float32),
            terminated=ended,
        )


def _batches(client, loaders, count=3):
    found = {}
    for key, options in loaders.items():
        with client.loader("replay", batch_size=ROWS, min_rows=1, format="numpy", timeout=0, **options) as loader:
            for number in range(count):
                batch = loader.next()
                found[key, number] = {name: array.copy() for name, array in batch.items()} | {"ids": batch.ids.copy()}
    return found


def _differing(found, expected):
    """Arrays that differ in a bit, with how many of their rows do."""
    return [
        (key, name, int((found[key]["ids"] != batch["ids"]).sum()))
        for key, batch in expected.items()
        for name, array in batch.items()
        if array.tobytes() != found[key][name].tobytes()
    ]


WRITERS = {
    "one": [(None, "disabled", 137, 0.1)],
    "two": [(None, "disabled", 137, 0.1), (None, "disabled", 50, 0.3)],
    "some that turn their pages now": [(None, "disabled", ticks, 0.3) for ticks in range(55, 61)],
    "a few rows each": [(None, "disabled", ticks, 0.2) for ticks in (1, 2, 3, 4, 5)],
    "vector": [(4, "same_step", 30, 0.1), (4, "disabled", 17, 0.1)],
    "vector, next step": [(4, "next_step", 41, 0.1), (4, "next_step", 12, 0.2)],
    "after many evictions": [(None, "disabled", 1500, 0.05), (None, "disabled", 1200, 0.05)],
}


@pytest.mark.parametrize("writers", WRITERS.values(), ids=WRITERS)
def test_batches_after_a_restore_are_those_of_the_engine_whose_writers_stayed_open(engine_name, tmp_path, writers):
    table = conduit.Table(
        SCHEMA,
        600,
        page_rows=64,
        max_n_step=3,
        max_stack=2,
        max_length=5,
        mean_lengths={"tokens": 9},
        priorities=conduit.Priorities(),
    )
    loaders = LOADERS | (ROLLOUTS if writers[0][0] == 4 else {})
    with ExitStack() as stack:
        engine = stack.enter_context(conduit.Engine.create(engine_name, {"replay": table}))
        for seed, (envs, autoreset, ticks, ends) in enumerate(writers):
            options = {} if envs is None else {"num_envs": envs}
            writer = stack.enter_context(engine.writer("replay", autoreset=autoreset, keep_final=False, **options))
            _write(writer, ticks, envs, seed, ends)
        with engine.loader(
            "replay", batch_size=64, min_rows=1, sampling=conduit.Prioritized(), format="numpy"
        ) as first:
            batch = first.next()
            first.update_priorities(batch.ids, np.arange(64.0))
        engine.checkpoint(tmp_path)
        expected = _batches(engine, loaders)
        again = stack.enter_context(conduit.Engine.restore(tmp_path, f"{engine_name}-again"))
        assert _differing(_batches(again, loaders), expected) == []
        # what a restored engine keeps, it keeps in its own checkpoints
        again.checkpoint(tmp_path / "second")
        third = stack.enter_context(conduit.Engine.restore(tmp_path / "second", f"{engine_name}-third"))
        assert _differing(_batches(third, loaders), expected) == []


def test_a_named_loader_goes_on_with_the_same_rows_while_its_writer_is_open(engine_name, tmp_path):
    table = conduit.Table(SCHEMA, 600, page_rows=64, max_n_step=3)
    options = {"batch_size": ROWS, "name": "learner", "format": "numpy", "window": conduit.Transition(n_step=3)}
    with ExitStack() as stack:
        engine = stack.enter_context(conduit.Engine.create(engine_name, {"replay": table}))
        writer = stack.enter_context(engine.writer("replay", keep_final=False))
        _write(writer, 200, None, 0, 0.1)
        loader = engine.loader("replay", **options)
        for _ in range(5):
            loader.next()
        engine.checkpoint(tmp_path)
        expected = [loader.next().ids.tolist() for _ in range(4)]
        again = stack.enter_context(conduit.Engine.restore(tmp_path, f"{engine_name}-again"))
        loader = again.loader("replay", **options)
        assert [loader.next().ids.tolist() for _ in range(4)] == expected


def test_the_last_rows_of_a_restored_stream_can_be_drawn_once_the_table_is_written_into(engine_name, tmp_path):
    """As those of a writer that died; until then there is nothing that would make the draws differ."""
    table = conduit.Table(SCHEMA, 600, page_rows=64, max_n_step=5, max_length=2)
    options = {"batch_size": 512, "min_rows": 1, "format": "numpy", "timeout": 0}
    with conduit.Engine.create(engine_name, {"replay": table}) as engine:
        with engine.writer("replay", keep_final=False) as writer:
            _write(writer, 40, None, 0, 0.0)
            engine.checkpoint(tmp_path)
        with conduit.Engine.restore(tmp_path, f"{engine_name}-again") as again:
            window = conduit.Transition(n_step=5)
            with again.loader("replay", window=window, **options) as loader:
                loader.next()
                assert loader.sampler.candidates == 35
            with (
                again.writer("replay", keep_final=False) as writer,
                again.loader("replay", window=window, **options) as loader,
            ):
                loader.next()
                assert loader.sampler.candidates == 35  # opening a writer writes nothing
                _write(writer, 1, None, 1, 0.0)
                loader.next()
                assert loader.sampler.candidates == 40
                check_each_row_is_drawn_from_one_page(again._views["replay"])
                _write(writer, 2000, None, 2, 0.1)
                loader.next()
                check_each_row_is_drawn_from_one_page(again._views["replay"])
