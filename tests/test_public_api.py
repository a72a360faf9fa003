"""The public names, what each has, and how it is called: a change here is a change for users, and goes into CHANGELOG.md."""

import ast
import inspect
from pathlib import Path

import pytest

import conduit
from conduit.store.format import table_spec

ROOT = Path(__file__).resolve().parents[1]

NAMES = {  # what programs construct and call, and the types that most of them name
    "Actor",
    "Batch",
    "BatchTransform",
    "Client",
    "CommitEvery",
    "Computed",
    "Contents",
    "Delivery",
    "Engine",
    "Episode",
    "Field",
    "Ingestion",
    "Limits",
    "Loader",
    "MinSize",
    "Priorities",
    "Prioritized",
    "Rollout",
    "SampleToInsertRatio",
    "Schema",
    "Sequence",
    "Shuffled",
    "Table",
    "Transition",
    "Writer",
    "__version__",
    "apply",
    "attach",
    "cast",
    "clip",
    "errors",
    "gae",
    "hindsight",
    "launch",
    "normalize",
    "normalize_advantages",
    "one_hot",
    "random_shift",
    "returns_to_go",
    "scale",
    "sequence_priority",
    "typing",
    "vtrace",
}

TYPES = {  # of conduit.typing: what calls return
    "ActorStatus",
    "Actors",
    "Claim",
    "Consumer",
    "ConsumerStats",
    "Counts",
    "Dataset",
    "Episodes",
    "EpochLoader",
    "LoaderStats",
    "MixedLoader",
    "Moments",
    "Plan",
    "PolicySlot",
    "RateLimiter",
    "Restored",
    "RolloutView",
    "Scan",
    "Statistics",
    "StepView",
    "Steps",
    "TableHandle",
    "Transform",
    "UncheckedView",
    "Weights",
}

MEMBERS = {
    "Actor": "attempt count index seed stopping wait",
    "Actors": "abort check close failures join kill running status",
    "Batch": "clone episodes get ids items keys nest release reward_names steps to values versions",
    "BatchTransform": "bound check_device extended outputs run run_on_device",
    "Claim": (
        "ack batch bootstrap complete delivered_before episodes finals first_tick get give_back ids is_first "
        "items keys mask nest num_envs steps stream ticks values versions"
    ),
    "Client": ("checkpoint close consumer dataset loader mixed_loader name policy recover table tables writer"),
    "CommitEvery": "publish_every",
    "Consumer": "close next poll stats",
    "Counts": "deleted evicted granted inserted reserved sampled size",
    "Delivery": "close next",
    "Engine": (
        "adopt checkpoint close consumer create dataset loader mixed_loader name policy recover restore restored table tables "
        "writer"
    ),
    "EpochLoader": "beta close epoch load_state_dict next sampler state_dict stats update_priorities valid",
    "Episode": "max_length next_obs",
    "Episodes": "mean_length mean_return returns",
    "Field": "casting dtype item_bytes itemsize max_length name numpy_dtype observation ragged reward row_bytes shape",
    "Ingestion": "publish_every",
    "Limits": "max_diff min_diff min_size samples_per_insert",
    "Loader": "beta close next sampler stats update_priorities valid",
    "MinSize": "limits min_size",
    "MixedLoader": "batch beta bounds close next stats update_priorities valid",
    "Moments": "count mean variance",
    "PolicySlot": "close name poll publish version wait",
    "Priorities": "alpha eps scale span unit",
    "Prioritized": "beta normalize stratified",
    "RateLimiter": "change counts explain limits",
    "Rollout": "next_obs num_envs stride ticks",
    "SampleToInsertRatio": "error_buffer limits min_size samples_per_insert",
    "Scan": "",
    "Schema": (
        "difference fields fingerprint flatten flatten_observation from_document from_example from_json "
        "from_spaces names nest observation_names ragged_names renamed reward_names row_bytes to_document to_json"
    ),
    "Sequence": "across burn_in length next_obs overlap pad",
    "Shuffled": "drop_last epochs",
    "Statistics": "fields read stamp update",
    "Steps": "columns episodes finals numbers part places starts terminated truncated",
    "Table": (
        "capacity kind limiter max_length max_n_step max_stack max_times_sampled mean_episode mean_lengths num_envs "
        "page_rows priorities queue replay rollout_length schema statistics within_episodes writers"
    ),
    "TableHandle": (
        "capacity counts delete episodes freeze kind limiter name nbytes reset rows sampleable scan schema statistics thaw"
    ),
    "Transform": "check_source dtype factor high is_affine is_cast is_clipped low offset",
    "Transition": "gamma n_step newest padding stack",
    "Weights": "arrays state_dict version",
    "Writer": "append close cut extend flush rollout step stream ticks_left unchecked version",
    "ActorStatus": "attempt index pid state",
    "ConsumerStats": "acknowledged claims delivered_before dropped given_back refused rows waited_s",
    "LoaderStats": "allocated batches redrawn rows stale waited_s",
    "Plan": "added adds batch_size batchwise computed fingerprint goals lone_return names outputs ragged reach returns reward_names sample_bytes window",
    "Restored": "created_ns extra loaders path skipped tables",
    "RolloutView": "abort bootstrap commit number set_final ticks",
    "StepView": "begin leave number reserve set_final",
    "UncheckedView": "close commit number row rows set_final",
    "Contents": "arrays is_open need need_steps reward reward_names window",
    "Computed": "dtype lanes name",
}

CALLS = {
    "attach": "name timeout=0.0 *on_owner_exit='raise'",
    "cast": "dtype",
    "scale": "factor *offset=0.0 *dtype='float32'",
    "Field": "name dtype shape=() observation=False casting='no' ragged=False reward=False",
    "Schema": "fields",
    "Schema.from_spaces": "observation_space action_space reward='float32'",
    "Schema.from_example": "example observation=None reward=None",
    "Table": (
        "schema capacity page_rows=None max_stack=1 max_n_step=1 max_length=1 num_envs=1 priorities=None "
        "statistics=() kind='replay' mean_lengths=None rollout_length=None limiter=None max_times_sampled=None "
        "writers=None mean_episode=None within_episodes=False"
    ),
    "Table.queue": (
        "schema capacity *rollout_length=None *page_rows=None *num_envs=1 *statistics=() *mean_lengths=None "
        "*writers=None *mean_episode=None"
    ),
    "Table.replay": (
        "schema capacity *max_stack=1 *max_n_step=1 *max_length=1 *priorities=None *limiter=None "
        "*max_times_sampled=None *within_episodes=False *page_rows=None *num_envs=1 *statistics=() *mean_lengths=None "
        "*writers=None *mean_episode=None"
    ),
    "Engine.create": "name tables *policies=None *backing='shm' *max_participants=128 *exist_ok=False *replace=False",
    "Engine.adopt": "name",
    "Engine.restore": "path name=None *limiter=None *backing='shm' *max_participants=None *progress=None *exist_ok=False "
    "*replace=False",
    "Client.checkpoint": "path *keep=2 *extra=None *progress=None",
    "Client.writer": (
        "table *num_envs=None *autoreset=None *policy=None *schema=None *timeout=10.0 *on_full='wait' "
        "*keep_final=True *statistics=False *ingestion=None *placement=None"
    ),
    "Client.loader": (
        "table *batch_size *window=None *fields=None *rename=None *ragged='pad' *transform=None *batch_transforms=() "
        "*sampling=None *seed=None *name=None *shard=None *min_rows=None *max_staleness=None *policy=None "
        "*format='torch' *buffers=3 *on_busy='allocate' *timeout=30.0 *device='cpu' *pool=None"
    ),
    "Client.consumer": (
        "table *format='torch' *timeout=30.0 *partial='deliver' *transform=None *batch_transforms=() *rename=None "
        "*on_refused='raise'"
    ),
    "Client.mixed_loader": (
        "tables *batch_size *counts='exact' *window=None *fields=None *rename=None *ragged='pad' *transform=None "
        "*batch_transforms=() *sampling=None *seed=None *name=None *min_rows=None *max_staleness=None *policy=None "
        "*format='torch' *buffers=3 *on_busy='allocate' *timeout=30.0"
    ),
    "Client.policy": "name='policy'",
    "Client.table": "name",
    "TableHandle.delete": "ids",
    "TableHandle.episodes": "*since=None *last=None",
    "TableHandle.sampleable": "window=None",
    "MixedLoader.next": "timeout=None",
    "MixedLoader.update_priorities": "batch priorities",
    "MixedLoader.valid": "batch",
    "Writer.extend": "columns *terminated=None *truncated=None *places=() *finals=None",
    "CommitEvery": "ticks",
    "Consumer.next": "timeout=None max_ticks=None",
    "Consumer.poll": "max_ticks=None",
    "Writer.append": "*terminated=False *truncated=False *final=None *priority=None *bootstrap=None **fields",
    "Writer.rollout": "ticks *max_finals=None",
    "Loader.next": "timeout=None",
    "Loader.valid": "ids",
    "PolicySlot.publish": "state_dict",
    "Ingestion.publish_every": "table num_envs",
    "Delivery.next": "timeout=None",
    "apply": "function",
    "clip": "low=None high=None",
    "gae": "gamma=0.99 lam=0.95 *values='value' *reward=None *bootstrap=None *final_values=None",
    "hindsight": (
        "function *goal='obs.desired_goal' *achieved='obs.achieved_goal' *reward=None *strategy='future' "
        "*ratio=0.8 *outcome='next' *max_length=None"
    ),
    "launch": (
        "function count *args=() *kwargs=None *restarts=3 *per=60.0 *grace=5.0 *env=None *stdout=None *stderr=None *on_death=None"
    ),
    "normalize": "*eps=1e-08 *update=False *dtype='float32'",
    "normalize_advantages": "*eps=1e-08 *name='advantages'",
    "one_hot": "n *start=0 *dtype='float32'",
    "returns_to_go": "gamma=1.0 *reward=None",
    "sequence_priority": "errors mask=None eta=0.9",
    "vtrace": (
        "gamma=0.99 *lam=1.0 *rho_bar=1.0 *c_bar=1.0 *pg_rho_bar=1.0 *values='value' *reward=None "
        "*log_ratios=None *bootstrap=None *final_values=None"
    ),
    "Transition": "n_step=1 gamma=0.99 stack=1 padding='repeat' newest='wait'",
    "Sequence": "length burn_in=0 overlap=None across=False pad=True next_obs=False",
    "Episode": "max_length next_obs=False",
    "Rollout": "ticks num_envs stride=None next_obs=False",
    "Prioritized": "beta=0.4 normalize='batch' stratified=True",
    "Shuffled": "epochs=None drop_last=False",
    "Priorities": "alpha=0.6 eps=1e-06 span=131072 scale=1.0",
    "Loader.update_priorities": "ids priorities",
    "Limits": "samples_per_insert min_size min_diff max_diff",
    "MinSize": "min_size",
    "RateLimiter.change": "limiter",
    "RateLimiter.explain": "samples=1 rows=1",
    "SampleToInsertRatio": "samples_per_insert min_size error_buffer",
}


def public(name):
    return getattr(conduit if name in NAMES else conduit.typing, name)


def test_the_public_names_are_these():
    assert set(conduit.__all__) == NAMES
    assert len(NAMES) < 45
    assert {name for name in vars(conduit) if not name.startswith("_")} - NAMES <= {
        # submodules appear as attributes once they are imported; none of them is public but `errors` and `typing`
        path.stem
        for path in (ROOT / "conduit").iterdir()
    }


def test_the_types_for_annotations_are_these_and_no_name_has_two_places():
    assert set(conduit.typing.__all__) == TYPES
    assert not TYPES & NAMES
    assert all(inspect.isclass(public(name)) and public(name).__name__ == name for name in TYPES)
    with pytest.raises(AttributeError, match="no attribute 'Dataloader'"):
        _ = conduit.typing.Dataloader


def test_every_public_name_is_re_exported_under_its_own_name_and_listed_in_order():
    tree = ast.parse((ROOT / "conduit" / "__init__.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            assert all(alias.asname == alias.name for alias in node.names), ast.unparse(node)
    assert conduit.__all__ == sorted(conduit.__all__)
    assert conduit.typing.__all__ == sorted(conduit.typing.__all__)
    assert set(MEMBERS) == {name for name in NAMES if inspect.isclass(getattr(conduit, name))} | TYPES - {"Dataset"}


@pytest.mark.parametrize("name", MEMBERS)
def test_a_public_class_has_these_members_and_no_others(name):
    kind = public(name)
    members = {member for member in dir(kind) if not member.startswith("_")}
    assert sorted(members) == sorted(MEMBERS[name].split())


@pytest.mark.parametrize("path", CALLS)
def test_a_public_call_takes_these_arguments(path):
    first, *parts = path.split(".")
    call = public(first)
    for part in parts:
        call = getattr(call, part)
    found = []
    for parameter in inspect.signature(call).parameters.values():
        if parameter.name == "self":
            continue
        mark = {parameter.KEYWORD_ONLY: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        found.append(f"{mark}{parameter.name}{default}")
    assert found == CALLS[path].split()


@pytest.mark.parametrize(
    ("call", "options"),
    [(conduit.Table.replay, table_spec.ReplayOptions), (conduit.Table.queue, table_spec.QueueOptions)],
    ids=["replay", "queue"],
)
def test_a_kind_of_table_takes_its_options_as_the_class_types_them_and_no_others(call, options):
    taken = inspect.signature(call).parameters
    assert taken.keys() == {"schema", "capacity", *options.__annotations__}
    for name, kind in options.__annotations__.items():
        assert kind.__forward_arg__ == conduit.Table.__annotations__[name] == taken[name].annotation
    schema = conduit.Schema([conduit.Field("obs", "float32")])
    other = "rollout_length" if options is table_spec.ReplayOptions else "within_episodes"
    for name in ("kind", other):
        with pytest.raises(TypeError, match=rf"unexpected keyword argument '{name}'"):
            call(schema, 100, **{name: getattr(conduit.Table.replay(schema, 100), name)})


@pytest.mark.parametrize("name", sorted((NAMES | TYPES) - {"__version__", "errors", "typing"}))
def test_everything_public_is_documented(name):
    item = public(name)
    assert item.__doc__
    assert item.__module__.startswith("conduit.")
    for member in MEMBERS.get(name, "").split():
        value = inspect.getattr_static(item, member)
        if callable(value) or isinstance(value, property | classmethod | staticmethod):
            assert inspect.getdoc(getattr(item, member)), f"{name}.{member}"


def test_the_generated_append_has_the_schema_s_fields_as_its_arguments(engine_name):
    schema = conduit.Schema([conduit.Field("obs", "float32", (4,), True), conduit.Field("action", "int64")])
    with conduit.Engine.create(engine_name, {"t": conduit.Table(schema, 100)}) as engine:
        writer = engine.writer("t")
        assert isinstance(writer, conduit.Writer)
        names = [p.name for p in inspect.signature(writer.append).parameters.values() if not p.name.startswith("_")]
        assert names == ["obs", "action", "terminated", "truncated", "final", "priority"]
        assert writer.append.__doc__
    tables = {"t": conduit.Table.queue(schema, 100, rollout_length=4)}
    with conduit.Engine.create(engine_name, tables) as engine:
        append = engine.writer("t").append
        names = [p.name for p in inspect.signature(append).parameters.values() if not p.name.startswith("_")]
        assert names == ["obs", "action", "terminated", "truncated", "final", "priority", "bootstrap"]


def test_the_version_is_the_distribution_s():
    text = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{conduit.__version__}"' in text
