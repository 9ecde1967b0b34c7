"""``loadbox export``: scraped over HTTP, by the parser of Prometheus' own client, and the dashboard that goes with it."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from loadbox.cli._app import app
from loadbox.reader import LoadReader

pytestmark = pytest.mark.slow  # `make test-more` runs them

ROOT = Path(__file__).resolve().parents[2]
LOADS = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "kv_cache_active_pages", "kv_cache_total_pages")
LIFE = ("snapshot_age_seconds", "publishes_total", "rank_start_time_seconds", "rank_info")


class Scrape:
    """One scrape; ``values[name]`` by rank."""

    def __init__(self, text: str) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self.samples = [sample for family in self.families.values() for sample in family.samples]

    def of(self, name: str) -> dict[str, float]:
        return {sample.labels.get("rank", ""): sample.value for sample in self.samples if sample.name == f"loadbox_{name}"}

    def state(self, rank: int) -> str:
        found = [
            sample.labels["state"]
            for sample in self.samples
            if sample.name == "loadbox_rank_state" and sample.labels["rank"] == str(rank) and sample.value == 1
        ]
        assert len(found) == 1, found
        return found[0]

    def info(self, rank: int) -> dict[str, str]:
        return next(s.labels for s in self.samples if s.name == "loadbox_rank_info" and s.labels["rank"] == str(rank))


class Exporter:
    def __init__(self, *args: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "loadbox.cli", "export", "--port", "0", *args],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/",
        )  # fmt: skip
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found, line + self.process.communicate()[1]
        self.url = found[0]

    def scrape(self) -> Scrape:
        with urllib.request.urlopen(self.url, timeout=60) as response:
            assert response.headers["Content-Type"].startswith("text/plain")
            return Scrape(response.read().decode())


@pytest.fixture
def exporter() -> Iterator[Callable[..., Exporter]]:
    running: list[Exporter] = []

    def start(*args: str) -> Exporter:
        running.append(Exporter(*args))
        return running[-1]

    yield start
    for each in running:
        each.process.kill()
        each.process.communicate()


def test_a_life_as_prometheus_sees_it(group: str, writer: Any, exporter: Any) -> None:
    server = exporter("--group", group)
    assert server.scrape().of("num_requests_running") == {}
    rank = writer(group, 0, 2)
    found = server.scrape()
    assert (found.state(0), found.state(1)) == ("silent", "absent")
    assert all(found.of(name) == {} for name in LOADS)  # unknown is not idle
    for _ in range(5):
        rank.publish(7, 2, 30, 60)
    found = server.scrape()
    assert found.state(0) == "live"
    assert [found.of(name) for name in LOADS] == [{"0": 7}, {"0": 2}, {"0": 0.5}, {"0": 30}, {"0": 60}]
    assert 0 < found.of("snapshot_age_seconds")["0"] < 600
    assert found.of("dp_size") == {"": 2}
    published, epoch = found.of("publishes_total")["0"], found.info(0)["epoch"]
    assert found.info(0)["pid"] == str(rank.pid)
    for _ in range(5):
        rank.publish(0, 0, 0, 60)
    found = server.scrape()
    assert found.of("publishes_total")["0"] == published + 5
    assert found.of("num_requests_running") == {"0": 0}
    started = found.of("rank_start_time_seconds")["0"]

    rank.kill()
    found = server.scrape()
    assert found.state(0) == "dead"
    assert all(found.of(name) == {} for name in (*LOADS, *LIFE))  # nothing is frozen at its last value

    again = writer(group, 0, 2, (1, 0, 3, 60))
    found = server.scrape()
    assert (found.state(0), found.of("num_requests_running")) == ("live", {"0": 1})
    assert found.info(0)["epoch"] != epoch
    assert found.of("rank_start_time_seconds")["0"] > started
    assert found.of("publishes_total")["0"] > published + 5  # it goes on: a counter that fell would be taken for a restart at 0
    other = writer(group, 1, 2, (0, 0, 0, 60))
    again.close()
    assert server.scrape().state(0) == "absent"  # as the living rank 1 announces it
    other.close()
    assert server.scrape().of("rank_state") == {}
    anew = writer(group, 0, 1, (1, 0, 3, 60))  # a new file under the old name
    found = server.scrape()
    assert (found.state(0), found.info(0)["pid"]) == ("live", str(anew.pid))
    assert found.of("publishes_total")["0"] < published  # anew from 0, as Prometheus expects of a restart


def test_a_bad_file_hides_nothing_and_boards_are_counted(group: str, writer: Any, exporter: Any) -> None:
    writer(group, 0, 1, (7, 2, 30, 60))
    Path(f"/dev/shm/loadbox.{group}.1").write_bytes(b"x" * 4096)
    server = exporter("--group", group)
    with LoadReader(group, 1) as view:
        view.choose("a")
        found = server.scrape()
    assert (found.state(0), found.state(1)) == ("live", "refused")
    assert found.of("num_requests_running") == {"0": 7}
    assert found.of("num_requests_in_flight")["0"] == 1
    assert found.of("frontends") == {"": 1}
    assert server.scrape().of("frontends") == {"": 0}


def test_groups_do_not_mix(groups: Callable[[], str], writer: Any, exporter: Any) -> None:
    mine, other = groups(), groups()
    writer(mine, 0, 1, (1, 0, 1, 10))
    writer(other, 0, 1, (2, 0, 1, 10))
    seen = {sample.labels.get("group") for sample in exporter("--group", mine).scrape().samples}
    assert seen == {mine, None}
    assert {mine, other} <= {sample.labels.get("group") for sample in exporter().scrape().samples}


def test_openmetrics_is_spoken_too(group: str, writer: Any, exporter: Any) -> None:
    from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse

    writer(group, 0, 1, (1, 0, 1, 10))
    request = urllib.request.Request(
        exporter("--group", group).url, headers={"Accept": "application/openmetrics-text; version=1.0.0"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        families = {family.name: family.type for family in parse(response.read().decode())}
    assert families["loadbox_publishes"] == "counter"
    assert families["loadbox_rank"] == "info"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_it(number: signal.Signals, group: str, exporter: Any) -> None:
    server = exporter("--group", group)
    server.scrape()
    server.process.send_signal(number)
    _, err = server.process.communicate(timeout=60)
    assert (server.process.returncode, err) == (0, "")


def test_a_port_in_use_is_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = CliRunner().invoke(app, ["export", "--port", str(port)])
    assert result.exit_code == 1
    assert result.output == f"Error: Cannot listen on 127.0.0.1 port {port}: Address already in use.\n"
    result = CliRunner().invoke(app, ["export", "--host", "no.such.host.invalid", "--port", "0"])
    assert result.exit_code == 1
    assert result.output.startswith("Error: Cannot listen on no.such.host.invalid port 0: ")


def test_a_missing_library_is_named(children: Any) -> None:
    child = children.start("""
        import sys
        sys.modules["prometheus_client"] = None
        from loadbox.cli.__main__ import main
        sys.argv = ["loadbox", "export"]
        main()
    """)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out) == (1, "")
    assert err == "Error: loadbox export needs prometheus_client: pip install 'loadbox[metrics]'\n"


def dashboard() -> dict[str, Any]:
    result = CliRunner().invoke(app, ["export", "--dashboard"])
    assert result.exit_code == 0, result.output
    assert result.output == (ROOT / "cli" / "export" / "grafana.json").read_text()
    found: dict[str, Any] = json.loads(result.output)
    return found


def test_the_dashboard_uses_only_what_is_exported(group: str, writer: Any, exporter: Any) -> None:
    writer(group, 0, 1, (7, 2, 30, 60))
    server = exporter("--group", group)
    with LoadReader(group, 1) as view:
        view.choose("a")
        found = server.scrape()
    exported: dict[str, set[str]] = {}
    for sample in found.samples:
        exported.setdefault(sample.name, set()).update(sample.labels)
    variables = dashboard()["templating"]["list"]
    queries = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", [])]
    queries += [str(variable["query"]) for variable in variables if variable["type"] == "query"]
    used = set()
    for query in queries:
        names = re.findall(r"\bloadbox_\w+", query)
        assert names, query
        used.update(names)
        labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", query))
        labels |= {label.strip() for by in re.findall(r"\bby\s*\(([^)]*)\)", query) for label in by.split(",")}
        for name in names:
            assert name in exported, f"{name} is not exported: {query}"
        assert labels <= {"instance"}.union(*(exported[name] for name in names)), query  # which Prometheus adds
    assert used >= {f"loadbox_{name}" for name in ("num_requests_running", "num_requests_waiting", "rank_state", "publishes_total")}


def test_the_dashboard_is_whole() -> None:
    board = dashboard()
    names = {variable["name"] for variable in board["templating"]["list"]}
    text = json.dumps(board)
    assert set(re.findall(r"\$\{?([a-z]\w+)", text)) <= names | {"__rate_interval"}
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["title"]
        assert panel["description"]
