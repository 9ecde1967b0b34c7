"""The bytes of a segment: the header compiles alone, and C, Python and the mapped memory agree on where each word lies."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import loadbox.mailbox
from loadbox.mailbox import _layout

HEADER = Path(loadbox.mailbox.__file__).with_name("loadbox.h")
STRICT = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]
LINE = 64  # bytes of a cache line on every processor that this runs on (some prefetch pairs)

ALONE = """
#include "loadbox.h"
#include "loadbox.h"

int use(lbx_segment *s, lbx_words *v, uint64_t *seq);
int use(lbx_segment *s, lbx_words *v, uint64_t *seq)
{
    lbx_repair(s);
    lbx_publish(s, v);
    *lbx_board_words(s) = lbx_board_pack(lbx_board_in_flight(*seq), lbx_board_owed(*seq));
    return lbx_read(s, seq, v) && lbx_try_read(s, seq, v) && lbx_words_valid(v) && lbx_owner_alive(0, v->epoch);
}
"""

HEADER_FIELDS = list(_layout.Header._fields)
WORDS = ["num_running", "num_waiting", "kv_active_pages", "kv_total_pages", "published_ns", "epoch"]
CONSTANTS = ["ABI_MAJOR", "ABI_MINOR", "SEGMENT_SIZE", "RECORD_OFFSET", "KIND_RANK", "KIND_BOARD", "STATE_OPEN", "STATE_CLOSED",
             "EPOCH_LIMIT", "READ_TRIES", "MAGIC"]  # fmt: skip


def compiler(*names: str) -> str:
    for name in names:
        if shutil.which(name):
            return name
    missing = f"none of {', '.join(names)} is installed: THE HEADER IS NOT COMPILED"
    if os.environ.get("LOADBOX_REQUIRE_C", "") not in ("", "0"):
        pytest.fail(missing)
    pytest.skip(missing)


def compile_alone(command: list[str], source: str, folder: Path) -> None:
    path = folder / f"alone{'.cpp' if '++' in command[0] else '.c'}"
    path.write_text(source)
    done = subprocess.run([*command, *STRICT, f"-I{HEADER.parent}", str(path)], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("standard", ["c11", "c17", "gnu11", "c++11", "c++17", "c++20"])
@pytest.mark.parametrize("family", ["gcc", "clang"])
def test_the_header_compiles_alone(family: str, standard: str, tmp_path: Path) -> None:
    tool = compiler({"gcc": "g++", "clang": "clang++"}[family] if "++" in standard else family)
    compile_alone([tool, f"-std={standard}", "-O2", "-c", "-o", "alone.o"], ALONE, tmp_path)


@pytest.mark.parametrize(
    "edit", [("uint64_t rank;", "uint64_t rank, more;"), ("uint64_t pad;", ""), ("lbx_words b;", "uint64_t more; lbx_words b;")]
)
def test_another_layout_does_not_compile(edit: tuple[str, str], tmp_path: Path) -> None:
    text = HEADER.read_text()
    assert text.count(edit[0]) == 1
    (tmp_path / "loadbox.h").write_text(text.replace(*edit))
    (tmp_path / "alone.c").write_text(ALONE)
    command = [compiler("gcc", "clang", "cc"), "-std=c11", "-fsyntax-only", "alone.c"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert "ABI 1" in done.stderr


@pytest.fixture(scope="module")
def in_c(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Offsets, sizes and constants as a C program sees them."""
    folder = tmp_path_factory.mktemp("layout")
    entries = {f"header.{name}": f"offsetof(lbx_header, {name})" for name in HEADER_FIELDS}
    entries |= {f"a.{name}": f"offsetof(lbx_segment, a.{name})" for name in WORDS}
    entries |= {f"b.{name}": f"offsetof(lbx_segment, b.{name})" for name in WORDS}
    entries |= {f"sizeof header.{name}": f"sizeof(((lbx_header *)0)->{name})" for name in HEADER_FIELDS}
    entries |= {f"sizeof words.{name}": f"sizeof(((lbx_words *)0)->{name})" for name in WORDS}
    entries |= {name: f"LBX_{name}" for name in CONSTANTS}
    entries |= {"seq": "offsetof(lbx_segment, seq)", "reserved": "offsetof(lbx_segment, reserved)"}
    entries |= {"sizeof header": "sizeof(lbx_header)", "sizeof words": "sizeof(lbx_words)", "sizeof segment": "sizeof(lbx_segment)"}
    prints = "\n".join(
        f'printf("%s\\"{name}\\": %llu", comma, (unsigned long long)({value})); comma = ", ";' for name, value in entries.items()
    )
    source = f"""
        #include "loadbox.h"
        #include <stdio.h>
        int main(void) {{ const char *comma = "{{"; {prints} printf("}}\\n"); return 0; }}
    """
    compile_alone([compiler("gcc", "clang", "cc"), "-std=gnu11", "-o", "alone"], source, folder)
    values: dict[str, int] = json.loads(subprocess.run([folder / "alone"], check=True, capture_output=True, text=True).stdout)
    return values


def test_every_word_is_8_bytes_wide(in_c: dict[str, int]) -> None:
    assert {name: in_c[f"sizeof words.{name}"] for name in WORDS} == dict.fromkeys(WORDS, 8)
    widths = {name: in_c[f"sizeof header.{name}"] for name in HEADER_FIELDS}
    assert widths == {**dict.fromkeys(HEADER_FIELDS, 8), "boot_id": 16}


def test_constants_are_those_of_c(in_c: dict[str, int]) -> None:
    assert {name: getattr(_layout, name) for name in CONSTANTS} == {name: in_c[name] for name in CONSTANTS}
    assert _layout.MAGIC.to_bytes(8, "little") == b"LOADBOX\0"
    assert _layout.MAGIC_SWAPPED.to_bytes(8, "big") == b"LOADBOX\0"


def test_no_constant_of_the_header_is_left_out() -> None:
    defined = set(re.findall(r"^#define LBX_(\w+) ", HEADER.read_text(), re.MULTILINE))
    assert defined - {"STATIC_ASSERT"} == set(CONSTANTS)


def test_record_and_sequence_lie_where_c_has_them(in_c: dict[str, int]) -> None:
    assert (_layout.SEQ, _layout.COPY_A, _layout.COPY_B) == (in_c["seq"], in_c["a.num_running"], in_c["b.num_running"])
    assert [in_c[f"a.{name}"] for name in WORDS] == [_layout.COPY_A + 8 * i for i in range(6)]
    assert [in_c[f"b.{name}"] for name in WORDS] == [_layout.COPY_B + 8 * i for i in range(6)]
    assert _layout.RECORD.size == in_c["sizeof words"]
    assert _layout.SEGMENT_SIZE == in_c["sizeof segment"]
    assert _layout.RECORD_OFFSET == in_c["sizeof header"]
    assert in_c["reserved"] == _layout.COPY_B + _layout.RECORD.size


def test_header_words_lie_where_c_has_them(in_c: dict[str, int]) -> None:
    assert (_layout.STATE, _layout.TIME_NS_INODE) == (in_c["header.state"], in_c["header.time_ns_inode"])
    for name in HEADER_FIELDS:
        image = bytearray(_layout.SEGMENT_SIZE)
        width = 16 if name == "boot_id" else 8
        image[in_c[f"header.{name}"] : in_c[f"header.{name}"] + width] = bytes(range(1, width + 1))
        header = _layout.Header.unpack(bytes(image))
        expected: Any = bytes(range(1, 17)) if width == 16 else 0x0807060504030201
        assert {field: value for field, value in header._asdict().items() if value not in (0, bytes(16))} == {name: expected}


def mappings(name: str) -> list[tuple[int, str]]:
    """(address, permissions) of each mapping of a segment in this process."""
    found = []
    with open("/proc/self/maps") as maps:
        for line in maps:
            fields = line.split()
            if fields[-1] == "/dev/shm" + name:
                assert fields[2] == "00000000"
                found.append((int(fields[0].split("-")[0], 16), fields[1]))
    return found


def test_no_word_crosses_a_cache_line_where_it_is_mapped(box: Any, group: str) -> None:
    with (
        box.MailboxWriter(group, 0) as writer,
        box.MailboxReader(group, 0) as reader,
        box.GroupReader(group, 1) as all_ranks,
    ):
        writer.publish(1, 2, 3, 4)
        assert tuple(reader.read()) == (1, 2, 3, 4)
        assert all_ranks.read()["usable"].tolist() == [True]
        found = mappings(writer.name)
        assert sorted(permissions for _, permissions in found) == ["r--s", "r--s", "rw-s"]
        for base, _ in found:
            words = [
                base + offset
                for offset in (_layout.SEQ, *(copy + 8 * i for copy in (_layout.COPY_A, _layout.COPY_B) for i in range(6)))
            ]
            words += [base + 8 * i for i in range(16)]
            assert all(word % 8 == 0 and word // LINE == (word + 7) // LINE for word in words)
            assert len({word // LINE for word in words[:7]}) == 1  # the sequence and copy A: a quiet read touches one line
            assert len({word // LINE for word in words[7:13]}) == 1
