"""The numbers of ABI 1, as in ``loadbox.h``, which is the one definition; ``tests/mailbox/test_layout.py`` holds the two together.

Offsets are in bytes.  All words are 8 bytes wide and 8-byte aligned, little-endian::

       0  header: magic, abi_major, abi_minor, kind, record_offset, rank, dp_size, owner_pid, start_ns, state, boot_id (two
          words), time_ns_inode, capacity, epoch
     128  line A: seq | num_running | num_waiting | kv_active_pages | kv_total_pages | published_ns | epoch
     192  line B: the same six words, without a sequence
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

MAGIC = 0x00584F4244414F4C
MAGIC_SWAPPED = 0x4C4F4144424F5800
ABI_MAJOR = 1
ABI_MINOR = 0
SEGMENT_SIZE = 4096
RECORD_OFFSET = 128
KIND_RANK = 1
KIND_BOARD = 2
STATE_OPEN = 1
STATE_CLOSED = 2
EPOCH_LIMIT = 1 << 62
READ_TRIES = 64

SEQ = 128
COPY_A = 136
COPY_B = 192
DP_SIZE = 48
STATE = 72
TIME_NS_INODE = 96

RANK_LIMIT = 65536
"""Ranks and DP sizes stay below this: a bound on what a damaged or hostile header can make a reader allocate."""

RECORD = Struct("<6q")
"""One copy: num_running, num_waiting, kv_active_pages, kv_total_pages, published_ns, epoch.  For reading only."""


class Header(NamedTuple):
    """The header's words, in their order, boot_id as 16 bytes."""

    magic: int
    abi_major: int
    abi_minor: int
    kind: int
    record_offset: int
    rank: int
    dp_size: int
    owner_pid: int
    start_ns: int
    state: int
    boot_id: bytes
    time_ns_inode: int
    capacity: int
    epoch: int

    @classmethod
    def unpack(cls, data: bytes) -> Header:
        """Decode the first 120 bytes of a segment."""
        return cls._make(HEADER.unpack_from(data))


HEADER = Struct("<10Q16s3Q")
