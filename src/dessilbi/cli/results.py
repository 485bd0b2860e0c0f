"""`dessilbi results`: the page of what was measured, from the files that `dessilbi reproduce` leaves."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.option(
    "--results",
    "folder",
    default="results",
    show_default=True,
    metavar="FOLDER",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of the results.",
)
@click.option(
    "--from",
    "sources",
    multiple=True,
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    help="Take over the rows that lie in another folder, such as one that came from another machine; repeatable.",
)
def command(folder: Path, sources: tuple[Path, ...]) -> None:
    """Write README.md beside the results: the paper's figures, those of its peers, and ours.

    \b
    Examples:
      dessilbi results
      dessilbi results --from /media/stick/results
    """
    from dessilbi.applications import results
    from dessilbi.report.results import write

    for source in sources:
        for name, count in results.merge(source, folder).items():
            click.echo(f"{folder / name}.json: {count} rows of {source}")
    click.echo(str(write(folder)))
