"""Writers, leases, eviction and death against the model, under random operations; every word, row and anchor compared."""

import itertools
import os

import numpy as np
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import conduit
from conduit.errors import Busy, Closed, ConfigError, DataTimeout, FieldError, Overwritten
from conduit.kernels.reference.gather import following_row
from conduit.sampling import uniform
from conduit.sampling.uniform import UNIFORM_PAGES, UNIFORM_SNAPSHOT
from conduit.store.format import words
from tests.plane.model import OPEN, Full, Model

SCHEMA = conduit.Schema(
    [
        conduit.Field("obs", "int64", (), observation=True),
        conduit.Field("pixels", "uint8", (130,), observation=True),  # rows of 256 bytes: padded
        conduit.Field("action", "int32", (2,)),
        conduit.Field("reward", "float32", casting="same_kind"),
    ]
)
RAMP = np.arange(130)
MODES = [
    (None, "disabled", True),
    (None, "disabled", False),
    (None, "next_step", True),
    (2, "next_step", True),
    (2, "same_step", True),
    (2, "same_step", False),
    (1, "disabled", True),
]


def observation(serial):
    serial = np.asarray(serial)
    return {"obs": serial.astype(np.int64), "pixels": ((serial[..., None] + RAMP) % 251).astype(np.uint8)}


def fields(serial):
    serial = np.asarray(serial)
    action = np.stack([serial, -serial], -1).astype(np.int32)
    return {**observation(serial), "action": action, "reward": (serial / 4).astype(np.float32)}


writers = st.integers(0, 3)

# Shrinking runs the whole machine hundreds of times, longer than a test may take; the failing example is printed as it is.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)


class TableMachine(RuleBasedStateMachine):
    numbers = itertools.count()

    @initialize(
        windows=st.sampled_from([(1, 1), (1, 3), (3, 1), (2, 2)]),
        spare=st.integers(0, 7),
        pages=st.integers(4, 6),
        seed=st.integers(0, 3),
        mode=st.sampled_from(MODES),
        reopens=st.booleans(),
    )
    def create(self, windows, spare, pages, seed, mode, reopens):
        stack, n_step = windows
        halo = stack - 1 + n_step
        rows = 2 * (2 * halo + 4) + spare
        # a page holds room for the final observation of its last row
        capacity = (pages - 1) * (rows - halo - 1)
        table = conduit.Table(
            SCHEMA,
            capacity,
            page_rows=rows,
            max_stack=stack,
            max_n_step=n_step,
            max_length=1 if reopens else 2,
            mean_episode=10**9,
        )
        self.name = f"t{os.getpid()}-machine{next(self.numbers)}"
        self.engine = conduit.Engine.create(self.name, {"replay": table}, max_participants=8)
        self.clients = [conduit.attach(self.name), conduit.attach(self.name)]
        self.view = self.engine._views["replay"]
        assert self.view.layout.pages == pages
        self.model = Model(pages, rows, stack - 1, n_step)
        self.model.reopens = reopens
        self.pairs = []
        self.held = []
        self.serial = 0
        self.loader = self.engine.loader("replay", batch_size=16, min_rows=1, format="numpy", timeout=0.0, seed=seed)
        self.sampler = uniform.Uniform(0, pages)
        self.open_writer(mode=mode, client=0, every=1)

    def teardown(self):
        if hasattr(self, "engine"):
            for lease, _ in self.held:
                lease.end()
            for client in self.clients:
                client.close()
            self.engine.close()

    def serials(self, shape):
        count = int(np.prod(shape, dtype=int))
        out = np.arange(self.serial, self.serial + count).reshape(shape)
        self.serial += count
        return out

    # -- writers

    @precondition(lambda self: len(self.open_pairs()) < 4)
    @rule(mode=st.sampled_from(MODES), client=st.integers(0, 1), every=st.sampled_from([1, 1, 1, 3]))
    def open_writer(self, mode, client, every):
        envs, autoreset, keep = mode
        writer = self.clients[client].writer(
            "replay",
            num_envs=envs,
            autoreset=autoreset,
            keep_final=keep,
            on_full="raise",
            ingestion=conduit.CommitEvery(every),
        )
        stream = self.model.open(writer.stream, envs or 1, autoreset, keep, every)
        self.pairs.append((writer, stream, client))

    def open_pairs(self):
        return [pair for pair in self.pairs if pair[1].open]

    def pick(self, number):
        """A writer that is open."""
        pairs = self.open_pairs()
        return pairs[number % len(pairs)][:2]

    def expect(self, error, foreseen, text):
        """An error was to come, and says what it should."""
        assert foreseen, error
        assert text in str(error)

    def ended(self, stream, ends, tick, env):
        """What a writer says of one row: terminated, truncated."""
        number = (ends >> (2 * (tick * stream.envs + env) % 60)) & 7
        return number in (1, 3), number in (2, 3)

    @precondition(open_pairs)
    @rule(
        number=writers,
        form=st.sampled_from(["append", "append", "lists", "step", "unchecked"]),
        ticks=st.integers(1, 12),
        ends=st.integers(0, 2**60),
        handed=st.sampled_from(["array", "objects", "none"]),
        extra=st.booleans(),
        discard=st.booleans(),
    )
    def write(self, number, form, ticks, ends, handed, extra, discard):
        """Ticks in any of the forms, with or without the final observations they should come with."""
        writer, stream = self.pick(number)
        if discard:
            self.discard_step(writer, stream)
        for tick in range(ticks):
            flags = [self.ended(stream, ends, tick, env) for env in range(stream.envs)]
            if handed != "none":
                flags = [pair if stream.may_end(env) else (False, False) for env, pair in enumerate(flags)]
            self.write_tick(writer, stream, form, flags, handed, extra)

    def write_tick(self, writer, stream, form, flags, handed, extra):
        lead = () if writer.num_envs is None else (writer.num_envs,)
        serials = self.serials(stream.envs)
        over = [any(pair) for pair in flags]
        finals = self.serials(stream.envs).tolist() if handed != "none" and stream.explicit else [None] * stream.envs
        reserve = stream.envs if stream.explicit else 0
        refused = stream.strict and any(o and f is None for o, f in zip(over, finals, strict=True))
        refused = refused or any(o and not stream.may_end(env) for env, o in enumerate(over))
        call = {"append": self.append, "lists": self.append_lists, "step": self.step, "unchecked": self.unchecked}[form]
        self.turned_late = False
        try:
            call(writer, stream, serials.reshape(lead), flags, over, finals, handed, extra)
        except Busy:
            try:
                self.model.reserve(stream, stream.envs, reserve)
            except Full:
                return
            raise
        except FieldError as error:
            self.expect(error, refused, "final observation")
            if form in ("step", "unchecked"):  # these must reserve their row before they can be refused
                self.model.reserve(stream, stream.envs, reserve)
            return
        assert not refused
        self.model.reserve(stream, stream.envs, reserve)
        rows = [(s, *f, final) for s, f, final in zip(serials.tolist(), flags, finals, strict=True)]
        self.model.commit(stream, rows)
        if form == "step" and extra:
            staged = [f is not None for f in finals]
            stream.wasted += sum(s and not o for s, o in zip(staged, over, strict=True))
        self.model.after_commit(stream, 1, reserve)
        if form == "unchecked":
            try:
                self.model.reserve(stream, stream.envs, reserve)
                assert not self.turned_late
            except Full:
                assert self.turned_late

    def final_of(self, writer, finals, over, handed):
        if finals[0] is None:
            return None
        if writer.num_envs is None:
            return observation(finals[0])
        if handed == "objects":
            return [observation(f) if o else None for f, o in zip(finals, over, strict=True)]
        return observation(finals)

    def append(self, writer, stream, serials, flags, over, finals, handed, extra):
        ends = np.array(flags) if writer.num_envs is not None else flags[0]
        terminated, truncated = (ends[:, 0].copy(), ends[:, 1].copy()) if writer.num_envs is not None else ends
        final = self.final_of(writer, finals, over, handed)
        writer.append(**fields(serials), terminated=terminated, truncated=truncated, final=final)

    def append_lists(self, writer, stream, serials, flags, over, finals, handed, extra):
        """The exact path: lists and numbers instead of arrays of the right dtype."""
        terminated, truncated = [f[0] for f in flags], [f[1] for f in flags]
        if writer.num_envs is None:
            (terminated,), (truncated,) = terminated, truncated
        values = {name: value.tolist() for name, value in fields(serials).items()}
        final = self.final_of(writer, finals, over, handed)
        writer.append(**values, terminated=terminated, truncated=truncated, final=final)

    def step(self, writer, stream, serials, flags, over, finals, handed, extra):
        with writer.step() as row:
            for name, value in fields(serials).items():
                row[name] = value
            for env, (terminated, truncated) in enumerate(flags):
                row.terminated.reshape(-1)[env] = terminated
                row.truncated.reshape(-1)[env] = truncated
                if finals[env] is not None and (over[env] or extra):
                    row.set_final(env, observation(finals[env]))

    def unchecked(self, writer, stream, serials, flags, over, finals, handed, extra):
        with writer.unchecked() as unchecked:
            row = unchecked.row
            for name, value in fields(serials.reshape(-1)).items():
                column = np.asarray(unchecked[name])
                column[row : row + stream.envs] = value
            for env, (terminated, truncated) in enumerate(flags):
                if terminated:
                    unchecked.terminated[row + env] = True
                if truncated:
                    unchecked.truncated[row + env] = True
                if finals[env] is not None and over[env]:
                    unchecked.set_final(observation(finals[env]), env)
            # the commit also turns the page; when no page is free the tick is committed all the same
            if unchecked.commit() >= unchecked.rows:
                try:
                    assert unchecked.row < 0, "neither refused nor busy"
                except Busy:
                    self.turned_late = True
                assert unchecked.commit() >= unchecked.rows

    @precondition(open_pairs)
    @rule(
        number=writers,
        ticks=st.integers(1, 4),
        ends=st.integers(0, 2**60),
        way=st.sampled_from(["commit", "commit", "commit", "abort", "forget", "twice"]),
        narrow=st.booleans(),
    )
    def rollout(self, number, ticks, ends, way, narrow):
        """Several ticks in place.

        `forget` leaves a final observation out, which is refused where it is insisted on; `twice` ends episodes that are still
        to be closed, which is always refused.
        """
        writer, stream = self.pick(number)
        count = ticks * stream.envs
        tail = 0 if not stream.explicit else 1 if narrow else count
        halo = (self.model.history + self.model.future) * stream.envs * (2 if stream.explicit else 1)
        fits = count + tail + halo <= self.model.rows
        try:
            slab = writer.rollout(ticks, max_finals=tail)
        except ConfigError as error:
            self.expect(error, not fits, f"page_rows={count + tail + halo}")
            return
        except Busy:
            try:
                self.model.reserve(stream, count, tail)
            except Full:
                return
            raise
        assert fits
        self.model.reserve(stream, count, tail)
        lead = (ticks,) if writer.num_envs is None else (ticks, writer.num_envs)
        serials = self.serials(lead)
        for name, value in fields(serials).items():
            slab[name] = value
        rows, lacking, staged, room = [], False, 0, self.model.room(stream) - count
        closing, misplaced = [not stream.may_end(env) for env in range(stream.envs)], False
        for tick in range(ticks):
            rows.append([])
            for env in range(stream.envs):
                terminated, truncated = self.ended(stream, ends, tick, env)
                if closing[env] and way != "twice":
                    terminated = truncated = False
                misplaced = misplaced or (closing[env] and (terminated or truncated))
                closing[env] = not stream.explicit and (terminated or truncated)
                slab.terminated.reshape(ticks, -1)[tick, env] = terminated
                slab.truncated.reshape(ticks, -1)[tick, env] = truncated
                final = None
                if (terminated or truncated) and stream.explicit:
                    if way != "forget":
                        final = int(self.serials(()))
                        staged += 1
                        try:
                            slab.set_final(tick, env, observation(final))
                        except FieldError as error:
                            self.expect(error, room < staged, "raise max_finals")
                            slab.abort()
                            return
                        assert room >= staged
                    lacking = lacking or way == "forget"
                rows[-1].append((int(serials.reshape(ticks, -1)[tick, env]), terminated, truncated, final))
        if way == "abort":
            slab.abort()
            slab.abort()
            return
        if (lacking and stream.strict) or misplaced:
            try:
                slab.commit()
            except FieldError as error:
                self.expect(error, True, "two ends in a row" if misplaced else "set_final")
                slab.abort()
                return
            raise AssertionError("committed an episode's end that is none")
        slab.commit()
        for row in rows:
            self.model.commit(stream, row)
        self.model.after_commit(stream, ticks, stream.envs if stream.explicit else 0)

    def discard_step(self, writer, stream):
        """What is given up leaves nothing behind, flags and final observations least of all."""
        try:
            with writer.step() as row:
                row.terminated[...] = True
                row.obs[...] = -1
                if stream.explicit:
                    row.set_final(0, observation(-1))
                row.action = "nothing that fits"
        except FieldError:
            self.model.reserve(stream, stream.envs, stream.envs if stream.explicit else 0)
        except Busy:
            pass

    @precondition(open_pairs)
    @rule(number=writers, what=st.sampled_from(["dtype", "shape", "missing", "unknown", "flag", "final"]))
    def refuse(self, number, what):
        """A call that brings something wrong changes nothing, not even the page."""
        writer, _ = self.pick(number)
        lead = () if writer.num_envs is None else (writer.num_envs,)
        values = fields(np.zeros(lead, int))
        ends = np.ones(lead, bool)
        given = values | {"terminated": ends, "truncated": ends, "final": observation(np.zeros(lead, int))}
        if what == "dtype":
            given["pixels"] = given["pixels"].astype(np.int16)
        elif what == "shape":
            given["action"] = given["action"][..., :1]
        elif what == "missing":
            del given["reward"]
        elif what == "unknown":
            given["rewards"] = given["reward"]
        elif what == "flag":
            given["truncated"] = ends.astype(np.int8)
        else:
            given["final"] = {"obs": given["final"]["obs"]}
        try:
            writer.append(**given)
        except FieldError:
            return
        raise AssertionError("accepted what is wrong")

    @precondition(open_pairs)
    @rule(number=writers)
    def cut(self, number):
        writer, stream = self.pick(number)
        writer.cut()
        self.model.cut(stream)

    @precondition(open_pairs)
    @rule(number=writers)
    def flush(self, number):
        writer, stream = self.pick(number)
        writer.flush()
        self.model.publish(stream)

    @precondition(open_pairs)
    @rule(number=writers, version=st.integers(0, 2**31 - 1))
    def set_version(self, number, version):
        writer, stream = self.pick(number)
        writer.version = version
        stream.version = version

    @precondition(open_pairs)
    @rule(number=writers)
    def close_writer(self, number):
        writer, stream = self.pick(number)
        writer.close()
        writer.close()
        self.model.close(stream)
        try:
            writer.append(**fields(np.zeros(() if writer.num_envs is None else (writer.num_envs,), int)))
        except Closed:
            return
        raise AssertionError("wrote after close")

    # -- leases and death

    @precondition(lambda self: len(self.held) < 4)
    @rule(client=st.integers(0, 1), page=st.integers(0, 5))
    def take_lease(self, client, page):
        page %= len(self.model.pages)
        model = self.model.pages[page]
        try:
            lease = self.clients[client]._views["replay"].lease(page)
        except Overwritten:
            assert not model.is_live()
            return
        assert model.is_live()
        model.leases += 1
        self.held.append((lease, lease.column("obs").copy()))

    @precondition(lambda self: self.held)
    @rule(number=st.integers(0, 3))
    def end_lease(self, number):
        lease, seen = self.held.pop(number % len(self.held))
        np.testing.assert_array_equal(lease.column("obs"), seen)
        lease.end()
        self.model.pages[lease.page].leases -= 1

    @rule(client=st.integers(0, 1))
    def kill(self, client):
        """A client's process dies: its lock goes, and somebody recovers its pages and leases."""
        view = self.clients[client]._views["replay"]
        self.clients[client]._participants.forget()
        dead = [stream for _, stream, owner in self.pairs if owner == client and stream.open]
        self.model.kill(dead)
        for lease, _ in self.held:
            self.model.pages[lease.page].leases -= lease._table is view
        self.held = [pair for pair in self.held if pair[0]._table is not view]
        self.engine.recover()
        assert self.engine.recover() == 0
        self.clients[client] = conduit.attach(self.name)

    # -- what must hold

    def sut_page(self, number, found, anchors):
        """Compare one page's words and rows; add its anchors to `anchors`."""
        page, view = self.model.pages[number], self.view
        stream = page.stream
        assert stream is not None
        local = (page.end - page.start) * stream.envs
        assert found[words.PAGE_COMMITTED // 8] == local
        assert found[words.PAGE_ENVS // 8] == stream.envs
        assert found[words.PAGE_STREAM // 8] == stream.number
        assert found[words.PAGE_TICK // 8] == page.start
        assert found[words.PAGE_HALO // 8] == (page.own - page.start) * stream.envs
        base = number * self.model.rows
        rows = [row for tick in stream.ticks[page.start : page.end] for row in tick]
        here = slice(base, base + local)
        for name, value in fields(np.array([row.serial for row in rows], int)).items():
            np.testing.assert_array_equal(view.columns[name][here], value)
        meta = view.meta[here]
        for name in ("version", "step", "episode"):
            assert meta[name].tolist() == [getattr(row, name) for row in rows]
        assert view.terminated[here].tolist() == [row.terminated for row in rows]
        assert view.truncated[here].tolist() == [row.truncated for row in rows]
        flags = meta["link"] & words.FLAG_MASK
        assert ((flags & words.FINAL) != 0).tolist() == [row.closing for row in rows]
        assert ((flags & words.FIRST) != 0).tolist() == [row.first for row in rows]
        return base, local

    @invariant()
    def pages_and_rows_are_the_model_s(self):
        if not hasattr(self, "engine"):
            return
        found = self.view.pages()
        for number, page in enumerate(self.model.pages):
            state = int(found[number, 0])
            assert state & words.KIND_MASK == page.state, number
            assert state >> words.GENERATION_SHIFT == page.generation
            if page.is_live():
                self.sut_page(number, found[number], None)
        assert self.view.rows_visible() == self.model.rows_visible()
        assert self.view.rows_evicted == self.model.evicted
        assert self.view.pages_recovered == self.model.recovered

    @invariant()
    def each_transition_is_an_anchor_of_exactly_one_page(self):
        if not hasattr(self, "engine"):
            return
        wanted = {}
        for page, stream, tick, env, following_ in self.model.transitions():
            number = self.model.pages.index(page)
            row = number * self.model.rows + (tick - page.start) * stream.envs + env
            assert (stream.number, tick, env) not in {value[0] for value in wanted.values()}
            wanted[row] = ((stream.number, tick, env), following_)
            # a window of the widest kind lies inside the page, as far as the stream goes
            assert page.start <= max(0, tick - self.model.history)
            assert min(stream.published, tick + self.model.future + 1) <= page.end
        uniform.look(self.sampler.state, self.view.address, self.model.future, 0)
        listed = self.sampler._state[UNIFORM_PAGES // 8]
        assert self.sampler._state[UNIFORM_SNAPSHOT // 8] == self.sampler._snapshot.ctypes.data
        anchors = {}
        for _, page, first, limit, _, envs, _ in self.sampler._snapshot[:listed].tolist():
            model = self.model.pages[page]
            future = self.model.future * envs if model.state == OPEN or model.stream.places[-1][0] is not model else 0
            base = page * self.model.rows
            meta = self.view.meta[base : base + self.model.rows]
            over = model.state != OPEN and model.stream.places[-1][0] is model
            for row in range(first, limit - future):
                after = following_row(row - base, meta, limit - base, over=over)
                if after is not None:
                    anchors[row] = base + after
        assert anchors.keys() == wanted.keys()
        for row, after in anchors.items():
            (_, _, _), (kind, serial) = wanted[row]
            assert self.view.columns["obs"][after] == serial, (row, kind)
            np.testing.assert_array_equal(self.view.columns["pixels"][after], observation(serial)["pixels"])
        self.wanted = wanted

    @rule()
    def sample(self):
        """Batches hold transitions that may be sampled, whole, and nothing else."""
        wanted = {}
        streams = {stream.number: stream for stream in self.model.streams}
        for page, stream, tick, env, following_ in self.model.transitions(need=0):
            number = self.model.pages.index(page)
            local = (tick - page.start) * stream.envs + env
            wanted[(page.generation << 40) | (number * self.model.rows + local)] = (stream, tick, env, following_)
        try:
            batch = self.loader.next()
        except DataTimeout:
            assert not wanted
            return
        assert wanted
        for i, key in enumerate(batch.ids.tolist()):
            stream, tick, env, (_, after) = wanted[key]
            row = streams[stream.number].ticks[tick][env]
            for name, value in fields(row.serial).items():
                np.testing.assert_array_equal(batch[name][i], value)
            for name, value in observation(after).items():
                np.testing.assert_array_equal(batch[f"next_{name}"][i], value)
            assert (batch["terminated"][i], batch["truncated"][i]) == (row.terminated, row.truncated)
            assert batch.versions[i] == row.version
            assert batch.steps[i] == row.step
            assert batch.episodes[i] == (stream.number << 32) | row.episode
        assert self.loader.valid(batch.ids).all()
        batch.release()


TestTable = TableMachine.TestCase
TestTable.settings = settings(settings(), max_examples=60, stateful_step_count=40, phases=PHASES)
