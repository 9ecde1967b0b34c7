"""Kinds of options that several commands take."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import click

from loadbox.mailbox import MailboxError, _names

__all__ = ["Number", "explained", "to_group", "to_groups"]

_Command = TypeVar("_Command", bound=Callable[..., Any])


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


def to_groups(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(value for value in values if to_group(ctx, param, value)))


def explained(command: _Command) -> _Command:
    """Let a command end with one sentence where the mailbox refuses."""

    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> Any:
        try:
            return command(*args, **options)
        except MailboxError as error:
            raise click.ClickException(str(error)) from None

    return run  # type: ignore[return-value]  # the same signature, which wraps cannot say
