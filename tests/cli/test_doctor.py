"""``loadbox doctor``: each check, sound and in need, and the exit codes."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from loadbox.cli._app import app
from loadbox.cli.doctor import _machine, _run, _segments, _selftest
from loadbox.cli.doctor._finding import Finding, Level, fine
from loadbox.mailbox import MailboxUnsupported, _names, _seqlock

pytestmark = pytest.mark.slow  # `make test-more` runs them


@pytest.fixture
def alone(group: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """As if this host had this group's segments only: other tests make and kill theirs meanwhile."""
    everything = _names.list_names
    monkeypatch.setattr(_names, "list_names", lambda: [name for name in everything() if name.split(".")[1] == group])
    return group


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """What statvfs says of /dev/shm."""

    class Answer:
        f_flag, f_frsize, f_blocks, f_bavail, f_files, f_favail = 0, 4096, 1 << 20, 1 << 19, 1 << 20, 1 << 19

    def say(**words: int) -> None:
        answer = Answer()
        for name, value in words.items():
            assert hasattr(answer, name)
            setattr(answer, name, value)
        monkeypatch.setattr(os, "statvfs", lambda path: answer)

    return say


def doctor(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "loadbox.cli", "doctor", *args],
        capture_output=True, text=True, cwd="/", timeout=120, env={**os.environ, **(env or {})},
    )  # fmt: skip


def is_level(finding: Finding, level: Level, words: str) -> None:
    assert finding.level is level, finding
    assert words in finding.found
    assert finding.found[0].isupper() or finding.found[0] in "/0123456789L"
    assert finding.found.endswith(".")
    assert bool(finding.advice) is (level is not Level.OK)
    assert finding.advice == "" or finding.advice.endswith(".")


def test_all_is_fine(alone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_segments, "_orphans", lambda pid: [])
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    assert result.output.endswith("All is fine.\n")
    assert "self-test" in result.output
    result = CliRunner().invoke(app, ["doctor", "--json"])
    found = json.loads(result.output)
    assert found["result"] == "ok"
    assert {check["level"] for check in found["checks"]} == {"ok"}
    assert [check["check"] for check in found["checks"]][-1] == "self-test"


def test_the_whole_of_it_on_this_machine() -> None:
    done = doctor("--json")
    found = json.loads(done.stdout)
    assert done.returncode in (0, 1), done.stdout  # other tests leave and remove segments meanwhile
    assert done.returncode == {"ok": 0, "warning": 1}[found["result"]]
    assert {check["check"]: check["level"] for check in found["checks"]}["self-test"] == "ok"
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("loadbox.doctor-") and name.endswith(".1")]


def test_the_twin_is_a_warning_with_its_cause() -> None:
    done = doctor("--json", env={"LOADBOX_PURE_PYTHON": "1"})
    found = {check["check"]: check for check in json.loads(done.stdout)["checks"]}
    assert done.returncode == 1
    assert "LOADBOX_PURE_PYTHON is set" in found["core"]["found"]
    assert found["core"]["advice"] == "Unset it."
    assert found["self-test"]["level"] == "ok"


def test_no_core_is_a_fault_and_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported() -> None:
        raise MailboxUnsupported("this machine is no x86-64")

    monkeypatch.setattr(_seqlock, "require_supported", unsupported)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 2
    assert "this machine is no x86-64." in result.output
    assert "1 fault" in result.output
    assert "self-test" not in result.output
    monkeypatch.undo()
    monkeypatch.setattr(_seqlock, "BACKEND", "py")
    is_level(_machine.core(), Level.WARNING, "the C core was not built")


def test_shm(limits: Callable[..., None], tmp_path: Path) -> None:
    is_level(_machine.folder(), Level.OK, "/dev/shm is tmpfs and writable")
    is_level(_machine.folder(str(tmp_path / "none")), Level.FAULT, "No such file or directory")
    (tmp_path / "file").touch()
    is_level(_machine.folder(str(tmp_path / "file")), Level.FAULT, "is no directory")
    tmp_path.chmod(0o777)
    found = _machine.folder(str(tmp_path))
    assert "no sticky bit (mode 0777" in found.found or "not in memory" in found.found
    limits(f_flag=os.ST_RDONLY)
    is_level(_machine.folder(), Level.FAULT, "mounted read-only")


def test_shm_that_may_not_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *args, **options: False)
    is_level(_machine.folder(), Level.FAULT, "This user may not write to /dev/shm")


@pytest.mark.parametrize(
    ("words", "level", "found"),
    [
        ({}, Level.OK, "2048.0 MiB of 4096.0 MiB are free"),
        ({"f_bavail": 3}, Level.FAULT, "may get no mailbox"),
        ({"f_bavail": 200}, Level.WARNING, "are free in /dev/shm; a rank takes"),
        ({"f_favail": 0}, Level.FAULT, "0 of 1048576 inodes"),
        ({"f_favail": 9}, Level.WARNING, "9 of 1048576 inodes"),
        ({"f_files": 0, "f_favail": 0}, Level.OK, "are free in /dev/shm; a rank takes"),
        ({"f_blocks": 0, "f_bavail": 0}, Level.OK, "no size limit"),
    ],
)
def test_room(words: dict[str, int], level: Level, found: str, limits: Callable[..., None]) -> None:
    limits(**words)
    is_level(_machine.room(), level, found)


def test_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    is_level(_machine.clocks(), Level.OK, "can be read")
    monkeypatch.setattr(_machine, "time_ns_inode", lambda: 0)
    is_level(_machine.clocks(), Level.WARNING, "ages of snapshots are upper bounds")
    monkeypatch.setattr(_machine, "boot_id", lambda: bytes(16))
    is_level(_machine.clocks(), Level.WARNING, "boot id cannot be read")


def test_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, level in ((64, Level.WARNING), (65536, Level.OK), (resource.RLIM_INFINITY, Level.OK)):
        monkeypatch.setattr(resource, "getrlimit", lambda what, limit=limit: (limit, 1 << 20))
        is_level(_machine.descriptors(), level, "open files")


def test_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADBOX_TRUST_UIDS", "")
    is_level(_machine.trust(), Level.OK, "root (uid 0)")
    monkeypatch.setenv("LOADBOX_TRUST_UIDS", "4242,1001 7")
    is_level(_machine.trust(), Level.OK, "uid 4242")
    monkeypatch.setenv("LOADBOX_TRUST_UIDS", "alice 1001")
    is_level(_machine.trust(), Level.WARNING, "names 'alice', which is no uid")


def test_leftovers(alone: str, writer: Any) -> None:
    is_level(_segments.leftovers(), Level.OK, "Nothing was left")
    rank = writer(alone, 0, 1, (1, 0, 1, 2))
    is_level(_segments.leftovers(), Level.OK, "Nothing was left")
    rank.kill()
    is_level(_segments.leftovers(), Level.WARNING, f"Nobody owns /loadbox.{alone}.0: ")
    for number in range(1, 6):
        Path(f"/dev/shm/loadbox.{alone}.{number}").touch(0o600)
    is_level(_segments.leftovers(), Level.WARNING, " and 3 more: ")


def test_refused(alone: str) -> None:
    is_level(_segments.refused(), Level.OK, "No file")
    Path(f"/dev/shm/loadbox.{alone}.0").write_bytes(b"x" * 4096)
    os.mkfifo(f"/dev/shm/loadbox.{alone}.1")
    is_level(
        _segments.refused(), Level.WARNING, f"Readers refuse /loadbox.{alone}.0, /loadbox.{alone}.1; the first: refused to read"
    )
    is_level(_segments.leftovers(), Level.OK, "Nothing was left")  # what is not ours is not called ours


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's file")
def test_others(alone: str, writer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    is_level(_segments.others(), Level.OK, "no segments of other users")
    writer(alone, 0, 1, (1, 0, 1, 2))
    os.chown(f"/dev/shm/loadbox.{alone}.0", 4242, 4242)
    is_level(_segments.others(), Level.OK, f"1 segment is of other users (4242); this user's readers refuse /loadbox.{alone}.0")
    monkeypatch.setenv("LOADBOX_TRUST_UIDS", "4242")
    is_level(_segments.others(), Level.OK, "believe all of them")


def test_other_clocks(alone: str, writer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    writer(alone, 0, 1, (1, 0, 1, 2))
    is_level(_segments.other_clocks(), Level.OK, "No living writer")
    monkeypatch.setattr(_segments, "time_ns_inode", lambda: 1)
    is_level(_segments.other_clocks(), Level.OK, f"/loadbox.{alone}.0: written in another time namespace")


def test_a_file_that_was_removed_under_its_owner(group: str, writer: Any) -> None:
    rank = writer(group, 0, 1, (1, 0, 1, 2))
    assert _segments._orphans(str(rank.pid)) == []
    os.unlink(f"/dev/shm/loadbox.{group}.0")
    assert _segments._orphans(str(rank.pid)) == [f"/loadbox.{group}.0"]
    is_level(_segments.removed(), Level.WARNING, "The file was removed under its owner: ")


def test_a_child_that_inherited_a_mapping_owns_nothing(group: str, children: Any) -> None:
    parent = children.start(
        """
        import os, sys
        from loadbox.mailbox import MailboxWriter
        writer = MailboxWriter(sys.argv[1], 0)
        ready, said = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(said, b"x")  # it has run, so it has let go of the lock
            sys.stdin.read()
            os._exit(0)
        os.read(ready, 1)
        writer.close()  # unlinks; the child's mapping goes on
        print(pid, flush=True)
        os.waitpid(pid, 0)
        """,
        group,
    )
    pid = parent.stdout.readline().strip()
    assert pid, parent.communicate()[1]
    assert f"/dev/shm/loadbox.{group}.0 (deleted)" in Path(f"/proc/{pid}/maps").read_text()
    assert _segments._orphans(pid) == []


@pytest.mark.parametrize(
    ("boot", "words"),
    [
        ("raise SystemExit('no locks here')", "the other process ended: no locks here."),
        ("pass", "the other process ended: no word of why."),
        ("import os; os.write(1, b'what')", "the other process said what it should not: what."),
    ],
)
def test_a_selftest_that_fails_says_why(boot: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_selftest, "_BOOT", boot)
    is_level(_selftest.selftest(), Level.FAULT, words)


def test_a_selftest_in_which_nothing_is_shared_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_selftest, "_BOOT", "import os, sys; os.write(1, b'up\\n'); sys.stdin.read()")
    monkeypatch.setattr(_selftest, "_PATIENCE_S", 2.0)
    finding = _selftest.selftest()
    assert finding.level is Level.FAULT
    assert re.search("after the start it is ABSENT, not SILENT|said nothing for 2 s", finding.found)  # on a loaded machine


def test_a_selftest_that_reads_something_else_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    other = _selftest._BOOT.replace("main()", "").replace("from loadbox.cli.doctor._child import main;", "") + (
        "import os; from loadbox.mailbox import MailboxWriter; w = MailboxWriter(sys.argv[1], 0, 1); os.write(1, b'up\\n'); "
        "[(w.publish(1, 2, 3, 4), os.write(1, b'done\\n')) for line in sys.stdin]; w.close()"
    )
    monkeypatch.setattr(_selftest, "_BOOT", other)
    is_level(_selftest.selftest(), Level.FAULT, "was published, and LoadSnapshot(num_running=1, num_waiting=2,")


def test_a_check_that_fails_itself_hides_no_other() -> None:
    def broken() -> Finding:
        raise OSError("no /proc here")

    findings = _run.examine_all([broken], [lambda: fine("b", "B.")])
    assert [each.check for each in findings] == ["broken", "b"]
    is_level(findings[0], Level.FAULT, "This check failed itself: OSError: no /proc here.")
