"""What lies in this host's shared memory, rank by rank, as a third process sees it: looking takes nothing and changes nothing."""

from __future__ import annotations

import mmap
import os
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from loadbox.mailbox import MailboxReader, RankState, _attach, _files, _names
from loadbox.mailbox._layout import HEADER, SEGMENT_SIZE, SEQ, Header

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from loadbox.mailbox import LoadSnapshot
    from loadbox.reader._boards import Boards

__all__ = ["USABLE", "GroupLook", "RankLook", "Survey", "all_ranks"]

USABLE = (RankState.LIVE, RankState.STALLED)
_RATE_WINDOW_S = 2.0
_RATE_SHORTEST_S = 0.2
_LISTED_DP_SIZE = 1024  # missing ranks are listed in groups up to this size: what a header merely says must not swell a table


@dataclass(frozen=True)
class RankLook:
    """One rank at one moment.  None: not known, which is never the same as nothing."""

    group: str
    rank: int
    state: RankState
    snapshot: LoadSnapshot | None = None
    """The load, if it is usable (LIVE or STALLED)."""
    age_s: float | None = None
    reason: str | None = None
    epoch: int | None = None
    pid: int | None = None
    """As the header says: to print, never to trust."""
    uid: int | None = None
    started_s: float | None = None
    """Start of this life, Unix time."""
    dp_size: int | None = None
    publishes: int | None = None
    """Records written since the file was made: one for each publish, and one at the start of each life."""
    publishes_per_s: float | None = None
    in_flight: int | None = None
    """Requests that this host's frontends have dispatched and not seen end; None without a frontend that tells."""

    @property
    def usable(self) -> bool:
        """Whether the load may be acted on."""
        return self.snapshot is not None


@dataclass(frozen=True)
class GroupLook:
    """One group at one moment."""

    group: str
    dp_size: int | None
    """The largest that its living ranks announce; None if they announce none."""
    frontends: int
    """Living dispatch boards: frontends on this host that tell what they have dispatched."""
    ranks: tuple[RankLook, ...]


class _Page:
    """Header and sequence of one rank's file, mapped as long as the name leads to it and a reader would read it.

    The sequence comes by one aligned load: a copy made by the kernel may tear, and a counter must not jump back.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._identity: tuple[int, int] | None = None
        self._memory: mmap.mmap | None = None

    def read(self, name: str, found: os.stat_result | None) -> tuple[Header, int] | None:
        """(header, sequence) of what ``name`` leads to now, which is ``found``; None if a reader would not read it."""
        identity = None if found is None or found.st_size < SEGMENT_SIZE else (found.st_dev, found.st_ino)
        if identity is None or identity != self._identity:
            self.drop()
            if identity is not None:
                self._map(name)
        if self._memory is None:
            return None
        with memoryview(self._memory) as view, view.cast("q") as words:
            return Header.unpack(self._memory[: HEADER.size]), int(words[SEQ // 8])

    def _map(self, name: str) -> None:
        fd, _, _ = _attach.find(name, self._rank)
        if fd < 0:
            return
        try:
            found = os.fstat(fd)
            self._memory = _files.map_shared(fd, SEGMENT_SIZE, mmap.PROT_READ)
            self._identity = (found.st_dev, found.st_ino)
        except OSError:
            pass  # the reader says what is the matter
        finally:
            os.close(fd)

    def drop(self) -> None:
        """Let go of the mapping."""
        if self._memory is not None:
            self._memory.close()
        self._identity = self._memory = None


@dataclass
class _Followed:
    reader: MailboxReader
    page: _Page
    marks: deque[tuple[float, int, int]] = field(default_factory=deque)
    closed_at: float | None = None
    last: RankLook | None = None

    def close(self) -> None:
        self.reader.close()
        self.page.drop()

    def rate(self, now: float, epoch: int, seq: int) -> float | None:
        """Publishes a second of this life, over the last two seconds; None until there is something to compare with."""
        marks = self.marks
        if marks and (marks[-1][1] != epoch or marks[-1][2] > seq):
            marks.clear()
        marks.append((now, epoch, seq))
        while len(marks) > 2 and now - marks[1][0] >= _RATE_WINDOW_S:
            marks.popleft()
        then, _, before = marks[0]
        return (seq // 2 - before // 2) / (now - then) if now - then >= _RATE_SHORTEST_S else None


class Survey:
    """Looks at every rank of every group, or of some groups, again and again.

    Follows ranks as they come, restart and go.  A bad file is a rank's state, never an exception.

    Args:
        groups: only these; none: all.
        linger_s: how long a rank that closed is still listed.

    Threads: the caller serialises.  ``close`` lets go of all mappings.
    """

    def __init__(self, groups: Collection[str] = (), *, linger_s: float = 0.0) -> None:
        self._only = frozenset(groups)
        self._linger_s = linger_s
        self._followed: dict[tuple[str, int], _Followed] = {}
        self._boards: dict[str, Boards] = {}

    def look(self) -> list[GroupLook]:
        """How things are now, sorted by group and rank."""
        ranks, with_boards = self._names()
        for key in ranks - self._followed.keys():
            # Looks are rare, and each is to be true: the owner is asked for every time.
            self._followed[key] = _Followed(MailboxReader(*key, liveness_interval=0), _Page(key[1]))
        frontends, sums = self._look_at_boards(with_boards)
        looks: dict[str, list[RankLook]] = {group: [] for group in frontends}
        for key in sorted(self._followed):
            look = self._look_at(key, key in ranks, sums.get(key[0]))
            if look is not None:
                looks.setdefault(key[0], []).append(look)
        return [_group(group, frontends.get(group, 0), looks[group]) for group in sorted(looks)]

    def close(self) -> None:
        """Let go of everything."""
        for followed in self._followed.values():
            followed.close()
        for boards in self._boards.values():
            boards.close()
        self._followed.clear()
        self._boards.clear()

    def _names(self) -> tuple[set[tuple[str, int]], set[str]]:
        ranks, with_boards = set(), set()
        for name in _names.list_names():
            _, group, *rest = name.split(".")
            if not self._only or group in self._only:
                if len(rest) == 1:
                    ranks.add((group, int(rest[0])))
                else:
                    with_boards.add(group)
        return ranks, with_boards

    def _look_at(self, key: tuple[str, int], there: bool, sums: list[int] | None) -> RankLook | None:
        followed = self._followed[key]
        group, rank = key
        reader = followed.reader
        now = time.monotonic()
        state = reader.state()
        if not there:
            # A writer that closes takes the name away, so this is how a rank ends; a name that others removed is just gone.
            if state is RankState.CLOSED and followed.closed_at is None:
                followed.closed_at = now
            if state is not RankState.CLOSED or now - (followed.closed_at or now) >= self._linger_s:
                followed.close()
                del self._followed[key]
                return None
        else:
            followed.closed_at = None
        snapshot = reader.read() if state in USABLE else None
        if state in USABLE and snapshot is None:  # it closed, or restarted, between the two
            state = reader.state()
        age = reader.age() if snapshot is not None else None
        epoch = reader.epoch or None
        found = _files.stat_name(reader.name)
        page = followed.page.read(reader.name, found)
        told = page is not None and state not in (RankState.ABSENT, RankState.REFUSED)
        header, seq = page if page is not None and told else (None, 0)
        alive = header is not None and state in (*USABLE, RankState.SILENT)
        last = followed.last if state is RankState.CLOSED and header is None else None  # the file is gone, its end is known
        pid, started_s, uid = (last.pid, last.started_s, last.uid) if last is not None else (None, None, None)
        look = RankLook(
            group,
            rank,
            state,
            snapshot=snapshot,
            age_s=age,
            reason=reader.reason if state is RankState.REFUSED else None,
            epoch=epoch if state is not RankState.REFUSED else None,
            pid=pid if header is None else header.owner_pid,
            uid=uid if found is None else found.st_uid,
            started_s=started_s if header is None else header.start_ns / 1e9,
            dp_size=None if header is None else header.dp_size or None,
            publishes=seq // 2 if alive else None,
            publishes_per_s=followed.rate(time.monotonic(), reader.epoch, seq) if alive else None,
            in_flight=None if sums is None else sums[rank] if rank < len(sums) else 0,
        )
        followed.last = look
        return look

    def _look_at_boards(self, with_boards: set[str]) -> tuple[dict[str, int], dict[str, list[int]]]:
        """Living frontends of each group, and what they have in flight, rank by rank."""
        if with_boards - self._boards.keys():
            from loadbox.reader._boards import Boards

            for group in with_boards - self._boards.keys():
                self._boards[group] = Boards(group, lambda sentence: None)
        for group in self._boards.keys() - with_boards:
            self._boards.pop(group).close()
        frontends, sums = {}, {}
        for group, boards in self._boards.items():
            boards.look(None)
            if boards.words:
                frontends[group] = len(boards.words)
                longest = max(map(len, boards.words))
                sums[group] = [
                    sum(words[rank] & 0xFFFFFFFF for words in boards.words if rank < len(words)) for rank in range(longest)
                ]
        return frontends, sums


def _group(group: str, frontends: int, ranks: list[RankLook]) -> GroupLook:
    alive = (*USABLE, RankState.SILENT)
    dp_size = max((look.dp_size for look in ranks if look.dp_size and look.state in alive), default=None)
    if dp_size is not None and dp_size <= _LISTED_DP_SIZE:
        missing = set(range(dp_size)) - {look.rank for look in ranks}
        ranks = sorted([*ranks, *(RankLook(group, rank, RankState.ABSENT) for rank in missing)], key=lambda look: look.rank)
    return GroupLook(group, dp_size, frontends, tuple(ranks))


def all_ranks(groups: list[GroupLook]) -> Iterator[RankLook]:
    """The ranks of all groups, in order."""
    for group in groups:
        yield from group.ranks
