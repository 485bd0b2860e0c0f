"""`dessilbi show`: a run, epoch by epoch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import click

from .progress import cells


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--last", type=click.IntRange(min=1), metavar="N", help="Only the last N epochs.")
@click.option("--json", "raw", is_flag=True, help="The metrics as they are, one JSON object a line.")
def command(run: Path, last: int | None, raw: bool) -> None:
    """Show a run: epoch, loss, dense and sparse accuracy, keep, λ, time.

    \b
    Examples:
      dessilbi show runs/quick-lenet-digits
      dessilbi show runs/quick-lenet-digits --last 5
      dessilbi show runs/quick-lenet-digits --json | jq .sparse
    """
    from dessilbi.training.run import Run

    opened = Run.open(run)
    metrics = opened.metrics()
    metrics = metrics[-last:] if last else metrics
    if raw:
        for row in metrics:
            click.echo(json.dumps({name: _json(value) for name, value in row.items()}))
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
    if opened.table_file.is_file():
        from .prune import show_table

        show_table(opened)


def _json(value: Any) -> Any:
    """JSON has no word for infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
