"""Every version reads what ABI 1 promised: images of segments and bytes of the wire that were made once, for good.

``generate.py`` made them and does not know loadbox.  Each image is laid under a name in /dev/shm, with the locks that a living
owner would hold, and read by everything that reads.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from loadbox.piggyback import BatchTokenIDOutSlim, decode_batch, encode_batch
from loadbox.piggyback._engines import announced_mailbox
from loadbox.piggyback._handshake import decode_init, decode_map, encode_init, encode_status
from loadbox.piggyback._requests import AbortRequest, GenerateRequest, decode_frames, encode_abort, encode_add
from loadbox.piggyback._send import ENGINE_CORE_DEAD
from loadbox.reader import LoadReader, _core_py, _sources
from loadbox.reader._board import Board

HERE = Path(__file__).parent
INDEX = json.loads((HERE / "index.json").read_text())
WIRE = json.loads((HERE / "wire.json").read_text())
RANK = INDEX["rank"]
ZEROS = (0, 0, 0, 0)


def image(kind: str, name: str) -> bytes:
    return bytes((HERE / "images" / f"{name}.bin").read_bytes().ljust(INDEX[kind][name]["size"], b"\0"))


def lock(fd: int, offset: int) -> None:
    """As an owner does: an exclusive open-file-description lock on one byte."""
    fcntl.fcntl(fd, 37, struct.pack("@hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, offset, 1, 0))


@pytest.fixture
def lay() -> Iterator[Callable[[str, bytes, list[int]], str]]:
    """Lays bytes under a name, with the locks of a living owner."""
    fds: list[int] = []

    def put(name: str, data: bytes, locked: list[int]) -> str:
        path = f"/dev/shm{name}"
        fds.append(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        os.write(fds[-1], data)
        for epoch in locked:
            lock(fds[-1], 0)
            lock(fds[-1], epoch)
        return path

    yield put
    for fd in fds:
        os.close(fd)


@pytest.mark.parametrize("name", INDEX["ranks"])
def test_images_of_ranks(box: Any, group: str, lay: Callable[..., str], name: str) -> None:
    expected = INDEX["ranks"][name]
    data = image("ranks", name)
    path = lay(f"/loadbox.{group}.{RANK}", data, expected["locked"])
    options = {"stall_after": expected.get("stall_after", 5.0), "liveness_interval": 0}
    load = expected["load"] and tuple(expected["load"])
    with box.MailboxReader(group, RANK, **options) as one, box.GroupReader(group, RANK + 1, **options) as ranks:
        one.read(), ranks.read()  # stalled is what has been seen before
        assert (one.state().name, one.read()) == (expected["state"], load)
        assert one.epoch == expected.get("epoch", 0)
        assert expected.get("reason", "") in (one.reason or "")
        assert bool(one.reason) == (expected["state"] == "REFUSED")
        row = ranks.read()[RANK]
        usable = expected["state"] in ("LIVE", "STALLED")
        assert (box.RankState(row["state"]).name, bool(row["usable"]), row["rank"]) == (expected["state"], usable, RANK)
        assert tuple(row.item()[:4]) == ((load if usable else None) or ZEROS)
    assert Path(path).read_bytes() == data


@pytest.mark.parametrize(
    "name", [name for name in INDEX["ranks"] if name.startswith(("killed", "dead", "closed", "half", "empty"))]
)
def test_what_the_dead_left_is_adopted(box: Any, group: str, lay: Callable[..., str], name: str) -> None:
    path = lay(f"/loadbox.{group}.{RANK}", image("ranks", name), [])
    inode = os.stat(path).st_ino
    with (
        box.MailboxWriter(group, RANK, 8, start_wait=0) as writer,
        box.MailboxReader(group, RANK, liveness_interval=0) as reader,
    ):
        assert os.stat(path).st_ino == inode
        assert (reader.state().name, reader.read()) == ("SILENT", None)
        writer.publish(1, 2, 3, 4)
        assert (reader.state().name, reader.read(), reader.epoch) == ("LIVE", (1, 2, 3, 4), writer.epoch)


def test_another_major_is_replaced(box: Any, group: str, lay: Callable[..., str]) -> None:
    path = lay(f"/loadbox.{group}.{RANK}", image("ranks", "newer_major"), [])
    inode = os.stat(path).st_ino
    with box.MailboxWriter(group, RANK, start_wait=0):
        assert os.stat(path).st_ino != inode


@pytest.mark.parametrize("core", ["c", "py"])
@pytest.mark.parametrize("name", INDEX["boards"])
def test_images_of_boards(group: str, lay: Callable[..., str], name: str, core: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sources, "merge", merge_of(core))
    expected = INDEX["boards"][name]
    lay(f"/loadbox.{group}.f.0123456789abcdef", image("boards", name), expected["locked"])
    with LoadReader(group, 4, board=False) as view:
        view._sources._wants_board = "auto"  # the others' boards are looked at, and none is made, which would clear up
        view.loads()
        table = view._sources.view
        assert (list(table.in_flight), list(table.owed)) == (expected["in_flight"], expected["owed"])


def merge_of(core: str) -> Any:
    if core == "py":
        return _core_py.merge
    try:
        from loadbox.reader import _core_c
    except ImportError:
        if os.environ.get("LOADBOX_TEST_WITHOUT_C"):
            pytest.skip("LOADBOX_TEST_WITHOUT_C is set: the C core is not tested")
        raise
    module: ModuleType = _core_c
    return module.merge


# ---- what the writer of today makes is what was promised ------------------------------------------------------------------


def masked(data: bytes) -> bytes:
    """With the times of the publishes taken out: each copy's published_ns."""
    return data[:168] + bytes(8) + data[176:224] + bytes(8) + data[232:]


def test_the_writer_makes_these_images(box: Any, group: str, lay: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A life with the epoch, the pid and the times of the images, on a segment whose sequence ends where theirs does."""
    wanted = image("ranks", "live")
    seq, epoch = struct.unpack_from("<Q", wanted, 128)[0], struct.unpack_from("<Q", wanted, 176)[0]
    head = struct.unpack_from("<8s9Q16s3Q", wanted)
    path = lay(f"/loadbox.{group}.{RANK}", bytes(128) + struct.pack("<Q", seq - 6) + bytes(4096 - 136), [])
    monkeypatch.setattr(box._writer._segment, "lock_epoch", lambda name, fd: lock(fd, epoch) or epoch)
    monkeypatch.setattr(box._writer, "boot_id", lambda: bytes(16))
    monkeypatch.setattr(box._writer, "time_ns_inode", lambda: 0)
    monkeypatch.setattr(box._writer.os, "getpid", lambda: head[7])
    monkeypatch.setattr(box._writer.time, "time_ns", lambda: head[8])
    with box.MailboxWriter(group, RANK, 8, start_wait=0) as writer:
        silent = Path(path).read_bytes()
        for load in ((9, 9, 9, 9), tuple(INDEX["ranks"]["live"]["load"])):
            writer.publish(*load)
        assert masked(Path(path).read_bytes()) == masked(wanted)
        fd = os.open(path, os.O_RDONLY)  # its file is about to lose its name
        writer.close()
        closed = os.pread(fd, 4096, 0)
        os.close(fd)
    for made, name in ((silent, "silent"), (closed, "closed")):
        assert made[:128] == image("ranks", name)[:128]
        assert masked(made)[136:] == masked(image("ranks", name))[136:]
        assert struct.unpack_from("<Q", made, 128)[0] % 2 == 0


def test_a_frontend_makes_this_board(group: str) -> None:
    board = Board(group, 4)
    try:
        made, wanted = Path(f"/dev/shm{board.name}").read_bytes(), image("boards", "board")
        assert len(made) == len(wanted)
        theirs, ours = struct.unpack_from("<8s9Q16s4Q", wanted), struct.unpack_from("<8s9Q16s4Q", made)
        own = (7, 8, 10, 11, 13)  # pid, start, boot, time namespace, epoch
        assert [word for i, word in enumerate(ours) if i not in own] == [word for i, word in enumerate(theirs) if i not in own]
        assert ours[13] != 0
        assert made[128:] == bytes(len(made) - 128)
        for rank, word in enumerate(struct.unpack_from("<4Q", wanted, 128)):
            board.words[rank] = word
        assert Path(f"/dev/shm{board.name}").read_bytes()[128:] == wanted[128:]
    finally:
        board.close()


# ---- the wire -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WIRE["batches"])
def test_batches(name: str) -> None:
    known = WIRE["batches"][name]
    data = bytes.fromhex(known["bytes"])
    batch = decode_batch(data)
    assert {key: getattr(batch, key) for key in known["reads"]} == known["reads"]
    if known["make"]:
        assert encode_batch(BatchTokenIDOutSlim(**known["reads"]), load_tail=name != "ten") == data


@pytest.mark.parametrize("name", WIRE["inits"])
def test_inits(name: str) -> None:
    known = WIRE["inits"][name]
    init = decode_init(bytes.fromhex(known["bytes"]))
    assert (init.tail, init.load_only) == (known["tail"], known["load_only"])
    assert (init.addresses.inputs, init.addresses.outputs) == (["tcp://h:1"], ["tcp://h:2"])
    if "offer" in known:
        assert encode_init("tcp://h:1", "tcp://h:2", known["offer"]).hex() == known["bytes"]


@pytest.mark.parametrize("name", WIRE["statuses"])
def test_statuses(name: str) -> None:
    known = WIRE["statuses"][name]
    message = decode_map(bytes.fromhex(known["bytes"]))
    assert message["status"] == known["status"]
    mailbox = announced_mailbox(message)
    assert (mailbox and list(mailbox)) == known["mailbox"]
    assert encode_status(known["status"], known["loadbox"]).hex() == known["bytes"]


@pytest.mark.parametrize("name", WIRE["requests"])
def test_requests(name: str) -> None:
    known = WIRE["requests"][name]
    frames = [bytes.fromhex(frame) for frame in known["frames"]]
    request = decode_frames(frames)
    if isinstance(request, AbortRequest):
        assert request.rids == known["rids"]
        assert encode_abort(request.rids) == frames
        return
    assert isinstance(request, GenerateRequest)
    assert {key: getattr(request, key) for key in ("rid", "input_ids", "max_new_tokens", "stream")} == {
        key: known[key] for key in ("rid", "input_ids", "max_new_tokens", "stream")
    }
    if known["make"]:
        assert encode_add(request) == frames


def test_the_goodbye() -> None:
    assert ENGINE_CORE_DEAD.hex() == WIRE["engine_dead"]


def test_the_set_is_whole() -> None:
    """Every state is in it, both parities, a cut after every store, and every file is in the index."""
    ranks = INDEX["ranks"]
    assert {known["state"] for known in ranks.values()} == {"ABSENT", "SILENT", "LIVE", "STALLED", "DEAD", "CLOSED", "REFUSED"}
    parities = {struct.unpack_from("<Q", image("ranks", name), 128)[0] & 1 for name in ranks if ranks[name]["state"] == "LIVE"}
    assert parities == {0, 1}
    assert [f"killed_after_{steps:02}_stores" in ranks for steps in range(15)] == [True] * 15
    assert sorted(path.stem for path in (HERE / "images").iterdir()) == sorted([*ranks, *INDEX["boards"]])
