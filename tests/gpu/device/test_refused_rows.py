"""A stored row that a transform cannot take, in batches for a device: as on the CPU."""

import numpy as np
import pytest

import conduit
from conduit.errors import FieldError


def test_the_error_names_row_field_and_value_and_the_loader_goes_on(engine_name, device):
    schema = conduit.Schema(
        [conduit.Field("obs", "float32", (3,), observation=True), conduit.Field("reward", "float32")]
    )
    table = conduit.Table(schema, 400, statistics=("obs",))
    with conduit.Engine.create(engine_name, {"t": table}) as engine:
        with engine.writer("t") as writer:
            for t in range(40):
                writer.append(obs=np.full(3, np.nan if t == 7 else t, np.float32), reward=float(t))
        options = {"batch_size": 256, "min_rows": 1, "transform": {"obs": conduit.normalize(update=True)}}
        with engine.loader("t", device=device, **options) as loader:
            with pytest.raises(FieldError, match=r"got nan in .* the next call draws another batch") as caught:
                loader.next()
            assert caught.value.at == "obs"
            assert engine.table("t").statistics.read("obs").count == 0
            assert engine.table("t").delete([caught.value.row_id]) == 1
            # an observation is that of the row before as well, which the update leaves alone
            rewards = loader.next()["reward"].cpu().tolist()
            assert 7 not in rewards
            assert engine.table("t").statistics.read("obs").count == 256
