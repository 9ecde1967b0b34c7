"""What a run of the demo is told, as its processes hand it on."""

from __future__ import annotations

import msgspec

__all__ = ["ROUND_ROBIN", "Options"]

ROUND_ROBIN = "round-robin"
"""The chooser that every other is compared with."""


class Options(msgspec.Struct, frozen=True):
    """One run: its group, its ranks and frontends, and how fast its time goes."""

    group: str
    ranks: int
    frontends: int
    remote: int
    """How many of the frontends, the last ones, behave as if they were on another host."""
    choosers: tuple[str, ...]
    """One for each replay."""
    board: bool
    speed_up: float
    seed: int
    trace: str
    """Where the requests come from, to be shown."""
    rate: float
    """Requests a second, as a multiple of the trace's."""
    directory: str = ""
    """The run's private directory: sockets, and the requests to replay."""

    @property
    def remote_group(self) -> str:
        """The group as remote frontends have it: there are no mailboxes in it, and their boards are on their own host."""
        return f"{self.group}-remote"

    def is_remote(self, frontend: int) -> bool:
        """Whether a frontend behaves as if it were on another host."""
        return frontend >= self.frontends - self.remote

    def address(self, frontend: int) -> str:
        """Where a frontend expects the ranks' handshakes."""
        return f"ipc://{self.directory}/f{frontend}"

    def title(self, replay: int) -> str:
        """A replay's name, to be shown."""
        chooser = self.choosers[replay]
        return "round robin" if chooser == ROUND_ROBIN else chooser if self.board else f"{chooser}, no board"
