"""Load reporting of the released tokenspeed, run as it is; only its neighbours that need a GPU stack are stood in for.

    python tokenspeed_peer.py FOLDER SCRIPT ARGUMENTS...

FOLDER holds the unpacked wheel; SCRIPT is run with ``load_snapshot``, ``io_struct`` and ``controller`` (their modules) as globals.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

REAL = ("tokenspeed", "tokenspeed.runtime", "tokenspeed.runtime.engine")
REAL_MODULES = tuple(f"tokenspeed.runtime.engine.{name}" for name in ("load_snapshot", "io_struct", "data_parallel_controller"))


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Every module that is neither one of the real ones nor installed has whatever is asked of it."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        theirs = name.startswith("tokenspeed") and name not in REAL and name not in REAL_MODULES
        if theirs or name.partition(".")[0] in ("torch", "setproctitle", "psutil"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class StandIn(types.ModuleType):
    """A module of which every name is an empty class of its own."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        import msgspec

        made = type(name, (msgspec.Struct,), {"__module__": self.__name__}) if name[0].isupper() else Anything()
        setattr(self, name, made)
        return made


class Anything:
    """Answers every call and attribute with itself."""

    def __getattr__(self, name: str) -> Anything:
        return self

    def __call__(self, *_: Any, **__: Any) -> Anything:
        return self

    def __bool__(self) -> bool:
        return False


def main() -> None:
    folder, script = sys.argv[1:3]
    sys.argv[1:] = sys.argv[3:]
    sys.path.insert(0, folder)
    sys.meta_path.insert(0, StandIns())
    modules = [importlib.import_module(name) for name in REAL_MODULES]
    for module in modules:
        assert module.__file__ is not None
        assert module.__file__.startswith(folder), module.__file__
    load_snapshot, io_struct, controller = modules
    exec(compile(script, "script", "exec"), {"load_snapshot": load_snapshot, "io_struct": io_struct, "controller": controller})


if __name__ == "__main__":
    main()
