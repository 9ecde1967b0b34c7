"""A real publish and a real read between two processes, and a real death."""

from __future__ import annotations

import os
import random
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Callable

from loadbox.cli.doctor._finding import Finding, fault, fine
from loadbox.mailbox import LoadSnapshot, MailboxError, MailboxReader, RankState, _names, _segment

__all__ = ["SELFTEST"]

_ROUNDS = 3
_PATIENCE_S = 30.0
_ADVICE = (
    "If the checks above are fine, this is a system without open-file-description locks (some sandboxes) or without shared memory "
    "between processes: the load comes with the output batches alone there (the piggyback)."
)


_BOOT = "import sys; sys.path[:] = sys.argv.pop().split('\\n'); from loadbox.cli.doctor._child import main; main()"


class _Failed(Exception):
    pass


def selftest() -> Finding:
    """Publish in one process, read in another, kill the first and see it DEAD."""
    group = f"doctor-{os.getpid()}-{secrets.token_hex(4)}"
    command = [sys.executable, "-c", _BOOT, group, "\n".join(sys.path)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        with MailboxReader(group, 0) as reader:
            _expect(child, b"up\n")
            _wait(lambda: reader.state() is RankState.SILENT, f"after the start it is {reader.state().name}, not SILENT")
            for _ in range(_ROUNDS):
                total = random.randrange(1, 1 << 62)
                load = LoadSnapshot(random.randrange(1 << 62), random.randrange(1 << 62), random.randrange(total), total)
                _tell(child, load)
                if reader.read() != load:
                    raise _Failed(f"{tuple(load)} was published, and {reader.read()} was read")
            child.kill()
            child.wait()
            _wait(lambda: reader.state() is RankState.DEAD, f"after its end it is {reader.state().name}, not DEAD")
    except (_Failed, MailboxError) as error:
        return fault("self-test", f"Publish and read between two processes failed: {error}.", _ADVICE)
    finally:
        child.kill()
        child.communicate()
        _segment.clean(_names.segment_name(group, 0))
    return fine("self-test", f"Process {child.pid} published {_ROUNDS} loads, this one read them, and saw its death.")


def _tell(child: subprocess.Popen[bytes], load: LoadSnapshot) -> None:
    assert child.stdin is not None
    try:
        child.stdin.write(" ".join(map(str, load)).encode() + b"\n")
        child.stdin.flush()
    except BrokenPipeError:
        pass  # what it said is told by what follows
    _expect(child, b"done\n")


def _expect(child: subprocess.Popen[bytes], line: bytes) -> None:
    """The child's next line, or why it has none."""
    assert child.stdout is not None
    assert child.stderr is not None
    ready, _, _ = select.select([child.stdout], [], [], _PATIENCE_S)
    found = os.read(child.stdout.fileno(), 100) if ready else b""
    if found == line:
        return
    if not ready:
        raise _Failed(f"the other process said nothing for {_PATIENCE_S:.0f} s")
    child.kill()
    said = (found + child.stderr.read()).decode(errors="replace").strip().splitlines()
    raise _Failed(
        f"the other process {'ended' if not found else 'said what it should not'}: {said[-1] if said else 'no word of why'}"
    )


def _wait(holds: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not holds():
        if time.monotonic() > deadline:
            raise _Failed(otherwise)
        time.sleep(0.01)


SELFTEST = (selftest,)
