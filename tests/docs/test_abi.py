"""docs/abi.md: its table is the header's, and its example reads what a real writer publishes, as C and as C++."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest

from loadbox.mailbox import MailboxWriter, _layout

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "abi.md").read_text()
EXAMPLE = ROOT / "docs" / "examples" / "read_load.c"
CONFORMANCE = ROOT / "tests" / "conformance"
INDEX = json.loads((CONFORMANCE / "index.json").read_text())
SEEN_TO_STALL = ("stalled", "stalled_in_the_middle")  # their clock is not ours: STALLED only to who has looked before
STRICT = ["-O2", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'mailbox'}"]


def compiled(folder: Path, source: Path, *how: str) -> Path:
    if shutil.which(how[0]) is None:
        if os.environ.get("LOADBOX_REQUIRE_C") and how[0] == "cc":
            pytest.fail(f"{how[0]} is not installed")
        pytest.skip(f"{how[0]} is not installed")
    program = folder / "program"
    subprocess.run([*how, *STRICT, str(source), "-o", str(program)], check=True)
    return program


@pytest.fixture(scope="module", params=["c", "c++"])
def read_load(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("example")
    how = ("cc", "-std=c11") if request.param == "c" else ("g++", "-std=c++11", "-x", "c++")
    return compiled(folder, EXAMPLE, *how)


def said(program: Path, group: str, rank: int = 0) -> str:
    return subprocess.run([program, group, str(rank)], check=True, capture_output=True, text=True, timeout=60).stdout.strip()


def test_the_table_is_the_layout() -> None:
    rows = dict(re.findall(r"^\| (\d+) \| ([\w ]+) \|", PAGE, re.MULTILINE))
    offsets = {name: int(offset) for offset, name in rows.items()}
    names = [name for name in _layout.Header._fields if name != "boot_id"]
    places = [8 * i for i in range(10)] + [96, 104, 112]
    assert {name: offsets[name] for name in names} == dict(zip(names, places, strict=True))
    assert offsets["boot_id"] == 80
    assert (offsets["seq"], offsets["copy A"], offsets["copy B"]) == (_layout.SEQ, _layout.COPY_A, _layout.COPY_B)
    assert offsets["reserved"] == _layout.COPY_B + _layout.RECORD.size
    assert f"0x{_layout.MAGIC:016X}" in PAGE
    assert f"{_layout.SEGMENT_SIZE} bytes" in PAGE
    (words,) = re.findall(r"typedef struct lbx_words \{(.*?)\}", (ROOT / "mailbox" / "loadbox.h").read_text(), re.DOTALL)
    (copy,) = re.findall(r"^\| 136 \| copy A \| (.*?) \|", PAGE, re.MULTILINE)
    assert copy.split(", ") == re.findall(r"int64_t (\w+);", words)


def test_the_example_reads_every_state(read_load: Path, group: str, children: Any) -> None:
    assert said(read_load, group) == "ABSENT"
    with MailboxWriter(group, 0, 1) as writer:
        assert said(read_load, group) == "SILENT"
        for running in (17, 18):  # both copies
            writer.publish(running, 3, 4200, 25000)
            assert said(read_load, group) == f"LIVE {running} 3 4200 25000"
        assert said(read_load, group, 1) == "ABSENT"
    child = children.start(
        """
        import sys
        from loadbox.mailbox import MailboxWriter
        writer = MailboxWriter(sys.argv[1], 0, 1)
        writer.publish(1, 2, 3, 4)
        print("up", flush=True)
        sys.stdin.readline()
        """,
        group,
    )
    assert child.stdout.readline() == "up\n"
    assert said(read_load, group) == "LIVE 1 2 3 4"
    child.kill()
    child.wait()
    assert said(read_load, group) == "DEAD"
    Path(f"/dev/shm/loadbox.{group}.0").chmod(0o666)
    assert said(read_load, group) == "REFUSED"


@pytest.mark.parametrize("name", INDEX["ranks"])
def test_the_example_reads_the_conformance_set(read_load: Path, group: str, name: str) -> None:
    """A user in another language starts from the example, so it has to judge as the package does; but it looks only once."""
    expected = INDEX["ranks"][name]
    state = "LIVE" if name in SEEN_TO_STALL else expected["state"]
    fd = os.open(f"/dev/shm/loadbox.{group}.{INDEX['rank']}", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.write(fd, (CONFORMANCE / "images" / f"{name}.bin").read_bytes().ljust(expected["size"], b"\0"))
        for epoch in expected["locked"]:
            fcntl.fcntl(fd, 37, struct.pack("@hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, epoch, 1, 0))  # F_OFD_SETLK, as its owner
        numbers = expected["load"] if state == "LIVE" else []
        assert said(read_load, group, INDEX["rank"]) == " ".join([state, *map(str, numbers)])
    finally:
        os.close(fd)


def test_the_example_refuses_what_was_planted(read_load: Path, group: str, tmp_path: Path) -> None:
    name = Path(f"/dev/shm/loadbox.{group}.0")
    name.symlink_to(tmp_path / "elsewhere")
    assert said(read_load, group) == "REFUSED"
    name.unlink()
    os.mkfifo(name, 0o600)
    assert said(read_load, group) == "REFUSED"
    name.unlink()
    name.write_bytes(b"")
    name.chmod(0o600)
    assert said(read_load, group) == "ABSENT"
    os.truncate(name, 4096)  # a hole
    assert said(read_load, group) == "REFUSED"


def test_the_block_compiles(tmp_path: Path) -> None:
    (block,) = re.findall(r"^```c\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    source = tmp_path / "block.c"
    source.write_text(block + "\nint main(void) { return 0; }\n")
    compiled(tmp_path, source, "cc", "-std=c11")
