"""A rank's parts by themselves: the engine's order of things, its frontends, a mailbox that fails."""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

import pytest
import zmq

from loadbox.cli.demo._cost import Cost
from loadbox.cli.demo._engine import Engine
from loadbox.cli.demo._links import REFUSED, Links
from loadbox.cli.demo._model import ModelConfig, Scheduler
from loadbox.piggyback import (
    AbortRequest,
    BatchTokenIDOutSlim,
    GenerateRequest,
    MsgpackFrontend,
    NothingReceived,
    connect_msgpack_engine,
)

FINISHED = "length"


def add(rid: str, prompt_tokens: int, output_tokens: int) -> GenerateRequest:
    return GenerateRequest(rid, input_ids=[0] * prompt_tokens, sampling_params=[output_tokens])


class Recv:
    """Scripted arrivals; None: nothing there this time."""

    def __init__(self, arrivals: list[Any]) -> None:
        self.arrivals = deque(arrivals)
        self.socket = zmq.Context.instance().socket(zmq.DEALER)

    def recv_pyobj(self, flags: int) -> Any:
        assert flags & zmq.NOBLOCK
        request = self.arrivals.popleft() if self.arrivals else None
        if request is None:
            raise zmq.Again
        return request


class Send:
    """Notes what goes out, and with which load."""

    def __init__(self, log: list[Any], name: str, full: bool = False) -> None:
        self.log = log
        self.name = name
        self.full = full
        self.socket = zmq.Context.instance().socket(zmq.PUSH)
        self.load_fn: Any = None

    def send_pyobj(self, batch: BatchTokenIDOutSlim) -> None:
        if self.full:
            raise zmq.Again
        load = self.load_fn() if self.load_fn else None
        self.log.append((self.name, batch.rids, [len(ids) for ids in batch.output_ids], batch.finished_reasons, load))
        self.batch = batch

    def after_advance(self) -> None:
        self.log.append(f"{self.name}: after")


class Publisher:
    errors = publishes = 0
    cost = Cost()

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def publish(self, *load: int) -> None:
        self.log.append(("publish", *load))


class Served(Links):
    """Links that end the run when the engine would wait and nothing is scripted any more."""

    def __init__(self, log: list[Any], *frontends: list[Any]) -> None:
        super().__init__()
        self.log = log
        self.recvs = [Recv(arrivals) for arrivals in frontends]
        self.sends = [Send(log, "abc"[number]) for number in range(len(frontends))]
        for number, (recv, send) in enumerate(zip(self.recvs, self.sends, strict=True)):
            self.add(number, recv, send)  # type: ignore[arg-type]

    def wait(self) -> None:
        if not any(recv.arrivals for recv in self.recvs):
            self.log.append("wait")
            raise SystemExit

    def close(self) -> None:
        for each in (*self.recvs, *self.sends):
            each.socket.close(linger=0)


def serve(*frontends: list[Any]) -> list[Any]:
    log: list[Any] = []
    links = Served(log, *frontends)
    config = ModelConfig(token_budget=8, page_tokens=4, kv_pages=8)
    engine = Engine(Scheduler(config), Publisher(log), links, speed_up=1000.0)  # type: ignore[arg-type]
    for send in links.sends:
        send.load_fn = engine.load
    try:
        with pytest.raises(SystemExit):
            engine.run()
    finally:
        links.close()
    return log


def test_the_engine_publishes_what_is_true_before_it_sends() -> None:
    assert serve([add("x", 4, 2)]) == [
        ("publish", 1, 0, 1, 8),
        ("a", ["x"], [1], [""], (1, 0, 1, 8)),  # the batch carries what was published
        "a: after",
        ("publish", 0, 0, 0, 8),  # the finished request is gone, its pages are free
        ("a", ["x"], [1], [FINISHED], (0, 0, 0, 8)),
        "a: after",
        "wait",  # idle: nothing is published
    ]


def test_the_engine_counts_what_arrives_during_an_iteration() -> None:
    assert [each for each in serve([add("x", 24, 1), None, add("y", 1, 1)]) if each != "a: after"] == [
        ("publish", 1, 1, 2, 8),  # a chunk gives no token: nothing is sent
        ("publish", 1, 1, 4, 8),
        ("publish", 0, 1, 0, 8),
        ("a", ["x"], [1], [FINISHED], (0, 1, 0, 8)),
        ("publish", 0, 0, 0, 8),
        ("a", ["y"], [1], [FINISHED], (0, 0, 0, 8)),
        "wait",
    ]


def test_the_engine_refuses_what_never_fits_and_goes_on_waiting() -> None:
    assert [each for each in serve([add("x", 400, 2), add("y", 1, 1)]) if each != "a: after"] == [
        ("a", ["x"], [0], [REFUSED], (0, 0, 0, 8)),
        ("publish", 0, 0, 0, 8),
        ("a", ["y"], [1], [FINISHED], (0, 0, 0, 8)),
        "wait",
    ]


def test_each_frontend_gets_its_own_even_under_the_same_id() -> None:
    log = serve([add("x", 2, 1)], [AbortRequest(["x"]), add("x", 3, 2)])
    assert log == [
        ("publish", 1, 0, 1, 8),
        ("a", ["x"], [1], [FINISHED], (1, 0, 1, 8)),
        ("b", ["x"], [1], [""], (1, 0, 1, 8)),
        "a: after",
        "b: after",
        ("publish", 0, 0, 0, 8),
        ("b", ["x"], [1], [FINISHED], (0, 0, 0, 8)),
        "a: after",
        "b: after",
        "wait",
    ]


def test_the_columns_count_the_tokens_of_each_request() -> None:
    log: list[Any] = []
    links = Served(log, [add("x", 5, 3)])
    scheduler = Scheduler(ModelConfig())
    try:
        for number, prompt_tokens, output_tokens in links.requests():
            assert scheduler.add(number, prompt_tokens, output_tokens)
        counts = []
        while (iteration := scheduler.schedule()) is not None:
            links.send(scheduler.apply(iteration))
            batch = links.sends[0].batch
            counts.append((batch.prompt_tokens, batch.completion_tokens, batch.cached_tokens))
    finally:
        links.close()
    assert counts == [([5], [1], [0]), ([5], [2], [0]), ([5], [3], [0])]


def test_a_frontend_that_does_not_read_holds_nobody_up(caplog: pytest.LogCaptureFixture) -> None:
    log: list[Any] = []
    links = Served(log, [add("x", 1, 3)], [add("y", 1, 3)])
    links.sends[0].full = True
    engine = Engine(Scheduler(ModelConfig()), Publisher(log), links, speed_up=1000.0)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING, "loadbox"), pytest.raises(SystemExit):
        engine.run()
    links.close()
    assert [each[3] for each in log if isinstance(each, tuple) and each[0] == "b"] == [[""], [""], [FINISHED]]
    assert [record.getMessage() for record in caplog.records] == ["frontend 0 does not read its batches, which are dropped"]


def test_links_over_real_sockets_never_wait_for_a_frontend(tmp_path: Any) -> None:
    context: zmq.Context[Any] = zmq.Context()
    address = f"ipc://{tmp_path}/f"
    links = Links()
    scheduler = Scheduler(ModelConfig())
    try:
        with MsgpackFrontend(context, address, 1) as frontend:
            recv, send, _ = connect_msgpack_engine(context, address, engine_index=0, ready={}, timeout=30)
            send.load_fn = scheduler.load
            links.add(0, recv, send)
            frontend.wait_ready(30)
            frontend.add(0, add("x", 3, 2))
            links.wait()
            for number, prompt_tokens, output_tokens in links.requests():
                assert scheduler.add(number, prompt_tokens, output_tokens)
            while (iteration := scheduler.schedule()) is not None:
                links.send(scheduler.apply(iteration))
                links.after_advance()
            batches = [frontend.recv(30)[1] for _ in range(2)]
            assert [batch.finished_reasons for batch in batches] == [
                [
                    "",
                ],
                [FINISHED],
            ]
            assert [batch.load for batch in batches] == [(1, 0, 1, 6144), (0, 0, 0, 6144)]
            with pytest.raises(NothingReceived):
                frontend.recv(0.05)  # the last batch has said that the rank is idle
        assert send.socket.getsockopt(zmq.SNDTIMEO) == 0
    finally:
        context.destroy(linger=0)


def test_costs_are_medians_and_none_without_samples() -> None:
    cost = Cost()
    assert cost.median_ns() is None
    for ns in (10**6, 10**7, 10**8):
        cost.add(ns)
    median = cost.median_ns()
    assert median is not None
    assert 0.9 * 10**7 < median <= 10**7
