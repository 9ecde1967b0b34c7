"""What a frontend knows of each engine: its life, its ready response, and where it says that its mailbox is."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from loadbox.piggyback._handshake import ABI

__all__ = ["EngineInfo", "EpochLookup", "MailboxKey", "announced_mailbox"]

EpochLookup = Callable[[str, int], "int | None"]

_NAME = re.compile(r"/?loadbox\.([A-Za-z0-9_-]{1,64})\.(0|[1-9][0-9]{0,4})")


class MailboxKey(NamedTuple):
    """One life of one rank's mailbox, as an engine announced it."""

    group: str
    rank: int
    epoch: int


@dataclass
class EngineInfo:
    """One engine as its frontend knows it.  Read it; the frontend writes it, in the thread that uses the frontend."""

    rank: int
    """0 to N - 1: the engine index less the base."""
    engine_index: int
    state: Literal["absent", "greeted", "ready", "dead"] = "absent"
    """absent: never seen. greeted: HELLO came. ready: takes requests. dead: it said ENGINE_CORE_DEAD."""
    lives: int = 0
    """How many HELLOs came from this index: more than one is an engine that came back."""
    ready: dict[str, Any] = field(default_factory=dict)
    """The ready response of this life, as it came."""
    mailbox: MailboxKey | None = None
    """The mailbox that this life announced, or None."""
    _epoch_lookup: EpochLookup | None = field(default=None, repr=False)

    @property
    def same_host(self) -> bool | None:
        """Whether the announced mailbox *with that epoch* is found here, which proves that the engine is on this host.

        Asked anew each time, with the frontend's ``mailbox_epoch`` callable; None without one, or if no mailbox was announced.
        """
        if self.mailbox is None or self._epoch_lookup is None:
            return None
        return self._epoch_lookup(self.mailbox.group, self.mailbox.rank) == self.mailbox.epoch


def announced_mailbox(message: Mapping[str, Any]) -> MailboxKey | None:
    """The mailbox named under ``loadbox`` in READY or in a ready response; None if there is none or it is odd."""
    offer = message.get("loadbox")
    if not isinstance(offer, Mapping) or offer.get("abi") != ABI:
        return None
    name, epoch = offer.get("mailbox"), offer.get("epoch")
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    if match is None or type(epoch) is not int or not 1 <= epoch < 1 << 62:
        return None
    return MailboxKey(match[1], int(match[2]), epoch)
