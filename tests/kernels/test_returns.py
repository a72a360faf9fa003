"""GAE, V-trace, returns-to-go and advantage normalization against sums in float64, and through a loader."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import conduit
from conduit.errors import ConfigError, FieldError
from conduit.kernels.reference import returns as reference
from conduit.kernels.spec.batch_transforms import with_batch_transforms
from conduit.kernels.spec.make_plan import make_plan

POISON = 0xA5


@st.composite
def batches(draw, *, real=True):
    """A batch of any flags whatever: what a window can hold is a part of them.

    With `real`, firsts and masks are those of episodes one after the other, with an observation-only row behind some ends.
    """
    size, ticks = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    envs = draw(st.sampled_from([(), (1,), (3,)]))
    shape = (size, ticks, *envs)
    number = st.floats(-10, 10, width=32)
    batch = {
        name: draw(hnp.arrays(np.float32, shape, elements=number)) for name in ("reward", "value", "final", "ratio")
    }
    batch["bootstrap"] = draw(hnp.arrays(np.float32, (size, *envs), elements=number))
    rare = st.sampled_from([False, False, False, True])
    for name in ("terminated", "truncated"):
        batch[name] = draw(hnp.arrays(bool, shape, elements=rare))
    batch["lengths"] = draw(hnp.arrays(np.int64, (size,), elements=st.integers(1, ticks)))
    if not real:
        batch["mask"] = draw(hnp.arrays(bool, shape, elements=st.sampled_from([True, True, False])))
        batch["is_first"] = draw(hnp.arrays(bool, shape, elements=rare))
        return batch
    batch["mask"], batch["is_first"] = np.ones(shape, bool), np.zeros(shape, bool)
    keeps = draw(st.booleans())
    for column in np.ndindex(size, *envs):
        at = (column[0], slice(None), *column[1:])
        ended, final = batch["terminated"][at] | batch["truncated"][at], False
        first = draw(st.booleans())
        for t in range(ticks):
            if final:
                batch["mask"][at][t], batch["terminated"][at][t], batch["truncated"][at][t] = False, False, False
                final, first = False, True
                continue
            batch["is_first"][at][t] = first
            final, first = bool(ended[t] and keeps), bool(ended[t])
        batch["mask"][at][batch["lengths"][column[0]] :] = False
    return batch


def columns(batch):
    """Each environment's part of a batch: [T] arrays and the place where they come from."""
    for column in np.ndindex(batch["bootstrap"].shape):
        at = (column[0], slice(None), *column[1:])
        names = {"reward": "reward", "values": "value", "log_ratios": "ratio"}
        names |= {name: name for name in ("terminated", "truncated", "mask", "is_first")}
        yield at, {new: batch[old][at] for new, old in names.items()} | {"length": batch["lengths"][column[0]]}, column


def check(made, batch, compute, names, *, bootstrap, finals):
    for at, part, column in columns(batch):
        given_ = {
            "bootstrap": batch["bootstrap"][column] if bootstrap else None,
            "final_values": batch["final"][at] if finals else None,
        }
        wanted = compute(part, given_)
        for name, array in zip(names, wanted, strict=True):
            got = np.asarray(made[name])[at]
            if array.dtype == bool:
                np.testing.assert_array_equal(got, array)
            else:
                np.testing.assert_allclose(got, array, rtol=2e-6, atol=1e-4)


OPTIONS = {"bootstrap": st.booleans(), "finals": st.booleans(), "real": st.booleans()}
RATES = {"gamma": st.floats(0, 1), "lam": st.floats(0, 1)}


@settings(max_examples=150)
@given(data=st.data(), **OPTIONS, **RATES)
def test_gae_is_the_sum_of_its_definition(data, bootstrap, finals, real, gamma, lam):
    batch = data.draw(batches(real=real))
    made = conduit.gae(gamma, lam)(
        batch,
        values=batch["value"],
        bootstrap=batch["bootstrap"] if bootstrap else None,
        final_values=batch["final"] if finals else None,
    )
    names = ("advantages", "returns", "advantage_mask")
    check(made, batch, lambda *a: reference.advantages(*a, gamma, lam), names, bootstrap=bootstrap, finals=finals)


@settings(max_examples=150)
@given(data=st.data(), bars=st.tuples(*[st.floats(0.1, 3)] * 3), **OPTIONS, **RATES)
def test_vtrace_is_the_sum_of_its_definition(data, bars, bootstrap, finals, real, gamma, lam):
    batch = data.draw(batches(real=real))
    batch["ratio"] = np.clip(batch["ratio"], -3, 3)
    rho, c, pg = max(bars[:2]), min(bars[:2]), bars[2]
    made = conduit.vtrace(gamma, lam=lam, rho_bar=rho, c_bar=c, pg_rho_bar=pg)(
        batch,
        values=batch["value"],
        log_ratios=batch["ratio"],
        bootstrap=batch["bootstrap"] if bootstrap else None,
        final_values=batch["final"] if finals else None,
    )
    names = ("advantages", "targets", "advantage_mask")
    check(
        made,
        batch,
        lambda *a: reference.corrected(*a, gamma, lam, (rho, c, pg)),
        names,
        bootstrap=bootstrap,
        finals=finals,
    )


@given(batch=batches(), gamma=st.floats(0, 1))
def test_with_lambda_1_an_advantage_is_the_return_less_the_value(batch, gamma):
    made = conduit.gae(gamma, 1.0)(
        batch, values=batch["value"], bootstrap=batch["bootstrap"], final_values=batch["final"]
    )
    for at, part, column in columns(batch):
        kinds = reference.successors(
            part, {"bootstrap": batch["bootstrap"][column], "final_values": batch["final"][at]}
        )
        carried = 0.0
        for t in reversed(range(len(kinds))):
            kind, after = kinds[t]
            assert kind != "unknown" or made["advantage_mask"][at][t] == 0
            if kind in ("absent", "unknown"):
                # what stands before an unknown step bootstraps from its value
                carried = float(part["values"][t])
                continue
            carried = float(part["reward"][t]) + gamma * (carried if kind == "next" else after)
            assert made["advantages"][at][t] == pytest.approx(carried - part["values"][t], rel=1e-5, abs=1e-4)
            assert made["returns"][at][t] == pytest.approx(carried, rel=1e-5, abs=1e-4)


@given(batch=batches(), gamma=st.floats(0, 1), lam=st.floats(0, 1))
def test_on_policy_vtrace_targets_are_gaes_returns(batch, gamma, lam):
    one = conduit.vtrace(gamma, lam=lam)(batch, values=batch["value"], bootstrap=batch["bootstrap"])
    other = conduit.gae(gamma, lam)(batch, values=batch["value"], bootstrap=batch["bootstrap"])
    np.testing.assert_allclose(one["targets"], other["returns"], rtol=1e-6, atol=1e-5)
    np.testing.assert_array_equal(one["advantage_mask"], other["advantage_mask"])


def steps(**changes):
    """One environment, three steps of reward 1 and value 0, 10, 20."""
    shape = (1, 3)
    batch = {
        "reward": np.ones(shape, np.float32),
        "terminated": np.zeros(shape, bool),
        "truncated": np.zeros(shape, bool),
        "value": np.array([[0, 10, 20]], np.float32),
    }
    for name, t in changes.items():
        batch[name][0, t] = True
    return batch


def test_a_termination_is_not_bootstrapped_and_a_truncation_is():
    rule = conduit.gae(1.0, 1.0)
    ended = steps(terminated=1)
    np.testing.assert_array_equal(rule(ended, values=ended["value"])["returns"][0, :2], [2, 1])
    cut = steps(truncated=1)
    finals = np.array([[-1, 100, -1]], np.float32)
    np.testing.assert_array_equal(rule(cut, values=cut["value"], final_values=finals)["returns"][0, :2], [102, 101])
    # never the value of the reset observation: what is not known is left out, and bootstraps the step before it
    made = rule(cut, values=cut["value"])
    np.testing.assert_array_equal(made["advantage_mask"][0], [True, False, False])
    np.testing.assert_array_equal(made["returns"][0, :2], [11, 10])


def test_the_last_step_takes_the_bootstrap_or_is_one_itself():
    batch, rule = steps(), conduit.gae(1.0, 1.0)
    made = rule(batch, values=batch["value"], bootstrap=np.array([5], np.float32))
    np.testing.assert_array_equal(made["returns"][0], [8, 7, 6])
    made = rule(batch, values=batch["value"])
    np.testing.assert_array_equal(made["returns"][0, :2], [22, 21])
    np.testing.assert_array_equal(made["advantage_mask"][0], [True, True, False])


def test_a_single_step_works():
    batch = {name: array[:, :1] for name, array in steps(terminated=0).items()}
    made = conduit.gae(0.9, 0.9)(batch, values=batch["value"])
    np.testing.assert_array_equal(made["advantages"], [[1.0]])


def test_tensors_give_tensors_without_gradients():
    batch = {name: torch.from_numpy(array) for name, array in steps(terminated=2).items()}
    values = batch["value"].double().requires_grad_()
    for rule in (conduit.gae(), conduit.vtrace()):
        made = rule(batch, values=values)
        assert all(isinstance(tensor, torch.Tensor) and not tensor.requires_grad for tensor in made.values())
    assert conduit.gae()(batch, values=batch["value"].bfloat16())["advantages"].dtype == torch.float32


def test_inputs_of_another_shape_are_refused_by_name():
    batch = steps()
    with pytest.raises(FieldError, match=r"shape \(1, 3\)") as info:
        conduit.gae()(batch, values=np.zeros((1, 2)))
    assert info.value.at == "value"
    with pytest.raises(FieldError, match=r"shape \(1,\)"):
        conduit.gae()(batch, values=batch["value"], bootstrap=np.zeros((1, 3)))


# -- as steps of a loader

SCHEMA = conduit.Schema(
    [
        conduit.Field("obs", "float32", (2,), observation=True),
        conduit.Field("reward", "float32", casting="same_kind"),
        conduit.Field("value", "float32", casting="same_kind"),
    ]
)


@pytest.fixture
def engine(engine_name):
    with conduit.Engine.create(
        engine_name, {"replay": conduit.Table(SCHEMA, 2000, max_length=17, num_envs=3)}
    ) as engine:
        rng = np.random.default_rng(5)
        closing = np.zeros(3, bool)
        with engine.writer("replay", num_envs=3, autoreset="next_step") as writer:  # final observations are rows
            for _ in range(120):
                terminated, truncated = (rng.random((2, 3)) < 0.08) & ~closing
                closing = terminated | truncated
                writer.append(
                    obs=rng.normal(size=(3, 2)).astype(np.float32),
                    reward=rng.normal(size=3),
                    value=rng.normal(size=3),
                    terminated=terminated,
                    truncated=truncated,
                )
        yield engine


def poisoned(loader):
    for buffer in loader._ring.buffers:
        for array in buffer.arrays.values():
            array.view(np.uint8)[...] = POISON
    return loader


WINDOWS = [
    conduit.Rollout(16, 3, stride=1),
    conduit.Sequence(10),
    conduit.Sequence(10, across=True),
    conduit.Episode(17),
]


def parts(batch):
    arrays = {name: np.asarray(array) for name, array in batch.items()}
    shape = arrays["reward"].shape
    lengths = arrays.get("lengths", np.full(shape[0], shape[1]))
    for column in np.ndindex(shape[0], *shape[2:]):
        at = (column[0], slice(None), *column[1:])
        names = {"reward": "reward", "values": "value"}
        names |= {name: name for name in ("terminated", "truncated", "mask", "is_first")}
        yield at, {new: arrays[old][at] for new, old in names.items()} | {"length": lengths[column[0]]}


@pytest.mark.parametrize(
    "window", WINDOWS, ids=lambda window: f"{type(window).__name__}{getattr(window, 'across', '')}"
)
@pytest.mark.parametrize("form", ["torch", "numpy"])
def test_a_loader_adds_what_the_references_say(engine, window, form):
    rules = (conduit.gae(0.9, 0.8), conduit.returns_to_go(0.7))
    loader = poisoned(engine.loader("replay", batch_size=8, window=window, format=form, batch_transforms=rules))
    batch = loader.next()
    none = {"bootstrap": None, "final_values": None}
    for at, part in parts(batch):
        advantages, returns, used = reference.advantages(part, none, 0.9, 0.8)
        np.testing.assert_allclose(np.asarray(batch["advantages"])[at], advantages, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(np.asarray(batch["returns"])[at], returns, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(np.asarray(batch["advantage_mask"])[at], used)
        wanted = reference.rewards_to_come(part, 0.7)
        np.testing.assert_allclose(np.asarray(batch["returns_to_go"])[at], wanted, rtol=1e-5, atol=1e-5)


def test_a_truncated_step_bootstraps_from_the_row_of_its_final_observation(engine):
    loader = engine.loader(
        "replay",
        batch_size=32,
        window=conduit.Rollout(16, 3, stride=1),
        format="numpy",
        batch_transforms=(conduit.gae(0.9, 0.8),),
    )
    batch = loader.next()
    cut = batch["truncated"][:, :-1] & ~batch["terminated"][:, :-1]
    assert cut.sum() > 20
    assert not batch["mask"][:, 1:][cut].any()
    wanted = batch["reward"][:, :-1][cut] + 0.9 * batch["value"][:, 1:][cut]
    np.testing.assert_allclose(batch["returns"][:, :-1][cut], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [*WINDOWS, None], ids=lambda window: type(window).__name__)
def test_normalized_advantages_have_mean_0_and_deviation_1(engine, window):
    rules = (conduit.normalize_advantages(name="reward"),)
    plain = engine.loader("replay", batch_size=16, window=window, format="numpy").next()
    batch = engine.loader("replay", batch_size=16, window=window, format="numpy", batch_transforms=rules).next()
    mask = plain["mask"] if "mask" in plain else np.ones(16, bool)
    wanted = reference.standardised(plain["reward"], mask, 1e-8)
    np.testing.assert_allclose(batch["reward"], wanted, rtol=1e-5, atol=1e-6)
    assert batch["reward"][mask].mean() == pytest.approx(0, abs=1e-6)


@given(values=hnp.arrays(np.float32, st.integers(1, 30), elements=st.floats(-100, 100, width=32)), data=st.data())
def test_normalizing_leaves_out_what_is_masked(values, data):
    mask = data.draw(hnp.arrays(bool, values.shape))
    array = values.copy()
    conduit.normalize_advantages(eps=1e-3).run({"advantages": array, "advantage_mask": mask}, {}, (0, 0))
    np.testing.assert_allclose(array, reference.standardised(values, mask, 1e-3), rtol=1e-4, atol=1e-3)
    np.testing.assert_array_equal(array[~mask], values[~mask])


def add_values(batch):
    batch["critic"] = batch["obs"].sum(-1)
    batch["last"] = batch["critic"][:, -1] * 0 + 2
    return batch


def drop_everything(batch):
    return {"reward": batch["reward"]}


def test_a_function_can_make_what_later_steps_need(engine):
    rules = (conduit.apply(add_values), conduit.gae(0.9, 0.8, values="critic", bootstrap="last"))
    for form in ("torch", "numpy"):
        loader = engine.loader(
            "replay", batch_size=8, window=conduit.Rollout(8, 3, stride=1), format=form, batch_transforms=rules
        )
        batch = loader.next()
        alone = conduit.gae(0.9, 0.8)(batch, values=batch["critic"], bootstrap=batch["last"])
        for name, array in alone.items():
            np.testing.assert_array_equal(np.asarray(batch[name]), np.asarray(array))
        assert np.asarray(batch["advantage_mask"]).any()


def test_a_batch_holds_what_the_last_function_returned(engine):
    batch = engine.loader("replay", batch_size=8, batch_transforms=(conduit.apply(drop_everything),)).next()
    assert list(batch) == ["reward"]


def fail(batch):
    raise RuntimeError("mine")


def give_nothing(batch):
    return None


def test_an_error_of_a_function_passes_its_batch_over_and_takes_no_buffer_away(engine):
    loader = engine.loader("replay", batch_size=8, batch_transforms=conduit.apply(fail), buffers=2)
    for _ in range(5):
        with pytest.raises(RuntimeError, match="mine"):
            loader.next()
    assert loader.sampler.batch == 5
    with pytest.raises(FieldError, match="give_nothing"):
        engine.loader("replay", batch_size=8, batch_transforms=(conduit.apply(give_nothing),)).next()


def test_buffers_of_transformed_batches_are_used_again(engine):
    rules = (conduit.gae(), conduit.normalize_advantages(), conduit.apply(add_values))
    loader = engine.loader(
        "replay", batch_size=4, window=conduit.Rollout(8, 3, stride=1), buffers=2, batch_transforms=rules
    )
    kept = loader.next()["advantages"].clone()
    for _ in range(10):
        batch = loader.next()
    assert not torch.equal(kept, batch["advantages"])


def test_missing_values_inside_a_batch_are_named(engine):
    rules = (conduit.apply(add_values), conduit.gae(values="critics"))
    loader = engine.loader("replay", batch_size=4, window=conduit.Rollout(8, 3, stride=1), batch_transforms=rules)
    with pytest.raises(FieldError, match="critics"):
        loader.next()


ROLLOUT = conduit.Rollout(8, 3)
REFUSED = [
    ("transitions", None, (conduit.gae(),), "consecutive steps"),
    ("no-values", ROLLOUT, (conduit.gae(values="v"),), r"\['v'\]"),
    ("twice", ROLLOUT, (conduit.gae(), conduit.vtrace()), "'advantages'"),
    ("no-advantages", ROLLOUT, (conduit.normalize_advantages(),), "'advantages'"),
    ("vectors", ROLLOUT, (conduit.gae(values="obs"),), "scalars"),
    ("no-step", ROLLOUT, (print,), "batch_transforms"),
    ("field-step", ROLLOUT, (conduit.clip(0, 1),), "Clip"),
]


@pytest.mark.parametrize(
    ("window", "rules", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_steps_that_cannot_work_are_refused_when_the_loader_is_opened(engine, window, rules, message):
    with pytest.raises(ConfigError, match=message):
        engine.loader("replay", batch_size=4, window=window, batch_transforms=rules)


def test_steps_need_the_flags_that_fields_leaves_out(engine):
    with pytest.raises(ConfigError, match="'is_first'"):
        engine.loader(
            "replay", batch_size=4, window=ROLLOUT, fields=["reward", "value"], batch_transforms=(conduit.gae(),)
        )


@pytest.mark.parametrize(
    "make",
    [
        lambda: conduit.gae(1.1),
        lambda: conduit.gae(0.9, -0.1),
        lambda: conduit.vtrace(0.9, rho_bar=0.0),
        lambda: conduit.vtrace(0.9, c_bar=2.0),
        lambda: conduit.returns_to_go(2.0),
        lambda: conduit.normalize_advantages(eps=-1.0),
        lambda: conduit.apply(lambda batch: batch),
        lambda: conduit.apply(3),
    ],
)
def test_bad_options_are_refused(make):
    with pytest.raises(ConfigError):
        make()


def test_fingerprints_tell_steps_and_functions_apart():
    plan = make_plan(SCHEMA, 4, ROLLOUT)
    rules = [
        (),
        (conduit.gae(0.9),),
        (conduit.gae(0.8),),
        (conduit.vtrace(0.9),),
        (conduit.apply(add_values),),
        (conduit.apply(drop_everything),),
        (conduit.gae(), conduit.normalize_advantages()),
    ]
    plans = [with_batch_transforms(plan, rule) for rule in rules]
    assert len({plan.fingerprint for plan in plans}) == len(rules)
    for plan in plans:
        assert pickle.loads(pickle.dumps(plan)).fingerprint == plan.fingerprint
