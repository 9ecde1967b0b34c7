"""A table that cannot be drawn, for the test of what happens to the terminal then."""

import loadbox.cli.top._table


def _broken(screen: object) -> None:
    raise RuntimeError("it broke")


loadbox.cli.top._table.draw = _broken  # type: ignore[assignment]
