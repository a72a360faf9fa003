"""The types of the public API as type checkers see them."""

import json
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


def run(checker, *options):
    pytest.importorskip(checker)
    return subprocess.run(
        [sys.executable, "-m", checker, *options, str(API)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )


def test_mypy_reveals_the_types_and_reports_the_errors_that_the_api_promises():
    done = run("mypy", "--no-error-summary", "--no-pretty", "--hide-error-context")
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


def test_pyright_reveals_the_same_types_and_reports_errors_on_the_same_lines():
    done = run("pyright", "--outputjson", "--pythonpath", sys.executable)
    said = {}
    for one in json.loads(done.stdout)["generalDiagnostics"]:
        revealed = re.match(r'Type of ".*" is "(.*)"$', one["message"], re.DOTALL)
        fact = ("is", revealed[1]) if revealed else (one["severity"],)
        said.setdefault(one["range"]["start"]["line"] + 1, set()).add(fact)
    wanted = {
        # it names a class without its module, and has rules of its own
        number: {("is", re.sub(r"\b[a-z_]+\.", "", one[1])) if one[0] == "is" else ("error",) for one in facts}
        for number, facts in expected().items()
    }
    assert said == wanted


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "conduit" / "py.typed").exists()
