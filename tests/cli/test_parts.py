"""The demo's parts by themselves: policies, a replay's books, the engine's order of things, a mailbox that fails."""

from __future__ import annotations

import logging
from collections import Counter, deque
from functools import partial
from typing import Any

import numpy
import pytest
import zmq

from loadbox.cli.demo import _publish
from loadbox.cli.demo._cost import Cost
from loadbox.cli.demo._engine import Engine
from loadbox.cli.demo._model import ModelConfig, Scheduler
from loadbox.cli.demo._phase import Phase, percentile
from loadbox.cli.demo._policy import TRANSIT_NS, LeastLoad, RoundRobin
from loadbox.cli.demo._publish import LoadPublisher
from loadbox.cli.demo._wire import REFUSED, STOP, AddRequest, Outputs
from loadbox.mailbox import MailboxReader, MailboxWriter, RankState

S = 1_000_000_000


def rows(*loads: tuple[int, int] | None, published_ns: int = 0) -> Any:
    table = numpy.zeros(
        len(loads), [("num_running", "i8"), ("num_waiting", "i8"), ("published_ns", "i8"), ("usable", "?")]
    )  # fmt: skip
    for rank, load in enumerate(loads):
        if load is not None:
            table[rank] = (*load, published_ns, True)
    return table


def test_round_robin_takes_turns_among_those_that_are_left() -> None:
    policy = RoundRobin()
    assert [policy.pick([0, 1, 2], None, 0) for _ in range(4)] == [0, 1, 2, 0]
    assert Counter(policy.pick([0, 2], None, 0) for _ in range(10)) == {0: 5, 2: 5}


def test_least_load_counts_those_who_wait_more_than_those_who_run() -> None:
    assert LeastLoad(3, 0).pick([0, 1, 2], rows((9, 0), (5, 2), (6, 1)), 0) == 0
    assert LeastLoad(3, 0).pick([1, 2], rows((9, 0), (5, 2), (6, 1)), 0) == 2


def test_a_burst_between_two_publishes_is_spread_evenly() -> None:
    policy = LeastLoad(4, 1)
    frozen = rows((10, 0), (10, 0), (10, 0), (10, 0), published_ns=5 * S)
    picks = Counter(policy.pick(range(4), frozen, 5 * S + n) for n in range(64))
    assert set(picks.values()) == {16}


def test_a_dispatch_is_forgotten_once_the_mailbox_must_have_seen_it() -> None:
    policy = LeastLoad(2, 1)
    assert policy.pick([0, 1], rows((0, 0), (1, 0)), S) == 0
    assert policy.pick([0, 1], rows((0, 0), (1, 0), published_ns=S + TRANSIT_NS - 1), S + 1) == 1, "not seen yet"
    policy = LeastLoad(2, 1)
    assert policy.pick([0, 1], rows((0, 0), (1, 0)), S) == 0
    assert policy.pick([0, 1], rows((0, 0), (1, 0), published_ns=S + TRANSIT_NS), S + 1) == 0


def test_unknown_is_not_idle() -> None:
    policy = LeastLoad(3, 1)
    picks = Counter(policy.pick(range(3), rows((50, 9), None, (50, 9), published_ns=0), S) for _ in range(10))
    assert picks[1] == 0
    policy = LeastLoad(3, 1)
    assert Counter(policy.pick(range(3), rows(None, None, None), S) for _ in range(9)) == {0: 3, 1: 3, 2: 3}


def test_the_books_of_a_replay() -> None:
    phase = Phase(RoundRobin(), first_rid=100, total=5, speed_up=10.0)
    for rank in (0, 1, 1, 0):
        phase.dispatched(rank, due=1.0)
    phase.undeliverable()
    phase.outputs(Outputs([100, 101, 7], [None, None, STOP]), now=1.5)
    phase.outputs(Outputs([100, 103], [STOP, REFUSED]), now=2.0)
    phase.rank_gone(1)
    phase.rank_gone(1)
    phase.outputs(Outputs([101, 102, 100], [STOP, STOP, STOP]), now=9.0)
    assert phase.in_flight == 0
    assert phase.ttft == [5.0, 5.0], "in the trace's time, from when it was due; the refused one has none"
    report = phase.report()
    assert (report.sent, report.served, report.lost, report.refused, report.ended) == (5, 1, 3, 1, 5)
    assert (report.ttft_p50, report.done) == (5.0, False)


def test_what_is_in_flight_at_the_end_stays_unanswered() -> None:
    phase = Phase(RoundRobin(), first_rid=0, total=1, speed_up=1.0)
    phase.dispatched(0, due=0.0)
    phase.close()
    assert (phase.report().unanswered, phase.report().done, phase.report().ttft_p99) == (1, True, None)


def test_percentiles_are_nearest_ranks() -> None:
    values = [float(n) for n in range(100, 0, -1)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile([3.0], 0.99), percentile([], 0.5)) == (50, 99, 3, None)


class Lanes:
    """A recv with scripted arrivals (each a list of requests, or None: nothing there) and a send, which note what happens."""

    def __init__(self, log: list[Any], arrivals: list[AddRequest | None]) -> None:
        self.log = log
        self.arrivals = deque(arrivals)

    def recv_pyobj(self, flags: int = 0) -> AddRequest:
        if not self.arrivals:
            if flags & zmq.NOBLOCK:
                raise zmq.Again
            self.log.append("wait")
            raise SystemExit
        request = self.arrivals.popleft()
        if request is None:
            assert flags & zmq.NOBLOCK, "the engine waited although it had work"
            raise zmq.Again
        return request

    def send_pyobj(self, batch: Outputs) -> None:
        self.log.append(("send", batch.rids, batch.finished_reasons))


class Publisher:
    errors = publishes = 0
    cost = Cost()

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def publish(self, *load: int) -> None:
        self.log.append(("publish", *load))


def serve(*arrivals: AddRequest | None) -> list[Any]:
    log: list[Any] = []
    lanes = Lanes(log, list(arrivals))
    config = ModelConfig(token_budget=8, page_tokens=4, kv_pages=8)
    engine = Engine(Scheduler(config), Publisher(log), lanes, lanes, speed_up=1000.0)  # type: ignore[arg-type]
    with pytest.raises(SystemExit):
        engine.run()
    return log


def test_the_engine_publishes_what_is_true_before_it_sends() -> None:
    assert serve(AddRequest(1, 4, 2)) == [
        ("publish", 1, 0, 1, 8),
        ("send", [1], [None]),
        ("publish", 0, 0, 0, 8),  # the finished request is gone, its pages are free
        ("send", [1], [STOP]),
        "wait",  # idle: nothing is published
    ]


def test_the_engine_counts_what_arrives_during_an_iteration() -> None:
    assert serve(AddRequest(1, 24, 1), None, AddRequest(2, 1, 1)) == [
        ("publish", 1, 1, 2, 8),  # a chunk gives no token: nothing is sent
        ("publish", 1, 1, 4, 8),
        ("publish", 0, 1, 0, 8),
        ("send", [1], [STOP]),
        ("publish", 0, 0, 0, 8),
        ("send", [2], [STOP]),
        "wait",
    ]


def test_the_engine_refuses_what_never_fits_and_goes_on_waiting() -> None:
    assert serve(AddRequest(1, 400, 2), AddRequest(2, 1, 1)) == [
        ("send", [1], [REFUSED]),
        ("publish", 0, 0, 0, 8),
        ("send", [2], [STOP]),
        "wait",
    ]


def test_a_mailbox_that_cannot_be_had_is_logged_once_and_counted(
    group: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_publish, "MailboxWriter", partial(MailboxWriter, start_wait=0.0))
    first = LoadPublisher(group, 0, 1)
    with MailboxReader(group, 0) as reader, caplog.at_level(logging.WARNING, "loadbox"):
        second = LoadPublisher(group, 0, 1)
        second.publish(1, 2, 3, 4)
        first.publish(5, 6, 7, 8)
        assert reader.read() == (5, 6, 7, 8)
        assert (second.errors, second.publishes, first.errors, first.publishes) == (1, 0, 0, 1)
        assert [record.getMessage().count("owned by another living writer") for record in caplog.records] == [1]
        second.close()
        first.close()
        assert reader.state() in (RankState.CLOSED, RankState.ABSENT)


def test_a_publish_that_fails_never_reaches_the_engine(
    group: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def publish(self, *load: int) -> None:
            raise OSError("no")

        def close(self) -> None:
            pass

    monkeypatch.setattr(_publish, "MailboxWriter", lambda *_: Broken())
    publisher = LoadPublisher(group, 0, 1)
    with caplog.at_level(logging.WARNING, "loadbox"):
        for _ in range(3):
            publisher.publish(1, 1, 1, 1)
    assert (publisher.errors, publisher.publishes, len(caplog.records)) == (3, 0, 1)
    publisher.close()


def test_costs_are_medians_and_none_without_samples() -> None:
    cost = Cost()
    assert cost.median_ns() is None
    for ns in (10**6, 10**7, 10**8):
        cost.add(ns)
    median = cost.median_ns()
    assert median is not None
    assert 0.9 * 10**7 < median <= 10**7
