"""The mailbox: each scheduler's load in shared memory, read on demand and without waiting.  Linux, one host."""

from loadbox.mailbox._errors import MailboxError, MailboxInUse, MailboxRefused, MailboxUnsupported
from loadbox.mailbox._group import GroupReader
from loadbox.mailbox._names import list_groups
from loadbox.mailbox._reader import MailboxReader
from loadbox.mailbox._types import LoadSnapshot, RankState
from loadbox.mailbox._writer import MailboxWriter

__all__ = [
    "GroupReader",
    "LoadSnapshot",
    "MailboxError",
    "MailboxInUse",
    "MailboxReader",
    "MailboxRefused",
    "MailboxUnsupported",
    "MailboxWriter",
    "RankState",
    "list_groups",
]
