"""Every state a rank can be in, and what a reader may use in it."""

from __future__ import annotations

import fcntl
import math
import os
import time
from typing import Any

import pytest

SEQ, RUNNING, PUBLISHED, EPOCH, B, TIME_NS = 16, 17, 21, 22, 24, 12
LONG = time.monotonic_ns() // 2  # as long a quiet as this machine's clock, which counts from its start, can show
STALL = LONG / 4e9


def age_by(view: memoryview, ns: int) -> None:
    """Make the last publish older than it is, in both copies, as a publish would have left it."""
    published = view[PUBLISHED] - ns
    view[PUBLISHED] = published
    view[B + 4] = published
    view[SEQ] += 2


def test_from_absent_to_closed(box: Any, group: str) -> None:
    State = box.RankState
    with box.MailboxReader(group, 3, liveness_interval=0) as reader:
        assert (reader.state(), reader.read(), reader.age(), reader.epoch, reader.reason) == (State.ABSENT, None, None, 0, None)
        with box.MailboxWriter(group, 3, 4) as writer:
            assert (reader.state(), reader.read(), reader.age()) == (State.SILENT, None, None)
            assert reader.epoch == writer.epoch
            writer.publish(1, 2, 3, 4)
            assert reader.state() is State.LIVE
            assert reader.read() == (1, 2, 3, 4)
            assert reader.read() is reader.read()
            assert 0 <= reader.age() < 60
        assert (reader.state(), reader.read(), reader.age()) == (State.CLOSED, None, None)
        with box.MailboxReader(group, 3) as late:
            assert late.state() is State.ABSENT
        with box.MailboxWriter(group, 3, 4) as again:
            assert reader.state() is State.SILENT
            assert reader.epoch == again.epoch != writer.epoch


def test_states_are_the_designs(box: Any) -> None:
    names = ["ABSENT", "SILENT", "LIVE", "STALLED", "DEAD", "CLOSED", "REFUSED"]
    assert [state.name for state in box.RankState] == names
    assert list(box.RankState) == list(range(7))


def test_working_and_quiet_is_stalled_idle_and_quiet_is_live(box: Any, group: str, words: Any) -> None:
    with box.MailboxWriter(group, 0) as writer, box.MailboxReader(group, 0, stall_after=STALL) as reader:
        view = words(writer.name)
        for load, state in [((1, 0, 1, 9), "STALLED"), ((0, 1, 1, 9), "STALLED"), ((0, 0, 1, 9), "LIVE")]:
            writer.publish(*load)
            assert reader.state().name == "LIVE"
            age_by(view, LONG)
            assert reader.state().name == state
            assert reader.read() == load
            assert LONG / 1e9 <= reader.age() < LONG / 1e9 + 60


def test_stall_after_inf_never_stalls(box: Any, group: str, words: Any) -> None:
    with box.MailboxWriter(group, 0) as writer, box.MailboxReader(group, 0, stall_after=math.inf) as reader:
        writer.publish(1, 1, 1, 9)
        age_by(words(writer.name), LONG)
        assert reader.state() is box.RankState.LIVE


def test_stalling_needs_no_new_publish(box: Any, group: str) -> None:
    """LIVE becomes STALLED by mere time, also on the quick path of an unchanged sequence."""
    with (
        box.MailboxWriter(group, 0, 1) as writer,
        box.MailboxReader(group, 0, stall_after=0.15) as reader,
        box.GroupReader(group, 1, stall_after=0.15) as all_ranks,
    ):
        writer.publish(1, 0, 1, 9)
        out = all_ranks.read()
        seen = {(reader.state().name, box.RankState(out["state"][0]).name)}
        while ("STALLED", "STALLED") not in seen:
            all_ranks.read(out)
            seen.add((reader.state().name, box.RankState(out["state"][0]).name))
        assert out["usable"][0]
        writer.publish(1, 0, 1, 9)
        assert reader.state() is box.RankState.LIVE


def test_odd_sequence(box: Any, group: str, words: Any) -> None:
    """A writer stopped in mid-publish is STALLED even when its last words are idle; one that has just begun is not."""
    with box.MailboxWriter(group, 0) as writer, box.MailboxReader(group, 0, stall_after=0.1) as reader:
        writer.publish(0, 0, 1, 9)
        view = words(writer.name)
        age_by(view, LONG)
        assert reader.state() is box.RankState.LIVE
        view[SEQ] += 1
        assert reader.state() is box.RankState.LIVE  # for all that is known the publish has just begun
        assert reader.read() == (0, 0, 1, 9)
        time.sleep(0.11)
        assert reader.state() is box.RankState.STALLED
        view[SEQ] += 1
        assert reader.state() is box.RankState.LIVE


def test_foreign_clock(box: Any, group: str, words: Any) -> None:
    """In another time namespace the age is counted from the last look that saw the old sequence; None at first sight."""
    with box.MailboxWriter(group, 0) as writer:
        view = words(writer.name)
        view[TIME_NS] += 1
        writer.publish(1, 0, 1, 9)
        with box.MailboxReader(group, 0, stall_after=0.15) as reader:
            assert reader.state() is box.RankState.LIVE
            assert reader.age() is None
            before = time.monotonic()
            reader.read()
            writer.publish(2, 0, 1, 9)
            assert reader.read() == (2, 0, 1, 9)
            age = reader.age()
            assert age is not None
            assert 0 <= age <= time.monotonic() - before + 0.02
            time.sleep(0.16)
            assert reader.age() >= 0.16
            assert reader.state() is box.RankState.STALLED


def test_foreign_clock_and_half_a_publish(box: Any, group: str, words: Any) -> None:
    """A sequence that moves without a publish makes the last one no younger."""
    with box.MailboxWriter(group, 0) as writer, box.MailboxReader(group, 0) as reader:
        view = words(writer.name)
        view[TIME_NS] += 1
        reader.read()
        writer.publish(1, 0, 1, 9)
        assert reader.read() == (1, 0, 1, 9)
        seen = time.monotonic()
        time.sleep(0.02)
        reader.read()
        view[SEQ] += 1
        elapsed = time.monotonic() - seen
        assert reader.age() >= elapsed - 0.01  # a tick of the coarse clock


@pytest.mark.parametrize("first_sight", [True, False])
def test_repair_is_no_sign_of_life(box: Any, group: str, words: Any, first_sight: bool) -> None:
    """An adopter that repairs what died in the middle of a publish does not bring it back to life, whatever its clock was."""
    writer = box.MailboxWriter(group, 0)
    view = words(writer.name)
    view[TIME_NS] += 1
    writer.publish(1, 0, 1, 9)
    with box.MailboxReader(group, 0, liveness_interval=0.05) as reader, box.GroupReader(group, 1, liveness_interval=0.05) as ranks:
        if not first_sight:
            ranks.read()
            reader.read()
        with pytest.warns(ResourceWarning):
            del writer
        view[SEQ] += 1
        time.sleep(0.1)
        assert reader.state() is box.RankState.DEAD
        ranks.read()
        for _ in range(2):
            time.sleep(0.01)
            assert reader.state() is box.RankState.DEAD
            assert ranks.read()["state"][0] == box.RankState.DEAD
        view[RUNNING], view[SEQ] = view[B], view[SEQ] + 1  # as _repair does
        assert reader.state() is box.RankState.DEAD
        assert ranks.read()["state"][0] == box.RankState.DEAD
        assert reader.read() == (1, 0, 1, 9)


@pytest.mark.parametrize("first_sight", [True, False])
def test_timestamp_from_the_future(box: Any, group: str, words: Any, first_sight: bool) -> None:
    with box.MailboxWriter(group, 0) as writer, box.MailboxReader(group, 0) as reader:
        writer.publish(1, 0, 1, 9)
        if not first_sight:
            reader.read()
        age_by(words(writer.name), -LONG)
        if first_sight:
            assert reader.age() is None
        else:
            assert 0 <= reader.age() < 60
        assert reader.state() is box.RankState.LIVE


def test_dead_is_told_and_the_last_words_stay(box: Any, group: str, children: Any) -> None:
    child = children.start(
        """
        import sys
        from loadbox.mailbox import MailboxWriter
        writer = MailboxWriter(sys.argv[1], 0)
        writer.publish(7, 8, 9, 10)
        print("ready", flush=True)
        sys.stdin.read()
        """,
        group,
        backend=box.backend,
    )
    assert child.stdout.readline() == "ready\n"
    with (
        box.MailboxReader(group, 0, liveness_interval=0.05) as reader,
        box.GroupReader(group, 1, liveness_interval=0.05) as all_ranks,
    ):
        out = all_ranks.read()
        assert reader.state() is box.RankState.LIVE
        assert out["state"][0] == box.RankState.LIVE
        child.kill()
        child.wait()
        time.sleep(0.05)
        assert reader.state() is box.RankState.DEAD
        assert reader.read() == (7, 8, 9, 10)
        all_ranks.read(out)
        assert out["state"][0] == box.RankState.DEAD
        assert not out["usable"][0]
        assert [out[field][0] for field in box.LoadSnapshot._fields] == [0, 0, 0, 0]


def test_dead_is_told_to_one_who_looks_seldom(box: Any, group: str, children: Any) -> None:
    """Movement between two looks is no proof that the owner still lives: it may have published once more and died."""
    child = children.start(
        """
        import sys
        from loadbox.mailbox import MailboxWriter
        writer = MailboxWriter(sys.argv[1], 0)
        writer.publish(1, 0, 1, 10)
        print("ready", flush=True)
        sys.stdin.readline()
        writer.publish(2, 0, 1, 10)
        print("again", flush=True)
        sys.stdin.readline()
        """,
        group,
        backend=box.backend,
    )
    assert child.stdout.readline() == "ready\n"
    with box.MailboxReader(group, 0, liveness_interval=0.05) as reader:
        assert reader.read() == (1, 0, 1, 10)
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "again\n"
        child.kill()
        child.wait()
        time.sleep(0.06)
        assert reader.state() is box.RankState.DEAD


def test_a_locked_owner_is_not_dead_just_because_another_reader_asks(box: Any, group: str) -> None:
    with box.MailboxWriter(group, 0) as writer:
        writer.publish(0, 0, 1, 1)
        readers = [box.MailboxReader(group, 0, liveness_interval=0) for _ in range(5)]
        for _ in range(20):
            assert {reader.state().name for reader in readers} == {"LIVE"}
        for reader in readers:
            reader.close()


def test_restart_on_the_same_segment(box: Any, group: str) -> None:
    """No snapshot between an adopter's start and its first publish; the reader follows without re-opening."""
    first = box.MailboxWriter(group, 0)
    first.publish(1, 2, 3, 4)
    with box.MailboxReader(group, 0, liveness_interval=0) as reader:
        assert reader.read() == (1, 2, 3, 4)
        first._detach()  # dies
        assert reader.state() is box.RankState.DEAD
        with box.MailboxWriter(group, 0) as second:
            assert reader.state() is box.RankState.SILENT
            assert reader.read() is None
            assert reader.epoch == second.epoch != first.epoch
            second.publish(5, 6, 7, 8)
            assert reader.state() is box.RankState.LIVE
            assert reader.read() == (5, 6, 7, 8)


def test_the_adopters_lock_does_not_vouch_for_the_dead_ones_numbers(box: Any, group: str) -> None:
    """Between an adopter's lock on byte 0 and its first record, the old record is still the dead writer's."""
    first = box.MailboxWriter(group, 0)
    first.publish(1, 2, 3, 4)
    first._detach()
    claim = box._writer._segment.claim(first.name, 1, mode=0o600, start_wait=0.0)
    try:
        with box.MailboxReader(group, 0, liveness_interval=0) as reader:
            assert reader.state() is box.RankState.DEAD
            assert reader.read() == (1, 2, 3, 4)
    finally:
        os.close(claim.lock_fd)
        os.close(claim.map_fd)


def test_new_inode(box: Any, group: str) -> None:
    old = box.MailboxWriter(group, 0)
    old.publish(1, 1, 1, 1)
    with box.MailboxReader(group, 0, liveness_interval=0) as reader, box.GroupReader(group, 1, liveness_interval=0) as all_ranks:
        out = all_ranks.read()
        assert reader.read() == (1, 1, 1, 1)
        os.unlink("/dev/shm" + old.name)
        old.publish(2, 2, 2, 2)  # an orphan, and nobody's news
        assert reader.read() is None
        assert reader.state() is box.RankState.ABSENT
        with box.MailboxWriter(group, 0) as new:
            new.publish(3, 3, 3, 3)
            old.publish(4, 4, 4, 4)
            assert reader.read() == (3, 3, 3, 3)
            assert reader.epoch == new.epoch
            all_ranks.read(out)
            assert tuple(out[0])[:4] == (3, 3, 3, 3)
            old.close()
            assert reader.read() == (3, 3, 3, 3)
            assert os.path.exists("/dev/shm" + new.name)


def test_another_boot_is_absent(box: Any, group: str, words: Any) -> None:
    with box.MailboxWriter(group, 0) as writer:
        writer.publish(1, 1, 1, 1)
        words(writer.name)[10] ^= 1
        with box.MailboxReader(group, 0) as reader:
            assert reader.state() is box.RankState.ABSENT
            assert reader.read() is None


def test_a_record_that_nobody_publishes_is_refused(box: Any, group: str, words: Any) -> None:
    with box.MailboxWriter(group, 0) as writer, box.MailboxReader(group, 0) as reader, box.GroupReader(group, 1) as all_ranks:
        writer.publish(1, 2, 3, 4)
        view = words(writer.name)
        for offset, value in [(17, -1), (18, -1), (19, -1), (20, -1), (21, -1), (22, 0), (22, -1), (22, 1 << 62), (19, 5)]:
            good = view[offset]
            view[offset] = value
            view[SEQ] += 2
            assert reader.state() is box.RankState.REFUSED
            assert reader.read() is None
            assert reader.age() is None
            assert "none that a writer publishes" in reader.reason
            row = all_ranks.read()[0]
            assert (row["state"], row["usable"], row["num_running"]) == (box.RankState.REFUSED, False, 0)
            assert "none that a writer publishes" in all_ranks.reason(0)
            view[offset] = good
            view[SEQ] += 2
            assert reader.state() is box.RankState.LIVE
            assert reader.reason is None


def test_shrunk_under_the_reader(box: Any, group: str) -> None:
    with box.MailboxWriter(group, 0) as writer, box.MailboxReader(group, 0, liveness_interval=0) as reader:
        writer.publish(1, 2, 3, 4)
        assert reader.read() == (1, 2, 3, 4)
        os.truncate("/dev/shm" + writer.name, 100)
        assert reader.state() is box.RankState.REFUSED
        assert "100 bytes" in reader.reason
        os.truncate("/dev/shm" + writer.name, 4096)


def test_descriptor_taken_away(box: Any, group: str) -> None:
    """A program that closes descriptors wholesale: the reader notices, closes nobody else's and attaches anew."""
    with box.MailboxWriter(group, 0) as writer, box.MailboxReader(group, 0, liveness_interval=0) as reader:
        writer.publish(1, 2, 3, 4)
        assert reader.read() == (1, 2, 3, 4)
        mine = [reader._slot.fd] if box.backend == "py" else [fd for fd in range(3, 256) if _reads(fd, writer.name)]
        assert len(mine) == 1
        os.close(mine[0])
        other = os.open("/dev/null", os.O_RDONLY)
        assert other == mine[0]
        assert reader.read() == (1, 2, 3, 4)
        os.fstat(other)
        os.close(other)


def _reads(fd: int, name: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}").endswith(name) and not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_RDWR
    except OSError:
        return False


def test_a_lock_that_cannot_be_asked_for_is_refused(box: Any, group: str) -> None:
    """Without its descriptor a reader cannot ask for the owner, so it hands nothing out any more, not even what it has read."""
    interval = 0.6
    for _ in range(10):
        with box.MailboxWriter(group, 0) as writer, box.MailboxReader(group, 0, liveness_interval=interval) as reader:
            writer.publish(0, 0, 3, 4)
            time.sleep(interval / 2)
            attached = time.monotonic()
            assert reader.read() == (0, 0, 3, 4)  # looks for the file again an interval from now; for the owner, half of one
            mine = [reader._slot.fd] if box.backend == "py" else [fd for fd in range(3, 256) if _reads(fd, writer.name)]
            os.close(mine[0])
            time.sleep(interval / 2)
            state, snapshot, reason = reader.state().name, reader.read(), reader.reason
            if time.monotonic() < attached + interval:  # else this machine was too busy, and the file has been found anew
                assert (state, snapshot) == ("REFUSED", None)
                assert "cannot be asked for" in reason
                return
    pytest.fail("ten times too busy to look in time")


def test_closed_reader(box: Any, group: str) -> None:
    reader = box.MailboxReader(group, 0)
    with box.MailboxWriter(group, 0) as writer:
        writer.publish(1, 2, 3, 4)
        kept = reader.read()
        reader.close()
        reader.close()
        for use in (reader.read, reader.state, reader.age):
            with pytest.raises(box.MailboxError, match="closed"):
                use()
        assert kept == (1, 2, 3, 4)
