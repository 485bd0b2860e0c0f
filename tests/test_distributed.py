"""Two gloo processes give what one gives: DistributedDataParallel, and FSDP2 with uneven shards."""

import os
import pathlib
import subprocess
import sys

import pytest
import torch
from torch import nn

from dessilbi import DessiLBI
from tests.distributed_worker import train

HERE = pathlib.Path(__file__).parent


def in_parallel(mode, optimizer, file):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}
    ran = subprocess.run(
        [*command, str(HERE / "distributed_worker.py"), mode, optimizer, str(file)],
        env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    ("mode", "optimizer"), [("ddp", "momentum"), ("ddp", "scaled"), ("fsdp", "momentum"), ("fsdp", "adamw")]
)
def test_two_processes_equal_one(mode, optimizer, tmp_path):
    found, expected = in_parallel(mode, optimizer, tmp_path / "out"), train("one", optimizer)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=2e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
    assert 0 < sum(float(v.sum()) for k, v in found.items() if k.startswith("S "))


def test_groups_across_ranks_are_refused(monkeypatch):
    """On a mesh of one rank, which is enough to have DTensors."""
    import torch.distributed as dist
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))

        def step(placement, **options):
            p = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [placement]))
            p.grad = distribute_tensor(torch.ones(4, 4), mesh, [placement])
            group = {"params": [("fc.weight", p)], "group": options.pop("group", "weight")}
            optimizer = DessiLBI([group], 0.1, momentum=0.9, **options)
            optimizer.step()
            return optimizer, p

        optimizer, p = step(Shard(0))
        assert optimizer.support(p).shape == (4, 4)
        step(Replicate(), group="neuron")
        with pytest.raises(ValueError, match="fc.weight.*'input'.*DistributedDataParallel"):
            step(Shard(0), group="input")
        with pytest.raises(ValueError, match="fc.weight.*scaling=True"):
            step(Shard(0), scaling=True)
        with pytest.raises(ValueError, match="fc.weight.*dimension 0"):
            step(Shard(1))
    finally:
        dist.destroy_process_group()
