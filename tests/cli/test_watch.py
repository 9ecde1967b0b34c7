"""``loadbox watch``: one rank's changes, line by line."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from loadbox.cli._app import app

pytestmark = pytest.mark.slow  # `make test-more` runs them

HEADINGS = ["time", "epoch", "state", "num_running", "num_waiting", "kv_active_pages", "kv_total_pages", "age_s"]


@pytest.fixture
def watch() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    running = []

    def start(*args: object, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "loadbox.cli", "watch", *map(str, args)]
        variables = {**os.environ, **(env or {})}
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/", env=variables))
        return running[-1]

    yield start
    for child in running:
        child.kill()
        child.communicate()


def row(child: Any) -> dict[str, str]:
    line = child.stdout.readline()
    assert line, child.communicate()[1]
    return dict(zip(HEADINGS, next(csv.reader([line])), strict=True))


def test_a_life_in_csv(group: str, writer: Any, watch: Any) -> None:
    child = watch(group, 0, "--csv", "--interval", "0.01")
    assert child.stdout.readline().rstrip().split(",") == HEADINGS
    found = row(child)
    assert (found["state"], found["epoch"], found["num_running"], found["age_s"]) == ("ABSENT", "", "", "")
    rank = writer(group, 0)
    found = row(child)
    assert (found["state"], found["num_running"]) == ("SILENT", "")
    epoch = found["epoch"]
    rank.publish(3, 1, 20, 40)
    found = row(child)
    assert [found[name] for name in HEADINGS[1:7]] == [epoch, "LIVE", "3", "1", "20", "40"]
    assert 0 <= float(found["age_s"]) < 60
    rank.publish(3, 1, 20, 40)  # no change
    rank.publish(0, 0, 0, 40)
    assert row(child)["num_running"] == "0"
    rank.kill()
    found = row(child)
    assert (found["state"], found["epoch"], found["num_running"]) == ("DEAD", epoch, "")
    again = writer(group, 0)
    found = row(child)
    assert (found["state"], found["epoch"] != epoch) == ("SILENT", True)
    again.close()
    assert row(child)["state"] == "CLOSED"
    child.send_signal(signal.SIGINT)
    assert (child.wait(60), child.stderr.read()) == (0, "")


def test_count_every_and_json(group: str, writer: Any) -> None:
    writer(group, 0, 1, (3, 1, 20, 40))
    result = CliRunner().invoke(app, ["watch", "0", "--group", group, "--json", "--every", "--count", "3", "--interval", "0.01"])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.output.splitlines()]
    assert [(found["state"], found["num_running"]) for found in rows] == [("LIVE", 3)] * 3
    assert all(list(found) == HEADINGS and found["epoch"].isdigit() for found in rows)
    assert rows[0]["time"] < rows[2]["time"]
    result = CliRunner().invoke(app, ["watch", "7", "--group", group, "--json", "--count", "1"])
    assert {name: value for name, value in json.loads(result.output).items() if value is not None}.keys() == {"time", "state"}


def test_lines_for_people(group: str, writer: Any) -> None:
    writer(group, 0, 1, (3, 1, 20, 40))
    head, line = CliRunner().invoke(app, ["watch", group, "0", "--count", "1"]).output.splitlines()
    assert head.split() == HEADINGS
    assert line.split()[2:7] == ["LIVE", "3", "1", "20", "40"]


def test_why_it_is_refused_goes_to_stderr(group: str, watch: Any) -> None:
    Path(f"/dev/shm/loadbox.{group}.0").write_bytes(b"x" * 4096)
    child = watch(group, 0, "--csv", "--count", 1)
    out, err = child.communicate(timeout=60)
    assert out.splitlines()[1].split(",")[1:] == ["", "REFUSED", "", "", "", "", ""]
    assert err.startswith(f"loadbox: refused to read /dev/shm/loadbox.{group}.0: it is no segment of loadbox")


def test_a_reader_that_has_enough_ends_it(group: str, watch: Any) -> None:
    child = watch(group, 0, "--csv", "--every", "--interval", "0.01")
    child.stdout.readline()
    child.stdout.close()
    assert child.wait(60) == 0
    assert child.stderr.read() == ""


def test_the_group_may_come_from_the_environment(group: str, writer: Any, watch: Any) -> None:
    writer(group, 2, 3, (3, 1, 20, 40))
    child = watch(2, "--csv", "--count", 1, env={"LOADBOX_GROUP": group})
    assert "LIVE" in child.communicate(timeout=60)[0]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "Say which rank"),
        (["g", "0", "1"], "Say which rank"),
        (["g", "x"], "'x' is no rank: use a number from 0 to 65535"),
        (["g", "70000"], "rank 70000 is out of range"),
        (["../g", "0"], "cannot name a DP group"),
        (["0", "--group", "a b"], "cannot name a DP group"),
        (["g", "0", "--interval", "nan"], "is not a number"),
    ],
)
def test_bad_words(args: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["watch", *args], env={"LOADBOX_GROUP": ""})
    assert result.exit_code == 2
    assert words in result.output


def test_several_groups_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from loadbox.mailbox import _names

    for groups, words in (
        (["a", "b"], "Say which group, since there are 2 groups on this host (a, b): loadbox watch GROUP 3."),
        ([], "Say which group, since there is no group on this host"),
    ):
        monkeypatch.setattr(_names, "list_groups", lambda groups=groups: groups)
        result = CliRunner().invoke(app, ["watch", "3"], env={"LOADBOX_GROUP": ""})
        assert result.exit_code == 2
        assert words in result.output
