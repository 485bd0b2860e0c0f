"""`dessilbi presets`: the settings of the paper, by name."""

from __future__ import annotations

import click

from dessilbi.training import presets

from .app import columns


@click.command()
@click.argument("name", required=False)
@click.pass_context
def command(ctx: click.Context, name: str | None) -> None:
    """List the presets, or print the one called NAME as TOML.

    \b
    Examples:
      dessilbi presets
      dessilbi presets paper/vgg16-weights > mine.toml    (then edit, and: dessilbi train --config mine.toml)
    """
    if name is None:
        click.echo(columns([(known, presets.describe(known)) for known in presets.names()]))
        return
    try:
        config = presets.get(name)
    except ValueError as error:
        raise click.UsageError(str(error), ctx) from None
    click.echo(config.to_toml(), nl=False)
