"""No ``struct.pack_into`` in the package: it fills its target with zeros first, and readers of live memory would see them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("mailbox", "piggyback", "reader", "engines", "cli")
NAME = "pack_into"


def uses(source: str) -> list[int]:
    """Lines where the function is named, however it was imported or fetched; prose that mentions it does not count."""
    found = []
    for node in ast.walk(ast.parse(source)):
        named = (
            (isinstance(node, ast.Attribute) and node.attr == NAME)
            or (isinstance(node, ast.Name) and node.id == NAME)
            or (isinstance(node, ast.alias) and node.name.endswith(NAME))
            or (isinstance(node, ast.Constant) and node.value == NAME)
        )
        if named and isinstance(node, (ast.expr, ast.alias)):
            found.append(node.lineno)
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_no_pack_into(room: str) -> None:
    paths = sorted((ROOT / room).rglob("*.py"))
    assert paths or not (ROOT / room).exists() or room == "engines", (
        f"{room} has no Python: does this test look in the right place?"
    )
    assert {str(path.relative_to(ROOT)): lines for path in paths if (lines := uses(path.read_text()))} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import struct\nstruct.pack_into('<q', memory, 0, 1)",
        "from struct import pack_into\npack_into('<q', memory, 0, 1)",
        "from struct import pack_into as put",
        "RECORD.pack_into(memory, 128, *words)",
        "put = RECORD.pack_into",
        "getattr(struct, 'pack_into')",
    ],
)
def test_the_rule_bites(source: str) -> None:
    assert uses(source)


def test_prose_and_other_names_pass() -> None:
    assert not uses('"""Never struct.pack_into here."""\nRECORD.unpack_from(memory)\nRECORD.pack(1)  # no pack_into')
