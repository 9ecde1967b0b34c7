"""The command ``loadbox inspect``."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import click

from loadbox.cli._params import explained
from loadbox.mailbox import _names

if TYPE_CHECKING:
    from loadbox.cli._examine import Facts, Record

__all__ = ["inspect"]

_LOCKS = {
    "held": "held",
    "shared": "a shared lock of some other process",
    "free": "free",
    None: "-",
}


@click.command()
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@explained
def inspect(name: str, as_json: bool) -> None:
    """Show all that one file in /dev/shm says, and explain what is odd about it.

    NAME is as loadbox ls prints it; the leading "/loadbox." or "/dev/shm/" may be left out.  The file's header, both copies of
    the load, the sequence and the locks are decoded; what is out of the ordinary is told in words, with what to do.  Works on
    mailboxes and boards, and on whatever else lies there: foreign, short, half-made, of a newer version.  Nothing is changed, no
    link is followed, and a FIFO is not opened.

    \b
    loadbox inspect llama-0.3           rank 3 of the group llama-0
    loadbox inspect /dev/shm/loadbox.llama-0.3
    loadbox inspect llama-0.3 --json | jq .state
    """
    from loadbox.cli._examine import examine
    from loadbox.cli._record import to_json

    segment = _find(name)
    try:
        facts = examine(segment)
    except FileNotFoundError:
        raise click.ClickException(f"There is no /dev/shm{segment}; loadbox ls lists what there is.") from None
    if as_json:
        click.echo(to_json(_record(facts)))
    else:
        _print(facts)


def _find(name: str) -> str:
    """The name meant, with its slash; a name that is there as it stands comes first."""
    short = name.removeprefix(_names.SHM_DIR + "/").removeprefix("/")
    if not short or "/" in short or "\0" in short or short in (".", ".."):
        raise click.BadParameter(f"{name!r} is no name in /dev/shm; loadbox ls lists what there is.", param_hint="'NAME'")
    if not short.startswith("loadbox.") and not os.path.lexists(f"{_names.SHM_DIR}/{short}"):
        short = f"loadbox.{short}"
    return f"/{short}"


def _print(facts: Facts) -> None:
    from rich.console import Console
    from rich.text import Text

    from loadbox.cli._show import state_text

    console = Console(highlight=False, soft_wrap=True)
    title = Text.assemble((f"/dev/shm{facts.name}", "bold"), "  ")
    if facts.state:
        title.append(state_text(facts.state))
    console.print(title)
    if facts.reason:
        console.print(Text(facts.reason, "red"))
    for heading, rows in _sections(facts):
        console.print(Text(heading, "bold"))
        for label, value in rows:
            console.print(Text.assemble((f"  {label:<16}", "dim"), value))
    if facts.words is not None:
        _print_words(console, facts.words)
    console.print(Text("odd" if facts.odd else "nothing odd", "bold"))
    for sentence in facts.odd:
        console.print(Text.assemble(("  ! ", "yellow"), sentence))


def _sections(facts: Facts) -> list[tuple[str, list[tuple[str, str]]]]:
    from loadbox.cli._examine import started
    from loadbox.cli._show import user
    from loadbox.mailbox import _files
    from loadbox.mailbox._host import boot_id, time_ns_inode
    from loadbox.mailbox._layout import ABI_MAJOR, KIND_BOARD, KIND_RANK, MAGIC, STATE_CLOSED, STATE_OPEN

    found, header = facts.found, facts.header
    assert found is not None
    sections = [
        (
            "file",
            [
                ("size", f"{found.st_size} bytes, {found.st_blocks * 512} of them allocated"),
                ("owner", f"{user(found.st_uid)} ({_files.owner_of(found)})"),
                ("inode", f"{found.st_ino}, {found.st_nlink} link{'s' if found.st_nlink != 1 else ''}"),
            ],
        )
    ]
    if header is None:
        return sections
    head = [("magic", repr(header.magic.to_bytes(8, "little")))]
    if header.magic == MAGIC:
        head.append(("ABI", f"{header.abi_major}.{header.abi_minor}"))
    if header.magic == MAGIC and header.abi_major == ABI_MAJOR:
        kinds = {KIND_RANK: "a rank's mailbox", KIND_BOARD: "a frontend's dispatch board"}
        states = {STATE_OPEN: "open", STATE_CLOSED: "closed"}
        boot = "this boot" if header.boot_id == boot_id() else "not told" if header.boot_id == bytes(16) else "another boot or host"
        clock = "this one" if header.time_ns_inode == time_ns_inode() else "another one" if header.time_ns_inode else "not told"
        head += [("kind", f"{header.kind}, {kinds.get(header.kind, 'unknown')}"), ("record offset", str(header.record_offset))]
        if header.kind == KIND_BOARD:
            head += [("capacity", f"{header.capacity} ranks"), ("epoch", str(header.epoch))]
        else:
            head += [("rank", str(header.rank)), ("dp_size", str(header.dp_size) if header.dp_size else "not told")]
        head += [
            ("owner pid", f"{header.owner_pid}, {_process(header.owner_pid)}"),
            ("started", started(header) or "not told"),
            ("state", states.get(header.state, str(header.state))),
            ("boot id", f"{header.boot_id.hex()}, {boot}"),
            ("time namespace", f"{header.time_ns_inode}, {clock}"),
        ]
    sections.append(("header", head))
    if facts.copies is not None and facts.seq is not None:
        used = facts.seq & 1
        parity = "odd: readers use copy B" if used else "even: readers use copy A"
        sections.append(
            ("sequence", [("number", f"{facts.seq}, {parity}"), ("publishes", f"{facts.seq // 2} since the file was made")])
        )
        for letter, copy in zip("AB", facts.copies, strict=True):
            sections.append((f"copy {letter}{' (in use)' if 'AB'[used] == letter else ''}", _copy(copy, header.time_ns_inode)))
    if facts.owner_lock is not None:
        locks = [("byte 0", f"{_LOCKS[facts.owner_lock]}: who holds it owns the file")]
        if facts.epoch_lock is not None:
            locks.append(("byte of epoch", f"{_LOCKS[facts.epoch_lock]}: held while the life that wrote this goes on"))
        sections.append(("locks", locks))
    return sections


def _copy(copy: Record, clock: int) -> list[tuple[str, str]]:
    from loadbox.cli._show import seconds
    from loadbox.mailbox._host import time_ns_inode

    rows = [(name, str(getattr(copy, name))) for name in ("num_running", "num_waiting")]
    share = f", {copy.kv_active_pages / copy.kv_total_pages:.0%}" if copy.kv_total_pages > 0 else ", so there is no snapshot"
    rows += [("KV pages", f"{copy.kv_active_pages} of {copy.kv_total_pages}{share}")]
    age = (time.monotonic_ns() - copy.published_ns) / 1e9
    ago = f", {seconds(age)} ago" if clock and clock == time_ns_inode() and age >= 0 and copy.published_ns else ""
    return [*rows, ("published", f"{copy.published_ns} ns{ago}"), ("epoch", str(copy.epoch))]


def _process(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return f"here that is {file.read().strip()!r} (a hint: pids come round again)"
    except OSError:
        return "no such process here (a hint: pids are per namespace)"


def _print_words(console: Any, words: list[tuple[int, int]]) -> None:
    from rich.text import Text

    console.print(Text("words", "bold"))
    busy = [(rank, word) for rank, word in enumerate(words) if word != (0, 0)]
    for rank, (in_flight, owed) in busy:
        console.print(Text.assemble((f"  {f'rank {rank}':<16}", "dim"), f"{in_flight} in flight, {owed} owed a first token"))
    idle = len(words) - len(busy)
    console.print(Text.assemble((f"  {'others' if busy else 'all ranks':<16}", "dim"), f"0 in flight, on {idle} words"))


def _record(facts: Facts) -> dict[str, Any]:
    found, header = facts.found, facts.header
    assert found is not None
    copies = facts.copies and {
        letter: {**copy._asdict(), "epoch": str(copy.epoch)} for letter, copy in zip("AB", facts.copies, strict=True)
    }
    return {
        "name": facts.name,
        "state": facts.state,
        "reason": facts.reason,
        "file": {
            "size": found.st_size,
            "allocated": found.st_blocks * 512,
            "uid": found.st_uid,
            "gid": found.st_gid,
            "mode": f"{found.st_mode & 0o7777:04o}",
            "inode": found.st_ino,
            "links": found.st_nlink,
        },
        "header": header
        and {
            **header._asdict(),
            "magic": header.magic.to_bytes(8, "little").hex(),
            "boot_id": header.boot_id.hex(),
            "epoch": str(header.epoch),
        },
        "sequence": facts.seq,
        "copy_in_use": None if facts.seq is None else "AB"[facts.seq & 1],
        "copies": copies,
        "words": facts.words and {rank: word for rank, word in enumerate(facts.words) if word != (0, 0)},
        "locks": {"byte_0": facts.owner_lock, "byte_of_epoch": facts.epoch_lock},
        "odd": facts.odd,
    }
