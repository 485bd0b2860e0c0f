"""Find the structure of a small network on real handwritten digits: `make demo`, or `python examples/digits.py`.

1797 images of 8×8 pixels ship with scikit-learn. A convolutional network learns them with DessiLBI; while it trains,
weights enter the support of Γ in the order of their importance. The table shows the path.
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path as FilePath
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional as F

from dessilbi import DessiLBI, Path, TargetThreshold, param_groups

if TYPE_CHECKING:
    from collections.abc import Iterator

EPOCHS, BATCH, KEEP = 30, 64, 0.15


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


@contextmanager
def only_the_support(optimizer: DessiLBI) -> Iterator[None]:
    """Inside, weights outside the support of Γ are zero."""
    saved = [(p, p.detach().clone()) for p, _ in optimizer.penalised()]
    with torch.no_grad():
        for p, _ in optimizer.penalised():
            p.mul_(optimizer.support(p))
        yield
        for p, before in saved:
            p.copy_(before)


def main() -> None:
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images, labels, test_size=0.25, random_state=0, stratify=labels)
    x, x_test, y, y_test = (torch.as_tensor(a) for a in parts)
    x, x_test = ((a.float().view(-1, 1, 8, 8) - 4.9) / 6.0 for a in (x, x_test))

    model = network()
    optimizer = DessiLBI(param_groups(model, conv="weight"), lr=0.05, nu=200.0, momentum=0.9)  # the two lines:
    threshold = TargetThreshold(optimizer, keep=KEEP, ramp=0.5)  # an optimizer, and how much to keep
    path = Path(model, optimizer)

    @torch.no_grad()
    def accuracy() -> float:
        return (model(x_test).argmax(1) == y_test).double().mean().item()

    steps = EPOCHS * (len(x) // BATCH)
    console = Console()
    with Progress(console=console) as progress:
        task = progress.add_task("training", total=steps)
        done = 0
        for epoch in range(1, EPOCHS + 1):
            for batch in torch.randperm(len(x)).split(BATCH)[: len(x) // BATCH]:
                optimizer.zero_grad()
                F.cross_entropy(model(x[batch]), y[batch]).backward()
                optimizer.step()
                done += 1
                threshold.step(done / steps)
                progress.advance(task)
            dense = accuracy()
            with only_the_support(optimizer):
                sparse = accuracy()
            path.record(epoch, dense=dense, sparse=sparse)

    table = Table("epoch", "dense", "sparse", "kept", *path.names, title="the path: accuracy, and what Γ has selected")
    everything, layers = path.keep(), [path.keep(name) for name in path.names]
    for i, point in enumerate(path.points):
        if point["point"] in (1, 2, 3) or point["point"] % 3 == 0:
            shares = (f"{float(keep[i]):.1%}" for keep in (everything, *layers))
            table.add_row(f"{point['point']:.0f}", f"{point['dense']:.1%}", f"{point['sparse']:.1%}", *shares)
    console.print(table)
    file = FilePath("runs/digits.path")
    file.parent.mkdir(exist_ok=True)
    path.save(file)
    console.print(f"The path is in {file}: dessilbi.Path.load('{file}')")


if __name__ == "__main__":
    main()
