"""What a step costs beside torch's own optimizers, on VGG16: `python -m benchmarks.step_cost [--device cuda]`.

Every contender has a copy of the network. Rounds are interleaved, so that all see the same machine; a figure is the
median over rounds, as a ratio to fused SGD with momentum of the same run. Fused SGD stands in the table twice: what
the second differs from 1 is noise.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from dessilbi import DessiLBI, Path, param_groups
from dessilbi.models import create

BATCHES_PER_EPOCH = 50_000 // 64
CONTROL = "SGD fused"


def contenders() -> dict[str, Callable[[nn.Module], torch.optim.Optimizer]]:
    sgd: dict[str, Any] = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 5e-4}
    table: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
        CONTROL: lambda m: torch.optim.SGD(m.parameters(), fused=True, **sgd),
        "SGD fused, again": lambda m: torch.optim.SGD(m.parameters(), fused=True, **sgd),
        "SGD foreach": lambda m: torch.optim.SGD(m.parameters(), foreach=True, **sgd),
        "Adam fused": lambda m: torch.optim.Adam(m.parameters(), 1e-3, fused=True),
    }
    for kernel in ("foreach",):
        for level in ("filter", "weight"):
            for scaling in (False, True):
                name = f"DessiLBI {kernel}, {level}s{', scaled' if scaling else ''}"
                table[name] = _ours(kernel, level, scaling, sgd)
    return table


def _ours(kernel: str, level: str, scaling: bool, sgd: dict[str, Any]) -> Callable[[nn.Module], torch.optim.Optimizer]:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        groups = param_groups(model, conv=level, linear="neuron" if level == "filter" else "weight")
        return DessiLBI(groups, scaling=scaling, lam=1e-3, **{kernel: True}, **sgd)

    return make


def timed(work: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Seconds a call, of `repeats` calls in a row."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    tensors = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors)


def measure(device: torch.device, batch: int, rounds: int, batch_rounds: int) -> dict[str, dict[str, float]]:
    torch.manual_seed(0)
    network = create("vgg16").to(device)
    x, y = torch.randn(batch, 3, 32, 32, device=device), torch.randint(0, 10, (batch,), device=device)
    runs = {}
    for name, make in contenders().items():
        model = copy.deepcopy(network)
        runs[name] = (model, make(model))

    def whole_batch(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    repeats = 20 if device.type == "cuda" else 1
    table: dict[str, dict[str, list[float]]] = {name: {"step": [], "batch": []} for name in runs}
    gc.disable()
    for r in range(batch_rounds + 1):
        for name, (model, optimizer) in runs.items():
            seconds = timed(lambda m=model, o=optimizer: whole_batch(m, o), device, repeats)  # type: ignore[misc]
            if r:
                table[name]["batch"].append(seconds)
    for r in range(rounds + 2):
        for name, (_, optimizer) in runs.items():
            seconds = timed(optimizer.step, device, repeats)
            if r > 1:
                table[name]["step"].append(seconds)
    gc.enable()
    result = {}
    for name, (model, optimizer) in runs.items():
        row = {key: statistics.median(values) for key, values in table[name].items()}
        result[name] = {**row, "state": state_bytes(optimizer)}
        if isinstance(optimizer, DessiLBI):
            path = Path(model, optimizer)
            result[name]["record"] = statistics.median(timed(lambda p=path: p.record(0), device, 1) for _ in range(5))  # type: ignore[misc]
    return result


def report(result: dict[str, dict[str, float]]) -> str:
    control = result[CONTROL]
    lines = [f"{'':34} {'step':>9} {'ratio':>6} {'batch':>9} {'ratio':>6} {'state':>8} {'record / epoch':>15}"]
    for name, row in result.items():
        record = f"{100 * row['record'] / (row['batch'] * BATCHES_PER_EPOCH):14.3f}%" if "record" in row else ""
        lines.append(
            f"{name:34} {1e3 * row['step']:6.2f} ms {row['step'] / control['step']:6.2f} {1e3 * row['batch']:6.1f} ms "
            f"{row['batch'] / control['batch']:6.3f} {row['state'] / 2**20:4.0f} MiB {record}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15, help="rounds of the step alone")
    parser.add_argument("--batch-rounds", type=int, default=None, help="rounds of a whole batch")
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    batch_rounds = arguments.batch_rounds or (15 if device.type == "cuda" else 3)
    result = measure(device, arguments.batch, arguments.rounds, batch_rounds)
    hardware = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"VGG16, batch {arguments.batch}, {hardware}, torch {torch.__version__}, {datetime.date.today()}")
    print(report(result))
    if arguments.json:
        facts = {"device": hardware, "torch": torch.__version__, "python": platform.python_version()}
        with open(arguments.json, "w", encoding="utf-8") as out:
            json.dump(
                {**facts, "date": str(datetime.date.today()), "batch": arguments.batch, "rows": result}, out, indent=1
            )


if __name__ == "__main__":
    main()
