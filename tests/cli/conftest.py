"""Schedulers in processes of their own, and terminals to run a command in."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

_WRITER = """
    import sys, time
    from loadbox.mailbox import MailboxWriter
    group, rank, dp_size, mode = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) or None, int(sys.argv[4])
    writer = MailboxWriter(group, rank, dp_size, mode=mode)
    print("up", flush=True)
    for line in sys.stdin:
        words = line.split()
        if words[0] == "close":
            writer.close()
        else:
            writer.publish(*map(int, words))
        print("done", flush=True)
"""


class Writer:
    """A rank's scheduler in a process of its own: publishes what it is told, closes or is killed."""

    def __init__(self, child: Any, group: str, rank: int) -> None:
        self.child, self.group, self.rank = child, group, rank
        assert child.stdout.readline() == "up\n", child.communicate()[1]

    @property
    def pid(self) -> int:
        pid: int = self.child.pid
        return pid

    def tell(self, line: str) -> None:
        self.child.stdin.write(line + "\n")
        self.child.stdin.flush()
        assert self.child.stdout.readline() == "done\n", self.child.communicate()[1]

    def publish(self, *load: int) -> None:
        self.tell(" ".join(map(str, load)))

    def close(self) -> None:
        self.tell("close")

    def kill(self) -> None:
        self.child.send_signal(signal.SIGKILL)
        self.child.wait()


@pytest.fixture
def writer(children: Any) -> Callable[..., Writer]:
    def make(group: str, rank: int = 0, dp_size: int = 0, load: tuple[int, ...] | None = None, mode: int = 0o600) -> Writer:
        made = Writer(children.start(_WRITER, group, rank, dp_size, mode), group, rank)
        if load is not None:
            made.publish(*load)
        return made

    return make


# The terminal becomes the command's own, so that its keys send signals.
_IN_A_TERMINAL = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execvp(sys.argv[1], sys.argv[1:])"
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Tty:
    """A command in a terminal of its own; ``text`` is all that it wrote."""

    def __init__(
        self,
        *args: str,
        program: tuple[str, ...] = (sys.executable, "-m", "loadbox.cli"),
        width: int = 150,
        height: int = 40,
        env: dict[str, str] | None = None,
    ) -> None:
        self.master, self.slave = pty.openpty()
        self.resize(width, height)
        self.before = termios.tcgetattr(self.slave)
        self.text = ""
        environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _IN_A_TERMINAL, *program, *args],
            stdin=self.slave, stdout=self.slave, stderr=self.slave, start_new_session=True, cwd="/",
            env={**environment, "TERM": "xterm-256color", "COLORTERM": "", "COLUMNS": "80", "LINES": "24", **(env or {})},
        )  # fmt: skip

    def resize(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def press(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def pump(self, timeout: float = 0.05) -> None:
        ready, _, _ = select.select([self.master], [], [], timeout)
        if ready:
            self.text += os.read(self.master, 1 << 16).decode(errors="replace")

    @property
    def screen(self) -> str:
        """The last whole frame, without colours.  The last of all may still be on its way."""
        *before, last = (ESCAPES.sub("", frame).replace("\r", "") for frame in self.text.split("\x1b[H")[-2:])
        lines = last.split("\n")
        return last if not before or (len(lines) >= self.height and len(lines[-1]) >= self.width) else before[0]

    def wait_for(self, what: Callable[[str], Any], timeout: float = 60) -> str:
        """Until the screen holds what is looked for; that screen."""
        deadline = time.monotonic() + timeout
        while not what(self.screen):
            assert time.monotonic() < deadline, f"not seen in {timeout} s:\n{self.screen}"
            assert self.process.poll() is None, f"it ended with {self.process.returncode}:\n{self.screen}"
            self.pump()
        return self.screen

    def end(self, timeout: float = 60) -> int:
        """Wait for the command's end, its terminal being read meanwhile; the exit code."""
        deadline = time.monotonic() + timeout
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"still running:\n{self.screen}"
            self.pump()
        self.pump(0)
        code: int = self.process.returncode
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for fd in (self.master, self.slave):
            try:
                os.close(fd)
            except OSError:
                pass


@pytest.fixture
def tty() -> Iterator[Callable[..., Tty]]:
    ttys: list[Tty] = []

    def make(*args: str, **options: Any) -> Tty:
        ttys.append(Tty(*args, **options))
        return ttys[-1]

    yield make
    for each in ttys:
        each.close()
