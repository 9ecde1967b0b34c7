"""Peers that send messages: ZMQ, Redis and a metrics scrape."""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import shutil
import socket
import struct
import subprocess
import tempfile
import threading
import time
import urllib.request
from typing import Any

from peer import Load, Missing, Peer, Publish, Read, ReadAll

__all__ = ["PrometheusScrape", "Redis", "ZmqPoll", "ZmqPubSub"]

_FOUR = struct.Struct("<4q")


class _Ipc(Peer):
    @classmethod
    def require(cls) -> None:
        importlib.import_module("zmq")

    def address(self, rank: int) -> str:
        return f"ipc://{tempfile.gettempdir()}/{self.place}.{rank}"

    def clean(self) -> None:
        for rank in range(64):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.address(rank).removeprefix("ipc://"))


class ZmqPoll(_Ipc):
    """A poll: REQ in the frontend, answered by a thread beside the scheduler."""

    name = "ZMQ REQ/REP poll"

    def writer(self, rank: int, ranks: int) -> Publish:
        import zmq

        latest = [_FOUR.pack(0, 0, 0, 0)]
        bound = threading.Event()

        def answer() -> None:
            server = zmq.Context.instance().socket(zmq.REP)
            server.bind(self.address(rank))
            bound.set()
            while True:
                server.recv()
                server.send(latest[0])

        threading.Thread(target=answer, daemon=True).start()
        bound.wait()
        pack = _FOUR.pack

        def publish(a: int, b: int, c: int, d: int) -> None:
            latest[0] = pack(a, b, c, d)

        return publish

    def reader(self, rank: int, ranks: int) -> Read:
        import zmq

        client = zmq.Context.instance().socket(zmq.REQ)
        client.connect(self.address(rank))
        unpack = _FOUR.unpack

        def read() -> Load:
            client.send(b"")
            return unpack(client.recv())  # type: ignore[return-value]  # four, by the format

        return read


class ZmqPubSub(_Ipc):
    """PUB and SUB with CONFLATE: the newest message, if one came since."""

    name = "ZMQ PUB/SUB CONFLATE"

    def writer(self, rank: int, ranks: int) -> Publish:
        import zmq

        publisher = zmq.Context.instance().socket(zmq.PUB)
        publisher.setsockopt(zmq.SNDHWM, 1)
        publisher.bind(self.address(rank))
        send, pack = publisher.send, _FOUR.pack
        return lambda a, b, c, d: send(pack(a, b, c, d), zmq.NOBLOCK)

    def reader(self, rank: int, ranks: int) -> Read:
        import zmq

        subscriber = zmq.Context.instance().socket(zmq.SUB)
        subscriber.setsockopt(zmq.CONFLATE, 1)
        subscriber.subscribe(b"")
        subscriber.connect(self.address(rank))
        last: list[Any] = [None]
        unpack = _FOUR.unpack

        def read() -> Load | None:
            try:
                last[0] = unpack(subscriber.recv(zmq.NOBLOCK))
            except zmq.Again:
                pass
            return last[0]  # type: ignore[no-any-return]

        return read


class Redis(Peer):
    name = "Redis, unix socket"

    @classmethod
    def require(cls) -> None:
        if shutil.which("redis-server") is None:
            raise Missing("redis-server is not installed")
        try:
            importlib.import_module("redis")
        except ImportError:
            raise Missing("redis (the Python client) is not installed") from None

    @property
    def socket(self) -> str:
        return f"{tempfile.gettempdir()}/{self.place}.redis"

    def prepare(self, ranks: int) -> None:
        self._server = subprocess.Popen(
            ["redis-server", "--port", "0", "--unixsocket", self.socket, "--save", "", "--appendonly", "no"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        end = time.monotonic() + 10
        while not os.path.exists(self.socket):
            if time.monotonic() > end:
                raise Missing("redis-server does not start")
            time.sleep(0.02)

    def _client(self) -> Any:
        import redis

        return redis.Redis(unix_socket_path=self.socket)

    def writer(self, rank: int, ranks: int) -> Publish:
        put, pack, key = self._client().set, _FOUR.pack, f"rank{rank}"
        return lambda a, b, c, d: put(key, pack(a, b, c, d))

    def reader(self, rank: int, ranks: int) -> Read:
        get, unpack, key = self._client().get, _FOUR.unpack, f"rank{rank}"

        def read() -> Load | None:
            found = get(key)
            return unpack(found) if found else None  # type: ignore[return-value]  # four, by the format

        return read

    def reader_of_all(self, ranks: int) -> ReadAll:
        get, keys = self._client().mget, [f"rank{rank}" for rank in range(ranks)]
        return lambda: [_FOUR.unpack(one) for one in get(keys)]

    def clean(self) -> None:
        self._server.kill()
        self._server.wait()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.socket)


def _are_free(port: int, count: int) -> bool:
    """Nobody listens on any of them: a range below that from which the kernel takes ports for others."""
    with contextlib.ExitStack() as stack:
        try:
            for number in range(port, port + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", number))
        except OSError:
            return False
    return True


class PrometheusScrape(Peer):
    """Four gauges a rank, each rank its own endpoint, scraped and parsed for every read."""

    name = "Prometheus scrape"
    guarded = False  # four gauges are set one after the other

    @classmethod
    def require(cls) -> None:
        try:
            importlib.import_module("prometheus_client")
        except ImportError:
            raise Missing("prometheus_client is not installed") from None

    def prepare(self, ranks: int) -> None:
        port = next(port for port in iter(lambda: random.randrange(20_000, 30_000), None) if _are_free(port, ranks))
        with open(f"{tempfile.gettempdir()}/{self.place}.port", "w") as file:
            file.write(str(port))

    @property
    def port(self) -> int:
        with open(f"{tempfile.gettempdir()}/{self.place}.port") as file:
            return int(file.read())

    def writer(self, rank: int, ranks: int) -> Publish:
        from prometheus_client import CollectorRegistry, Gauge, start_http_server

        registry = CollectorRegistry()
        gauges = [Gauge(name, name, registry=registry) for name in ("running", "waiting", "kv_active", "kv_total")]
        start_http_server(self.port + rank, "127.0.0.1", registry)
        a_set, b_set, c_set, d_set = (gauge.set for gauge in gauges)

        def publish(a: int, b: int, c: int, d: int) -> None:
            a_set(a)
            b_set(b)
            c_set(c)
            d_set(d)

        return publish

    def reader(self, rank: int, ranks: int) -> Read:
        from prometheus_client.parser import text_string_to_metric_families

        url = f"http://127.0.0.1:{self.port + rank}/metrics"

        def read() -> Load:
            with urllib.request.urlopen(url, timeout=5) as answer:
                text = answer.read().decode()
            found = {family.name: int(family.samples[0].value) for family in text_string_to_metric_families(text)}
            return found["running"], found["waiting"], found["kv_active"], found["kv_total"]

        return read

    def clean(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{tempfile.gettempdir()}/{self.place}.port")
