"""Checks of what lies in shared memory: leftovers, what is refused, other users' files, files that were removed under a writer."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from loadbox.cli._examine import Facts, examine
from loadbox.cli._show import user
from loadbox.cli.doctor._finding import Finding, fine, warning
from loadbox.mailbox import _names
from loadbox.mailbox._host import time_ns_inode
from loadbox.mailbox._layout import ABI_MAJOR, MAGIC

__all__ = ["SEGMENTS"]

_NAMED = 3
_PREFIX = f"{_names.SHM_DIR}/loadbox."
_DELETED = " (deleted)"


@dataclass(frozen=True)
class _Seen:
    name: str
    facts: Facts
    mine: bool

    @property
    def left(self) -> bool:
        """Does nobody own it?"""
        header = self.facts.header
        ours = header is None or header.magic in (0, MAGIC)
        return (
            self.facts.owner_lock == "free"
            and ours
            and (header is not None or not self.facts.found or not self.facts.found.st_size)
        )


def _look() -> list[_Seen]:
    seen = []
    for name in _names.list_names():
        try:
            facts = examine(name)
        except FileNotFoundError:
            continue
        assert facts.found is not None
        seen.append(_Seen(name, facts, facts.found.st_uid == os.geteuid()))
    return seen


def _listed(names: list[str]) -> str:
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def leftovers() -> Finding:
    """What killed processes of this user left."""
    names = [each.name for each in _look() if each.left and (each.mine or os.geteuid() == 0)]
    if not names:
        return fine("leftovers", "Nothing was left by processes that were killed.")
    return warning(
        "leftovers",
        f"Nobody owns {_listed(names)}: their processes were killed, or died before they were done.",
        "They do no harm: readers call such ranks DEAD, and the next writer adopts its own. loadbox clean removes them.",
    )


def refused() -> Finding:
    """What readers of this user refuse, among files of this user."""
    bad = [each for each in _look() if each.facts.state == "REFUSED" and each.mine]
    if not bad:
        return fine("refused", "No file of this user is refused.")
    odd = bad[0].facts.odd
    why = bad[0].facts.reason or (odd[0] if odd else "")
    names = _listed([each.name for each in bad])
    return warning("refused", f"Readers refuse {names}; the first: {why.rstrip('.')}.", "loadbox inspect NAME explains.")


def others() -> Finding:
    """Files of other users."""
    theirs = [each for each in _look() if not each.mine]
    if not theirs:
        return fine("others", "There are no segments of other users.")
    users = sorted({user(each.facts.found.st_uid) for each in theirs if each.facts.found is not None})
    unseen = [each.name for each in theirs if each.facts.state == "REFUSED"]
    words = f"{len(theirs)} segment{'s are' if len(theirs) > 1 else ' is'} of other users ({', '.join(users)})"
    if not unseen:
        return fine("others", f"{words}; this user's readers believe all of them.")
    return fine(
        "others",
        f"{words}; this user's readers refuse {_listed(unseen)}. If they should not: give the writer mode=0o640 and a common "
        "group, or name its uid in LOADBOX_TRUST_UIDS.",
    )


def other_clocks() -> Finding:
    """Living writers in other time namespaces."""
    here = time_ns_inode()
    names = [
        each.name
        for each in _look()
        if each.facts.epoch_lock == "held"
        and each.facts.header is not None
        and each.facts.header.abi_major == ABI_MAJOR
        and each.facts.header.time_ns_inode != here
    ]
    if not names:
        return fine("namespaces", "No living writer is in another time namespace.")
    return fine(
        "namespaces",
        f"{_listed(names)}: written in another time namespace, so their ages are upper bounds. Loads are exact.",
    )


def removed() -> Finding:
    """Owners whose files others have removed: they publish where nobody can find it."""
    found = [f"{name} (pid {pid})" for pid in filter(str.isdigit, os.listdir("/proc")) for name in _orphans(pid)]
    if not found:
        return fine("removed", "No process that can be seen publishes into a file that was removed.")
    return warning(
        "removed",
        f"The file was removed under its owner: {_listed(found)}. Readers call such a rank ABSENT.",
        "Restart these processes, and find out who removes files in /dev/shm (systemd's RemoveIPC=yes does when a user logs out).",
    )


def _orphans(pid: str) -> list[str]:
    """Names without a file that the process holds an owner's lock of; a child that inherited a mapping has no lock."""
    names = set()
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            link = os.readlink(f"/proc/{pid}/fd/{fd}")
            if link.startswith(_PREFIX) and link.endswith(_DELETED):
                with open(f"/proc/{pid}/fdinfo/{fd}", encoding="ascii", errors="replace") as file:
                    if re.search(r"^lock:.*OFDLCK.*WRITE", file.read(), re.MULTILINE):
                        names.add(link.removeprefix(_names.SHM_DIR).removesuffix(_DELETED))
    except OSError:
        pass  # another user's process, or it has ended
    return sorted(names)


SEGMENTS = (leftovers, refused, others, other_clocks, removed)
