"""What keeping a selection at zero costs: `python -m benchmarks.masking [--device cuda]`.

Three copies of a network train side by side: plain, with `sel.apply(model)`, and plain again. Rounds are interleaved,
so that all see the same machine; a figure is the median over rounds of the ratio to the plain copy of the same round.
What the third differs from 1 is noise. Where that is more than the effect, the last column tells: what follows the
step, timed alone, as a share of the step.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import gc
import json
import statistics
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.step_cost import timed
from dessilbi import DessiLBI, Selection, param_groups
from dessilbi.models import create
from dessilbi.training.environment import commit

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), 0.01, momentum=0.9, weight_decay=5e-4),
    "DessiLBI": lambda m: DessiLBI(param_groups(m), 0.01, momentum=0.9, weight_decay=5e-4, lam=1e-3),
}
LEVELS = ("filter", "weight")


def half(model: nn.Module, level: str) -> Selection:
    """A random half of the filters or weights of every convolution and linear layer."""
    weights = {name: p for name, p in model.named_parameters() if p.ndim > 1}
    shapes = {name: p.shape if level == "weight" else p.shape[:1] for name, p in weights.items()}
    return Selection({name: torch.rand(shape) < 0.5 for name, shape in shapes.items()})


def trainer(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Callable[[], None]:
    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def measure(network: nn.Module, kind: str, level: str, x: Tensor, y: Tensor, rounds: int, repeats: int) -> list[float]:
    """Seconds a plain step, the ratios of the masked one and of the control, and the share of what was added."""
    models = [copy.deepcopy(network) for _ in range(3)]
    optimizers = [OPTIMIZERS[kind](model) for model in models]
    steps = [trainer(model, optimizer, x, y) for model, optimizer in zip(models, optimizers, strict=True)]
    gc.disable()
    with half(network, level).apply(models[1]) as handle:
        seconds: list[list[float]] = [[], [], []]
        for r in range(rounds + 2):
            for i in [(r + k) % 3 for k in range(3)]:  # no one goes always first
                taken = timed(steps[i], x.device, repeats)
                if r > 1:
                    seconds[i].append(taken)
        alone = [timed(lambda: handle._after_step(optimizers[1]), x.device, 10) for _ in range(rounds)]
    gc.enable()
    plain = seconds[0]
    ratios = [statistics.median(b / a for a, b in zip(plain, other, strict=True)) for other in seconds[1:]]
    return [statistics.median(plain), *ratios, statistics.median(alone) / statistics.median(plain)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", action="append", help="a built-in network; may be given several times")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    hardware = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"batch {arguments.batch}, {hardware}, torch {torch.__version__}, {datetime.date.today()}")
    print(f"{'':32} {'step':>10} {'masked':>7} {'control':>8} {'added':>8}")
    rows = []
    for name in arguments.model or ["resnet20"]:
        torch.manual_seed(0)
        network = create(name).to(device)
        x = torch.randn(arguments.batch, 3, 32, 32, device=device)
        y = torch.randint(0, 10, (arguments.batch,), device=device)
        for kind in OPTIMIZERS:
            for level in LEVELS:
                repeats = 10 if device.type == "cuda" else 1
                plain, masked, control, added = measure(network, kind, level, x, y, arguments.rounds, repeats)
                label = f"{name}, {kind}, half the {level}s"
                print(f"{label:32} {1e3 * plain:7.2f} ms {masked:7.3f} {control:8.3f} {100 * added:7.2f}%")
                rows.append({"model": name, "optimizer": kind, "level": level, "step": plain, "masked": masked,
                             "control": control, "added": added})  # fmt: skip
    if arguments.json:
        facts = {
            "command": " ".join(["python -m benchmarks.masking", *sys.argv[1:]]),
            "date": str(datetime.date.today()),
            "commit": commit(),
            "device": hardware,
            "torch": torch.__version__,
        }
        with open(arguments.json, "w", encoding="utf-8") as out:
            json.dump({**facts, "batch": arguments.batch, "rows": rows}, out, indent=1)


if __name__ == "__main__":
    main()
