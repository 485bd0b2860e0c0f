"""`dessilbi watch`: the page of a run while it trains."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import click


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Of the server.  [one that is free]")
def command(run: Path, port: int) -> None:
    """Serve the page of a run, which grows while it trains: on this machine only, until Ctrl-C.

    In the terminal, `dessilbi show RUN --follow` does it in lines.

    \b
    Examples:
      dessilbi watch runs/vgg16
      dessilbi watch runs/vgg16 --port 8000     # on a remote machine: ssh -L 8000:localhost:8000 MACHINE
    """
    from dessilbi.report.watch import server

    with server(run, port) as served:
        host, found = served.server_address[:2]
        click.echo(f"{run}: http://{host!s}:{found}/ (Ctrl-C ends)")
        with suppress(KeyboardInterrupt):
            served.serve_forever()
