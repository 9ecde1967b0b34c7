"""A pytest plugin: of the tests that run on both twins, those on the C core."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what a sanitizer has nothing to do with."""
    params = {item: getattr(getattr(item, "callspec", None), "params", {}) for item in items}
    kept = [item for item in items if "py" not in (params[item].get("box"), params[item].get("core"))]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept
