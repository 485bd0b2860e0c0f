"""The processes of a run: one, or as many as torchrun started."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dessilbi.training.config import Config


@dataclass
class World:
    """This process, how many there are, and its device."""

    rank: int
    size: int
    device: torch.device
    owns_group: bool = False

    @classmethod
    def enter(cls, config: Config) -> World:
        """Join the processes that torchrun started; without it, be alone."""
        size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
        device = find_device(config.device)
        if size == 1:
            if config.fsdp:
                raise ValueError("fsdp=True needs several processes: start it with torchrun --nproc-per-node N, "
                                 "or set fsdp=False")  # fmt: skip
            return cls(0, 1, device)
        if config.compile == "graph":
            raise ValueError(f"compile='graph' works in one process, not in {size}: set compile='compile' or 'none'")
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(device)
        owns = not dist.is_initialized()
        if owns:
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        return cls(rank, size, device, owns)

    def leave(self) -> None:
        """Let the others go."""
        if self.owns_group and dist.is_initialized():
            dist.destroy_process_group()

    @property
    def first(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model whose backward pass averages the gradients of all processes."""
        if self.size == 1:
            return model
        ids = [self.device.index] if self.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(model, device_ids=ids)

    def shard(self, model: nn.Module) -> None:
        """Cut parameters into one part a process (FSDP2), in place: the large children each, then the rest."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.device.type, (self.size,))
        for child in model.children():
            if any(True for _ in child.parameters()):
                fully_shard(child, mesh=mesh)
        fully_shard(model, mesh=mesh)

    def add(self, values: Tensor) -> Tensor:
        """The sum over the processes, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def share_buffers(self, model: nn.Module) -> None:
        """Give all processes the buffers (running statistics) of the first."""
        if self.size > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, 0)

    def wait(self) -> None:
        """For the others to come here."""
        if self.size > 1:
            dist.barrier()


def find_device(name: str) -> torch.device:
    """The device that a configuration names."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device={name!r}: must be auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={name!r}: torch sees {torch.cuda.device_count()} CUDA devices: take device='cpu', or "
                         "'auto' for what is there")  # fmt: skip
    return device
