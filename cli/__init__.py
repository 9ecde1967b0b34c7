"""The command line: ``loadbox``, or ``python -m loadbox.cli``."""

__all__: list[str] = []
