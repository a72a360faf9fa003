"""Makes the peers' virtual environments: `python -m perf.peers.setup [NAME ...] [--folder .peers]`.

One environment per library, pinned, with a CPU build of torch where one is asked for. What does not install is told and left
out; the others go on. An environment that is complete is left as it is. About 14 GB in all, of which TorchRL's torch is 5 where it is a CUDA build.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

from perf.peers.driver import PEERS, ROOT, Peer

FOLDER = ROOT / ".peers"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


def python_for(peer: Peer) -> str | None:
    """The interpreter to make an environment with; None if this machine has none of the version."""
    if not peer.python or peer.python == ".".join(map(str, sys.version_info[:2])):
        return sys.executable
    found = shutil.which(f"python{peer.python}")
    if found is None:
        return None
    works = subprocess.run([found, "-c", "import venv"], capture_output=True, check=False)
    return found if works.returncode == 0 else None


def make(peer: Peer, folder: Path, *, cpu_index: bool) -> str | None:
    """Makes one environment; returns why it failed, or None."""
    place = folder / peer.folder
    if (place / "done").exists():
        return None
    python = python_for(peer)
    if python is None:
        return f"needs Python {peer.python}, which is not on this machine"
    shutil.rmtree(place, ignore_errors=True)
    subprocess.run([python, "-m", "venv", str(place)], check=True)
    pip = [str(place / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    if cpu_index and any(one.startswith("torch==") for one in peer.requirements):
        pip += ["--extra-index-url", TORCH_INDEX]
    log = place / "install.log"
    with log.open("wb") as out:
        done = subprocess.run([*pip, *peer.requirements], stdout=out, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        why = reason(log.read_text(errors="replace"))
        (place / "failed").write_text(why + "\n")
        shutil.rmtree(place / "lib", ignore_errors=True)
        (place / "bin" / "python").unlink(missing_ok=True)
        return why
    (place / "failed").unlink(missing_ok=True)
    (place / "done").touch()
    return None


def reason(log: str) -> str:
    """The line of pip's output that says most: the exception of a build, else the last error."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception): ", line)]
    errors = [line for line in lines if line.lower().startswith("error")]
    if raised and any("urlopen" in line for line in raised):
        return f"its build downloads files of its own ({raised[-1]})"
    return (raised or errors or lines or ["no output"])[-1]


def main(arguments: list[str] | None = None) -> int:
    """Makes the environments named, or all; 1 if one failed."""
    folders = {peer.folder: peer for peer in PEERS.values() if peer.requirements}
    parser = argparse.ArgumentParser(prog="python -m perf.peers.setup", description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="*", help=f"of: {', '.join(folders)}; all without")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument(
        "--cpu-index",
        action="store_true",
        help=f"take torch from {TORCH_INDEX}, where the index would give a CUDA build",
    )
    asked = parser.parse_args(arguments)
    unknown = set(asked.name) - folders.keys()
    if unknown:
        parser.error(f"expected names of {', '.join(folders)}, got {', '.join(sorted(unknown))}")
    asked.folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in asked.name or folders:
        print(f"{name} ...", end=" ", flush=True)
        why = make(folders[name], asked.folder, cpu_index=asked.cpu_index)
        failed += why is not None
        print("ok" if why is None else f"failed: {why}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
