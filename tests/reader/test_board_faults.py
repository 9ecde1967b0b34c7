"""What an enemy would do to the boards, and what two frontends do to each other that start at the same instant."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy
import pytest

from loadbox.mailbox import _attach
from loadbox.reader import LoadReader
from loadbox.reader._board import Board, board_names


def test_a_frontend_that_starts_while_another_clears_up(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start removes the boards that nobody owns: also the one whose owner is just about to take its lock.  It makes another."""
    hold, others = Board._hold, []

    def hold_late(self: Board, fd: int) -> None:
        if not others:
            others.append(None)
            others[0] = Board(group, 4)
        hold(self, fd)

    monkeypatch.setattr(Board, "_hold", hold_late)
    board = Board(group, 4)
    assert sorted(board_names(group)) == sorted([board.name, others[0].name])
    board.close()
    others[0].close()
    assert not list(board_names(group))


def test_closed_standard_streams_never_lead_to_a_board(group: str, children: Any, view_of: Callable[..., LoadReader]) -> None:
    """A frontend that closed its stdin, stdout or stderr and uses them nevertheless must not write into a board."""
    view_of(group, 2, board=True).choose("a", pinned=1)
    children.run(
        """
        import os, sys
        import numpy
        from loadbox.reader import LoadReader
        group = sys.argv[1]
        for closed in ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)):
            child = os.fork()
            if not child:
                saved = os.dup(2)
                for fd in closed:
                    os.close(fd)
                view = LoadReader(group, 2, board=True)
                view.loads()
                right = list(view._sources.view.in_flight) == [0, 1]
                for fd in closed:
                    try:
                        os.write(saved, f"descriptor {fd} is {os.readlink(f'/proc/self/fd/{fd}')}".encode())
                        right = False
                    except FileNotFoundError:
                        pass
                view.close()
                os._exit(0 if right else 1)
            assert os.waitpid(child, 0)[1] == 0, closed
        """,
        group,
    )


def test_a_board_that_shrinks_before_it_is_mapped(
    group: str, view_of: Callable[..., LoadReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is left out, and the view goes on."""
    view, other = view_of(group, 4), view_of(group, 4, board=True)
    read_header, shrunk = _attach.read_header, []

    def shrink(fd: int) -> Any:
        header = read_header(fd)
        path = os.readlink(f"/proc/self/fd/{fd}")
        if other._sources._board.name in path:  # type: ignore[union-attr]
            os.truncate(path, 1024)
            shrunk.append(path)
        return header

    monkeypatch.setattr(_attach, "read_header", shrink)
    view._sources._next_boards_ns = 0
    view.choose("a")
    assert shrunk


def test_readers_map_boards_read_only(group: str, view_of: Callable[..., LoadReader], children: Any) -> None:
    view_of(group, 2, board=True)
    shown = children.run(
        """
        import sys
        from loadbox.reader import LoadReader
        view = LoadReader(sys.argv[1], 2, board=False)
        view._sources._wants_board = "auto"  # others' boards are looked at, none is made
        view.loads()
        print(*[line.split()[1] for line in open("/proc/self/maps") if sys.argv[1] in line])
        """,
        group,
    )
    assert shown.split() == ["r--s"]


def test_sums_of_boards_never_spill(core: ModuleType, group: str, view_of: Callable[..., LoadReader], kit: Any) -> None:
    """Each half of a word is summed by itself: what one frontend writes into the lower half is never owed in the upper."""
    view = view_of(group, 1)
    boards = [Board(group, 1) for _ in range(2)]
    boards[0].words[0] = boards[1].words[0] = (1 << 32) - 1
    kit.until(lambda: view.loads() and len(view._sources._others.words) == 2)
    view.loads()
    table = view._sources.view
    assert (table.in_flight[0], table.owed[0]) == (2 * ((1 << 32) - 1), 0)
    boards[0].words[0] = boards[1].words[0] = (1 << 64) - 1
    view.loads()
    assert (table.in_flight[0], table.owed[0]) == (2 * ((1 << 32) - 1), 2 * ((1 << 32) - 1))
    assert view.choose("a") == 0
    for board in boards:
        board.close()


def test_a_group_that_grows_at_every_look(group: str, view_of: Callable[..., LoadReader]) -> None:
    """Ranks may come between two reads of one look: the view takes them in, and never raises."""
    view = view_of(group)
    reader = view._sources._reader
    assert reader is not None

    class Growing:
        dtype, size = reader.dtype, 1

        def read(self, out: Any = None) -> Any:
            if out is None or len(out) < self.size:
                if self.size < 5:
                    self.size += 1
                if out is not None:
                    raise ValueError("the group has grown")
                return numpy.zeros(self.size - (self.size < 5), self.dtype)
            return out

        def close(self) -> None:
            reader.close()

    view._sources._reader = Growing()  # type: ignore[assignment]
    assert len(view.loads()) == 5
