"""The README's and the docs' Python blocks are programs, and each of them runs.

A block whose fence reads `python no-run` shows a fragment and is left out.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced Python block and the line on which its code starts."""

    page: str
    line: int
    code: str


def blocks_of(text: str, page: str) -> list[Block]:
    """The blocks of a page that are to be run, each under its own line number so that tracebacks point into the page."""
    return [
        Block(page, line := text.count("\n", 0, found.start("body")) + 1, "\n" * (line - 1) + found["body"])
        for found in FENCE.finditer(text)
        if found["info"].split() == ["python"]
    ]


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [block for page in PAGES for block in blocks_of(page.read_text(), str(page.relative_to(ROOT)))]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"{block.page}:{block.line}")
def test_a_block_runs_as_a_program(block, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(block.code)
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-W", "error", program],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"{block.page}, block at line {block.line}:\n{done.stdout}{done.stderr}"
    assert done.stderr == ""


def test_the_readme_has_a_program():
    assert any(block.page == "README.md" for block in BLOCKS)


def test_only_blocks_fenced_as_python_are_run():
    text = "x\n```python\na\n```\n```python no-run\nb\n```\n```sh\nc\n```\n```\nd\n```\n"
    assert blocks_of(text, "page") == [Block("page", 3, "\n\na\n")]
