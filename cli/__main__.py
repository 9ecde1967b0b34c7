"""``loadbox``, or ``python -m loadbox.cli``."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line; exits."""
    try:
        from loadbox.cli._app import app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("loadbox"):
            raise
        sys.exit(f"loadbox: the command line needs {error.name}: pip install 'loadbox[cli]'")
    app(prog_name="loadbox")


if __name__ == "__main__":
    main()
