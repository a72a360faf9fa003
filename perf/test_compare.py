"""Two trees side by side: the throw-away worktree, the refusal of red tests, and a ratio of one tree with itself."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from perf import compare
from perf.peers.cases import CASES
from perf.peers.driver import PEERS, Process
from perf.peers.setup import FOLDER

IN_GIT = (
    subprocess.run(["git", "rev-parse", "HEAD"], cwd=compare.ROOT, capture_output=True, check=False).returncode == 0
)
needs_git = pytest.mark.skipif(not IN_GIT, reason="this tree is no git clone")


def worktrees():
    return compare._git(compare.ROOT, "worktree", "list").stdout


@needs_git
def test_a_worktree_has_the_bases_package_and_this_trees_perf_and_is_gone_afterwards():
    before = worktrees()
    with compare.worktree("HEAD") as tree:
        assert (tree / "conduit" / "__init__.py").exists()
        assert (tree / "perf" / "compare.py").read_text() == Path(compare.__file__).read_text()
        assert str(tree) in worktrees()
    assert not tree.exists()
    assert worktrees() == before


@needs_git
def test_an_unknown_commit_is_refused(capsys):
    assert compare.main(["no-such-commit"]) == 2
    assert "expected a commit" in capsys.readouterr().err


def test_a_red_tree_is_refused(tmp_path):
    (tmp_path / "test_red.py").write_text("def test_red():\n    assert 1 == 2\n")
    with pytest.raises(compare.Red, match="1 == 2"):
        compare.check(tmp_path, ("test_red.py",))
    (tmp_path / "test_green.py").write_text("def test_green():\n    pass\n")
    compare.check(tmp_path, ("test_green.py", "test_that_it_does_not_have.py"))


def test_a_tree_is_about_as_fast_as_itself():
    with Process(PEERS["conduit"], FOLDER) as this, Process(PEERS["conduit"], FOLDER) as base:
        found = compare.measure(CASES["small-batch"], {"this": this, "base": base}, 7, 0.01, 1 << 12)
    # a neighbour on the machine may take a third of one side's time
    assert 0.5 < found["sample"].median < 2.0
