"""Which core runs: the C extension, or its pure-Python twin.

The twin's stores are ordered by the processor on x86-64 and nowhere else: a Python lock is no fence between processes on AArch64.
``LOADBOX_PURE_PYTHON=1`` forces the twin.
"""

from __future__ import annotations

import logging
import os
import platform
from typing import TYPE_CHECKING

from loadbox.mailbox._errors import MailboxUnsupported

__all__ = ["BACKEND", "GroupCore", "ReaderCore", "WriterCore", "require_supported"]

_NAMES = ("GroupCore", "ReaderCore", "WriterCore")
_log = logging.getLogger("loadbox")

FORCED = os.environ.get("LOADBOX_PURE_PYTHON", "") not in ("", "0")
_missing: ImportError | None = None

if TYPE_CHECKING:
    from loadbox.mailbox._seqlock_c import GroupCore, ReaderCore, WriterCore

    BACKEND: str
else:
    if not FORCED:
        try:
            from loadbox.mailbox import _seqlock_c as _core

            BACKEND = "c"
        except ImportError as error:
            _missing = error
    if FORCED or _missing:
        from loadbox.mailbox import _seqlock_py as _core

        BACKEND = "py"
    _absent = [name for name in _NAMES if not hasattr(_core, name)]
    if _absent:
        raise ImportError(f"{_core.__name__} is of another version of loadbox: no {', '.join(_absent)}; install loadbox again")
    GroupCore, ReaderCore, WriterCore = _core.GroupCore, _core.ReaderCore, _core.WriterCore

_told = False


def require_supported() -> None:
    """Raise MailboxUnsupported where no core keeps the latch's order; say once, in the log, that the twin runs for want of C."""
    global _told
    if BACKEND == "c":
        return
    machine = platform.machine()
    if machine not in ("x86_64", "AMD64"):
        raise MailboxUnsupported(
            f"the pure-Python mailbox is not safe on {machine}: its stores need the order of x86-64; "
            "install loadbox with a C compiler at hand, or rely on the piggyback"
        )
    if _missing and not _told:
        _told = True
        _log.warning("loadbox runs without its C core (%s): publish and read are several times slower", _missing)
