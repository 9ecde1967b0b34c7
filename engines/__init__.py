"""Adapters for real engines; each imports its engine inside its own module only."""

from loadbox.engines._publisher import LoadPublisher, PublisherStats, publisher_stats

__all__ = ["LoadPublisher", "PublisherStats", "publisher_stats"]
