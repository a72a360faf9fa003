"""The layout study's layouts deliver the same rows."""

from __future__ import annotations

import pytest

from perf import layout_study


@pytest.mark.parametrize("row", [layout_study.CARTPOLE, layout_study.STEP_97], ids=["cartpole", "step97"])
def test_every_layout_delivers_the_rows_that_numpy_takes(monkeypatch, row):
    monkeypatch.setattr(layout_study, "TABLE_BYTES", 1 << 20)
    size = sum(c.row_bytes for c in row.columns + layout_study.SYSTEM)
    laid = {
        "fields": layout_study.Laid(row, None, 1),
        "records": layout_study.Laid(row, -(-size // 8) * 8, 1),
        "records 64": layout_study.Laid(row, -(-size // 64) * 64, 1),
    }
    laid["fields, flags in meta"] = laid["fields"]
    result = layout_study.gather_study(row, laid, 256, seconds=0.0)
    assert len(result.costs) == 2 * len(layout_study.LAYOUTS)
    layout_study.write_study(row, laid, 1, seconds=0.0)
    layout_study.write_study(row, laid, 64, seconds=0.0)
