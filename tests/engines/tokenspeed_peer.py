"""Load reporting of the released tokenspeed, run as it is; only its neighbours that need a GPU stack are stood in for.

    python tokenspeed_peer.py FOLDER SCRIPT ARGUMENTS...

FOLDER holds the unpacked wheel; SCRIPT is run with the modules in GIVEN as globals.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

REAL = ("tokenspeed", "tokenspeed.runtime", "tokenspeed.runtime.engine")
GIVEN = {
    "load_snapshot": "load_snapshot",
    "io_struct": "io_struct",
    "controller": "data_parallel_controller",
    "event_loop": "event_loop",
}
REAL_MODULES = {given: f"tokenspeed.runtime.engine.{name}" for given, name in GIVEN.items()}


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Every module that is neither one of the real ones nor installed has whatever is asked of it."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        theirs = name.startswith("tokenspeed") and name not in REAL and name not in REAL_MODULES.values()
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
    modules = {given: importlib.import_module(name) for given, name in REAL_MODULES.items()}
    for module in modules.values():
        assert module.__file__ is not None
        assert module.__file__.startswith(folder), module.__file__
    exec(compile(script, "script", "exec"), {**modules})


if __name__ == "__main__":
    main()
