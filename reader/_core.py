"""Which core runs: the C extension, or its pure-Python twin, a good deal slower with many ranks.

``LOADBOX_PURE_PYTHON=1`` forces the twin, as in the mailbox.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from loadbox.reader import _core_py
from loadbox.reader._view import INPUT_COLUMNS, VIEW_COLUMNS

__all__ = ["BACKEND", "CHANGED", "RANK_SHIFT", "SEEN", "cold_set", "merge"]

CHANGED, SEEN, RANK_SHIFT = _core_py.CHANGED, _core_py.SEEN, _core_py.RANK_SHIFT

if TYPE_CHECKING:
    from loadbox.reader._core_c import cold_set, merge

    BACKEND: str
else:
    BACKEND = "py"
    if os.environ.get("LOADBOX_PURE_PYTHON", "") in ("", "0"):
        try:
            from loadbox.reader import _core_c

            BACKEND = "c"
        except ImportError as error:
            logging.getLogger("loadbox").warning("loadbox.reader runs without its C core (%s): choose is slower", error)
    core = _core_c if BACKEND == "c" else _core_py
    if (core.view_columns, core.input_columns) != (VIEW_COLUMNS, INPUT_COLUMNS):
        raise ImportError(f"{core.__name__} is of another version of loadbox: install loadbox again")
    cold_set, merge = core.cold_set, core.merge
