"""The dispatch board, with frontends in processes of their own: seen at once, dropped at death, clean at a start."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from loadbox.mailbox import MailboxError, MailboxWriter, _segment
from loadbox.mailbox._layout import HEADER, KIND_BOARD, MAGIC, SEGMENT_SIZE, Header
from loadbox.reader import LoadReader, _boards
from loadbox.reader._board import Board, board_names

FRONTEND = """
    import sys
    from loadbox.reader import LoadReader
    view = LoadReader(sys.argv[1], 4, board=True, seed=1)
    print("up", flush=True)
    for line in sys.stdin:
        verb, name, *rank = line.split()
        if verb == "choose":
            view.choose(name, pinned=int(rank[0]))
        elif verb == "close":
            view.close()
        else:
            getattr(view, verb)(name)
        print("done", flush=True)
"""


def say(child: Any, line: str) -> None:
    child.stdin.write(line + "\n")
    child.stdin.flush()
    assert child.stdout.readline() == "done\n", child.stderr.read()


def frontend(children: Any, group: str) -> Any:
    child = children.start(FRONTEND, group)
    assert child.stdout.readline() == "up\n", child.stderr.read()
    return child


def files(group: str) -> list[str]:
    return sorted(name for name in os.listdir("/dev/shm") if name.startswith(f"loadbox.{group}.f."))


def test_dispatches_of_others_are_seen_at_once(
    group: str, core: ModuleType, view_of: Callable[..., LoadReader], kit: Any, children: Any
) -> None:
    view = view_of(group, 4)
    child = frontend(children, group)
    say(child, "choose a 0")
    kit.until(lambda: kit.on_the_host(view) == [1, 0, 0, 0])
    for i in range(5):
        for rank in (0, 1, 3):
            say(child, f"choose {rank}-{i} {rank}")
            assert kit.on_the_host(view)[rank] == i + 1 + (rank == 0), "no lag once the board is known"
    assert kit.in_flight(view) == [0] * 4, "loads() tells one's own"
    assert [view.choose(f"m{i}") for i in range(5)] == [2] * 5, "the only rank that the other has not filled"
    assert kit.on_the_host(view) == [6, 5, 5, 5]
    shown = view._sources.view
    assert (shown.owed.tolist(), shown.own.tolist()) == ([6, 5, 5, 5], [0, 0, 5, 0])
    say(child, "first_token a")
    say(child, "finished 1-0")
    assert kit.on_the_host(view) == [6, 4, 5, 5]
    assert shown.owed.tolist() == [5, 4, 5, 5]


def test_a_frontend_that_dies_is_dropped_and_one_that_starts_is_clean(
    group: str, view_of: Callable[..., LoadReader], kit: Any, children: Any
) -> None:
    view = view_of(group, 4)
    child = frontend(children, group)
    for i in range(9):
        say(child, f"choose {i} {i % 2}")
    kit.until(lambda: kit.on_the_host(view) == [5, 4, 0, 0])
    child.send_signal(signal.SIGSTOP)
    assert kit.on_the_host(view) == [5, 4, 0, 0], "a stopped frontend's requests are still in flight"
    child.kill()
    kit.until(lambda: kit.on_the_host(view) == [0, 0, 0, 0])
    assert len(files(group)) == 2, "the dead one's file is left"
    again = frontend(children, group)
    assert len(files(group)) == 2, "and removed by the next"
    assert kit.on_the_host(view) == [0, 0, 0, 0]
    say(again, "choose a 3")
    kit.until(lambda: kit.on_the_host(view) == [0, 0, 0, 1])
    say(again, "close -")
    assert len(files(group)) == 1
    kit.until(lambda: kit.on_the_host(view) == [0, 0, 0, 0])


def test_files_and_descriptors_stay_bounded(
    group: str, view_of: Callable[..., LoadReader], kit: Any, children: Any, open_files: Callable[[], int]
) -> None:
    view = view_of(group, 4)
    kit.on_the_host(view)
    before = None
    for _ in range(6):
        child = frontend(children, group)
        say(child, "choose a 1")
        kit.until(lambda: kit.on_the_host(view) == [0, 1, 0, 0])
        descriptors = open_files()
        assert before in (None, descriptors)
        before = descriptors
        child.kill()
        child.wait()
        kit.until(lambda: kit.on_the_host(view) == [0, 0, 0, 0])
        assert len(files(group)) <= 2


def test_others_of_another_group_are_not_seen(groups: Callable[[], str], view_of: Callable[..., LoadReader], kit: Any) -> None:
    one, two = view_of(groups(), 2), view_of(groups(), 2)
    one.choose("a")
    assert kit.on_the_host(two) == [0, 0]


def test_many_frontends_in_one_process(group: str, core: ModuleType, view_of: Callable[..., LoadReader], kit: Any) -> None:
    views = [view_of(group, 5, seed=i) for i in range(6)]
    for view in views:
        view.loads()
    kit.until(lambda: all(len(view.loads()) == 5 and len(view._sources._others.words) == 5 for view in views))
    for i in range(100):
        views[i % 6].choose(f"{i}")
        on_host = kit.on_the_host(views[0])
        assert max(on_host) - min(on_host) <= 1, "six frontends level the ranks as one would"
    assert [kit.on_the_host(view) for view in views] == [[20] * 5] * 6


def test_what_the_board_says_of_reports(group: str, core: ModuleType, view_of: Callable[..., LoadReader], kit: Any) -> None:
    """Others' dispatches later than a rank's report count as unseen until the next report, and no longer."""
    with MailboxWriter(group, 0, 1) as writer:
        view, other = view_of(group, 1), view_of(group, 1)
        kit.until(lambda: view.loads() and view._sources._others.words)
        writer.publish(0, 0, 1, 10)
        other.choose("before")
        kit.on_the_host(view)
        writer.publish(0, 1, 1, 10)
        shown = view._sources.view
        assert (kit.on_the_host(view), shown.unseen[0]) == ([1], 0)
        other.choose("after")
        view.choose("mine")
        assert (kit.on_the_host(view), shown.unseen[0]) == ([3], 2)
        other.first_token("before")
        assert (kit.on_the_host(view), shown.unseen[0], shown.owed[0]) == ([3], 1, 2)
        other.choose("third")
        assert (kit.on_the_host(view), shown.unseen[0]) == ([4], 2)
        writer.publish(1, 3, 1, 10)
        assert (kit.on_the_host(view), shown.unseen[0]) == ([4], 0)


def test_no_board(group: str, view_of: Callable[..., LoadReader], kit: Any) -> None:
    public = view_of(group, 2)
    private = view_of(group, 2, board=False)
    assert len(files(group)) == 1
    public.choose("a", pinned=0)
    private.choose("b", pinned=1)
    assert kit.on_the_host(private) == [0, 1]
    assert kit.on_the_host(public) == [1, 0]


def test_a_board_grows_with_the_group(group: str, view_of: Callable[..., LoadReader], kit: Any) -> None:
    view, other = view_of(group), view_of(group)
    view.feed(kit.Batch.of(1))
    other.feed(kit.Batch.of(1))
    other.choose("a", pinned=1)
    kit.until(lambda: kit.on_the_host(view) == [0, 1])
    other.feed(kit.Batch.of(700))
    other.choose("b", pinned=700)
    view.feed(kit.Batch.of(700))
    kit.until(lambda: sum(kit.on_the_host(view)) == 2)
    assert kit.on_the_host(view)[700] == 1
    assert sorted(os.stat(f"/dev/shm/{name}").st_size for name in files(group)) == [8192, 8192]


def test_it_looks_as_loadbox_h_says(group: str, view_of: Callable[..., LoadReader]) -> None:
    view = view_of(group, 3)
    view.choose("a", pinned=2)
    view.choose("b", pinned=2)
    view.first_token("a")
    (name,) = files(group)
    data = Path("/dev/shm", name).read_bytes()
    header = Header.unpack(data)
    assert (header.magic, header.kind, header.record_offset, header.rank, header.capacity) == (MAGIC, KIND_BOARD, 128, 0, 496)
    assert (header.owner_pid, header.state, len(data)) == (os.getpid(), 1, SEGMENT_SIZE)
    assert 0 < header.epoch < 1 << 62
    assert [int.from_bytes(data[at : at + 8], "little") for at in (128, 136, 144, 152)] == [0, 0, 1 << 32 | 2, 0]
    assert os.stat(f"/dev/shm/{name}").st_mode & 0o777 == 0o600
    assert list(board_names(group)) == [f"/{name}"]


@pytest.mark.parametrize(
    "make",
    ["magic", "major", "kind", "capacity", "offset", "epoch", "mode", "link", "symlink", "fifo", "dir", "short", "hole", "uid"],
)
def test_what_is_no_board_is_left_out_and_left_alone(
    group: str, view_of: Callable[..., LoadReader], kit: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path, make: str
) -> None:
    view = view_of(group, 2)
    path = f"/dev/shm/loadbox.{group}.f.{0:016x}"
    fields = {"magic": MAGIC, "abi_major": 1, "kind": 2, "record_offset": 128, "capacity": 496, "epoch": 5}
    change = {
        "magic": ("magic", 77), "major": ("abi_major", 2), "kind": ("kind", 1), "capacity": ("capacity", 497),
        "offset": ("record_offset", 64), "epoch": ("epoch", 0),
    }  # fmt: skip
    if make in change:
        fields.update([change[make]])
    header = dict.fromkeys(Header._fields, 0) | {"boot_id": bytes(16)} | fields
    content = HEADER.pack(*header.values()) + bytes(8) + b"\x09" * (SEGMENT_SIZE - 128)
    if make in ("symlink", "link"):
        (tmp_path / "it").write_bytes(content)
    if make == "symlink":
        os.symlink(tmp_path / "it", path)
    elif make == "link":
        Path(path).write_bytes(content)
        os.link(path, path.replace(".f.", ".x."))
    elif make == "fifo":
        os.mkfifo(path, 0o600)
    elif make == "dir":
        os.mkdir(path)
    elif make == "hole":
        with open(path, "wb") as file:
            file.truncate(SEGMENT_SIZE)
    else:
        Path(path).write_bytes(content[: 200 if make == "short" else None])
    if make not in ("symlink", "dir"):
        os.chmod(path, 0o622 if make == "mode" else 0o600)
    if make == "uid":
        if os.geteuid():
            pytest.skip("only root can make another user's file")
        os.chown(path, 12345, 12345)
    before = os.stat(path, follow_symlinks=False)
    assert kit.on_the_host(view) == [0, 0]
    assert f"the dispatch board {path} is left out: " in caplog.text
    with LoadReader(group, 2) as other:
        assert kit.on_the_host(other) == [0, 0]
    if make not in {*change, "short", "hole", "uid"} - {"magic"}:  # those are nobody's by their magic: removed with the leftovers
        after = os.stat(path, follow_symlinks=False)
        assert (before.st_ino, before.st_size, before.st_mode) == (after.st_ino, after.st_size, after.st_mode)


def test_a_directory_that_has_not_changed_is_not_listed_again(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[str] = []
    generation = [1]
    boards = _boards.Boards(group, pytest.fail)
    boards._watch = SimpleNamespace(again=lambda: None, generation=lambda: generation[0])  # type: ignore[assignment]
    try:
        with LoadReader(group, 2) as other:
            other.choose("a", pinned=1)
            monkeypatch.setattr(_boards, "board_names", lambda group: listed.append(group) or board_names(group))
            for _ in range(3):
                boards.look(None)
                assert [words[1] for words in boards.words] == [1 << 32 | 1]
        for _ in range(3):
            boards.look(None)
            assert boards.words == [], "the owner is asked all the same"
        assert listed == [group]
        generation[0] = 2
        boards.look(None)
        assert listed == [group] * 2
    finally:
        boards.close()


def test_a_full_shm(
    group: str, view_of: Callable[..., LoadReader], kit: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(_segment.os, "posix_fallocate", full)
    with pytest.raises(MailboxError, match=r"the dispatch board /loadbox\..* cannot be made: /dev/shm is full") as caught:
        view_of(group, 2, board=True)
    assert caught.value.errno == errno.ENOSPC
    view = view_of(group, 2)
    assert "goes on without a dispatch board" in caplog.text
    assert files(group) == []
    view.choose("a", pinned=1)
    assert kit.in_flight(view) == [0, 1]


def test_a_shm_that_fills_up_later(
    group: str, view_of: Callable[..., LoadReader], kit: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    view = view_of(group, board=True)
    view.feed(kit.Batch.of(1))
    view.choose("a", pinned=1)
    monkeypatch.setattr(_segment.os, "posix_fallocate", full)
    view.feed(kit.Batch.of(700))
    assert "goes on without a dispatch board" in caplog.text
    assert (sum(kit.in_flight(view)), files(group)) == (1, [])
    view.choose("b", pinned=700)
    view.finished("a")
    assert (sum(kit.in_flight(view)), kit.in_flight(view)[700]) == (1, 1)


def test_a_board_that_is_just_being_made(
    group: str, view_of: Callable[..., LoadReader], kit: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Its file is there, empty and then of zeros, before it is a board: it is looked at again the next time."""
    view, other = view_of(group, 2), view_of(group, 2)
    other.choose("a", pinned=0)
    (name,) = [f"/dev/shm/{name}" for name in files(group) if f"/{name}" != view._sources._board.name]
    aside = name.replace(".f.", ".x.")
    os.rename(name, aside)
    for content in (b"", bytes(SEGMENT_SIZE)):
        Path(name).write_bytes(content)
        os.chmod(name, 0o600)
        view._sources._next_boards_ns = 0
        assert kit.on_the_host(view) == [0, 0]
    os.rename(aside, name)
    view._sources._next_boards_ns = 0
    assert kit.on_the_host(view) == [1, 0]
    assert caplog.text == ""


def test_a_start_that_fails_leaves_nothing(group: str, monkeypatch: pytest.MonkeyPatch, open_files: Callable[[], int]) -> None:
    def fails(*_: object) -> int:
        raise MailboxError("no")

    descriptors = open_files()
    monkeypatch.setattr(_segment, "lock_epoch", fails)
    with pytest.raises(MailboxError):
        Board(group, 4)
    assert files(group) == []
    assert open_files() == descriptors


FORKED = """
    import os, signal, sys
    from loadbox.reader import LoadReader
    group = sys.argv[1]
    view = LoadReader(group, 3, seed=1)
    def host(view):
        view.loads()
        return view._sources.view.in_flight.tolist()
    for i in range(4):
        view.choose(f"p{i}", pinned=1)
    pid = os.fork()
    if pid == 0:
        before = [load.in_flight for load in view.loads()]
        assert before == [0, 0, 0], before
        assert host(view) == [0, 4, 0], host(view)
        view.finished("p0")
        view.choose("c", pinned=2)
        assert host(view) == [0, 4, 1], host(view)
        print("child", os.getpid(), flush=True)
        signal.pause()
    assert sys.stdin.readline() == "go\\n"
    import time
    end = time.monotonic() + 20
    while host(view) != [0, 4, 1] and time.monotonic() < end:
        time.sleep(0.01)
    print(host(view), [load.in_flight for load in view.loads()], flush=True)
    if sys.argv[2] == "die":
        os.kill(os.getpid(), 9)
    view.close()
    print("closed", flush=True)
    os.waitpid(pid, 0)
"""


@pytest.mark.parametrize("end", ["die", "close"])
def test_fork(group: str, view_of: Callable[..., LoadReader], kit: Any, children: Any, end: str) -> None:
    """The child is a frontend of its own, and does not keep its parent's board alive."""
    child = children.start(FORKED, group, end)
    forked = int(child.stdout.readline().removeprefix("child "))
    view = view_of(group, 3)
    kit.until(lambda: kit.on_the_host(view) == [0, 4, 1])
    assert len(files(group)) == 3
    child.stdin.write("go\n")
    child.stdin.flush()
    assert child.stdout.readline() == "[0, 4, 1] [0, 4, 0]\n"
    kit.until(lambda: kit.on_the_host(view) == [0, 0, 1])
    os.kill(forked, signal.SIGKILL)
    kit.until(lambda: kit.on_the_host(view) == [0, 0, 0])


def test_forked_frontends_draw_for_themselves(group: str, children: Any) -> None:
    """Workers of a server that forks would otherwise all follow the same seed, and pile up on the same ranks."""
    program = """
        import os, sys
        from loadbox.reader import LoadReader
        view = LoadReader(sys.argv[1], 64, board=False, seed=1)
        for _ in range(2):
            pid = os.fork()
            if pid == 0:
                print([view.choose(str(i)) for i in range(20)], flush=True)
                os._exit(0)
            os.waitpid(pid, 0)
        view.close()
    """
    one, two = children.run(program, group).splitlines()
    assert one != two


def test_a_fork_while_a_board_is_made_does_not_keep_its_lock(
    group: str, view_of: Callable[..., LoadReader], kit: Any, children: Any
) -> None:
    """Another thread forks between the lock and the rest; the child must not hold the board for a dead frontend."""
    program = """
        import os, sys, threading
        from loadbox.mailbox import _segment
        from loadbox.reader import LoadReader
        lock = _segment._lock
        def lock_and_fork(name, fd):
            lock(name, fd)
            def fork():
                if os.fork() == 0:
                    os.close(1); os.close(2)
                    os.read(0, 1)  # outlives its parent
                    os._exit(0)
            thread = threading.Thread(target=fork)
            thread.start()
            thread.join()
        _segment._lock = lock_and_fork
        view = LoadReader(sys.argv[1], 2, board=True)
        view.choose("a", pinned=0)
        print("chosen", flush=True)
        sys.stdin.readline()
        os._exit(0)
    """
    child = children.start(program, group)
    assert child.stdout.readline() == "chosen\n"
    view = view_of(group, 2)
    kit.until(lambda: kit.on_the_host(view) == [1, 0])
    child.kill()
    child.wait()
    kit.until(lambda: kit.on_the_host(view) == [0, 0])
