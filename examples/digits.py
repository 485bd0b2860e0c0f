"""From digits to a smaller network: `make demo`, or `python examples/digits.py`.

1797 images of 8×8 pixels ship with scikit-learn. A convolutional network learns them with DessiLBI; while it trains,
filters and neurons enter the support of Γ in the order of their importance: the path. The most important ones are
selected, the rest is removed for good, and what is left is fine-tuned.
"""

from __future__ import annotations

import statistics
import time
from collections import OrderedDict
from pathlib import Path as FilePath

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from dessilbi import DessiLBI, Path, TargetThreshold, param_groups, profile, save_shrunk, select, shrink
from dessilbi.report import build_page

EPOCHS, FINE_TUNING, BATCH, KEEP = 20, 10, 64, 0.3


def network() -> nn.Sequential:
    return nn.Sequential(OrderedDict(
        conv1=nn.Conv2d(1, 16, 3, padding=1, bias=False), norm1=nn.BatchNorm2d(16), relu1=nn.ReLU(),
        conv2=nn.Conv2d(16, 32, 3, padding=1, bias=False), norm2=nn.BatchNorm2d(32), relu2=nn.ReLU(),
        pool=nn.MaxPool2d(2), flat=nn.Flatten(), hidden=nn.Linear(512, 64), relu3=nn.ReLU(), out=nn.Linear(64, 10),
    ))  # fmt: skip


def train_epoch(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> float:
    """The mean loss."""
    model.train()
    losses = []
    for batch in torch.randperm(len(x)).split(BATCH)[: len(x) // BATCH]:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[batch]), y[batch])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return statistics.mean(losses)


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return (model.eval()(x).argmax(1) == y).double().mean().item()


@torch.inference_mode()
def milliseconds(models: list[nn.Module], x: Tensor) -> list[float]:
    """The median time of each, taken in turns."""
    taken: list[list[float]] = [[] for _ in models]
    for _ in range(60):
        for model, times in zip(models, taken, strict=True):
            begun = time.perf_counter()
            model(x)
            times.append(1e3 * (time.perf_counter() - begun))
    return [statistics.median(times[10:]) for times in taken]


def main() -> None:
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images, labels, test_size=0.25, random_state=0, stratify=labels)
    x, x_test, y, y_test = (torch.as_tensor(a) for a in parts)
    x, x_test = ((a.float().view(-1, 1, 8, 8) - 4.9) / 6.0 for a in (x, x_test))
    console = Console()

    # Train. Two lines: an optimizer in place of SGD, and how much to keep.
    model = network()
    groups = param_groups(model, conv="filter", linear="neuron", exclude="out")  # the last layer stays as it is
    optimizer = DessiLBI(groups, lr=0.05, nu=200.0, momentum=0.9, scaling=True)
    threshold = TargetThreshold(optimizer, keep=KEEP, ramp=0.5)
    path = Path(model, optimizer)
    with Progress(console=console) as progress:
        for epoch in progress.track(range(1, EPOCHS + 1), description="training"):
            loss = train_epoch(model, optimizer, x, y)
            threshold.step(epoch / EPOCHS)
            path.record(epoch, loss=loss, dense=accuracy(model, x_test, y_test))
            with select(path).applied(model):
                path.note(sparse=accuracy(model, x_test, y_test))

    table = Table("epoch", "dense", "kept", *path.names, title="the path: accuracy, and what Γ has selected")
    everything, layers = path.keep(), [path.keep(name) for name in path.names]
    for i, point in enumerate(path.points):
        if point["point"] in (1, 2, 3) or point["point"] % 4 == 0:
            shares = (f"{float(keep[i]):.1%}" for keep in (everything, *layers))
            table.add_row(f"{point['point']:.0f}", f"{point['dense']:.1%}", *shares)
    console.print(table)

    # Select, remove, fine-tune.
    sel = select(path, keep=KEEP)
    one = x_test[:1]
    small = shrink(model, sel, one)
    rows = [("dense", model, accuracy(model, x_test, y_test))]
    with sel.applied(model):
        rows.append(("selected (masked)", model, accuracy(model, x_test, y_test)))
    rows.append(("removed", small, accuracy(small, x_test, y_test)))
    tuner = torch.optim.SGD(small.parameters(), lr=0.01, momentum=0.9)
    for _ in range(FINE_TUNING):
        train_epoch(small, tuner, x, y)
    rows.append(("fine-tuned", small, accuracy(small, x_test, y_test)))

    times = dict(zip((id(model), id(small)), milliseconds([model.eval(), small.eval()], x_test[:64]), strict=True))
    table = Table("network", "accuracy", "parameters", "MACs", "64 images", title="what is left")
    for name, net, correct in rows:
        report = profile(net, one)
        table.add_row(name, f"{correct:.1%}", f"{report.parameters:,}", f"{report.macs:,}", f"{times[id(net)]:.2f} ms")
    console.print(table)

    folder = FilePath("runs")
    folder.mkdir(exist_ok=True)
    path.save(folder / "digits.path")
    save_shrunk(small, folder / "digits.safetensors")
    page = build_page([folder / "digits.path"], folder / "digits.html")
    console.print(
        "The path is in runs/digits.path, the network in runs/digits.safetensors:\n"
        "dessilbi.Path.load('runs/digits.path'), dessilbi.load_shrunk('runs/digits.safetensors', factory=network)\n"
        "What there is to see, with a slider over the path; open it in a browser:"
    )
    console.print(page.resolve().as_uri(), soft_wrap=True)


if __name__ == "__main__":
    main()
