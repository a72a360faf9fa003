"""The types of the public API as mypy sees them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
API = Path(__file__).with_name("api.py")


def expected():
    """{line: what mypy must say there}."""
    found = {}
    for number, line in enumerate(API.read_text().splitlines(), 1):
        if match := re.search(r"  # (is|error:) (.+)$", line):
            kind = match[1].rstrip(":")
            found[number] = {(kind, match[2])} if kind == "is" else {(kind, code) for code in match[2].split(", ")}
    return found


def test_mypy_reveals_the_types_and_reports_the_errors_that_the_api_promises():
    pytest.importorskip("mypy")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", "--no-pretty", "--hide-error-context", str(API)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert not done.stderr, done.stderr
    said = {}
    for line in done.stdout.splitlines():
        match = re.match(r"tests/typing/api\.py:(\d+): (note|error): (.*)$", line)
        assert match, line
        number, kind, text = int(match[1]), match[2], match[3]
        if revealed := re.match(r'Revealed type is "(.*)"$', text):
            said.setdefault(number, set()).add(("is", re.sub(r"builtins\.|typing\.|\?", "", revealed[1])))
        elif kind == "error":
            said.setdefault(number, set()).add(("error", re.search(r"\[([a-z-]+)\]$", text)[1]))
    assert said == expected()


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "conduit" / "py.typed").exists()
