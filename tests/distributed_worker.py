"""Run by torchrun in test_distributed.py: train a small network in parallel, rank 0 writes what came out."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from dessilbi import DessiAdamW, DessiLBI, Path, TargetThreshold, param_groups
from dessilbi.sharding import whole


def network() -> nn.Module:
    torch.manual_seed(5)
    # 7 filters and 5 rows do not divide by 2: uneven shards.
    return nn.Sequential(nn.Conv2d(1, 7, 3), nn.ReLU(), nn.Conv2d(7, 8, 3), nn.Flatten(), nn.Linear(128, 5))


def train(mode: str, optimizer_name: str) -> dict[str, torch.Tensor]:
    model = network()
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    wrapped: nn.Module = model
    if mode == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model)
    elif mode == "fsdp":
        from torch.distributed.fsdp import fully_shard

        wrapped = fully_shard(model)
    options = {"lr": 0.05, "nu": 5.0, "lam": 0.01}
    groups = param_groups(model, linear="neuron")
    optimizer = (
        DessiLBI(groups, momentum=0.9, scaling=mode != "fsdp" and optimizer_name == "scaled", **options)
        if optimizer_name != "adamw"
        else DessiAdamW(groups, **{**options, "lr": 0.01})
    )
    path = Path(model, optimizer)
    threshold = TargetThreshold(optimizer, keep=0.5, ramp=0.5)
    g = torch.Generator().manual_seed(0)
    for k in range(12):
        x, y = torch.randn(16, 1, 8, 8, generator=g), torch.randint(0, 5, (16,), generator=g)
        mine = slice(rank * 16 // world, (rank + 1) * 16 // world)
        optimizer.zero_grad()
        F.cross_entropy(wrapped(x[mine]), y[mine]).backward()
        optimizer.step()
        threshold.step((k + 1) / 12)
    path.record(1)
    found = {}
    for name, p in model.named_parameters():
        found[name] = whole(p.detach())
        if optimizer.partition(p) is not None:
            found[f"V {name}"] = whole(optimizer.dual(p))
            found[f"G {name}"] = whole(optimizer.gamma(p))
            found[f"S {name}"] = path.support(name).float()
    found["lam"] = torch.tensor(float(optimizer.lam))
    if world > 1:  # every rank must hold the same
        for tensor in found.values():
            other = tensor.clone()
            dist.broadcast(other, 0)
            assert torch.equal(other, tensor)
    return found


if __name__ == "__main__":
    mode, optimizer_name, file = sys.argv[1:]
    dist.init_process_group("gloo")
    result = train(mode, optimizer_name)
    if dist.get_rank() == 0:
        torch.save(result, file)
    dist.barrier()
    # Not destroy_process_group: when ranks tear gloo down at different moments, its threads can abort the process.
    sys.stdout.flush()
    os._exit(0)
