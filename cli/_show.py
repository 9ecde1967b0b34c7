"""How ranks and figures look, wherever a command shows them."""

from __future__ import annotations

import os
import pwd
import re
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from loadbox.mailbox import RankState

__all__ = ["KV_WIDTH", "kv_bar", "print_trimmed", "save_svg", "seconds", "size", "state_text", "user"]

_BAR = 10
KV_WIDTH = _BAR + 15
_STYLES = {"LIVE": "green", "STALLED": "yellow", "DEAD": "bold red", "REFUSED": "bold red"}


def state_text(state: RankState | str) -> Text:
    """The state's name in its colour."""
    name = state if isinstance(state, str) else state.name
    return Text(name, _STYLES.get(name, "dim"))


def seconds(value: float | None) -> str:
    """A duration for people: 850 µs, 12 ms, 1.25 s, 3m07s, 2h05m, 4d02h; a dash if there is none."""
    if value is None:
        return "-"
    if value < 0.001:
        return f"{value * 1e6:.0f} µs"
    if value < 0.9995:
        return f"{value * 1e3:.0f} ms"
    if value < 99.995:
        return f"{value:.2f} s"
    minutes, rest = divmod(int(value), 60)
    hours, minutes = divmod(minutes, 60)
    if not hours:
        return f"{minutes}m{rest:02d}s"
    days, hours = divmod(hours, 24)
    return f"{days}d{hours:02d}h" if days else f"{hours}h{minutes:02d}m"


def size(amount: int) -> str:
    """Bytes for people: 4096 B, 64.0 MiB."""
    number, units = float(amount), ["B", "KiB", "MiB", "GiB", "TiB"]
    while number >= 10240 and len(units) > 1:
        number /= 1024
        units.pop(0)
    return f"{number:.0f} B" if units[0] == "B" else f"{number:.1f} {units[0]}"


def kv_bar(active: int, total: int, *, numbers: bool = True) -> Text:
    """KV pages in use as a bar, a share and numbers; ``total`` is at least 1."""
    share = active / total
    full = round(share * _BAR)
    style = "red" if share > 0.95 else "yellow" if share > 0.8 else "cyan"
    tail = f" {active}/{total}" if numbers else ""
    return Text.assemble(("█" * full, style), ("░" * (_BAR - full), "dim"), f" {share:4.0%}{tail}")


def user(uid: int) -> str:
    """A user's name, or the number where there is none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def print_trimmed(console: Console, content: RenderableType, *, no_wrap: bool = False) -> None:
    """Print without the blanks that fill a table's last column."""
    with console.capture() as printed:
        console.print(content, highlight=False, no_wrap=no_wrap)
    console.file.write("".join(f"{line.rstrip(' ')}\n" for line in printed.get().split("\n")[:-1]))
    console.file.flush()


def save_svg(path: Path, content: RenderableType, *, title: str, width: int) -> None:
    """Write a picture of what a terminal of that width would show."""
    from rich.console import Console

    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        canvas = Console(record=True, width=width, force_terminal=True, color_system="truecolor", no_color=False, file=nowhere)
        canvas.print(content, highlight=False)
    # Without rich's web fonts, since a picture loads nothing; with the spaces that some viewers leave out.
    picture = re.sub(r"@font-face \{.*?\}\s*", "", canvas.export_svg(title=title), flags=re.DOTALL)
    path.write_text(picture.replace("<svg ", '<svg xml:space="preserve" ', 1), encoding="utf-8")
