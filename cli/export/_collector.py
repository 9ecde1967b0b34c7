"""The ranks as Prometheus metrics, read at the moment of the scrape.

Names and units follow the field's (``num_requests_running``, ``num_requests_waiting``, ``kv_cache_usage_perc`` with 1 for a full
cache, as vLLM has them), the labels are the group and the rank.  A number that is not known has no sample: a rank that died or
is refused keeps only its state, and a silent one has no load, so that no query takes last words for a load.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from importlib import metadata

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from loadbox.cli._survey import GroupLook, RankLook, Survey
from loadbox.mailbox import RankState, _seqlock

__all__ = ["RankCollector"]

_RANK = ("group", "rank")


class RankCollector(Collector):
    """Looks at every rank of this host, or of some groups, at each scrape; nothing runs in between.

    Threads: scrapes may come at once; they look one after the other.
    """

    def __init__(self, groups: Collection[str] = ()) -> None:
        self._survey = Survey(groups)
        self._lock = threading.Lock()

    def collect(self) -> Iterator[Metric]:
        """All families; those of which nothing is known are empty."""
        with self._lock:
            groups = self._survey.look()
        ranks = [look for group in groups for look in group.ranks]
        yield from _states(ranks)
        yield from _loads(ranks)
        yield from _lives(ranks)
        yield from _groups(groups)
        yield InfoMetricFamily(
            "loadbox_build",
            "The exporter's own version and core.",
            {"version": metadata.version("loadbox"), "core": _seqlock.BACKEND},
        )

    def close(self) -> None:
        """Let go of all mappings."""
        with self._lock:
            self._survey.close()


def _labels(look: RankLook) -> list[str]:
    return [look.group, str(look.rank)]


def _states(ranks: list[RankLook]) -> Iterator[Metric]:
    states = GaugeMetricFamily(
        "loadbox_rank_state",
        "1 for the state that the rank is in, 0 for the others: absent, silent, live, stalled, dead, closed, refused.",
        labels=(*_RANK, "state"),
    )
    for look in ranks:
        for state in RankState:
            states.add_metric([*_labels(look), state.name.lower()], float(look.state is state))
    yield states


def _loads(ranks: list[RankLook]) -> Iterator[Metric]:
    running = GaugeMetricFamily("loadbox_num_requests_running", "Requests in the running batch.", labels=_RANK)
    waiting = GaugeMetricFamily("loadbox_num_requests_waiting", "Requests queued.", labels=_RANK)
    usage = GaugeMetricFamily("loadbox_kv_cache_usage_perc", "KV-cache pages in use; 1 means 100 percent.", labels=_RANK)
    active = GaugeMetricFamily("loadbox_kv_cache_active_pages", "KV-cache pages in use.", labels=_RANK)
    total = GaugeMetricFamily("loadbox_kv_cache_total_pages", "KV-cache pages in all.", labels=_RANK)
    age = GaugeMetricFamily(
        "loadbox_snapshot_age_seconds", "Time since the rank published.  An idle rank may be silent for hours.", labels=_RANK
    )
    for look in ranks:
        labels, load = _labels(look), look.snapshot
        if load is not None:
            running.add_metric(labels, load.num_running)
            waiting.add_metric(labels, load.num_waiting)
            usage.add_metric(labels, load.kv_active_pages / load.kv_total_pages)
            active.add_metric(labels, load.kv_active_pages)
            total.add_metric(labels, load.kv_total_pages)
        if look.age_s is not None:
            age.add_metric(labels, look.age_s)
    yield from (running, waiting, usage, active, total, age)


def _lives(ranks: list[RankLook]) -> Iterator[Metric]:
    publishes = CounterMetricFamily(
        "loadbox_publishes",
        "Snapshots published.  Goes on when a new process adopts the rank's file, and starts at 0 with a new file.",
        labels=_RANK,
    )
    start = GaugeMetricFamily(
        "loadbox_rank_start_time_seconds", "Unix time at which the rank's process took it; changes with each restart.", labels=_RANK
    )
    info = InfoMetricFamily("loadbox_rank", "The rank's life: epoch, and the pid and uid of its process (hints).", labels=(*_RANK,))
    for look in ranks:
        if look.publishes is None:  # not alive
            continue
        publishes.add_metric(_labels(look), look.publishes)
        if look.started_s is not None:
            start.add_metric(_labels(look), look.started_s)
        info.add_metric(_labels(look), {"epoch": str(look.epoch), "pid": str(look.pid), "uid": str(look.uid)})
    yield from (publishes, start, info)


def _groups(groups: list[GroupLook]) -> Iterator[Metric]:
    sizes = GaugeMetricFamily("loadbox_dp_size", "Ranks in the group, as its living ranks say.", labels=("group",))
    frontends = GaugeMetricFamily(
        "loadbox_frontends", "Living frontends on this host that tell what they have dispatched.", labels=("group",)
    )
    in_flight = GaugeMetricFamily(
        "loadbox_num_requests_in_flight",
        "Requests that this host's frontends have sent to the rank and not seen end.",
        labels=_RANK,
    )
    for group in groups:
        if group.dp_size is not None:
            sizes.add_metric([group.group], group.dp_size)
        frontends.add_metric([group.group], group.frontends)
        for look in group.ranks:
            if look.in_flight is not None:
                in_flight.add_metric(_labels(look), look.in_flight)
    yield from (sizes, frontends, in_flight)
