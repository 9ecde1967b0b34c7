"""``loadbox top``: at a terminal of its own, and its plain snapshot."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from loadbox.cli._app import app
from loadbox.cli._survey import RankLook
from loadbox.cli.top._order import ORDERS, Order
from loadbox.cli.top._terminal import Terminal
from loadbox.mailbox import LoadSnapshot, RankState
from loadbox.reader import LoadReader

pytestmark = pytest.mark.slow  # `make test-more` runs them


def line_of(screen: str, group: str, rank: int) -> str:
    found = [line for line in screen.splitlines() if line.split()[:2] == [group, str(rank)]]
    return found[-1] if found else ""


def order_of(screen: str, group: str) -> list[int]:
    return [int(line.split()[1]) for line in screen.splitlines() if line.split()[:1] == [group] and line.split()[1].isdigit()]


def snapshot(*args: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["top", "--json", *args])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.output)
    return found


def assert_given_back(terminal: Any) -> None:
    """The modes as they were, the screen of before, the cursor."""
    assert termios.tcgetattr(terminal.slave) == terminal.before
    assert terminal.text.count("\x1b[?1049h") == terminal.text.count("\x1b[?1049l") > 0
    assert terminal.text.rindex("\x1b[?25h") > terminal.text.rindex("\x1b[?25l")


def test_ranks_come_change_die_restart_and_go(group: str, writer: Any, tty: Any) -> None:
    top = tty("top", "--group", group, "--interval", "0.1")
    top.wait_for(lambda screen: "no mailboxes on this host" in screen)
    first = writer(group, 0, 3, (7, 2, 30, 60))
    writer(group, 1)
    screen = top.wait_for(lambda screen: "LIVE" in line_of(screen, group, 0) and "SILENT" in line_of(screen, group, 1))
    assert "50% 30/60" in line_of(screen, group, 0)
    assert line_of(screen, group, 0).split()[3:5] == ["7", "2"]
    assert str(first.pid) in line_of(screen, group, 0)
    assert line_of(screen, group, 1).split()[3:6] == ["-", "-", "-"]  # silent is not idle
    assert line_of(screen, group, 2).split() == [group, "2", "ABSENT", *"----------"]  # announced by dp_size
    first.publish(9, 0, 60, 60)
    top.wait_for(lambda screen: "100% 60/60" in line_of(screen, group, 0))
    first.kill()
    screen = top.wait_for(lambda screen: "DEAD" in line_of(screen, group, 0))
    assert line_of(screen, group, 0).split()[3:8] == ["-", "-", "-", "-", "-"]
    again = writer(group, 0, 3, (1, 0, 6, 60))
    top.wait_for(lambda screen: "10% 6/60" in line_of(screen, group, 0))
    again.close()
    top.wait_for(lambda screen: "CLOSED" in line_of(screen, group, 0))
    top.press("q")
    assert top.end() == 0
    assert_given_back(top)


def test_iterations_a_second_are_counted(group: str, writer: Any, tty: Any) -> None:
    rank = writer(group, 0, 0, (1, 0, 1, 10))
    top = tty("top", "--group", group, "--interval", "0.1")
    deadline = time.monotonic() + 60
    while True:
        rank.publish(1, 0, 1, 10)
        top.pump(0.01)
        rate = line_of(top.screen, group, 0).split()[10:11]
        if rate and rate[0].isdigit() and int(rate[0]) > 0:
            break
        assert time.monotonic() < deadline, top.screen
    top.wait_for(lambda screen: line_of(screen, group, 0).split()[10:11] == ["0"])  # it has stopped: measured, and zero


def test_keys_sort_reverse_and_pause(group: str, writer: Any, tty: Any) -> None:
    for rank, running in enumerate((5, 9, 1)):
        writer(group, rank, 4, (running, 0, 10 * rank, 100))
    top = tty("top", "--group", group, "--interval", "0.1")
    top.wait_for(lambda screen: order_of(screen, group) == [0, 1, 2, 3])
    top.press("r")
    top.wait_for(lambda screen: order_of(screen, group) == [1, 0, 2, 3] and "running▼" in screen)
    top.press("r")
    top.wait_for(lambda screen: order_of(screen, group) == [2, 0, 1, 3] and "running▲" in screen)  # unknown last, still
    top.press("k")
    top.wait_for(lambda screen: order_of(screen, group) == [2, 1, 0, 3] and "KV pages▼" in screen)
    top.press("-")
    top.wait_for(lambda screen: order_of(screen, group) == [0, 1, 2, 3] and "KV pages▲" in screen)
    top.press(" ")
    top.wait_for(lambda screen: "PAUSED" in screen)
    writer(group, 3, 4, (3, 3, 3, 3))
    top.press("g")
    assert "ABSENT" in top.wait_for(lambda screen: "group▲" in screen)
    top.press(" ")
    top.wait_for(lambda screen: "PAUSED" not in screen and "100% 3/3" in line_of(screen, group, 3))
    top.press("q")
    assert top.end() == 0


def test_scrolls_and_follows_the_terminals_size(group: str, writer: Any, tty: Any) -> None:
    writer(group, 0, 40, (1, 0, 1, 10))
    top = tty("top", "--group", group, "--interval", "30", height=14)
    screen = top.wait_for(lambda screen: "rows 1 to 10" in screen)
    assert order_of(screen, group) == list(range(10))
    top.press("\x1b[B\x1b[B")
    top.wait_for(lambda screen: order_of(screen, group) == list(range(2, 12)))
    top.press("\x1b[6~")
    top.wait_for(lambda screen: order_of(screen, group) == list(range(12, 22)))
    top.press("\x1b[F")
    top.wait_for(lambda screen: order_of(screen, group) == list(range(30, 40)))
    top.press("\x1b[A")
    top.wait_for(lambda screen: order_of(screen, group) == list(range(29, 39)))
    top.press("\x1b[H")
    top.wait_for(lambda screen: order_of(screen, group) == list(range(10)))
    top.resize(80, 24)  # the terminal's own signal, long before the next look
    screen = top.wait_for(lambda screen: order_of(screen, group) == list(range(20)))
    assert "epoch" not in screen
    assert all(len(line) <= 80 for line in screen.splitlines())
    top.resize(58, 24)  # what is left to give way is the end of the group's name
    screen = top.wait_for(lambda screen: "…" in screen and order_of(screen, group) == [])
    assert re.search(rf"^{group[:3]}\S*… +0 (LIVE|STALLED) +1 +0 █░░░░░░░░░  10% ", screen, re.MULTILINE)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_give_the_terminal_back(number: signal.Signals, group: str, tty: Any) -> None:
    top = tty("top", "--group", group)
    top.wait_for(lambda screen: "no mailboxes" in screen)
    top.process.send_signal(number)
    assert top.end() == 0
    assert_given_back(top)


def test_control_c_and_control_z(group: str, tty: Any) -> None:
    top = tty("top", "--group", group)
    top.wait_for(lambda screen: "no mailboxes" in screen)
    top.process.send_signal(signal.SIGTSTP)
    deadline = time.monotonic() + 60
    while "\x1b[?1049l" not in top.text:
        assert time.monotonic() < deadline
        top.pump()
    # A session leader without a shell above it cannot be stopped by its terminal: it goes on, and takes the screen again.
    top.process.send_signal(signal.SIGCONT)
    top.wait_for(lambda screen: top.text.count("\x1b[?1049h") == 2 and "no mailboxes" in screen)
    top.press("\x03")
    assert top.end() == 0
    assert_given_back(top)


@pytest.mark.skipif(shutil.which("bash") is None, reason="no shell with job control here")
def test_a_shell_stops_it_and_lets_it_go_on(group: str, tty: Any) -> None:
    shell = tty("--norc", "--noprofile", "-i", program=("bash",))
    shell.press(f"{sys.executable} -m loadbox.cli top --group {group}\n")
    shell.wait_for(lambda screen: "\x1b[?1049h" in shell.text and "no mailboxes" in screen)
    shell.press("\x1a")
    shell.wait_for(lambda screen: "Stopped" in shell.text.rpartition("\x1b[?1049l")[2])  # said where one can see it
    shell.press("fg\n")
    shell.wait_for(lambda screen: shell.text.count("\x1b[?1049h") == 2 and "no mailboxes" in screen)
    shell.press("q")
    shell.wait_for(lambda screen: shell.text.count("\x1b[?1049l") == 2)
    shell.press("exit\n")
    assert shell.end() == 0


def test_an_error_gives_the_terminal_back(group: str, tty: Any) -> None:
    top = tty("top", "--group", group, env={"PYTHONPATH": str(Path(__file__).parent / "broken")})
    assert top.end() == 1
    assert "it broke" in top.text
    assert_given_back(top)


def test_a_terminal_that_goes_away_ends_it(group: str, tty: Any) -> None:
    top = tty("top", "--group", group, "--interval", "0.1")
    top.wait_for(lambda screen: "no mailboxes" in screen)
    os.close(top.slave)
    os.close(top.master)
    assert top.process.wait(60) == 0


def test_a_bad_file_never_hides_the_others_and_says_why(group: str, writer: Any) -> None:
    writer(group, 0, 2, (4, 1, 5, 10))
    Path(f"/dev/shm/loadbox.{group}.1").write_bytes(b"nonsense" * 512)
    os.chmod(f"/dev/shm/loadbox.{group}.1", 0o600)
    os.symlink("/etc/passwd", f"/dev/shm/loadbox.{group}.2")
    os.mkfifo(f"/dev/shm/loadbox.{group}.3")
    ranks = snapshot("--group", group)["groups"][0]["ranks"]
    assert [rank["state"] for rank in ranks] == ["LIVE", "REFUSED", "REFUSED", "REFUSED"]
    assert "no segment of loadbox" in ranks[1]["reason"]
    assert "symbolic link" in ranks[2]["reason"]
    assert "FIFO" in ranks[3]["reason"]
    assert all(rank["num_running"] is None and rank["epoch"] is None and not rank["usable"] for rank in ranks[1:])
    text = CliRunner().invoke(app, ["top", "--once", "--group", group]).output
    assert f"{group} 3: refused to read /dev/shm/loadbox.{group}.3: it is a FIFO" in text
    assert "1 LIVE, 3 REFUSED" in text


def test_json_says_what_is_known_and_null_else(group: str, writer: Any) -> None:
    rank = writer(group, 1, 2, (4, 1, 5, 10))
    found = snapshot("--group", group)
    (one,) = found["groups"]
    assert (one["group"], one["dp_size"], one["frontends"]) == (group, 2, 0)
    absent, live = one["ranks"]
    assert {name: value for name, value in absent.items() if value is not None} == {"rank": 0, "state": "ABSENT", "usable": False}
    assert (live["state"], live["usable"], live["pid"], live["uid"]) == ("LIVE", True, rank.pid, os.geteuid())
    assert [live[name] for name in ("num_running", "num_waiting", "kv_active_pages", "kv_total_pages")] == [4, 1, 5, 10]
    assert live["age_s"] > 0
    assert live["publishes_per_s"] == 0
    assert live["in_flight"] is None
    assert re.fullmatch(r"[0-9]+", live["epoch"])
    assert live["started"].endswith("Z")


def test_a_picture(group: str, writer: Any, tmp_path: Path) -> None:
    writer(group, 0, 1, (4, 1, 5, 10))
    result = CliRunner().invoke(app, ["top", "--group", group, "--svg", str(tmp_path / "top.svg")])
    assert result.exit_code == 0, result.output
    picture = (tmp_path / "top.svg").read_text()
    assert group in picture
    assert "LIVE" in picture
    assert "@font-face" not in picture  # it loads nothing
    assert "url(http" not in picture
    assert "--svg" not in CliRunner().invoke(app, ["top", "--help"]).output


def test_boards_tell_what_frontends_have_in_flight(group: str, writer: Any) -> None:
    writer(group, 0, 1, (0, 0, 0, 10))
    with LoadReader(group, 1) as view:
        view.choose("a")
        view.choose("b")
        (one,) = snapshot("--group", group)["groups"]
        assert (one["frontends"], one["ranks"][0]["in_flight"]) == (1, 2)
        assert "1 frontend" in CliRunner().invoke(app, ["top", "--once", "--group", group]).output
    (one,) = snapshot("--group", group)["groups"]
    assert (one["frontends"], one["ranks"][0]["in_flight"]) == (0, None)


def test_groups_do_not_mix(groups: Callable[[], str], writer: Any) -> None:
    mine, other = groups(), groups()
    writer(mine, 0, 1, (1, 0, 1, 10))
    writer(other, 0, 1, (2, 0, 1, 10))
    assert [one["group"] for one in snapshot("--group", mine)["groups"]] == [mine]
    assert [one["group"] for one in snapshot("--group", mine, "--group", other)["groups"]] == sorted([mine, other])
    assert {mine, other} <= {one["group"] for one in snapshot()["groups"]}


@pytest.mark.parametrize(("variables", "coloured", "bold"), [({}, True, True), ({"NO_COLOR": "1"}, False, True)])
def test_colours_respect_no_color(variables: dict[str, str], coloured: bool, bold: bool, group: str, writer: Any, tty: Any) -> None:
    writer(group, 0, 1, (1, 0, 1, 10))
    top = tty("top", "--group", group, env=variables)
    top.wait_for(lambda screen: "LIVE" in screen)
    assert bool(re.search(r"\x1b\[[0-9;]*\b3[0-7]m", top.text)) is coloured
    assert ("\x1b[1m" in top.text) is bold


@pytest.mark.parametrize(
    ("options", "variables", "coloured"),
    [([], {}, False), ([], {"FORCE_COLOR": "1"}, True), (["--no-color"], {"FORCE_COLOR": "1"}, False)],
)
def test_colours_in_a_pipe_only_if_forced(
    options: list[str], variables: dict[str, str], coloured: bool, group: str, writer: Any
) -> None:
    writer(group, 0, 1, (1, 0, 1, 10))
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    done = subprocess.run(
        [sys.executable, "-m", "loadbox.cli", *options, "top", "--group", group],  # no terminal: one snapshot
        stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd="/", timeout=60,
        env={**environment, "TERM": "xterm", **variables},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "10% 1/10" in done.stdout
    assert bool(re.search(r"\x1b\[[0-9;]*\b3[0-7]m", done.stdout)) is coloured


@pytest.mark.parametrize("backend", ["c", "py"])
def test_both_cores(backend: str, group: str, writer: Any) -> None:
    writer(group, 0, 1, (0, 0, 1, 10))
    done = subprocess.run(
        [sys.executable, "-m", "loadbox.cli", "top", "--once", "--group", group],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd="/", timeout=60,
        env={**os.environ, "LOADBOX_PURE_PYTHON": "1" if backend == "py" else ""},
    )  # fmt: skip
    assert "LIVE" in done.stdout, done.stderr


def look(rank: int, running: int | None = None) -> RankLook:
    load = None if running is None else LoadSnapshot(running, 0, 0, 1)
    return RankLook("g", rank, RankState.LIVE, snapshot=load)


def test_zero_is_known_and_unknown_comes_last_both_ways_round() -> None:
    looks = [look(0), look(1, 0), look(2, 5)]
    assert [each.rank for each in Order("running").sort(looks)] == [2, 1, 0]
    assert [each.rank for each in Order("running", reverse=True).sort(looks)] == [1, 2, 0]


def test_every_column_has_a_key_of_its_own() -> None:
    letters = [key.letter for key in ORDERS.values()]
    assert len(set(letters)) == len(letters)
    assert not {"q", "-", " "} & set(letters)
    for name, key in ORDERS.items():
        assert Order("group" if name != "group" else "pid").press(key.letter) == Order(name)
        Order(name).sort([look(0), look(1, 3)])
    assert Order("kv").press("x") == Order("kv")


def test_keys_are_told_apart() -> None:
    terminal = Terminal(0, lambda: None, lambda: None)
    assert terminal._split(b"ab\x1b[A\x1b[5~\x1b[1;5Cq") == ["a", "b", "up", "page up", "q"]
    assert terminal._split(b"\x1b[") == []
    assert terminal._split(b"B") == ["down"]
    assert terminal._split(b"\x1b") == []
    assert terminal._split(b"q") == ["q"]
    assert terminal._split(b"\x1bOF\xff") == ["end", "�"]
