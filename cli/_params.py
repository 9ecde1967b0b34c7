"""Kinds of options that several commands take."""

from __future__ import annotations

import math
from typing import Any

import click

from loadbox.mailbox import _names

__all__ = ["Number", "to_group"]


class Number(click.FloatRange):
    """A range that NaN is not in."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


def to_group(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    try:
        return None if value is None else _names.check_group(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
