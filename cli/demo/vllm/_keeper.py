"""The process between the demo and its vLLM server, so that no end of the demo, however sudden, leaves a server behind.

Standard input is the lifeline: its end means stop, and the kernel writes that end even when the demo was killed.  The server is the
leader of a process group of its own, which Ctrl-C at the terminal does not reach; its id is the first line of standard output.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable

__all__ = ["main"]

_TICK_S = 0.05
_ORDERLY_S = 2.0
_POLITENESS = 5


def main() -> None:
    """``LOG COMMAND…``: run the command with its output in the file ``LOG``, until it ends or standard input does."""
    log, *command = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # A server takes every core there is, with a process a rank; whoever looks at the mailboxes meanwhile is to be seen looking.
    os.nice(_POLITENESS)
    with open(log, "ab") as output:
        server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            cwd=os.path.dirname(log), start_new_session=True, restore_signals=True, preexec_fn=_default_signals,
        )  # fmt: skip
    os.write(1, f"{server.pid}\n".encode())
    try:
        _until(lambda: _let_go() or server.poll() is not None)
        # Asked first, since it then removes what vLLM itself keeps in shared memory.
        if server.poll() is None:
            server.terminate()
        _until(lambda: server.poll() is not None and not _group_lives(server.pid), _ORDERLY_S)
    finally:
        try:
            os.killpg(server.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    code = server.wait()
    sys.exit(code if 0 <= code < 128 else 1)


def _default_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _until(holds: Callable[[], bool], limit_s: float = float("inf")) -> None:
    end = time.monotonic() + limit_s
    while not holds() and time.monotonic() < end:
        time.sleep(_TICK_S)


def _let_go() -> bool:
    return bool(select.select([0], [], [], 0)[0]) and not os.read(0, 4096)


def _group_lives(group: int) -> bool:
    """Whether a process of the group is there that is no zombie."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                    state, _, of_group, *_ = file.read().rpartition(")")[2].split()
            except (OSError, ValueError):
                continue
            if int(of_group) == group and state != "Z":
                return True
    return False
