"""The run's processes, seen from the supervisor: started, listened to, stopped; none of them outlives it."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Child", "Children", "Line"]

# The child gets this process's sys.path, whatever made it; and nothing of the working directory, where a module may hide another.
_BOOT = r"import sys; sys.path[:] = sys.argv.pop(1).split('\n'); from {module} import main; main()"
_STOP_LIMIT_S = 3.0
_TERM_LIMIT_S = 1.0


class Child:
    """One process: its input is the lifeline, its output are reports, its errors are for people."""

    def __init__(self, name: str, module: str, *args: str, env: dict[str, str] | None = None) -> None:
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, "-c", _BOOT.format(module=module), "\n".join(sys.path), *args],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, env=env,
        )  # fmt: skip
        self.noticed = False
        """Whether the supervisor has been told of this child's end."""

    @property
    def pid(self) -> int:
        """The process's id."""
        return self.process.pid

    def order(self, line: str) -> None:
        """Write a line to the child, if it is still there."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line.encode() + b"\n")
        except OSError:
            pass

    def let_go(self) -> None:
        """Close the lifeline: the child stops by itself, even if somebody has suspended it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.send_signal(signal.SIGCONT)

    def ended(self) -> str | None:
        """How the process ended, in words; None while it runs."""
        code = self.process.poll()
        if code is None:
            return None
        return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


@dataclass(frozen=True)
class Line:
    """A line that a child wrote: a report, or (``error``) words."""

    child: Child
    data: bytes
    error: bool


class Children:
    """All processes of the run; a context manager that stops them."""

    def __init__(self) -> None:
        self.all: list[Child] = []
        self._selector = selectors.DefaultSelector()
        self._pending: dict[int, bytes] = {}

    def start(self, name: str, module: str, *args: str, env: dict[str, str] | None = None) -> Child:
        """Start a child; Ctrl-C at the terminal, or the terminal's end, does not reach it."""
        # A blocked signal stays blocked over fork and exec; one that comes meanwhile is ours as soon as we unblock it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
        try:
            child = Child(name, module, *args, env=env)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.all.append(child)
        for stream, error in ((child.process.stdout, False), (child.process.stderr, True)):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            self._pending[stream.fileno()] = b""
            self._selector.register(stream, selectors.EVENT_READ, (child, error))
        return child

    def lines(self, timeout: float) -> Iterator[Line]:
        """What the children wrote, waiting up to ``timeout`` seconds for it."""
        if not self._selector.get_map():
            time.sleep(timeout)
            return
        for key, _ in self._selector.select(timeout):
            child, error = key.data
            yield from self._read(key.fileobj, child, error)  # type: ignore[arg-type] # only pipes are registered

    def _read(self, stream: IO[bytes], child: Child, error: bool) -> Iterator[Line]:
        number = stream.fileno()
        try:
            data = os.read(number, 65536)
        except BlockingIOError:
            return
        if not data:
            self._selector.unregister(stream)
            stream.close()
            data = b"\n" if self._pending[number] else b""
        *whole, self._pending[number] = (self._pending[number] + data).split(b"\n")
        for line in whole:
            yield Line(child, line, error)

    def stop(self) -> Iterator[Line]:
        """Stop all: ask, insist, kill.  Gives what they wrote to their very end."""
        for child in self.all:
            child.let_go()
        for limit, insist in ((_STOP_LIMIT_S, signal.SIGTERM), (_TERM_LIMIT_S, signal.SIGKILL), (_TERM_LIMIT_S, None)):
            deadline = time.monotonic() + limit
            while self._selector.get_map() or any(child.ended() is None for child in self.all):
                if time.monotonic() >= deadline:
                    break
                yield from self.lines(0.02)
            for child in self.all:
                if insist is not None and child.ended() is None:
                    child.process.send_signal(insist)

    def close(self) -> None:
        """Stop all, and let go of the pipes; idempotent."""
        for _ in self.stop():
            pass
        for key in list(self._selector.get_map().values()):
            self._selector.unregister(key.fileobj)
            key.fileobj.close()  # type: ignore[union-attr] # only pipes are registered
        self._selector.close()
        for child in self.all:
            child.process.wait()
        self.all.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
