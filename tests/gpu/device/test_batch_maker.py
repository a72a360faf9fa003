"""A device's batch maker: a batch that was made early, drawn again and patched is the batch that is made then."""

import numpy as np
import pytest

from conduit.kernels.spec.make_plan import make_plan
from conduit.plane.device.batch_maker import DeviceMaker
from conduit.sampling.uniform import Uniform
from tests.gpu.device.conftest import SCHEMA, Source

SIZE, SEED = 40, 5


def maker_of(engine, device, pool):
    view = engine._views["replay"]
    plan = make_plan(SCHEMA, SIZE, fields=["obs", "next_obs", "action", "terminated"])
    return DeviceMaker(view, plan, Uniform(SEED, view.layout.pages), SEED, device=device, pool=pool)


def sent(maker, buffer):
    batch = maker.batch(buffer, maker.sampler.batch)
    return {"ids": batch.ids.cpu().numpy(), **{name: value.cpu().numpy() for name, value in batch.items()}}


def begin(maker, number):
    maker.sampler.batch = number
    maker.prepare(number)


@pytest.mark.parametrize(
    ("pool", "more"),
    # registered pages are leased, so no writer could overwrite them
    [(None, 10), ("1 MiB", 10), ("1 MiB", 60), ("1 MiB", 700)],
    ids=["registered, some rows more", "some rows more", "two pages overwritten", "all overwritten"],
)
def test_a_batch_made_early_and_patched_is_the_one_made_then(make, device, pool, more):
    engine = make()
    source = Source(engine)(300)
    early, late = maker_of(engine, device, pool), maker_of(engine, device, pool)
    begin(early, 2)
    buffer = early.open_buffer()
    assert early.fill(buffer)
    before = early.drawn(buffer)
    source(more)
    begin(early, 2)
    assert early.draw(buffer)
    slots = before.differing(early.drawn(buffer))
    assert len(slots) == SIZE if more == 700 else len(slots) > 0
    assert early.gather(buffer, slots)
    begin(late, 2)
    wanted = late.open_buffer()
    assert late.fill(wanted)
    found, whole = sent(early, buffer), sent(late, wanted)
    for name, array in whole.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    for maker in (early, late):
        maker.close()
