"""The adapter by itself, and driven by the load reporter, the store and the budget of the released tokenspeed 0.1.1."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq

from loadbox.engines.tokenspeed import MailboxLoadStore, MailboxSink, group_of, with_mailbox
from loadbox.mailbox import MailboxReader, MailboxWriter, RankState
from loadbox.piggyback import BatchTokenIDOutSlim, MsgpackSendSocket, decode_batch

PEER = Path(__file__).with_name("tokenspeed_peer.py")


class Sink:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def observe(self, values: Any) -> None:
        self.seen.append(values)

    def close(self) -> None:
        self.seen.append("closed")


def test_it_publishes_and_passes_on(group: str) -> None:
    then = Sink()
    sink = MailboxSink(group, 1, 2, then=then)
    assert sink.load() == (0, 0, 0, 0), "no snapshot before the first observation"
    with MailboxReader(group, 1) as reader:
        assert reader.state() is RankState.SILENT
        sink.observe((3, 2, 40, 70, 100))
        assert reader.read() == sink.load() == (3, 2, 40, 100)
        sink.close()
    assert then.seen == [(3, 2, 40, 70, 100), "closed"]
    assert not os.path.exists(f"/dev/shm/loadbox.{group}.1")


def test_it_feeds_the_piggyback(group: str) -> None:
    """One observation for both: the mailbox and the tail of the next batch say the same."""
    heard = []
    with zmq.Context() as context, context.socket(zmq.PULL) as pull, context.socket(zmq.PUSH) as push:
        push.connect(f"tcp://127.0.0.1:{pull.bind_to_random_port('tcp://127.0.0.1')}")
        pull.rcvtimeo = 20_000
        send = MsgpackSendSocket(push, engine_index=3)
        sink = MailboxSink(group, 3)
        send.load_fn = sink.load
        with MailboxReader(group, 3) as reader:
            for values in (None, (3, 2, 40, 70, 100), (0, 0, 0, 70, 100)):
                if values:
                    sink.observe(values)
                send.send_pyobj(BatchTokenIDOutSlim(["a"], [[1]], [""], [1], [1], [0], [[]], [[]], 0))
                heard.append((decode_batch(pull.recv()).load, reader.read()))
        sink.close()
        send.close()
    assert heard == [(None, None), ((3, 2, 40, 100), (3, 2, 40, 100)), ((0, 0, 0, 100), (0, 0, 0, 100))]


@pytest.mark.parametrize("values", [(), (1, 2, 3), None, 5, (1, 2, 9, 9, 3), (-1, 0, 0, 0, 1), ("a", 0, 0, 0, 1)], ids=repr)
def test_values_that_no_reporter_gives(group: str, values: Any) -> None:
    then = Sink()
    sink = MailboxSink(group, 0, then=then)
    with MailboxReader(group, 0) as reader:
        sink.observe((1, 2, 3, 3, 4))
        sink.observe(values)
        assert reader.read() == (1, 2, 3, 4)
    assert (sink.publisher.published, sink.publisher.dropped, then.seen[-1]) == (1, 1, values)
    sink.load()
    sink.close()


def test_an_engine_without_a_mailbox_has_its_own_sink(group: str) -> None:
    then = Sink()
    with MailboxWriter(group, 0):
        sink = MailboxSink(group, 0, then=then)
        sink.observe((1, 2, 3, 3, 4))
        assert (sink.publisher.dropped, then.seen, sink.load()) == (1, [(1, 2, 3, 3, 4)], (1, 2, 3, 4))
        sink.close()


def test_ranks_that_do_not_report_have_none(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADBOX_GROUP", group)
    sink = Sink()
    assert with_mailbox(sink, "tcp://127.0.0.1:1", 0, enabled=False) is sink
    assert not os.path.exists(f"/dev/shm/loadbox.{group}.0")


@pytest.mark.parametrize("endpoint", [None, 5, ""], ids=repr)
def test_an_endpoint_that_names_no_group_is_not_the_engines_trouble(
    endpoint: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("LOADBOX_GROUP", raising=False)
    then = Sink()
    sink: Any = with_mailbox(then, endpoint, 0, enabled=True)
    sink.observe((1, 2, 3, 3, 4))
    sink.close()
    assert (sink.publisher.dropped, then.seen) == (1, [(1, 2, 3, 3, 4), "closed"])
    assert len(caplog.records) == 1


def test_the_files_mode(group: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("LOADBOX_GROUP", group)
    for mode in ({}, {"mode": 0o640}, {"mode": 0o644}):
        sink = with_mailbox(Sink(), "ipc:///tmp/x", 0, enabled=True, **mode)
        assert os.stat(f"/dev/shm/loadbox.{group}.0").st_mode & 0o7777 == mode.get("mode", 0o600)
        sink.close()
    assert not caplog.records
    then = Sink()
    sink = with_mailbox(then, "ipc:///tmp/x", 0, enabled=True, mode=0o666)
    sink.observe((1, 2, 3, 3, 4))
    sink.close()
    assert then.seen == [(1, 2, 3, 3, 4), "closed"]
    assert ["mode 0o666 is not allowed" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize(
    ("endpoint", "group"),
    [
        ("tcp://127.0.0.1:5004", "tokenspeed-127-0-0-1-5004"),
        ("tcp://[fd00::1]:5004", "tokenspeed-fd00-1-5004"),
        ("ipc:///tmp/a b", "tokenspeed-tmp-a-b"),
        ("tcp://" + 40 * "long." + "example:5004", "tokenspeed-" + (40 * "long-" + "example-5004")[-53:].strip("-")),
    ],
)
def test_a_group_is_made_of_the_endpoint(endpoint: str, group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOADBOX_GROUP", raising=False)
    assert group_of(endpoint) == group
    with MailboxReader(group, 0) as reader:
        assert reader.name == f"/loadbox.{group}.0"
    monkeypatch.setenv("LOADBOX_GROUP", "mine")
    assert group_of(endpoint) == "mine"


def test_nothing_is_taken_from_messages(group: str) -> None:
    with MailboxLoadStore(group, 1) as store:
        assert store.accept(object()) is False
        assert not store.is_complete_fresh()


@pytest.fixture
def theirs() -> Callable[..., str]:
    """Runs a script beside the real modules."""
    folder = os.path.abspath(os.environ.get("LOADBOX_TOKENSPEED", "none"))
    if not os.path.isdir(os.path.join(folder, "tokenspeed")):
        pytest.skip("tokenspeed 0.1.1 is not unpacked in $LOADBOX_TOKENSPEED; `make tokenspeed` does it")

    def run(script: str, *arguments: str, **env: str) -> str:
        done = subprocess.run(
            [sys.executable, str(PEER), folder, textwrap.dedent(script), *arguments],
            env={**os.environ, **env}, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.slow
def test_its_reporter_drives_our_sink(group: str, theirs: Callable[..., str]) -> None:
    """With the one line that the documentation gives, put where its sinks are made, in each of its modes."""
    out = theirs(
        """
        import inspect, sys, time
        from loadbox.mailbox import MailboxReader, MailboxWriter
        import loadbox.engines.tokenspeed

        source = inspect.getsource(load_snapshot.create_load_reporter)
        before = "    return LoadReporter("
        assert source.count(before) == 1
        line = "    publisher = loadbox.engines.tokenspeed.with_mailbox(publisher, endpoint, dp_rank, enabled=enabled)\\n"
        assert line.strip() in loadbox.engines.tokenspeed.__doc__
        load_snapshot.loadbox = loadbox
        exec(source.replace(before, line + before), load_snapshot.__dict__)

        group = sys.argv[1]
        tail = []
        stats = {"num_queue_reqs": 0, "num_active_pages": 0, "num_cached_pages": 0}

        def make(rank, *, enabled=True, direct=False):
            return load_snapshot.create_load_reporter(
                enabled=enabled, direct_setter=(lambda *load: tail.append(load)) if direct else None,
                endpoint="ipc:///tmp/" + group, dp_rank=rank, heartbeat_interval=1.0, num_total_pages=100,
                sample_stats=lambda: stats,
            )

        for rank, direct in ((0, False), (1, True)):
            reporter = make(rank, direct=direct)
            with MailboxReader(group, rank, liveness_interval=0) as reader:
                assert reader.state().name == "SILENT"
                for i in range(300):
                    stats.update(num_queue_reqs=i % 7, num_active_pages=i % 50, num_cached_pages=i % 40)
                    if i % 3:
                        reporter.observe(stats, i % 5)
                    else:
                        reporter.sample_and_observe(i % 5)
                    assert reader.read() == (i % 5, i % 7, i % 50, 100)
                    if direct:
                        assert tail[-1] == reader.read()
                with MailboxWriter(group, 9) as other:  # another server's
                    reporter.close()
                assert reader.state().name in ("CLOSED", "ABSENT"), reader.state()
        silent = make(2, enabled=False)
        silent.observe(stats, 1)
        silent.sample_and_observe(1)
        with MailboxReader(group, 2) as reader:
            print(reader.state().name)
        silent.close()
        """,
        group,
        LOADBOX_GROUP=group,
    )
    assert out == "ABSENT\n"


@pytest.mark.slow
def test_our_store_answers_as_theirs(group: str, theirs: Callable[..., str]) -> None:
    """The same loads, sent to its store and published to ours."""
    out = theirs(
        """
        import random, sys, time
        from loadbox.engines.tokenspeed import MailboxLoadStore, MailboxSink

        group = sys.argv[1]
        draw = random.Random(7)
        now = [0.0]
        real = load_snapshot.LoadSnapshotStore(3, clock=lambda: now[0])
        sinks = [MailboxSink(group, rank, 3) for rank in range(3)]
        ours = MailboxLoadStore(group, 3)
        fields = ("dp_rank", "num_running_reqs", "num_waiting_reqs", "num_active_pages", "num_used_pages", "max_total_pages")

        def same():
            assert ours.is_complete_fresh() == real.is_complete_fresh()
            assert ours.project_loads() == real.project_loads()
            mine, its = ([[getattr(one, field) for field in fields] for one in store.fresh_snapshots()] for store in (ours, real))
            assert mine == its, (mine, its)

        same()
        for i in range(300):
            rank = draw.randrange(3)
            active = draw.randrange(50)
            values = (draw.randrange(9), draw.randrange(9), active, active, 100)
            sinks[rank].observe(values)
            assert real.accept(io_struct.LoadSnapshot(f"epoch{rank}", i, rank, *values, 1000))
            same()
        epochs = {one.dp_rank: (one.epoch, one.sequence) for one in ours.fresh_snapshots()}
        assert len({epoch for epoch, _ in epochs.values()}) == 3
        assert len(real.project_loads()) == 3

        sinks[1].close()  # dead at once, where its own store waits for the time limit
        assert not ours.is_complete_fresh() and ours.project_loads() == []
        assert [one.dp_rank for one in ours.fresh_snapshots()] == [0, 2]
        sinks[1] = MailboxSink(group, 1, 3)
        assert not ours.is_complete_fresh()  # SILENT: unknown is not idle
        sinks[1].observe((0, 0, 0, 0, 100))
        end = time.monotonic() + 20
        while not ours.is_complete_fresh():  # a mailbox that was made anew is looked for every 0.1 s
            assert time.monotonic() < end
        print(len(ours.project_loads()))
        for sink in sinks:
            sink.close()
        ours.close()
        """,
        group,
    )
    assert out == "3\n"


@pytest.mark.slow
def test_its_controller_needs_no_message(group: str, theirs: Callable[..., str]) -> None:
    """Its own ``budget_scheduler`` and budget, asked before every dispatch, follow the mailboxes."""
    out = theirs(
        """
        import sys, time, types
        from loadbox.engines.tokenspeed import MailboxLoadStore, MailboxSink

        group = sys.argv[1]
        sent = []
        budget = controller.DPBudget(controller.LoadBalanceMethod.SHORTEST_QUEUE)
        its = types.SimpleNamespace(
            dp_budget=budget,
            load_snapshot_store=MailboxLoadStore(group, 2, budget=budget),
            workers=[types.SimpleNamespace(send_pyobj=lambda req, rank=rank: sent.append(rank)) for rank in range(2)],
            round_robin_scheduler=lambda req: sent.append("round robin"),
        )

        def fresh(n):
            "The mailboxes are looked for every 0.1 s; waits until so many are fresh."
            end = time.monotonic() + 20
            while len(its.load_snapshot_store.fresh_snapshots()) != n:
                assert time.monotonic() < end

        def dispatch(n=1):
            del sent[:]
            for _ in range(n):
                controller.DataParallelController.budget_scheduler(its, None)
            return list(sent)

        assert dispatch() == ["round robin"]  # no rank has reported
        busy, idle = MailboxSink(group, 0, 2), MailboxSink(group, 1, 2)
        busy.observe((4, 2, 50, 50, 100))
        fresh(1)
        assert dispatch() == ["round robin"]  # one has not
        idle.observe((0, 0, 0, 0, 100))
        fresh(2)
        assert dispatch(6) == [1] * 6  # up to level
        assert dispatch() == ["round robin"]  # level
        idle.observe((3, 3, 60, 60, 100))  # the six have arrived
        busy.observe((0, 0, 0, 0, 100))
        assert dispatch(2) == [0, 0]  # and the loads have swapped
        idle.close()
        assert dispatch() == ["round robin"]
        busy.observe((2, 0, 10, 10, 100))
        idle = MailboxSink(group, 1, 2)
        idle.observe((0, 0, 0, 0, 100))
        fresh(2)
        print(dispatch())
        busy.close(), idle.close()
        """,
        group,
    )
    assert out == "[1]\n"


@pytest.mark.slow
@pytest.mark.parametrize("came_and_went", [True, False], ids=["came and went", "on its way"])
def test_a_reservation_lasts_until_its_request_is_there(group: str, theirs: Callable[..., str], came_and_went: bool) -> None:
    """Its budget takes a reservation back when a rank's requests have grown.  Looked at only before a dispatch, a request that was
    done before the next one never made them grow; a rank would keep the reservation for ever and be shunned for it."""
    out = theirs(
        """
        import sys, types
        import loadbox.engines.tokenspeed as adapter

        group, came_and_went = sys.argv[1], sys.argv[2] == "True"
        if came_and_went:
            adapter._ARRIVED_NS = 0
        sent = []
        budget = controller.DPBudget(controller.LoadBalanceMethod.SHORTEST_QUEUE)
        store = adapter.MailboxLoadStore(group, 2, budget=budget)
        its = types.SimpleNamespace(
            dp_budget=budget,
            load_snapshot_store=store,
            workers=[types.SimpleNamespace(send_pyobj=lambda req, rank=rank: sent.append(rank)) for rank in range(2)],
            round_robin_scheduler=lambda req: sent.append("round robin"),
        )
        busy, idle = adapter.MailboxSink(group, 0, 2), adapter.MailboxSink(group, 1, 2)
        busy.observe((3, 0, 50, 50, 100))
        idle.observe((0, 0, 0, 0, 100))
        while len(store.fresh_snapshots()) != 2:
            pass
        for _ in range(12):
            controller.DataParallelController.budget_scheduler(its, None)
            if came_and_went:
                busy.observe((3, 0, 50, 50, 100))
                idle.observe((1, 0, 1, 1, 100))
                idle.observe((0, 0, 0, 0, 100))
        print(sent.count(1), sent.count("round robin"), budget.reservations)
        if came_and_went:  # pinned ones, too, which are booked without a look before
            for _ in range(3):
                budget.dispatch(pinned_rank=0)
            for seen in ({0: 2, 1: 0}, {0: 2, 1: 0}):
                assert store.is_complete_fresh()
                assert budget.reservations == seen, budget.reservations
            busy.observe((3, 0, 50, 50, 100))
            assert store.is_complete_fresh()
            print(budget.reservations)
        for one in (busy, idle, store):
            one.close()
        """,
        group,
        str(came_and_went),
    )
    assert out == ("12 0 {0: 0, 1: 1}\n{0: 0, 1: 0}\n" if came_and_went else "3 9 {0: 0, 1: 3}\n")


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 1], ids=["plain", "overlapped"])
def test_its_event_loop_says_what_runs_before_it_runs(group: str, theirs: Callable[..., str], depth: int) -> None:
    """Its own loop, reporter and cadence; the C++ scheduler, the device and the requests are stood in for."""
    out = theirs(
        """
        import contextlib, inspect, random, sys, threading, types
        from collections import deque
        from loadbox.mailbox import MailboxReader
        import loadbox.engines.tokenspeed

        source = inspect.getsource(load_snapshot.create_load_reporter)
        before = "    return LoadReporter("
        line = "    publisher = loadbox.engines.tokenspeed.with_mailbox(publisher, endpoint, dp_rank, enabled=enabled)\\n"
        load_snapshot.loadbox = loadbox
        exec(source.replace(before, line + before), load_snapshot.__dict__)
        event_loop.create_load_reporter = load_snapshot.create_load_reporter
        event_loop.advance_scheduler = lambda scheduler, changes: scheduler.advance(changes)
        event_loop.maybe_control_plane_guard = contextlib.nullcontext
        event_loop.PlannedForward = types.SimpleNamespace
        draw = random.Random(7)

        class Scheduler:
            "Requests of so many steps, one page each, four at a time."
            def __init__(self): self.waiting, self.running = deque(), {}
            def waiting_size(self): return len(self.waiting)
            def active_lcm_blocks(self): return len(self.running)
            def empty_lcm_blocks(self): return 100 - len(self.running) - 7
            def advance(self, finished):
                for rid in finished: del self.running[rid]
            def next_execution_plan(self):
                while self.waiting and len(self.running) < 4:
                    rid, steps = self.waiting.popleft()
                    self.running[rid] = steps
                op = types.SimpleNamespace(request_ids=list(self.running), input_lengths=[1] * len(self.running))
                return types.SimpleNamespace(forward=[op])

        class Loop(event_loop.EventLoop):
            def __init__(self, depth):
                self.in_flight_depth, self.rounds, self.forwards, self.frozen, self.idle = depth, 0, 0, 0, 0
                self.dp_rank, self.attn_tp_rank, self.has_dp = 1, 0, False
                self._request_history_rows = None
                self._uses_eager_grammar = False
                self.server_args = types.SimpleNamespace(
                    zmq_msgpack=False, load_watch_interval=1.0, enable_log_request_stats=False,
                    mapping=types.SimpleNamespace(has_pp=False, rank=0),
                )
                self.port_args = types.SimpleNamespace(metrics_ipc_name="ipc:///tmp/" + sys.argv[1])
                self._scheduler_cache_geometry = types.SimpleNamespace(num_usable_pages=100)
                self.model_config = types.SimpleNamespace(is_multimodal_active=False)
                self.shutdown_event = threading.Event()
                self.output_processor = types.SimpleNamespace(rid_to_state={})
                self.scheduler = Scheduler()
                self._pause = types.SimpleNamespace(forward_blocked=False, maybe_finish_drain=self.end_of_round)
                self._cache_hooks = types.SimpleNamespace(poll_ready_events=list, count_plan_ops=lambda plan: None)
                self._l3_hooks = types.SimpleNamespace(
                    revalidate_queued_hits=lambda: None, prepare_forward=lambda plan, op: (op, []),
                )
                self._pd_hooks = types.SimpleNamespace(poll_transfer_events=list)
                self._device = types.SimpleNamespace(execute=self.execute)
                self._init_load_reporter()

            def __getattr__(self, name):
                return lookalike

            def _gather_sampling_params(self, op): return []
            def _gather_grammar_state(self, op): return None
            def _record_scheduler_iteration_metrics(self, stats, tokens): pass
            def _publish_scheduler_kv_events(self): pass

            def truth(self):
                return (self._num_running(), self.scheduler.waiting_size(), self.scheduler.active_lcm_blocks(), 100)

            def _process_new_requests(self):
                self.rounds += 1
                self._pause.forward_blocked = self.rounds % 50 > 45
                for _ in range(draw.randrange(3) if self.rounds % 100 < 60 else 0):
                    rid = f"r{self.rounds}.{len(self.output_processor.rid_to_state)}"
                    self.scheduler.waiting.append((rid, draw.randrange(1, 4)))
                    self.output_processor.rid_to_state[rid] = None
                if self.rounds == 499:  # long idle, and frozen
                    self.shutdown_event.set()

            def execute(self, plan, planned, **_):
                assert reader.read() == self.truth(), (reader.read(), self.truth())  # while it runs, this is what frontends see
                if planned is None:
                    self.idle += 1
                    return None
                self.forwards += 1
                return planned

            def _commit_forward_results(self, op, pending):
                finished = []
                for rid in op.request_ids:
                    if rid not in self.output_processor.rid_to_state: continue  # overlapped: it ended a step ago
                    self.scheduler.running[rid] -= 1
                    if self.scheduler.running[rid] == 0:
                        finished.append(rid)
                        del self.output_processor.rid_to_state[rid]
                return finished

            def end_of_round(self, scheduler):
                if self._pause.forward_blocked:
                    self.frozen += 1
                    assert reader.read() == self.truth()

        class Lookalike:
            def __getattr__(self, name): return self
            def __call__(self, *_, **__): return self
            def __bool__(self): return False

        lookalike = Lookalike()
        with MailboxReader(sys.argv[1], 1, liveness_interval=0) as reader:
            loop = Loop(int(sys.argv[2]))
            assert reader.state().name == "SILENT"
            loop.event_loop()
            assert loop.forwards > 200 and loop.idle > 20 and loop.frozen == 40, (loop.forwards, loop.idle, loop.frozen)
            assert reader.read() == loop.truth() == (0, 0, 0, 100), (reader.read(), loop.truth())
            loop.load_reporter.close()
            print(reader.state().name in ("CLOSED", "ABSENT"))
        """,
        group,
        str(depth),
        LOADBOX_GROUP=group,
    )
    assert out == "True\n"
