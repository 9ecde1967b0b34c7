"""The mailbox says what vLLM's real scheduler holds, after every call; and nothing of ours reaches it."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from rig import Rig, make_config, make_scheduler, rank_config, truth
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from loadbox.engines import LoadPublisher
from loadbox.engines import _publisher as publisher_module
from loadbox.engines import vllm as adapter
from loadbox.mailbox import MailboxReader, MailboxWriter, RankState, _segment, list_groups

pytestmark = pytest.mark.slow

REQUESTS = 600
MODES = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


@pytest.fixture(scope="module")
def configs(model: Path) -> dict[bool, Any]:
    return {asynchronous: make_config(model, asynchronous=asynchronous) for asynchronous in (False, True)}


@pytest.fixture(autouse=True)
def no_group_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOADBOX_GROUP", raising=False)


class Client:
    """Sends what a server's clients send, at random: bursts, aborts, cache resets; and looks into the mailbox after each call."""

    def __init__(self, rig: Rig, reader: MailboxReader, seed: int) -> None:
        self.rig, self.reader = rig, reader
        self.random = random.Random(seed)
        self.sent = self.aborted_running = self.aborted_waiting = self.resets = self.looks = 0
        self.most_waiting = 0
        self.fullest = 0.0
        self.prefixes = [[self.random.randrange(2, 500) for _ in range(64)] for _ in range(4)]

    def look(self) -> None:
        expected = truth(self.rig.scheduler)
        assert self.reader.read() == expected
        assert self.reader.state() is RankState.LIVE
        self.looks += 1
        self.most_waiting = max(self.most_waiting, expected[1])
        self.fullest = max(self.fullest, expected[2] / expected[3])

    def send(self) -> None:
        draw = self.random
        prompt = draw.choice(self.prefixes) * draw.randrange(2) + [draw.randrange(2, 500) for _ in range(draw.randrange(1, 200))]
        self.rig.add(self.rig.request(f"r{self.sent}", prompt, draw.randrange(1, 60)))
        self.sent += 1
        self.look()

    def abort(self) -> None:
        scheduler = self.rig.scheduler
        running = [request.request_id for request in scheduler.running]
        waiting = sorted(scheduler.requests.keys() - set(running))
        names = [self.random.choice(some) for some in (running, waiting) if some and self.random.random() < 0.7]
        for name in names:
            if self.rig.scheduler.requests[name].status == RequestStatus.RUNNING:
                self.aborted_running += 1
            else:
                self.aborted_waiting += 1
        self.rig.scheduler.finish_requests([*names, "never-heard-of"], RequestStatus.FINISHED_ABORTED)
        self.look()

    def step(self) -> bool:
        did = False
        while self.rig.schedule():
            did = True
            self.look()
        if self.rig.apply():
            did = True
            self.look()
        return did


@MODES
def test_the_mailbox_is_the_scheduler(configs: dict[bool, Any], group: str, asynchronous: bool) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    scheduler = make_scheduler(rank_config(configs[asynchronous], 3, loadbox_group=group))
    assert isinstance(scheduler, AsyncScheduler) is asynchronous
    assert isinstance(scheduler, adapter.MailboxScheduler)
    rig = Rig(scheduler)
    with MailboxReader(group, 3) as reader:
        assert (reader.read(), reader.state()) == ((0, 0, 0, 64), RankState.LIVE)
        client = Client(rig, reader, seed)
        while client.sent < REQUESTS:
            if client.random.random() < 0.03 and len(scheduler.waiting) < 20:
                for _ in range(client.random.randrange(40)):
                    client.send()
            if client.random.random() < 0.05:
                client.abort()
            if client.random.random() < 0.004:
                client.resets += bool(scheduler.running)
                scheduler.reset_prefix_cache(reset_running_requests=True)
                client.look()
            client.step()
        while client.step():
            pass
        assert not scheduler.has_requests()
        assert reader.read() == (0, 0, 0, 64) == truth(scheduler)
        assert scheduler._loadbox_publish_lengths
        # What the run is for has really occurred.
        seen = {
            "preempted": rig.preempted,
            "waiting": client.most_waiting,
            "full": client.fullest,
            "running aborted": client.aborted_running,
            "waiting aborted": client.aborted_waiting,
            "resets": client.resets,
            "cached tokens": rig.cached,
            "looks": client.looks,
        }
        print(seen)
        assert client.sent >= REQUESTS
        assert rig.preempted >= 20, seen
        assert client.fullest > 0.95, seen
        assert client.most_waiting >= 10, seen
        assert min(client.aborted_running, client.aborted_waiting) >= 5, seen
        assert client.resets, seen
        assert rig.cached, seen
        assert scheduler._loadbox.dropped == 0
        scheduler.shutdown()
        assert reader.state() is RankState.CLOSED


@pytest.mark.parametrize("other", ["counts", "free blocks", "priority queues"])
def test_counts_that_are_not_the_known_ones(
    model: Path, configs: dict[bool, Any], group: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configs[False]
    if other == "priority queues":
        config = make_config(model, asynchronous=False, policy="priority")
    elif other == "counts":
        monkeypatch.setattr(Scheduler, "get_request_counts", lambda self: (len(self.running), truth(self)[1]))
    else:  # kept elsewhere: where they were, nothing is to be believed any more
        monkeypatch.setattr(BlockPool, "get_num_free_blocks", lambda self: int(str(self.free_block_queue.num_free_blocks)))
    scheduler = make_scheduler(rank_config(config, loadbox_group=group))
    assert not scheduler._loadbox_publish_lengths
    with MailboxReader(group, 0) as reader:
        client = Client(Rig(scheduler), reader, 1)
        while client.sent < 60:
            client.send()
            client.step()
        while client.step():
            pass
        assert reader.read() == (0, 0, 0, 64)
        assert client.most_waiting > 5
    scheduler.shutdown()


def drive(scheduler: Any, requests: int = 12) -> list[str]:
    """Serve some requests to their end, one of them aborted; gives what vLLM said at each step, in a form that can be compared."""
    rig = Rig(scheduler)
    said = []
    apply = rig.scheduler.update_from_output
    for n in range(requests):
        rig.add(rig.request(f"d{n}", [2 + n % 5] * (20 + 17 * n), 5 + n))
    scheduler.finish_requests("d3", RequestStatus.FINISHED_ABORTED)
    for _ in itertools.repeat(None, 500):
        did = False
        while rig.schedule():
            did = True
        if rig._flying:
            did = True
            outputs = apply(*rig._flying.popleft())
            said.append(
                str(
                    {
                        n: [(o.request_id, o.new_token_ids, str(o.finish_reason)) for o in each.outputs]
                        for n, each in outputs.items()
                    }
                )
            )
        if not did:
            break
    assert not scheduler.has_requests()
    assert said
    return said


@pytest.fixture(scope="module")
def expected(configs: dict[bool, Any]) -> dict[bool, list[str]]:
    """What vLLM does without us."""
    return {mode: drive(make_scheduler(rank_config(configs[mode], scheduler=None))) for mode in configs}


@MODES
def test_it_schedules_as_vllm_does(
    configs: dict[bool, Any], expected: dict[bool, list[str]], group: str, asynchronous: bool
) -> None:
    scheduler = make_scheduler(rank_config(configs[asynchronous], loadbox_group=group))
    assert drive(scheduler) == expected[asynchronous]
    scheduler.shutdown()


def refuse(*args: object, **kwargs: object) -> Any:
    raise RuntimeError("no, not today")


@MODES
@pytest.mark.parametrize(
    "fault", ["publish", "store", "constructor", "counts", "pool", "queue", "rank", "instance", "scheduler-config"]
)
def test_no_error_of_ours_reaches_the_engine(
    configs: dict[bool, Any], expected: dict[bool, list[str]], group: str, asynchronous: bool, fault: str,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    config = rank_config(configs[asynchronous], loadbox_group=group)
    if fault == "constructor":
        monkeypatch.setattr(adapter, "LoadPublisher", refuse)
    if fault == "rank":
        config.parallel_config = Without(config.parallel_config, "data_parallel_index")
    if fault == "instance":
        config = Without(rank_config(config), "instance_id")
    if fault == "counts":
        monkeypatch.setattr(adapter, "_counts_are_known", lambda scheduler: False)
    if fault == "scheduler-config":
        monkeypatch.setattr(adapter, "_own_choice", refuse)
    scheduler = make_scheduler(config)
    assert isinstance(scheduler, AsyncScheduler) is (asynchronous and fault != "scheduler-config")
    if fault == "publish":
        scheduler._loadbox.publish = scheduler._loadbox.close = scheduler._loadbox_publish_lengths = refuse
    if fault == "store":
        scheduler._loadbox._use(refuse)
    if fault == "counts":
        scheduler.get_request_counts = Without(scheduler.get_request_counts, "__call__")
    if fault == "pool":
        scheduler.kv_cache_manager = Without(scheduler.kv_cache_manager, "block_pool")
    if fault == "queue":  # it was there when the adapter looked, and is replaced later
        pool = scheduler.kv_cache_manager.block_pool
        pool.free_block_queue = Without(pool.free_block_queue, "num_free_blocks")
    with MailboxReader(group, 0) as reader:
        if fault != "scheduler-config" or not asynchronous:
            assert drive(scheduler) == expected[asynchronous]
        if fault in ("counts", "pool", "queue"):  # it was LIVE and idle before, and must not be shown so for ever
            assert (reader.read(), reader.state()) == (None, RankState.SILENT)
        if fault in ("constructor", "rank", "instance"):
            assert reader.state() is RankState.ABSENT
    scheduler.shutdown()
    assert "no, not today" in caplog.text
    assert [record.levelno for record in caplog.records if record.name == "loadbox"] == [logging.WARNING], "once, not at every step"


class Without:
    """An object of another version of vLLM's, in which the adapter does not find what it looks for; vLLM itself does."""

    def __init__(self, real: Any, gone: str) -> None:
        self.__dict__.update(real=real, gone=gone)

    def _check(self, name: str) -> None:
        if name == self.gone and sys._getframe(2).f_globals["__name__"].startswith("loadbox"):
            raise AttributeError(f"no, not today: {name}")

    def __getattr__(self, name: str) -> Any:
        self._check(name)
        return getattr(self.real, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.real, name, value)

    def __call__(self) -> Any:
        self._check("__call__")
        return self.real()


@pytest.mark.parametrize("bad", ["no group!", "", 5, ["a"], {"a": 1}, "x" * 65, False], ids=repr)
def test_a_group_that_is_none(
    configs: dict[bool, Any], expected: dict[bool, list[str]], caplog: pytest.LogCaptureFixture, bad: object
) -> None:
    """It is not mended: frontends look for what was given."""
    scheduler = make_scheduler(rank_config(configs[False], loadbox_group=bad))
    assert scheduler._loadbox.writer is None
    assert drive(scheduler) == expected[False]
    assert "serves without a mailbox" in caplog.text
    assert "group" in caplog.text


@pytest.mark.parametrize(
    ("given", "mode"), [(None, 0o600), ("0640", 0o640), ("640", 0o640), ("0o644", 0o644), (0o640, 0o640), (384, 0o600)], ids=repr
)
def test_the_files_mode(configs: dict[bool, Any], group: str, given: object, mode: int) -> None:
    scheduler = make_scheduler(rank_config(configs[False], loadbox_group=group, loadbox_mode=given))
    assert os.stat(f"/dev/shm/loadbox.{group}.0").st_mode & 0o7777 == mode
    scheduler.shutdown()


@pytest.mark.parametrize("bad", ["rw-r-----", "", "0888", "0666", 640, -1, True, 1.5, ["0640"], {}], ids=repr)
def test_a_mode_that_is_none(
    configs: dict[bool, Any], expected: dict[bool, list[str]], group: str, caplog: pytest.LogCaptureFixture, bad: object
) -> None:
    scheduler = make_scheduler(rank_config(configs[False], loadbox_group=group, loadbox_mode=bad))
    assert not os.path.exists(f"/dev/shm/loadbox.{group}.0")
    assert drive(scheduler) == expected[False]
    scheduler.shutdown()
    said = [record.getMessage() for record in caplog.records if record.name == "loadbox"]
    assert len(said) == 1, said
    assert "mode" in said[0]


def test_a_rank_that_is_taken(
    configs: dict[bool, Any], expected: dict[bool, list[str]], group: str, caplog: pytest.LogCaptureFixture
) -> None:
    with MailboxWriter(group, 0) as other:
        other.publish(7, 7, 7, 7)
        scheduler = make_scheduler(rank_config(configs[False], loadbox_group=group))
        assert drive(scheduler) == expected[False]
        with MailboxReader(group, 0) as reader:
            assert reader.read() == (7, 7, 7, 7)
        assert scheduler._loadbox.dropped
    scheduler.shutdown()
    assert "in use" in caplog.text or "living" in caplog.text


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EMFILE, errno.ENOENT], ids=errno.errorcode.get)
def test_shared_memory_is_refused(
    configs: dict[bool, Any], expected: dict[bool, list[str]], group: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def claim(*args: object, **kwargs: object) -> Any:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(_segment, "claim", claim)
    scheduler = make_scheduler(rank_config(configs[False], loadbox_group=group))
    assert scheduler._loadbox.writer is None
    assert drive(scheduler) == expected[False]
    scheduler.shutdown()


def test_where_the_group_is_from(configs: dict[bool, Any], group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = rank_config(configs[False])
    config.instance_id = f"{group}/i"
    given = rank_config(config, 1, loadbox_group=f"{group}-a")
    monkeypatch.setenv("LOADBOX_GROUP", f"{group}-e")
    schedulers = [make_scheduler(given), make_scheduler(config)]
    monkeypatch.setenv("LOADBOX_GROUP", "")
    schedulers.append(make_scheduler(config))
    ray = rank_config(config, 2)
    ray.instance_id = f"{config.instance_id}_dp2"
    schedulers.append(make_scheduler(ray))
    names = [f"/loadbox.{group}-a.1", f"/loadbox.{group}-e.0", f"/loadbox.{group}_i.0", f"/loadbox.{group}_i.2"]
    try:
        assert [scheduler._loadbox.writer.name for scheduler in schedulers] == names
        assert {f"{group}-a", f"{group}-e", f"{group}_i"} <= set(list_groups())
    finally:
        for scheduler in schedulers:
            scheduler.shutdown()
    assert not any(os.path.exists(f"/dev/shm{name}") for name in names)


def test_the_dp_size_if_it_is_known(configs: dict[bool, Any], group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told = []

    class Spy(LoadPublisher):
        def __init__(self, group: str, rank: int, dp_size: int | None = None, *, mode: int = 0o600) -> None:
            told.append((rank, dp_size))
            super().__init__(group, rank, dp_size, mode=mode)

    monkeypatch.setattr(adapter, "LoadPublisher", Spy)
    for rank, size in ((0, 1), (1, 1), (1, 4)):
        config = rank_config(configs[False], rank, loadbox_group=group)
        config.parallel_config.data_parallel_size = size
        make_scheduler(config).shutdown()
    assert told == [(0, None), (1, None), (1, 4)]


def test_a_reset_that_fails_after_it_has_preempted(configs: dict[bool, Any], group: str) -> None:
    scheduler = make_scheduler(rank_config(configs[False], loadbox_group=group))
    rig = Rig(scheduler)
    rig.add(rig.request("a", [5] * 40, 5))
    rig.schedule()
    rig.apply()
    with MailboxReader(group, 0) as reader:
        assert reader.read() == (1, 0, 3, 64)
        scheduler.kv_cache_manager.reset_prefix_cache = lambda: False
        with pytest.raises(RuntimeError, match="Failed to reset"):
            scheduler.reset_prefix_cache(reset_running_requests=True)
        assert reader.read() == truth(scheduler) == (0, 1, 0, 64)
    scheduler.shutdown()


def test_a_scheduler_of_ones_own(configs: dict[bool, Any], group: str) -> None:
    class Own(AsyncScheduler):
        scheduled = 0

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            self.scheduled += 1
            return super().schedule(*args, **kwargs)

    class Mine(adapter.MailboxScheduler, Own):
        pass

    scheduler = make_scheduler(rank_config(configs[True], scheduler=Mine, loadbox_group=group))  # type: ignore[arg-type]
    assert type(scheduler) is Mine
    drive(scheduler)
    assert scheduler.scheduled > 5
    assert scheduler._loadbox.published > 10
    scheduler.shutdown()


def test_diffusion_models_get_their_scheduler(configs: dict[bool, Any]) -> None:
    from vllm.v1.core.sched.diffusion_scheduler import DiffusionAsyncScheduler, DiffusionScheduler

    for asynchronous, base in ((False, DiffusionScheduler), (True, DiffusionAsyncScheduler)):
        config = rank_config(configs[asynchronous])
        config.diffusion_config = object()
        made = adapter._class_for(config)
        assert issubclass(made, base)
        assert issubclass(made, adapter.MailboxScheduler)
        assert made is adapter._class_for(config)


def test_everything_of_vllms_interface_that_changes_counts_is_covered() -> None:
    """A method that a new vLLM adds shall be looked at, before the mailbox misses what it changes."""
    from vllm.v1.core.sched.interface import SchedulerInterface

    publishing = {"add_request", "schedule", "update_from_output", "finish_requests", "reset_prefix_cache", "shutdown"}
    changes_no_counts = {
        "get_grammar_bitmask", "update_draft_token_ids", "update_draft_token_ids_in_output", "get_num_unfinished_requests",
        "has_unfinished_requests", "has_finished_requests", "has_requests", "pause_state", "set_pause_state", "reset_encoder_cache",
        "get_request_counts", "get_kv_cache_usage", "make_stats", "get_kv_connector", "get_ec_connector",
        "get_kv_event_publisher_config",
    }  # fmt: skip
    assert {name for name in vars(SchedulerInterface) if not name.startswith("_")} == publishing | changes_no_counts
    assert publishing <= vars(adapter.MailboxScheduler).keys()
    assert publisher_module.LoadPublisher is LoadPublisher
