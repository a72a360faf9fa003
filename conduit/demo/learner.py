"""The learner: the demo's main process. It owns the engine, trains on what the loader delivers and publishes weights.

Both sides pace each other. Actors take a fixed number of steps with each version (`conduit.demo.actor`). The learner publishes the next
version after a fixed number of updates, but not before every live actor has acted with the last version. So the number of updates per row
is the same on any machine. Both sides run at the same time, and the time that the learner waits is measured.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any, Self

import numpy as np

import conduit
from conduit.demo.agent import Agent, one_thread
from conduit.demo.crew import Crew
from conduit.demo.display import Display, View
from conduit.demo.network import Evaluation, empty, environments
from conduit.demo.record import DemoResult, History, Sample, Scored
from conduit.demo.settings import POLICY, SOLVED_AT, TABLE, Settings

_SAMPLE_EVERY = 0.2
_ATTENTION = 0.1


class Interrupt:
    """While active, SIGINT, SIGTERM and SIGHUP only set `asked`, so a run ends between two updates and never within one.

    A signal that was ignored before (nohup) stays ignored. Outside the main thread signals cannot be handled, and nothing
    is changed.
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self.asked = True

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            heeded = [number for number in self._SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._handle) for number in heeded}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class Learner:
    """One run.

    Args:
        name: Engine name.
        settings: Hyperparameters.
        seed: Of weights, environments, exploration and batches.
        limit: Seconds after which it gives up.
        display: Shows what happens.
        interrupt: Looked at between updates.

    Attributes:
        history: What happened so far.
    """

    def __init__(
        self, name: str, settings: Settings, seed: int, limit: float, display: Display, interrupt: Interrupt
    ) -> None:
        self.history = History()
        self._name = name
        self._settings = settings
        self._seed = seed
        self._limit = limit
        self._display = display
        self._interrupt = interrupt
        self._crew: Crew
        self._loader: conduit.Loader
        self._begun = time.monotonic()
        self._sampled = 0.0
        self._solved = False
        self._rows = 0
        self._updates = 0
        self._version = 0
        self._waited_for_actors = 0.0
        self._delivering = 0.0

    def run(self) -> DemoResult:
        """Train until solved, interrupted or out of time; every process and the segment are gone afterwards.

        Raises:
            ConduitError: The engine cannot be made, or an actor cannot be started.
        """
        settings = self._settings
        envs = environments(1)
        spaces = envs.single_observation_space, envs.single_action_space
        envs.close()
        inputs, outputs = int(spaces[0].shape[0]), int(spaces[1].n)
        schema = conduit.Schema.from_spaces(*spaces)
        with (
            conduit.Engine.create(
                self._name,
                tables={TABLE: conduit.Table.replay(schema, capacity=settings.capacity)},
                policies={POLICY: empty(inputs, settings.hidden, outputs)},
            ) as engine,
            Crew(self._name, settings, self._seed, self._display.note) as self._crew,
        ):
            self._display.show(self._view())
            # Actors start while this process imports torch.
            agent = Agent(inputs, outputs, settings, self._seed)
            policy = engine.policy(POLICY)
            self._version = policy.publish(agent.state_dict())
            with one_thread(), engine.loader(TABLE, batch_size=settings.batch_size, seed=self._seed) as self._loader:
                while not self._over and not all(actor.version for actor in self._crew.actors):
                    self._listen(_ATTENTION)
                if not self._over:
                    self.history.trained_from = self._seconds
                    self._train(agent, policy)
                self._sample()
                self._display.show(self._view())
                return self._result()

    def _train(self, agent: Agent, policy: conduit.typing.PolicySlot) -> None:
        settings = self._settings
        evaluation = Evaluation(settings.evaluation_episodes)
        evaluated = 0
        while not self._over:
            for _ in range(settings.updates_per_version):
                begun = time.perf_counter()
                batch = self._loader.next()
                self._delivering += time.perf_counter() - begun
                agent.update(batch)
                self._updates += 1
            self._wait_for_actors()
            self._version = policy.publish(agent.state_dict())
            if self._updates - evaluated >= settings.evaluate_every:
                evaluated = self._updates
                self._evaluate(agent, evaluation)
        evaluation.close()

    def _evaluate(self, agent: Agent, evaluation: Evaluation) -> None:
        """Evaluate; the run is solved when a second evaluation, from other starts, reaches the bar as well."""
        for attempt in range(2):
            (start,) = np.random.SeedSequence((self._seed, self._updates, attempt)).generate_state(1)
            score = evaluation(agent.arrays(), int(start))
            self.history.evaluations.append(Scored(self._seconds, self._rows, score))
            if score < SOLVED_AT:
                return
        self._solved = True

    def _wait_for_actors(self) -> None:
        """Wait until every live actor has acted with the newest version; it is counted as waiting for experience."""
        self._listen(0.0)
        while not self._crew.done_with(self._version) and not self._over:
            begun = time.perf_counter()
            self._listen(_ATTENTION)
            self._crew.stop_waiting_for(self._version)
            self._waited_for_actors += time.perf_counter() - begun

    def _listen(self, timeout: float) -> None:
        """Take in what actors report, waiting up to `timeout` seconds for something, and show it now and then."""
        restarts = self._crew.restarts
        for report in self._crew.poll(timeout):
            self._rows += report.rows
            for score in report.returns:
                self.history.finish_episode(self._seconds, self._rows, score)
        self.history.restarts += [self._seconds] * (self._crew.restarts - restarts)
        if self._seconds - self._sampled >= _SAMPLE_EVERY:
            self._sample()
            self._display.show(self._view())

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._begun

    @property
    def _over(self) -> bool:
        return self._solved or self._interrupt.asked or self._seconds >= self._limit

    @property
    def _batch_microseconds(self) -> float | None:
        return self._delivering / self._updates * 1e6 if self._updates else None

    def _sample(self) -> None:
        self._sampled = self._seconds
        in_loader = self._loader.stats.waited_s
        waited, delivering = self._waited_for_actors + in_loader, self._delivering - in_loader
        self.history.samples.append(Sample(self._sampled, self._rows, self._updates, waited, delivering))

    def _view(self) -> View:
        history = self.history
        rows_per_s, batches_per_s = history.rates()
        return View(
            engine=self._name,
            seed=self._seed,
            seconds=self._seconds,
            limit=self._limit,
            training=history.trained_from is not None,
            rows=self._rows,
            episodes=len(history.episodes),
            updates=self._updates,
            version=self._version,
            rows_per_s=rows_per_s,
            batches_per_s=batches_per_s,
            batch_microseconds=self._batch_microseconds,
            waited_share=history.waited_share(),
            recent_return=history.recent_return,
            evaluations=[one.score for one in history.evaluations],
            actors=self._crew.actors,
        )

    def _result(self) -> DemoResult:
        history, seconds = self.history, self._seconds
        startup = seconds if history.trained_from is None else history.trained_from
        training = max(seconds - startup, 1e-9)
        first = next((one for one in history.samples if one.seconds >= startup), history.samples[-1])
        scores = [one.score for one in history.evaluations]
        return DemoResult(
            solved=self._solved,
            interrupted=self._interrupt.asked and not self._solved,
            seed=self._seed,
            evaluation=scores[-1] if scores else None,
            best_evaluation=max(scores, default=None),
            seconds=seconds,
            startup_seconds=startup,
            rows=self._rows,
            episodes=len(history.episodes),
            updates=self._updates,
            versions=self._version,
            rows_per_s=(self._rows - first.rows) / training,
            batches_per_s=self._updates / training,
            waited_share=history.waited_share(),
            batch_microseconds=self._batch_microseconds,
            restarts=self._crew.restarts,
        )
