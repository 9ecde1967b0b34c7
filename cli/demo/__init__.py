"""``loadbox demo``: a data-parallel group for real, with a model in the place of the accelerator.

Nothing is imported here: a dozen processes pass this door, and only one of them draws tables.
"""
