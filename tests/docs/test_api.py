"""The API reference finds what has no docstring."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("pdoc", reason="pdoc comes with the extra loadbox[docs]")
PROGRAM = Path(__file__).resolve().parents[2] / "docs" / "build_api.py"


@pytest.fixture
def build_api() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_api", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_public_name_has_a_docstring(build_api: ModuleType) -> None:
    for module in build_api.MODULES:
        assert build_api.undocumented(module) == []


def test_a_missing_docstring_is_found(build_api: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from loadbox.mailbox import MailboxWriter

    monkeypatch.setattr(MailboxWriter.close, "__doc__", None)
    assert build_api.undocumented("loadbox.mailbox") == ["loadbox.mailbox.MailboxWriter.close"]
