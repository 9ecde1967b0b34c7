"""A terminal taken over for a while: keys one by one, the alternate screen, and everything given back on every way out.

The way out by an exception, SIGTERM, SIGHUP, SIGINT or Ctrl-Z is one: nothing is done in a signal handler but to note the signal,
and a pipe wakes the loop.  (After SIGKILL nobody can give anything back: ``reset`` does.)
"""

from __future__ import annotations

import os
import select
import signal
import termios
import time
import tty
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Terminal"]

_ESCAPES = {
    "[A": "up", "OA": "up", "[B": "down", "OB": "down", "[5~": "page up", "[6~": "page down",
    "[H": "home", "OH": "home", "[1~": "home", "[F": "end", "OF": "end", "[4~": "end",
}  # fmt: skip
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_NOTED = (*_ENDS, signal.SIGTSTP, signal.SIGWINCH)


class Terminal:
    """Keys from ``fd``, which is a terminal; a context manager.  The main thread only.

    Args:
        fd: where keys come from.
        enter, leave: show and hide the screen; called again around a stop by Ctrl-Z.
    """

    def __init__(self, fd: int, enter: Callable[[], None], leave: Callable[[], None]) -> None:
        self._fd = fd
        self._enter_screen = enter
        self._leave_screen = leave
        self._noted: set[int] = set()
        self._handlers: dict[int, Any] = {}
        self._wake = (-1, -1)
        self._old_wakeup = -1
        self._old: list[Any] = []
        self._unread = b""

    def __enter__(self) -> Self:
        self._old = termios.tcgetattr(self._fd)
        self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._old_wakeup = signal.set_wakeup_fd(self._wake[1], warn_on_full_buffer=False)
        try:
            for number in _NOTED:
                self._handlers[number] = signal.signal(number, self._note)
            self._take()
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._restore()

    def _restore(self) -> None:
        try:
            self._give_back()
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._old_wakeup)
            for end in self._wake:
                os.close(end)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted.add(number)

    def _take(self) -> None:
        tty.setcbreak(self._fd, termios.TCSADRAIN)
        self._enter_screen()

    def _give_back(self) -> None:
        try:
            self._leave_screen()
        finally:
            try:
                termios.tcsetattr(self._fd, termios.TCSADRAIN, self._old)
            except termios.error:
                pass  # the terminal is gone: an ssh connection that broke

    def _stop(self) -> None:
        """Ctrl-Z: give the terminal back, stop as others do, and take it again when told to go on."""
        self._give_back()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._note)
        self._take()

    def keys(self, timeout_s: float) -> list[str]:
        """Keys pressed within so many seconds, at least until the first; ``"end"`` is a key, "quit" an end of the session.

        An empty list: the time is over, or the terminal was resized or taken again, so that it is to be drawn anew.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            if not self._noted.isdisjoint(_ENDS):
                return ["quit"]
            if self._noted:
                stop = signal.SIGTSTP in self._noted
                self._noted.clear()
                if stop:
                    self._stop()
                return []
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._fd, self._wake[0]], [], [], max(0.0, left))
            if self._wake[0] in ready:
                os.read(self._wake[0], 512)
            if self._fd in ready:
                try:
                    data = os.read(self._fd, 512)
                except OSError:
                    data = b""
                return self._split(data) if data else ["quit"]  # no data: the terminal is gone
            if left <= 0 and not self._noted:
                return []

    def _split(self, data: bytes) -> list[str]:
        text = (self._unread + data).decode("ascii", "replace")
        self._unread = b""
        keys: list[str] = []
        while text:
            if text[0] != "\x1b":
                keys.append(text[0])
                text = text[1:]
                continue
            name = next((name for name in _ESCAPES if text[1:].startswith(name)), None)
            if name is not None:
                keys.append(_ESCAPES[name])
                text = text[1 + len(name) :]
            elif text[1:2] not in ("", "[", "O"):  # Esc, or Alt with a key
                text = text[1:]
            elif len(text) <= 3 and not text[2:].isalpha():
                self._unread = text.encode()  # the rest of a key that is on its way
                break
            else:  # some other key: its sequence ends with a letter or ~
                end = next((at for at in range(2, len(text)) if text[at].isalpha() or text[at] == "~"), len(text) - 1)
                text = text[end + 1 :]
        return keys
