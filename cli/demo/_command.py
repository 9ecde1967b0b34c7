"""The command ``loadbox demo`` and its options."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path
from typing import NoReturn

import click
from click.core import ParameterSource

from loadbox.cli._params import Number, to_group
from loadbox.mailbox import MailboxUnsupported, _names

__all__ = ["demo"]

_RATE_A_RANK = 0.95


@click.command()
@click.option(
    "--engine",
    type=click.Choice(["model", "vllm"]),
    default="model",
    show_default=True,
    help="What the ranks are: a model of an engine, or a real vLLM server on the CPU; that one takes --group and --plain only.",
)
@click.option("--ranks", type=click.IntRange(1, 64), default=4, show_default=True, help="Rank processes.")
@click.option("--frontends", type=click.IntRange(1, 16), default=4, show_default=True, help="Frontend processes.")
@click.option(
    "--remote",
    type=click.IntRange(min=0),
    metavar="N",
    help="So many frontends behave as if on another host: no mailboxes, only what comes with the batches.  [default: half]",
)
@click.option(
    "--chooser",
    "choosers",
    multiple=True,
    default=["cold-set"],
    show_default=True,
    metavar="NAME",
    help="How frontends choose: cold-set, least, own, p2c, smg or vllm.  May be repeated: a replay for each.",
)
@click.option(
    "--board/--no-board", default=True, help="Whether frontends tell those on their host what they dispatch.  [default: yes]"
)
@click.option(
    "--rate",
    type=Number(0, 1000, min_open=True),
    metavar="X",
    help=f"Requests a second, as a multiple of the trace's.  [default: {_RATE_A_RANK:g} for each rank]",
)
@click.option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False, readable=True, path_type=Path),
    help="A CSV with the columns arrival_s, prompt_tokens, output_tokens.  [default: an excerpt of Azure's chat trace of 2023]",
)
@click.option(
    "--speed-up",
    type=Number(0, 1000, min_open=True),
    default=5.0,
    show_default=True,
    metavar="X",
    help="How many seconds of the trace's time pass in a second.",
)
@click.option(
    "--seconds",
    type=Number(0, 86400, min_open=True),
    default=8.0,
    show_default=True,
    help="Real time for which requests arrive, in each replay.",
)
@click.option("--requests", type=click.IntRange(min=1), help="At most so many requests in each replay.")
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Of what is drawn: which frontend gets a request, which of equal ranks."
)
@click.option("--group", callback=to_group, help="Name of the DP group.  [default: a new one]")
@click.option("--plain", is_flag=True, help="Plain lines, as without a terminal.")
@click.option("--svg", type=click.Path(dir_okay=False, writable=True, path_type=Path), hidden=True)
def demo(
    engine: str,
    ranks: int,
    frontends: int,
    remote: int | None,
    choosers: tuple[str, ...],
    board: bool,
    rate: float | None,
    trace: Path | None,
    speed_up: float,
    seconds: float,
    requests: int | None,
    seed: int,
    group: str | None,
    plain: bool,
    svg: Path | None,
) -> None:
    """Replay a request trace against a group of rank processes, and watch their mailboxes.

    Each rank is a process with an engine's event loop: it batches continuously, fills prompts in chunks, runs out of KV pages and
    preempts, and publishes its load after every iteration.  Only the accelerator is a model: an iteration sleeps for as long as
    its batch would take.

    Frontend processes replay the trace; each request goes to one of them, drawn at random.  For every request a frontend looks at
    its view of all ranks, chooses one, sends it there over ZMQ, and measures the time to first token.  Half of the frontends read
    the ranks' mailboxes; the others behave as if they were on another host and know what comes with the output batches.  Frontends
    on one host tell each other by a board what they have sent.  Then they replay the same arrivals round robin, and the summary
    compares.

    \b
    loadbox demo                        four ranks, four frontends, about 25 seconds
    loadbox demo --rate 2.5             less load: the policies come closer
    loadbox demo --remote 0             all frontends on the ranks' host
    loadbox demo --no-board             frontends that do not know of each other
    loadbox demo --chooser least --chooser own
    loadbox demo --ranks 8 --seconds 5
    kill -9 PID                         meanwhile: a rank dies, the others serve on
    loadbox demo --engine vllm          instead, `vllm serve -dp 2` with a tiny random model: three minutes
    """
    from rich.console import Console

    if engine == "vllm":
        _vllm_demo(group, plain)

    from loadbox.cli.demo._options import ROUND_ROBIN, Options
    from loadbox.cli.demo._run import DemoError, run
    from loadbox.cli.demo._trace import TraceError, read_trace, scale
    from loadbox.reader._chooser import make_chooser

    if rate is None:
        rate = _RATE_A_RANK * ranks
    try:
        arrivals = scale(read_trace(trace), rate=rate, seconds=seconds * speed_up, limit=requests)
    except TraceError as error:
        raise click.BadParameter(str(error), param_hint="'--trace'") from None
    for name in choosers:
        try:
            make_chooser(name)
        except ValueError as error:
            raise click.BadParameter(f"{error}.", param_hint="'--chooser'") from None
    if remote is not None and remote > frontends:
        raise click.BadParameter(f"{remote} of {frontends} frontends cannot be remote.", param_hint="'--remote'")
    options = Options(
        group=group or f"demo-{os.getpid()}-{secrets.token_hex(3)}",
        ranks=ranks,
        frontends=frontends,
        remote=frontends // 2 if remote is None else remote,
        choosers=tuple(dict.fromkeys((*choosers, ROUND_ROBIN))),
        board=board,
        speed_up=speed_up,
        seed=seed,
        trace=trace.name if trace else "Azure 2023 chat",
        rate=rate,
    )
    try:
        _names.check_group(options.remote_group)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="'--group'") from None
    console = Console()
    plain = plain or not console.is_terminal or console.is_dumb_terminal
    try:
        sys.exit(run(options, arrivals, console, plain=plain, still=svg))
    except (DemoError, MailboxUnsupported) as error:
        raise click.ClickException(str(error)) from None


def _vllm_demo(group: str | None, plain: bool) -> NoReturn:
    from rich.console import Console

    from loadbox.cli.demo._run import DemoError
    from loadbox.cli.demo.vllm._server import HOW_TO_INSTALL, is_installed

    source = click.get_current_context().get_parameter_source
    parameters = click.get_current_context().command.params
    others = [
        p.opts[0]
        for p in parameters
        if p.name not in ("engine", "group", "plain") and source(p.name or "") is ParameterSource.COMMANDLINE
    ]
    if others:
        raise click.UsageError(f"{', '.join(others)}: not with --engine vllm, which takes --group and --plain only.")
    if not is_installed():
        raise click.ClickException(HOW_TO_INSTALL)
    from loadbox.cli.demo.vllm._run import run

    console = Console()
    plain = plain or not console.is_terminal or console.is_dumb_terminal
    try:
        sys.exit(run(group or f"demo-{os.getpid()}-{secrets.token_hex(3)}", console, plain=plain))
    except (DemoError, MailboxUnsupported) as error:
        raise click.ClickException(str(error)) from None
