"""What ties a rank or the frontend to the supervisor: it ends when the supervisor lets go, however that one ended.

A child's standard input is a pipe from the supervisor.  Lines in it are orders; its end means stop, and the kernel writes that
end even when the supervisor was killed.  A thread watches it, so that the child's own loop may block for ever, as an idle
engine does; the same thread writes the child's report to standard output a few times a second.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

__all__ = ["Lifeline"]

_INTERVAL = 0.2


class Lifeline:
    """Stop this process's main thread, by SystemExit, on SIGTERM or when standard input ends.

    Made in the main thread.  ``report`` gives a line to be written every 0.2 s, and is called in the watching thread, never while
    another line is being made: a report may be of what is new.  ``order`` gets each line of standard input, there too.
    """

    def __init__(self, report: Callable[[], bytes], order: Callable[[str], object] = lambda _: None) -> None:
        self._report = report
        self._order = order
        self._writing = threading.Lock()
        self._said_all = False
        self._main = threading.main_thread().ident or 0
        signal.signal(signal.SIGTERM, self._raise)
        threading.Thread(target=self._watch, name="lifeline", daemon=True).start()

    def last_words(self, report: Callable[[], bytes]) -> None:
        """Write a last line; no report follows it."""
        self._write(report, last=True)

    def _write(self, report: Callable[[], bytes], *, last: bool = False) -> None:
        with self._writing:
            if self._said_all:
                return
            line = report()
            try:
                while line:
                    line = line[os.write(1, line) :]
            except OSError:
                pass  # the supervisor is gone, and so shall we be
            self._said_all = last

    def _raise(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once: the clean-up is not to be interrupted
        raise SystemExit(0)

    def _watch(self) -> None:
        pending = b""
        while True:
            if not select.select([0], [], [], _INTERVAL)[0]:
                self._write(self._report)
                continue
            data = os.read(0, 65536)
            if not data:
                break
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                self._order(line.decode())
        while True:  # again and again: a signal just before the main thread blocks would be missed
            signal.pthread_kill(self._main, signal.SIGTERM)
            time.sleep(0.05)
