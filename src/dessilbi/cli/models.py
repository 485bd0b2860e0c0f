"""`dessilbi models`: the networks, by name."""

from __future__ import annotations

import click

from dessilbi import models

from .app import columns


@click.command()
@click.option("--parameters", is_flag=True, help="Count the parameters as well (imports torch: a few seconds).")
def command(parameters: bool) -> None:
    """List the networks with the images they were made for.

    Any network of your own works as well: --model package.module:factory.

    \b
    Examples:
      dessilbi models
      dessilbi models --parameters
    """
    rows = [["name", "input", *(["parameters"] if parameters else [])]]
    for name in models.names():
        shape = " x ".join(map(str, models.input_shape(name)))
        rows.append([name, shape, *([str(_parameters(name))] if parameters else [])])
    click.echo(columns(rows))


def _parameters(name: str) -> int:
    import torch

    with torch.device("meta"):  # shapes only: nothing is allocated or initialised
        return sum(parameter.numel() for parameter in models.create(name).parameters())
