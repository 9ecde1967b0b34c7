"""The mailbox as an engine uses it: nothing that goes wrong with it reaches the engine."""

from __future__ import annotations

import logging
from time import perf_counter_ns

from loadbox.cli.demo._cost import Cost
from loadbox.mailbox import MailboxWriter

__all__ = ["LoadPublisher"]

_log = logging.getLogger("loadbox")


class LoadPublisher:
    """One rank's mailbox, or none if it cannot be had; errors are logged once and counted in ``errors``."""

    def __init__(self, group: str, rank: int, dp_size: int) -> None:
        self.publishes = 0
        self.errors = 0
        self.cost = Cost()
        self.writer: MailboxWriter | None = None
        """The mailbox, to be announced to frontends."""
        try:
            self.writer = MailboxWriter(group, rank, dp_size)
        except Exception as error:
            self._failed("serving without a mailbox", error)

    def publish(self, num_running: int, num_waiting: int, kv_active_pages: int, kv_total_pages: int) -> None:
        """Publish; never raises."""
        if self.writer is None:
            return
        before = perf_counter_ns()
        try:
            self.writer.publish(num_running, num_waiting, kv_active_pages, kv_total_pages)
        except Exception as error:
            self._failed("a publish failed, serving on", error)
            return
        self.cost.add(perf_counter_ns() - before)
        self.publishes += 1

    def close(self) -> None:
        """Say CLOSED; idempotent."""
        if self.writer is not None:
            self.writer.close()

    def _failed(self, what: str, error: Exception) -> None:
        self.errors += 1
        if self.errors == 1:
            _log.warning("%s: %s", what, error)
