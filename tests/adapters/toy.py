"""A small problem and the loop that a user would write by hand: what the adapters must agree with."""

import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from dessilbi import DessiLBI, Path, param_groups

KEEP, RAMP = 0.25, 0.5
BATCH = 4
X = torch.from_numpy(np.random.default_rng(0).standard_normal((64, 6), dtype=np.float32))
Y = (X[:, 0] + X[:, 1] > 0).long() + (X[:, 2] > 0.5).long()
WEIGHTS = 6 * 8 + 8 * 3


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def optimizer_of(model: nn.Module) -> DessiLBI:
    return DessiLBI(param_groups(model), lr=0.1, momentum=0.9, nu=20.0)


def by_hand(epochs: int, accumulate: int = 1, most: int | None = None) -> list[dict[str, torch.Tensor]]:
    """Γ's support after every optimizer step of a plain loop whose λ is read off the sorted |V|."""
    model = network()
    optimizer = optimizer_of(model)
    weights = {"0.weight": model[0].weight, "2.weight": model[2].weight}
    batches = len(X) // BATCH
    total = most or epochs * math.ceil(batches / accumulate)
    copies: list[dict[str, torch.Tensor]] = []
    for _ in range(epochs):
        optimizer.zero_grad()
        for i, (x, y) in enumerate(zip(X.split(BATCH), Y.split(BATCH), strict=True), start=1):
            if len(copies) == total:
                return copies
            (F.cross_entropy(model(x), y) / accumulate).backward()
            if i % accumulate and i < batches:
                continue
            optimizer.step()
            optimizer.zero_grad()
            kept = allowed(len(copies) + 1, total)
            sizes = torch.cat([optimizer.dual(w).abs().flatten() for w in weights.values()]).tolist()
            lam = sorted(sizes, reverse=True)[kept]
            optimizer.lam = lam
            copies.append({name: optimizer.dual(w).abs() > lam for name, w in weights.items()})
    return copies


def allowed(step: int, total: int) -> int:
    """How many weights may be in the support after this step."""
    return round(KEEP * min(1.0, step / total / RAMP) * WEIGHTS)


def agrees(path: Path, supports: list[dict[str, torch.Tensor]], prefix: str = "") -> None:
    """The path's supports are these, point for point, and not trivial."""
    assert len(path) == len(supports)
    for at, expected in enumerate(supports):
        for name, support in expected.items():
            assert torch.equal(path.support(prefix + name, at), support), (at, name)
    assert sum(int(s.sum()) for s in supports[-1].values()) == round(KEEP * WEIGHTS)


def same(path: Path, other: Path) -> None:
    """Two paths are equal: points, entries, supports and norms."""
    assert path.points == other.points
    assert path.names == other.names
    for name in path.names:
        assert torch.equal(path.entry(name), other.entry(name))
        assert all(torch.equal(path.support(name, at), other.support(name, at)) for at in range(len(path)))
        assert all(torch.equal(a, b) for a, b in zip(path.norms(name), other.norms(name), strict=True))
    assert any((path.entry(name) >= 0).any() for name in path.names)
