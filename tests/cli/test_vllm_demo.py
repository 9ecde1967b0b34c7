"""What of ``loadbox demo --engine vllm`` needs no vLLM; `make vllm` runs it whole."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from loadbox.cli._app import app
from loadbox.cli._survey import RankLook
from loadbox.cli.demo._children import Children
from loadbox.cli.demo._run import DemoError
from loadbox.cli.demo.vllm import _run, _server
from loadbox.cli.demo.vllm._requests import Request
from loadbox.cli.demo.vllm._screen import Scene, Screen
from loadbox.mailbox import LoadSnapshot, MailboxWriter, RankState


def until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_server, "is_installed", lambda: False)
    result = CliRunner().invoke(app, ["demo", "--engine", "vllm"])
    assert result.exit_code == 1
    assert "make vllm-install && .venv-vllm/bin/loadbox demo --engine vllm" in result.output
    makefile = Path(__file__).parents[2] / "Makefile"
    assert "\nvllm-install:" in makefile.read_text()


@pytest.mark.parametrize("arguments", [["--ranks", "3"], ["--no-board"], ["--trace", __file__, "--seed", "1"]], ids=" ".join)
def test_options_of_the_model_are_refused(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["demo", "--engine", "vllm", *arguments])
    assert result.exit_code == 2
    assert f"{arguments[0].replace('no-', '')}" in result.output
    assert "--group and --plain only" in result.output


SERVER = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(os.getcwd(), child.pid, flush=True)
time.sleep(600)
"""


def keep(log: Path, *command: str) -> subprocess.Popen[bytes]:
    boot = "from loadbox.cli.demo.vllm._keeper import main; main()"
    return subprocess.Popen([sys.executable, "-c", boot, str(log), *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_keeper_ends_a_server_that_does_not_listen_and_its_children(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with keep(log, sys.executable, "-c", SERVER) as keeper:
        assert keeper.stdin is not None
        assert keeper.stdout is not None
        server = int(keeper.stdout.readline())
        until(lambda: log.exists() and log.read_text().endswith("\n"))
        folder, child = log.read_text().split()
        assert folder == str(tmp_path), "not the demo's own, where a module may hide another"
        assert os.getpgid(int(child)) == server != os.getpgid(0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            keeper.send_signal(number)
        assert keeper.poll() is None
        keeper.stdin.close()
        keeper.wait(30)
    until(lambda: not is_there(server) and not is_there(int(child)))


def test_the_keeper_ends_with_its_server(tmp_path: Path) -> None:
    with keep(tmp_path / "log", sys.executable, "-c", "import sys; print('no'); sys.exit(7)") as keeper:
        assert keeper.wait(30) == 7
    assert (tmp_path / "log").read_text() == "no\n"


def test_the_group_reaches_the_server_one_way_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADBOX_GROUP", "somebody-elses")
    assert "LOADBOX_GROUP" not in _server.environment(None)
    assert _server.environment("mine")["LOADBOX_GROUP"] == "mine"
    assert "--additional-config" not in _server.serve_command(Path("m"), 1, {})
    command = _server.serve_command(Path("m"), 1, {"loadbox_group": "mine"})
    assert command[command.index("--additional-config") + 1] == '{"loadbox_group": "mine"}'
    assert command[command.index("--scheduler-cls") + 1] == "loadbox.engines.vllm.MailboxScheduler"


def test_a_request_to_nobody_is_an_error_and_no_hang() -> None:
    request = Request(_server.free_port(), 0, 5)
    assert "Connection" in (request.wait() or "")
    request.abort()
    assert request.done


def test_it_sees_the_ranks(group: str, tmp_path: Path) -> None:
    with Children() as children, Screen(Console(file=io.StringIO()), plain=True) as screen:
        demo = _run._Demo(group, tmp_path, children, screen, lambda: False)
        assert [look.state for look in demo.look()] == [RankState.ABSENT] * 2
        with MailboxWriter(group, 1) as one:
            one.publish(1, 2, 3, 4)
            ranks = demo.until("rank 1 comes", lambda ranks: ranks[1].state is RankState.LIVE, 30)
            assert [(look.state, look.snapshot) for look in ranks] == [(RankState.ABSENT, None), (RankState.LIVE, (1, 2, 3, 4))]
        with pytest.raises(DemoError, match="this has not come in 0 s: rank 0 comes"):
            demo.until("rank 0 comes", lambda ranks: ranks[0].state is RankState.LIVE, 0)
        demo.survey.close()


@pytest.mark.parametrize("plain", [False, True])
def test_the_screen(plain: bool) -> None:
    output = io.StringIO()
    ranks = [RankLook("g", 0, RankState.LIVE, LoadSnapshot(6, 2, 120, 128), 0.001, pid=7), RankLook("g", 1, RankState.DEAD)]
    scene = Scene("g", doing="6 requests for rank 0", elapsed_s=1.0, shown=["it serves"], ranks=ranks)
    with Screen(Console(file=output, force_terminal=not plain, width=110), plain=plain) as screen:
        assert screen.due()
        for _ in range(3):
            screen.show(scene)
        assert not screen.due()
    text = output.getvalue()
    for words in ("it serves", "6 requests for rank 0", "LIVE", "DEAD", "94%"):
        assert words in text
    if plain:
        assert text.count("it serves") == text.count("for rank 0") == 1, "what has not changed is not said again"
