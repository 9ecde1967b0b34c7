"""Walk a signal through every point of an operation of a writer, and tell what readers in another process see.

A program: for each job, a line of JSON on stdin, it prints one line of JSON a point, then "end".  The process itself is the reader;
for each point it forks one writer, which makes its segment by itself and dies or stops there.  Readers that were attached before,
and fresh ones, look at once, then the next writer takes over.
"""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import killpoints

V1, V2, V3 = (11, 23, 35, 4711), (12, 25, 38, 4718), (13, 27, 41, 4725)
IDLE1, IDLE2 = (0, 0, 35, 4711), (0, 0, 38, 4718)
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_finished = mmap.mmap(-1, 4096)  # shared with the writers: the operation came to its end


class Writers:
    """What a writer does before the walk (``begin``) and under it (``act``), by the operation's name."""

    def __init__(self, box: ModuleType, group: str, idle: bool = False) -> None:
        self.box, self.group = box, group
        self.old, self.new = (IDLE1, IDLE2) if idle else (V1, V2)
        self.writer: Any = None

    def begin(self, operation: str) -> None:
        if operation in ("publish", "close"):
            self.create()
            self.writer.publish(*self.old)

    def act(self, operation: str) -> None:
        {"publish": self.publish, "create": self.create, "close": self.close}[operation]()

    def create(self) -> None:
        self.writer = self.box.MailboxWriter(self.group, 0, 1, start_wait=0)

    def publish(self) -> None:
        self.writer.publish(*self.new)

    def close(self) -> None:
        self.writer.close()


class Life:
    """A writer in a process of its own, forked from this one.  It stops itself between ``begin`` and ``act``, and at the end."""

    def __init__(self, writers: Writers, operation: str, kind: str, at: int, what: signal.Signals) -> None:
        _finished[0] = 0
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                writers.begin(operation)
                os.kill(os.getpid(), signal.SIGSTOP)
                killpoints.arm(writers.box, kind, at, what)
                writers.act(operation)
                killpoints.disarm(writers.box, kind)
                _finished[0] = 1
                os.kill(os.getpid(), signal.SIGSTOP)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(3)
        self._wait(expected=True)

    def _wait(self, expected: bool | None = None) -> bool:
        """Until it stops (True) or is killed (False)."""
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        stopped = os.WIFSTOPPED(status)
        if not stopped:
            self.pid = 0
            assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, "the writer failed"
        assert expected in (None, stopped)
        return stopped

    def go_on(self) -> bool:
        """Run until it stops (True) or is killed (False)."""
        os.kill(self.pid, signal.SIGCONT)
        return self._wait()

    def kill(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            self._wait(expected=False)

    @property
    def finished(self) -> bool:
        return _finished[0] == 1


class Readers:
    """One rank and its group, read through one twin."""

    def __init__(self, box: ModuleType, group: str, stall_after: float) -> None:
        times = {"stall_after": stall_after, "liveness_interval": 0}
        self.rank = box.MailboxReader(group, 0, **times)
        self.group = box.GroupReader(group, 1, **times)
        self.states = list(box.RankState)

    def look(self) -> list[Any]:
        """[state, the four numbers or None, epoch, state of the row, the row's numbers or None]"""
        value = self.rank.read()
        row = self.group.read()[0]
        numbers = [int(row[i]) for i in range(4)]
        return [
            self.rank.state().name, value, self.rank.epoch,
            self.states[row["state"]].name, numbers if row["usable"] else None if not any(numbers) else "not zero",
        ]  # fmt: skip

    def close(self) -> None:
        self.rank.close()
        self.group.close()


class Scene:
    """One rank, its segment's file, readers of the writer's own twin that are attached, and fresh ones of the other."""

    def __init__(self, boxes: dict[str, ModuleType], job: dict[str, Any]) -> None:
        self.box = boxes[job["backend"]]
        self.other = boxes.get("py" if job["backend"] == "c" else "c", self.box)
        self.group = job["group"]
        self.path = f"/dev/shm/loadbox.{self.group}.0"
        self.stall_after = job.get("stall_after", float("inf"))
        self.seen: dict[str, Any] = {}

    def image(self) -> bytes | None:
        """The segment as it lies there now, None if there is none."""
        try:
            with open(self.path, "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None

    def lay(self, image: bytes | None) -> None:
        """Have what a dead writer left: its file, which nobody has locked."""
        if os.path.exists(self.path):
            os.unlink(self.path)
        if image is not None:
            with open(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
                file.write(image)

    @contextmanager
    def attached(self) -> Iterator[None]:
        self.readers = Readers(self.box, self.group, self.stall_after)
        self.seen = {}
        try:
            yield
        finally:
            self.readers.close()

    def look(self, moment: str) -> None:
        attached = self.readers.look()
        late = Readers(self.other, self.group, self.stall_after)
        fresh = late.look()
        late.close()
        image = self.image()
        inode = os.stat(self.path).st_ino if image is not None else 0
        self.seen[moment] = {
            "attached": attached, "fresh": fresh, "inode": inode,
            "seq": int.from_bytes((image or b"")[128:136], "little"),
        }  # fmt: skip

    def take_over(self) -> int:
        """The next writer of the rank, without any patience."""
        with self.box.MailboxWriter(self.group, 0, 1, start_wait=0) as writer:
            self.look("opened")
            writer.publish(*V3)
            self.look("published")
        self.look("closed")
        return int(writer.epoch)


def remains(scene: Scene, writers: Writers, operation: str, kind: str) -> list[bytes | None]:
    """What a writer that is killed leaves, in all its different forms, in order."""
    images: list[bytes | None] = []
    forms = []
    for at in range(10_000):
        scene.lay(None)
        life = Life(writers, operation, kind, at, signal.SIGKILL)
        life.go_on()
        done = life.finished
        life.kill()
        image = scene.image()
        form = image and _form(image)
        if form not in forms:
            forms.append(form)
            images.append(image)
        if done:
            return images
    raise AssertionError(f"{operation} has no end")


def _form(image: bytes) -> tuple[Any, ...]:
    """An image without what differs from life to life: times, epochs, pids."""
    words = memoryview(image).cast("q").tolist() if len(image) == 4096 else [0] * 512
    told = {number for value in (V1, V2) for number in value}
    same = [words[17 + i] == words[24 + i] for i in range(6)]
    return len(image), same, *(word if word in told or 0 <= word < 10 else "other" for word in words[:30])


# Each chooses, from what a killed writer leaves, what the walk starts on; "" leaves nothing.
LEFTOVERS: dict[str, tuple[str, Callable[[list[int]], bool]]] = {
    "published": ("publish", lambda words: words[16] % 2 == 0 and words[17:23] == words[24:30]),
    "odd": ("publish", lambda words: words[16] % 2 == 1),
    "even": ("publish", lambda words: words[16] % 2 == 0 and words[17:23] != words[24:30]),
    "torn": ("publish", lambda words: True),
    "half-made": ("create", lambda words: words[0] == 0),
    "closed": ("close", lambda words: words[9] == 2),
}


def leftovers(scene: Scene, writers: Writers, job: dict[str, Any]) -> list[bytes | None]:
    """The images that the walk starts on: one in the middle of its kind, or all (``every``)."""
    if not job["leftover"]:
        return [None]
    operation, fits = LEFTOVERS[job["leftover"]]
    found = [
        image for image in remains(scene, writers, operation, "step" if job["backend"] == "c" else "store")
        if image is not None and len(image) == 4096 and fits(memoryview(image).cast("q").tolist())
    ]  # fmt: skip
    assert found, f"no writer leaves anything that is {job['leftover']}"
    return found if job.get("every") else [found[len(found) // 2]]


def point(scene: Scene, writers: Writers, job: dict[str, Any], image: bytes | None, at: int) -> bool:
    """Walk to one point; False if the operation came to its end before it."""
    operation, stop = job["operation"], job["signal"] == "STOP"
    what = signal.SIGSTOP if stop else signal.SIGKILL
    scene.lay(image)
    with scene.attached():
        life = Life(writers, operation, job["kind"], at, what)
        try:
            scene.look("before")
            life.go_on()
            done = life.finished
            if stop and not done:
                scene.look("stopped")
                if "stall_after" in job:
                    time.sleep(2 * job["stall_after"])
                    scene.look("stalled")
                life.go_on()
                assert life.finished
            if life.pid:
                scene.look("finished")
        finally:
            life.kill()
        scene.look("dead")
        epoch = scene.take_over() if job.get("take_over", True) else 0
    print(json.dumps({"at": at, "done": done, "epoch": epoch, **scene.seen}))
    return not done


def walk(boxes: dict[str, ModuleType], job: dict[str, Any]) -> None:
    """Walk through all points of ``job["operation"]``, on each leftover; for the other keys see the tests."""
    scene = Scene(boxes, job)
    writers = Writers(scene.box, scene.group, job.get("idle", False))
    images = leftovers(scene, writers, job)
    repair = scene.box.MailboxWriter._repair
    if job.get("without_repair"):
        scene.box.MailboxWriter._repair = lambda self: None  # type: ignore[attr-defined]
    try:
        for image in images:
            at = 0
            while point(scene, writers, job, image, at):
                at += 1
                assert at < 10_000
    finally:
        scene.box.MailboxWriter._repair = repair  # type: ignore[attr-defined]


def main() -> None:
    boxes = killpoints.load(os.environ["LOADBOX_KILL_CORE"])
    gc.freeze()  # a forked writer shall not copy what it does not need
    for line in sys.stdin:
        walk(boxes, json.loads(line))
        print("end", flush=True)


if __name__ == "__main__":
    main()
