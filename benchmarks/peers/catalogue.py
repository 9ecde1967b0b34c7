"""All peers by name."""

from __future__ import annotations

from libraries import Iceoryx2, Kickmsg, Membridge, SGLang
from memory import LoadboxC, LoadboxPython, LockedSharedMemory, NumpyMemmap, UnprotectedMmap
from messages import PrometheusScrape, Redis, ZmqPoll, ZmqPubSub
from peer import Peer

__all__ = ["PEERS", "peer_named"]

PEERS: tuple[type[Peer], ...] = (
    LoadboxC, LoadboxPython, SGLang, Kickmsg, Iceoryx2, Membridge, LockedSharedMemory, UnprotectedMmap, NumpyMemmap,
    ZmqPoll, ZmqPubSub, Redis, PrometheusScrape,
)  # fmt: skip


def peer_named(name: str) -> type[Peer]:
    """The peer of that class name."""
    return next(peer for peer in PEERS if peer.__name__ == name)
