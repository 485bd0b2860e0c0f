"""`dessilbi show`: a run, epoch by epoch, also while it trains."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .progress import cells, epoch_line

if TYPE_CHECKING:
    from dessilbi.training.run import Run

_POLL_SECONDS = 0.5


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--last", type=click.IntRange(min=1), metavar="N", help="Only the last N epochs.")
@click.option("--json", "raw", is_flag=True, help="The metrics as they are, one JSON object a line.")
@click.option("--follow", "-f", is_flag=True, help="Go on with every epoch that ends, until the run does.")
def command(run: Path, last: int | None, raw: bool, follow: bool) -> None:
    """Show a run: epoch, loss, dense and sparse accuracy, keep, λ, time.

    \b
    Examples:
      dessilbi show runs/quick-lenet-digits
      dessilbi show runs/quick-lenet-digits --last 5
      dessilbi show runs/quick-lenet-digits --json | jq .sparse
      dessilbi show runs/quick-lenet-digits --follow
    """
    from dessilbi.training.run import Run

    opened = Run.open(run)
    if follow:
        _follow(opened, last, raw)
        return
    metrics = opened.metrics()
    metrics = metrics[-last:] if last else metrics
    if raw:
        for row in metrics:
            click.echo(_as_json(row))
        return

    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    config = opened.config
    title = f"{run}: {config.model} on {config.data}, {opened.status}"
    table = Table(box=SIMPLE_HEAD)
    for heading in ("epoch", *(label for label, _ in cells({}))):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in metrics:
        table.add_row(f"{row.get('epoch', '?')}/{config.epochs}", *(text or "-" for _, text in cells(row)))
    console = Console(highlight=False)
    console.print(title, style="bold", markup=False, soft_wrap=True)
    console.print(table)
    if opened.growth_file.is_file():
        from .grow import show_growth

        show_growth(opened)
    if opened.table_file.is_file():
        from .prune import show_table

        show_table(opened)


def _follow(run: Run, last: int | None, raw: bool) -> None:
    """A line an epoch, as they end; what is there first."""
    shown = max(0, len(run.metrics()) - last) if last else 0
    while True:
        # The status first: what was written before it said "finished" is then all there is.
        status = run.status
        metrics = run.metrics()
        for row in metrics[shown:]:
            click.echo(_as_json(row) if raw else epoch_line(row, run.config.epochs))
        shown = len(metrics)  # fewer than before where a run went back to its checkpoint: it goes through epochs again
        if status not in ("new", "running"):
            break
        time.sleep(_POLL_SECONDS)
    if not raw:
        click.echo(f"{run.folder}: {status}")


def _as_json(row: dict[str, Any]) -> str:
    return json.dumps({name: _json(value) for name, value in row.items()})


def _json(value: Any) -> Any:
    """JSON has no word for infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
