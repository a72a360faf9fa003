"""What the actors of `test_launch.py` do, in a module that their processes can import."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import conduit

PATIENCE = 60.0


def say(folder, actor, **facts):
    """Leave facts where the test finds them: one file for each attempt of an actor, there as a whole or not at all."""
    path = Path(folder) / f"{actor.index}-{actor.attempt}"
    path.with_suffix(".new").write_text(json.dumps({"pid": os.getpid(), **facts}))
    path.with_suffix(".new").rename(path)


def tell(actor, folder, *rest, word=None):
    say(
        folder,
        actor,
        index=actor.index,
        count=actor.count,
        rest=rest,
        word=word,
        threads=os.environ.get("OMP_NUM_THREADS"),
    )
    print("actor", actor.index, "says", word)


def die(actor, folder, ways, times):
    """Die the way that stands at its index, so many times; then wait to be stopped."""
    way = ways[actor.index]
    if actor.attempt < times and way != "live":
        if way == "raise":
            raise ValueError(f"no luck in attempt {actor.attempt}")
        if way == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if way == "exit":
            os._exit(7)
        sys.exit("enough")
    say(folder, actor)
    assert actor.wait(PATIENCE)


def linger(actor, folder, ways):
    """Do not return by itself: what that takes stands at its index."""
    way = ways[actor.index]
    if way == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if way == "once deaf":
        straight = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, straight))
    helper = subprocess.Popen(["sleep", "100"]) if way == "helped" else None
    say(folder, actor, helper=helper.pid if helper else None)
    if way == "polite":
        actor.wait(PATIENCE)
        say(folder, conduit.Actor(actor.index, actor.count, 100), stopping=actor.stopping)
        return
    try:
        if way == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if way == "helped":
            actor.wait(PATIENCE)
            return
        while True:
            time.sleep(PATIENCE)
    finally:
        say(folder, conduit.Actor(actor.index, actor.count, 100), left=True)


def put(actor, queue, pipe):
    """Use multiprocessing's things; the first attempt dies with its ends open."""
    if actor.attempt == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    queue.put(actor.index)
    pipe.send(actor.attempt)
    pipe.close()


def nest(actor, folder):
    with conduit.launch(linger, 1, args=(Path(folder) / "inner", ["polite"])) as inner:
        say(folder, actor)
        actor.wait(PATIENCE)
        assert inner.running == 1


def write(actor, engine, rows):
    """Write rows; the first attempt is killed inside its next row, the second raises."""
    with conduit.attach(engine, timeout=PATIENCE) as client, client.writer("replay") as writer:
        for t in range(rows):
            writer.append(obs=np.full(2, t, np.float32), action=actor.attempt, reward=0.0)
        with writer.step() as row:
            row.obs[:] = -1
            if actor.attempt == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("the environment is gone")


def wait_for_weights(actor, folder, engine):
    """Wait where only weights would end it; afterwards, one of the two fails in its own way."""
    try:
        with conduit.attach(engine) as client:
            say(folder, actor)
            client.policy("policy").wait(None)
    finally:
        if actor.index == 1:
            raise OSError("the log is full")
