"""One base exception and its precise children.

Every message is a sentence that says what was found, where, and what to do.  Where the operating system gave the reason,
``errno`` carries it.
"""

from __future__ import annotations

__all__ = ["MailboxError", "MailboxInUse", "MailboxRefused", "MailboxUnsupported"]


class MailboxError(Exception):
    """A mailbox cannot be made or used.  ``errno`` is the system's error number, or None."""

    def __init__(self, message: str, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno

    def __reduce__(self) -> tuple[type[MailboxError], tuple[str, int | None]]:
        return type(self), (str(self), self.errno)


class MailboxInUse(MailboxError):
    """Another living writer owns this rank's mailbox."""


class MailboxRefused(MailboxError):
    """Something is in the mailbox's place that must not be trusted, followed or changed."""


class MailboxUnsupported(MailboxError):
    """This machine cannot run a mailbox: it is not x86-64 and the C core is not there."""
