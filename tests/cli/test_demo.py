"""``loadbox demo`` as a person runs it: whole, in a terminal, ended by hand, with a rank that dies; nothing stays behind."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loadbox.mailbox import GroupReader, MailboxReader, MailboxWriter, RankState

LIMIT_S = 45.0  # a bound against hanging, no expectation


class Demo:
    """Demos in their own group, whose traces can be looked for."""

    def __init__(self, group: str) -> None:
        self.group = group
        self.directory = Path(tempfile.mkdtemp(prefix="lb-"))
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *args: str, **options: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "loadbox.cli", "demo", "--group", self.group]
        command += ["--ranks", "2", "--frontends", "2", *args]
        env = {**os.environ, "TMPDIR": str(self.directory), "COLUMNS": "100", "TERM": "xterm-256color"}
        options.setdefault("stdout", subprocess.PIPE)
        options.setdefault("stderr", subprocess.PIPE)
        demo = subprocess.Popen(command, text=True, env=env, cwd=self.directory, **options)
        self.started.append(demo)
        return demo

    def finish(self, demo: subprocess.Popen[str]) -> tuple[str, str]:
        return demo.communicate(timeout=LIMIT_S)

    def processes(self) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    command = (entry / "cmdline").read_bytes()
                except OSError:
                    continue
                if self.group.encode() in command:
                    found.append(int(entry.name))
        return found

    def segments(self) -> list[str]:
        return [entry for entry in os.listdir("/dev/shm") if entry.startswith(f"loadbox.{self.group}")]

    def assert_nothing_left(self) -> None:
        assert self.processes() == []
        assert self.segments() == []
        assert list(self.directory.iterdir()) == []

    def wait_until_gone(self) -> None:
        deadline = time.monotonic() + LIMIT_S
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.05)

    def end(self) -> None:
        for demo in self.started:
            if demo.poll() is None:
                demo.kill()
            if demo.stdout:
                demo.communicate()
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.wait_until_gone()
        shutil.rmtree(self.directory)


@pytest.fixture
def demo(group: str) -> Iterator[Demo]:
    run = Demo(group)
    yield run
    run.end()


def wait_for(stream: Any, pattern: str) -> str:
    """Read lines until one has the pattern; all of them."""
    seen = ""
    for line in stream:
        seen += line
        if re.search(pattern, line):
            return seen
    pytest.fail(f"{pattern!r} did not come, but:\n{seen}")


def live_ranks(group: str) -> list[RankState]:
    states = []
    for rank in range(2):
        with MailboxReader(group, rank) as reader:
            states.append(reader.state())
    return states


TIME = r"(?:[\d.]+ (?:µs|ms|s))"


def test_a_run_to_its_end(demo: Demo) -> None:
    out, err = demo.finish(demo.start("--requests", "40", "--speed-up", "20", "--rate", "4"))
    assert err == ""
    assert demo.started[0].returncode == 0
    assert re.search(rf"cold-set +40 +40 +0 +{TIME} +{TIME} *\n", out), out
    assert re.search(rf"round robin +40 +40 +0 +{TIME} +{TIME} *\n", out), out
    kinds = re.findall(rf"(same host, mailbox|remote, piggyback) +(\d+) +(\d+) +0 +{TIME} +{TIME}((?: +{TIME}){{2}})? *\n", out)
    assert [kind for kind, *_ in kinds] == ["same host, mailbox", "remote, piggyback"] * 2, out
    assert [requests == served for _, requests, served, _ in kinds] == [True] * 4
    assert [bool(ages) for *_, ages in kinds] == [True, True, False, False], "round robin goes by no load"
    assert int(kinds[0][1]) + int(kinds[1][1]) == 40
    publishes = re.search(r"Publishes: ([\d,]+) in ([\d,]+) iterations, [\d,]+ ns each", out)
    assert publishes, out
    made, iterations = (int(number.replace(",", "")) for number in publishes.groups())
    assert made == iterations + 2, "one an iteration, and one at the start of each rank"
    assert iterations > 40
    assert re.search(r"Choices: 80, [\d,]+ ns each", out), "one for each request of both replays"
    assert "by name and epoch: by 1 of 2 frontends." in out, "the remote one did not look"
    batches = re.search(r"Batches with a load: ([\d,]+), ([\d,]+) of them with nothing else", out)
    assert batches, out
    sent, load_only = (int(number.replace(",", "")) for number in batches.groups())
    assert sent > iterations / 2
    assert load_only > 0, "a rank that falls idle by one frontend's request tells the other"
    assert "\x1b" not in out
    demo.assert_nothing_left()


def test_a_replay_for_each_chooser_without_boards(demo: Demo) -> None:
    args = ["--chooser", "own", "--chooser", "p2c", "--no-board", "--remote", "0", "--requests", "20", "--speed-up", "40"]
    run = demo.start(*args, "--rate", "4")
    out, err = demo.finish(run)
    assert run.returncode == 0, err
    for title in ("own, no board", "p2c, no board"):
        assert re.search(rf"^{title} +20 +20 +0 +{TIME} +{TIME} +{TIME} +{TIME} *$", out, re.MULTILINE), out
    assert re.search(rf"^round robin +20 +20 +0 +{TIME} +{TIME} *$", out, re.MULTILINE), out
    assert "remote" not in out, "one kind of frontend needs no rows"
    demo.assert_nothing_left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_ends_it_cleanly(demo: Demo, number: signal.Signals) -> None:
    run = demo.start("--seconds", "60", start_new_session=True)
    wait_for(run.stdout, r"[1-9]\d*/\d+ sent")
    assert len(demo.processes()) == 5
    assert live_ranks(demo.group) == [RankState.LIVE] * 2
    os.killpg(run.pid, number)  # as a terminal does it: to all of them
    out, err = demo.finish(run)
    assert run.returncode == 128 + number
    assert err == ""
    assert f"Stopped by {number.name}." in out
    assert "cold-set: stopped after" in out
    demo.assert_nothing_left()


def test_a_rank_that_is_killed_loses_its_requests_and_nothing_hangs(demo: Demo, tmp_path: Path) -> None:
    trace = tmp_path / "four.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n" + "0,10,150\n" * 4)
    run = demo.start("--trace", str(trace), "--speed-up", "2")
    deadline = time.monotonic() + LIMIT_S
    with MailboxReader(demo.group, 1) as reader:
        while (reader.read() or (0,))[0] < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        victim = owner(demo.group, 1)
        os.kill(victim, signal.SIGKILL)  # its two requests are under way, and no others will come
        while reader.state() is not RankState.DEAD and time.monotonic() < deadline:
            time.sleep(0.01)
    out, err = demo.finish(run)
    assert run.returncode == 0, err
    assert f"rank 1 (pid {victim}) ended by SIGKILL" in out
    assert "1 DEAD" in out
    assert re.search(r"cold-set +4 +2 +2 ", out), out
    assert re.search(r"round robin +4 +4 +0 ", out), "the other rank serves all of the second replay"
    assert "not answered" not in out
    demo.assert_nothing_left()


def owner(group: str, number: int, what: str = "engine") -> int:
    """The pid of a rank's or a frontend's process, by what it was told."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if group.encode() in command and f"_{what} import".encode() in command and b"\0%d\0{" % number in command:
                return int(entry.name)
    pytest.fail(f"no process of {what} {number}")


def test_a_frontend_that_is_killed_loses_its_requests_and_the_others_go_on(demo: Demo, tmp_path: Path) -> None:
    trace = tmp_path / "long.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n" + "0,10,300\n" * 12)
    run = demo.start("--trace", str(trace), "--speed-up", "3")
    deadline = time.monotonic() + LIMIT_S
    with GroupReader(demo.group, 2) as reader:
        while reader.read()["num_running"].sum() < 12 and time.monotonic() < deadline:
            time.sleep(0.01)
    boards = [name for name in demo.segments() if ".f." in name]
    assert len(boards) == 2
    assert len([name for name in boards if name.startswith(f"loadbox.{demo.group}-remote.")]) == 1
    os.kill(owner(demo.group, 1, "frontend"), signal.SIGKILL)
    out, err = demo.finish(run)
    assert run.returncode == 0, err
    assert re.search(r"frontend 1 \(pid \d+\) ended by SIGKILL: its requests are lost", out), out
    rows = re.findall(r"(mailbox|piggyback) +(\d+) +(\d+) +(\d+) ", out)
    (_, here, served, lost), (_, there, *theirs) = rows[:2]
    assert (served, lost) == (here, "0")
    assert theirs == ["0", there], "three hundred tokens each take a while"
    assert rows[2:] == [("mailbox", here, here, "0"), ("piggyback", there, "0", there)], "it gets none of the second replay"
    demo.assert_nothing_left()


def test_a_supervisor_that_is_killed_takes_its_processes_with_it(demo: Demo) -> None:
    run = demo.start("--seconds", "60")
    wait_for(run.stdout, r"LIVE")
    run.kill()
    run.wait()
    demo.wait_until_gone()
    assert demo.processes() == []
    assert demo.segments() == [], "the ranks closed their mailboxes"


def test_at_a_terminal_there_is_a_live_table(demo: Demo) -> None:
    master, slave = pty.openpty()
    run = demo.start("--seconds", "60", stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
    os.close(slave)
    screen = ""
    interrupted = False
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and select.select([master], [], [], LIMIT_S)[0]:
        try:
            data = os.read(master, 65536)
        except OSError:  # the other end is closed
            break
        screen += data.decode(errors="replace")
        if not interrupted and re.search(r"[1-9]\d*/\d+ ", plain(screen)) and screen.count("iter/s") > 8:
            interrupted = True
            os.killpg(run.pid, signal.SIGINT)
    os.close(master)
    assert run.wait(LIMIT_S) == 130
    text = plain(screen)
    assert re.search(r"rank +pid +state +running +waiting +KV pages +age +iter/s", text)
    assert re.search(r"0 +\d+ +LIVE +\d+ +\d+ +[█░]{10} +\d+% \d+/6144 +[\d.]+ (µs|ms|s) +[\d-]+", text)
    assert "Stopped by SIGINT." in text
    assert screen.count("\x1b[?25l") == screen.count("\x1b[?25h") == 1, "the cursor is back"
    demo.assert_nothing_left()


def plain(screen: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen)


@pytest.mark.slow
def test_a_rank_that_is_suspended_does_not_hold_the_demo_up(demo: Demo) -> None:
    run = demo.start("--seconds", "2", "--speed-up", "20", "--rate", "3")
    deadline = time.monotonic() + LIMIT_S
    with MailboxReader(demo.group, 1) as reader:
        while (reader.read() or (0,))[0] < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    os.kill(owner(demo.group, 1), signal.SIGSTOP)
    out, err = demo.finish(run)
    assert run.returncode == 0, err
    assert re.search(r"cold-set: \d+ requests were not answered", out), out
    assert re.search(r"round robin: \d+ requests were not answered", out), out
    demo.assert_nothing_left()


def test_a_group_in_use_is_left_alone(demo: Demo) -> None:
    with MailboxWriter(demo.group, 1, 2) as writer:
        writer.publish(1, 2, 3, 4)
        out, err = demo.finish(demo.start("--requests", "5"))
        assert demo.started[0].returncode == 1
        assert out == ""
        assert re.fullmatch(
            rf"Error: group {demo.group} is in use: /dev/shm/loadbox.{demo.group}.1 is there, and its owner is alive "
            rf"\(pid {os.getpid()}\); choose another --group\n",
            err,
        )
        with MailboxReader(demo.group, 1) as reader:
            assert reader.read() == (1, 2, 3, 4)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--ranks", "0"], "0 is not in the range 1<=x<=64"),
        (["--ranks", "two"], "'two' is not a valid integer"),
        (["--frontends", "17"], "17 is not in the range 1<=x<=16"),
        (["--remote", "5"], "'--remote': 5 of 4 frontends cannot be remote"),
        (["--chooser", "best"], "'--chooser': there is no chooser 'best': use one of cold-set, "),
        (["--rate", "0"], "'--rate': 0.0 is not in the range"),
        (["--rate", "nan"], "'nan' is not a number"),
        (["--speed-up", "-1"], "'--speed-up': -1.0 is not in the range"),
        (["--speed-up", "inf"], "'--speed-up': inf is not in the range"),
        (["--seconds", "0"], "'--seconds': 0.0 is not in the range"),
        (["--requests", "0"], "'--requests': 0 is not in the range"),
        (["--group", "a b"], "group 'a b' cannot name a DP group"),
        (["--group", "g" * 60], "-remote' cannot name a DP group: use 1 to 64"),
        (["--trace", "none.csv"], "'--trace': File 'none.csv' does not exist"),
        (["--trace", "bad.csv"], "Invalid value for '--trace': bad.csv, line 2: arrival_s is 'x', which is no number of seconds"),
    ],
)
def test_bad_options_get_one_clear_error(
    args: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    from click.testing import CliRunner

    from loadbox.cli._app import app

    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.csv").write_text("arrival_s,prompt_tokens,output_tokens\nx,1,1\n")
    result = CliRunner().invoke(app, ["demo", *args])
    assert result.exit_code == 2
    assert said in result.output
    assert result.output.count("Error:") == 1
    assert "Traceback" not in result.output
