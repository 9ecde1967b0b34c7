"""The table of faults cannot rot: every number has its row, and every test and target that it names is there."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reliability.md").read_text()
ROW = re.compile(r"^\| ([A-Z]?\d+) \| (.+?) \| (.+?) \| (.+) \|$", re.MULTILINE)
ITEMS = 43


@lru_cache
def collected_from(path: Path) -> set[str]:
    """What pytest collects from a file: functions called test_, and classes called Test."""
    assert path.name.startswith("test_"), path
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {name for name in names if name.startswith(("test_", "Test"))}


def missing(named: str) -> str | None:
    """What is wrong with something that a row names as its test, or None."""
    if named.startswith("make "):
        steps = (ROOT / ".ci" / "run").read_text() if (ROOT / ".ci").is_dir() else named  # the sdist has no .ci
        known = re.search(rf"^{named[5:]}:", (ROOT / "Makefile").read_text(), re.MULTILINE) and re.search(rf"{named}\b", steps)
        return None if known else f"{named} is no target that .ci/run runs"
    path, _, name = named.partition("::")
    if not (ROOT / "tests" / path).is_file():
        return f"there is no tests/{path}"
    return None if name in collected_from(ROOT / "tests" / path) else f"tests/{path} has no {name}"


def named_in(text: str) -> list[str]:
    return [word for word in re.findall(r"`([^`]+)`", text) if "::" in word or re.fullmatch("make [a-z-]+", word)]


def test_every_item_has_a_row() -> None:
    numbers = [int(match[1]) for match in ROW.finditer(PAGE) if match[1].isdigit()]
    assert numbers == list(range(1, ITEMS + 1))


def test_every_row_names_tests() -> None:
    rows = list(ROW.finditer(PAGE))
    assert len(rows) >= ITEMS
    assert [match[1] for match in rows if not named_in(match[4])] == []


def test_all_that_is_named_is_there() -> None:
    named = named_in(PAGE)
    assert len(named) > 2 * ITEMS
    assert [wrong for wrong in map(missing, named) if wrong] == []


def test_the_check_bites() -> None:
    assert missing("mailbox/test_fork.py::test_that_nobody_wrote") == "tests/mailbox/test_fork.py has no test_that_nobody_wrote"
    assert missing("mailbox/test_nothing.py::test_x") == "there is no tests/mailbox/test_nothing.py"
    assert missing("make nothing") == "make nothing is no target that .ci/run runs"
