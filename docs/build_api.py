"""Build the API reference from the docstrings with pdoc: ``python docs/build_api.py FOLDER``.

Fails on anything that pdoc warns of, and on a public name without a docstring or without a place in the reference.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import warnings
from pathlib import Path

import pdoc

MODULES = ("loadbox.mailbox", "loadbox.piggyback", "loadbox.reader", "loadbox.engines", "loadbox.engines.tokenspeed")


def undocumented(name: str) -> list[str]:
    """Public names of a module, and public attributes of its classes, without a docstring."""
    module = importlib.import_module(name)
    found = []
    for public in module.__all__:
        thing = getattr(module, public)
        documented = inspect.isclass(thing) or inspect.isroutine(thing)
        if documented and not inspect.getdoc(thing):
            found.append(f"{name}.{public}")
        if inspect.isclass(thing) and thing.__module__.startswith("loadbox"):
            for attribute, value in vars(thing).items():
                described = inspect.isroutine(value) or isinstance(value, property) or inspect.isgetsetdescriptor(value)
                if not attribute.startswith("_") and described and not inspect.getdoc(value):
                    found.append(f"{name}.{public}.{attribute}")
    return found


def main() -> None:
    """Build."""
    folder = Path(sys.argv[1])
    missing = [name for module in MODULES for name in undocumented(module)]
    if missing:
        sys.exit(f"no docstring: {', '.join(missing)}")
    warnings.simplefilter("error")
    pdoc.render.configure(docformat="google", footer_text="loadbox", show_source=False)
    pdoc.pdoc(*MODULES, output_directory=folder)
    for module in MODULES:
        page = (folder / f"{module.replace('.', '/')}.html").read_text()
        absent = [name for name in importlib.import_module(module).__all__ if f'id="{name}"' not in page]
        if absent:
            sys.exit(f"not in the reference of {module}: {', '.join(absent)}")


if __name__ == "__main__":
    main()
