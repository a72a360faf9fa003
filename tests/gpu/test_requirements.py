"""What is said where Triton is missing or too old."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROBE = """
import sys

sys.path.insert(0, sys.argv[1])
if len(sys.argv) > 2:
    sys.modules["triton"] = None
from conduit.errors import MissingExtra

try:
    import conduit.kernels.gpu.gather
except MissingExtra as error:
    print(error)
"""


def said(*arguments):
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_triton_the_error_names_the_extra(tmp_path):
    text = said(str(tmp_path), "none")
    assert text == "The GPU kernels need Triton 3.6 or newer: pip install 'conduit-rl[gpu]'\n"


@pytest.mark.parametrize("version", ["2.3.1", "3.5.9+git1"])
def test_a_triton_that_is_too_old_is_named(tmp_path, version):
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text(f"__version__ = {version!r}\n")
    assert f"need Triton 3.6 or newer, got {version}: pip install" in said(str(tmp_path))
