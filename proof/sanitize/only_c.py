"""A pytest plugin: of the tests that run on both twins, those on the C core."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what a sanitizer has nothing to do with."""
    kept = [item for item in items if getattr(getattr(item, "callspec", None), "params", {}).get("box") != "py"]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept
