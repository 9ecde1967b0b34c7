"""Every Python block of the documents runs, in the order it stands in its page, in an interpreter of its own.

A block headed ``python continue`` goes on where the one before it ended; one headed ``python norun`` shows a fragment and is
compiled only.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "proof" / "README.md"]
BLOCK = re.compile(r"^```python([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def programs(page: Path) -> list[tuple[str, str]]:
    """(where, program): blocks that continue each other are one program."""
    text = page.read_text()
    found: list[tuple[str, str]] = []
    for match in BLOCK.finditer(text):
        where = f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 2}"
        how, code = match[1].strip(), match[2]
        if how == "continue":
            found[-1] = (found[-1][0], found[-1][1] + code)
        elif how == "norun":
            compile(code, where, "exec")
        else:
            assert how == "", f"{where}: what is 'python {how}'?"
            found.append((where, code))
    return found


CASES = [case for page in PAGES if page.exists() for case in programs(page)]


def test_there_are_blocks() -> None:
    assert any(where.startswith("README.md") for where, _ in CASES)


@pytest.mark.parametrize(("where", "code"), CASES, ids=[where for where, _ in CASES])
def test_block(where: str, code: str, groups: Any, children: Any) -> None:
    for name in set(re.findall(r'"(llama-\d+)"', code)):
        code = code.replace(f'"{name}"', f'"{groups()}"')
    program = children.start("import sys; exec(compile(sys.stdin.read(), sys.argv[1], 'exec'))", where)
    _, err = program.communicate(code, timeout=60)
    assert program.returncode == 0, f"{where}\n{err}"
