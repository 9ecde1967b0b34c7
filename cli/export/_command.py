"""The command ``loadbox export`` and its options."""

from __future__ import annotations

import signal
from importlib import resources

import click

from loadbox.cli._params import explained, to_groups

__all__ = ["export"]

_PORT = 9837


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 or :: for all.")
@click.option("--port", type=click.IntRange(0, 65535), default=_PORT, show_default=True, help="0: any free one; it is told.")
@click.option("--group", "groups", multiple=True, callback=to_groups, help="Only this DP group; may be repeated.")
@click.option("--dashboard", is_flag=True, help="Print a dashboard for Grafana, and serve nothing.")
@explained
def export(host: str, port: int, groups: tuple[str, ...], dashboard: bool) -> None:
    """Serve the load of every rank on this host to Prometheus.

    The ranks are read at the moment of each scrape; looking slows no scheduler.  A rank that is dead or refused has its state
    and no numbers of its own, and a silent one has no load: nothing is frozen at its last value.  docs/commands.md lists the
    metrics.  SIGTERM and Ctrl-C end it.  There is no authentication: mind what --host opens.

    \b
    loadbox export                      http://127.0.0.1:9837/metrics
    loadbox export --host 0.0.0.0 --group llama-0
    loadbox export --dashboard > loadbox.json      to be imported in Grafana
    curl -s http://127.0.0.1:9837/metrics | grep num_requests
    """
    if dashboard:
        click.echo(resources.files("loadbox.cli.export").joinpath("grafana.json").read_text(encoding="utf-8"), nl=False)
        return
    try:
        from prometheus_client import CollectorRegistry, start_http_server

        from loadbox.cli.export._collector import RankCollector
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("prometheus_client"):
            raise
        raise click.ClickException("loadbox export needs prometheus_client: pip install 'loadbox[metrics]'") from None

    collector = RankCollector(groups)
    registry = CollectorRegistry()
    registry.register(collector)
    ends = (signal.SIGINT, signal.SIGTERM)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # before there are threads: they are waited for below, in this one
    try:
        server, _ = start_http_server(port, host, registry)
        shown = f"[{host}]" if ":" in host else host
        click.echo(f"loadbox: metrics at http://{shown}:{server.server_port}/metrics")
        signal.sigwait(ends)
        server.shutdown()
        server.server_close()
    except OSError as error:
        raise click.ClickException(f"Cannot listen on {host} port {port}: {error.strerror}.") from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        collector.close()
