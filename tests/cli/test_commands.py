"""``loadbox --version``, ``--help`` and ``clean``, and the command line where its libraries are missing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from loadbox.cli._app import app
from loadbox.mailbox import MailboxWriter
from loadbox.reader import LoadReader
from loadbox.reader._chooser import CHOOSERS

HOLD = """
    import sys, time
    from loadbox.mailbox import MailboxWriter
    writer = MailboxWriter(sys.argv[1], int(sys.argv[2]), 2)
    writer.publish(1, 0, 1, 8)
    print("up")
    time.sleep(600)
"""


def invoke(*args: str) -> str:
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    return result.output


def leave_behind(children: Any, group: str, rank: int) -> None:
    child = children.start(HOLD, group, rank)
    assert child.stdout.readline() == "up\n"
    child.send_signal(signal.SIGKILL)
    child.wait()


def test_version() -> None:
    assert invoke("--version") == f"loadbox {metadata.version('loadbox')}\n"


def test_help_teaches() -> None:
    text = invoke("--help")
    assert "loadbox demo" in text
    assert [line.split()[0] for line in text.partition("Commands:\n")[2].splitlines()] == list(app.commands)
    demo = invoke("demo", "--help")
    for word in ("--ranks", "--frontends", "--remote", "--chooser", "--no-board", "--rate", "--trace", "--speed-up", "--requests"):
        assert word in demo
    for word in ("--seconds", "--seed", "--group", "kill -9 PID", *CHOOSERS.keys() - {"round-robin"}):
        assert word in demo
    assert "--svg" not in demo
    clean = invoke("clean", "--help")
    assert "leftovers do no harm" in clean.lower()
    assert "mailboxes and dispatch boards" in clean


@pytest.mark.parametrize("name", sorted(app.commands))
def test_each_command_teaches_by_examples(name: str) -> None:
    (line,) = re.findall(rf"^  {name}  +(.+)$", invoke("--help"), re.MULTILINE)
    assert line.endswith(".")
    assert "..." not in line  # whole, in eighty columns
    assert invoke(name, "--help").count(f"\n  loadbox {name} ") >= 2


def test_help_is_quick(children: Any) -> None:
    """Nothing that only some command needs is loaded for it."""
    code = """
        import sys
        from click.testing import CliRunner
        from loadbox.cli._app import app
        assert CliRunner().invoke(app, ["--help"]).exit_code == 0
        print([name for name in ("numpy", "rich", "zmq", "msgspec", "prometheus_client") if name in sys.modules])
    """
    assert children.run(code) == "[]\n"


def test_clean_removes_what_nobody_owns_and_says_why_it_keeps_the_rest(group: str, children: Any) -> None:
    leave_behind(children, group, 0)
    with MailboxWriter(group, 1, 2) as writer:
        writer.publish(0, 0, 0, 8)
        kept = f"kept     /loadbox.{group}.1: its owner is alive (pid {os.getpid()})\n"
        assert invoke("clean", "--dry-run", "--group", group) == (
            f"would remove /loadbox.{group}.0\n{kept}1 to be removed, 1 kept.\n"
        )
        assert os.path.exists(f"/dev/shm/loadbox.{group}.0")
        assert invoke("clean", "--group", group) == f"removed /loadbox.{group}.0\n{kept}1 removed, 1 kept.\n"
        assert not os.path.exists(f"/dev/shm/loadbox.{group}.0")
        assert os.path.exists(f"/dev/shm/loadbox.{group}.1")
    assert invoke("clean", "--group", group) == "0 removed, 0 kept.\n"


def test_clean_touches_only_the_group_it_was_told(groups: Callable[[], str], children: Any) -> None:
    mine, other = groups(), groups()
    leave_behind(children, mine, 0)
    leave_behind(children, other, 0)
    assert f"removed /loadbox.{mine}.0" in invoke("clean", "--group", mine)
    assert os.path.exists(f"/dev/shm/loadbox.{other}.0")


def test_clean_takes_several_groups(group: str) -> None:
    for name in ("a", "b", "c"):
        MailboxWriter(f"{group}-{name}", 0, start_wait=0)._detach()
    try:
        said = invoke("clean", "--group", f"{group}-a", "--group", f"{group}-b", "--dry-run")
        assert said == f"would remove /loadbox.{group}-a.0\nwould remove /loadbox.{group}-b.0\n2 to be removed, 0 kept.\n"
    finally:
        for name in ("a", "b", "c"):
            invoke("clean", "--group", f"{group}-{name}")


def test_clean_covers_boards_and_what_is_half_made(group: str) -> None:
    left, half = f"loadbox.{group}.f.0123456789abcdef", f"loadbox.{group}.0"
    for name in (left, half):
        Path(f"/dev/shm/{name}").touch(0o600)
    with LoadReader(group, 1):  # it removes what dead frontends have left
        assert not os.path.exists(f"/dev/shm/{left}")
        Path(f"/dev/shm/{left}").touch(0o600)
        said = invoke("clean", "--group", group)
        assert f"removed /{left}\n" in said
        assert f"removed /{half}\n" in said
        assert re.search(rf"kept     /loadbox\.{group}\.f\.[0-9a-f]+: its owner is alive \(pid {os.getpid()}\)\n", said)
        assert said.endswith("2 removed, 1 kept.\n")


def test_clean_refuses_a_bad_group() -> None:
    result = CliRunner().invoke(app, ["clean", "--group", "../x"])
    assert result.exit_code == 2
    assert "cannot name a DP group" in result.output


def test_a_missing_library_is_named(tmp_path: Path) -> None:
    hide = "import sys; sys.modules['click'] = None; from loadbox.cli.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", hide], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == "loadbox: the command line needs click: pip install 'loadbox[cli]'\n"


@pytest.mark.parametrize("word", ["nonsense", "--nonsense"])
def test_unknown_words_are_usage_errors(word: str) -> None:
    assert CliRunner().invoke(app, [word]).exit_code == 2
