"""Adapters for real engines; each imports its engine inside its own module only."""

__all__: list[str] = []
