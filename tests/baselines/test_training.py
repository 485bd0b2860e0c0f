"""The baselines that act during training, named in a configuration: in one process, cut off, and in two."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dessilbi import Selection, Ticket
from dessilbi.training import Config, train
from dessilbi.training.run import Run
from tests.training.nets import plain
from tests.training.runs import SMALL, Stops, final_state, same

SGD = SMALL.replace(optimizer="sgd", keep=None, momentum=0.9, epochs=2, checkpoint_every=5, conv="weight")
CONFIGS = {
    "gradual": SGD.replace(method="gradual", method_options={"keep": 0.2, "every": 4, "end": 0.9}),
    "gradual filters": SGD.replace(
        method="gradual",
        method_options={"keep": 0.5, "every": 4, "allocation": "uniform"},
        conv="filter",
        linear="none",
    ),
    "soft filters": SGD.replace(method="soft-filters", method_options={"keep": 0.5}, conv="filter", linear="none"),
    "l1": SGD.replace(method="l1", method_options={"lam": 0.01}),
    "slimming": SGD.replace(method="slimming", method_options={"lam": 0.3}),
    "linbreg": SGD.replace(optimizer="linbreg", lr=0.5, lam=0.02, sparse_start=0.1),
    "adabreg": SGD.replace(optimizer="adabreg", lr=0.01, lam=0.02, sparse_start=0.1, conv="filter"),
    "adabound": SGD.replace(optimizer="adabound", lr=1e-3, optimizer_options={"final_lr": 0.05, "gamma": 0.1}),
}


def zeros(weights: dict[str, Any]) -> dict[str, int]:
    return {name: int((w == 0).sum()) for name, w in weights.items() if w.ndim and name.endswith("weight")}


def some_but_not_all(weights: dict[str, Any], *names: str) -> bool:
    return all(0 < int((weights[name] == 0).sum()) < weights[name].numel() for name in names)


# What each leaves of the 6 filters of 9 weights, of the 6 scales that follow, and of 540 linear weights.
LEAVES = {
    "gradual": lambda w: zeros(w)["0.weight"] + zeros(w)["5.weight"] == 594 - int(0.2 * 594),
    "gradual filters": lambda w: zeros(w) == {"0.weight": 27, "1.weight": 3, "5.weight": 0},
    "soft filters": lambda w: zeros(w) == {"0.weight": 27, "1.weight": 0, "5.weight": 0},
    "l1": lambda w: some_but_not_all(w, "5.weight") and zeros(w)["1.weight"] == 0,
    "slimming": lambda w: zeros(w)["1.weight"] > 0 and zeros(w)["0.weight"] == zeros(w)["5.weight"] == 0,
    "linbreg": lambda w: some_but_not_all(w, "0.weight", "5.weight"),
    "adabreg": lambda w: some_but_not_all(w, "5.weight") and zeros(w)["0.weight"] % 9 == 0,
    "adabound": lambda w: not any(zeros(w).values()),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_run_that_was_cut_off_ends_alike(name: str, tmp_path: Path) -> None:
    train(CONFIGS[name], tmp_path / "whole")

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(CONFIGS[name], tmp_path / "parts", progress=Stops(2, 3, stop))
    train(CONFIGS[name], tmp_path / "parts", resume=True)
    whole = final_state(tmp_path / "whole")
    assert same(final_state(tmp_path / "parts"), whole)
    assert LEAVES[name](whole["model"])


def test_bregman_iterations_start_sparse(tmp_path: Path) -> None:
    config = CONFIGS["linbreg"].replace(epochs=1, keep_epochs=(0,), seed=3)

    def start(name: str, **changes: Any) -> dict[str, Any]:
        train(config.replace(**changes), tmp_path / name)
        weights: dict[str, Any] = Run.open(tmp_path / name).at_epoch(0)["model"]
        return weights

    dense, sparse = start("dense", sparse_start=1.0), start("sparse")
    assert zeros(dense) == dict.fromkeys(zeros(dense), 0)
    assert zeros(sparse) == {"0.weight": 54 - 5, "1.weight": 0, "5.weight": 540 - 54}
    left = sparse["5.weight"] != 0
    torch.testing.assert_close(sparse["5.weight"][left], dense["5.weight"][left] * 10**0.5)
    assert zeros(start("excluded", exclude=("0",)))["0.weight"] == 0
    # What is given stays as it is.
    Ticket(Selection({"5.weight": torch.ones(10, 54, dtype=torch.bool)}), dense, {"data": "digits"}).save(
        tmp_path / "dense.ticket"
    )
    assert zeros(start("ticket", ticket=str(tmp_path / "dense.ticket"))) == zeros(dense)


def test_what_a_configuration_cannot_have(tmp_path: Path) -> None:
    for changes, words in (
        ({"optimizer": "linbreg", "fsdp": True}, "optimizer='linbreg' with fsdp=True"),
        ({"method": "gradual", "fsdp": True}, "method='gradual' with fsdp=True"),
        ({"method_options": {"keep": 0.1}}, "with method='none': name the method"),
        ({"sparse_start": 0.0}, r"sparse_start=0.0: must be a fraction in \(0, 1\]"),
        ({"method": "magic"}, "method='magic': must be one of none, gradual"),
    ):
        with pytest.raises(ValueError, match=words):
            SGD.replace(**changes)
    for changes, words in (
        ({"optimizer": "linbreg", "compile": "graph"}, "optimizer='linbreg' cannot be captured in a CUDA graph"),
        ({"optimizer": "linbreg", "conv": "channel"}, "conv must be 'weight', 'filter', 'neuron' or None"),
        ({"method": "gradual"}, r"method='gradual' with method_options=\{\}: .*'keep'"),
        ({"method": "l1", "method_options": {"lambda": 1}}, "unexpected keyword argument 'lambda'"),
        ({"optimizer": "adabound", "optimizer_options": {"gamma": 2}}, r"gamma must be a number in \(0, 1\), got 2"),
    ):
        with pytest.raises(ValueError, match=words):
            train(SGD.replace(**changes), tmp_path / "run")
        assert not (tmp_path / "run").exists()


# -- two processes -------------------------------------------------------------------------------------------------

DISTRIBUTED = SGD.replace(
    model="tests.training.nets:plain", batch=124, schedule="constant", lr=0.1, checkpoint_every=None
)


@pytest.fixture
def configs(tmp_path: Path) -> dict[str, Config]:
    torch.manual_seed(1)
    masks = {"1.weight": torch.rand(16, 64) < 0.3, "3.weight": torch.rand(10, 16) < 0.5}
    Ticket(Selection(masks), plain().state_dict(), {"data": "digits"}).save(tmp_path / "one.ticket")
    return {
        "ticket": DISTRIBUTED.replace(ticket=str(tmp_path / "one.ticket")),
        "gradual": DISTRIBUTED.replace(method="gradual", method_options={"keep": 0.2, "every": 4, "end": 0.9}),
        "linbreg": DISTRIBUTED.replace(optimizer="linbreg", lr=0.5, lam=0.02, sparse_start=0.1),
    }


def test_all_processes_have_the_same_masks(configs: dict[str, Config], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"""
import os, torch
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
from dessilbi.training import Config, loop
kept, before = [], loop._Loop.go
def go(self):
    summary = before(self)
    kept.append({{name: p.detach().clone() for name, p in self.model.named_parameters()}})
    return summary
loop._Loop.go = go
for name, config in { ({name: config.to_dict() for name, config in configs.items()})!r}.items():
    config, folder = Config.from_dict(config), {str(tmp_path)!r} + "/two-" + name
    loop.train(config, folder, until=1)
    loop.train(config, folder, resume=True)
torch.save(kept, {str(tmp_path)!r} + "/rank" + os.environ["RANK"])
torch.distributed.barrier()
torch.distributed.destroy_process_group()
""")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": ".", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[:3000] + done.stderr[-3000:]
    first, second = (torch.load(tmp_path / f"rank{rank}") for rank in range(2))
    assert len(first) == 6
    for mine, other in zip(first, second, strict=True):
        assert same(mine, other)
    halfway, found = dict(zip(configs, first[::2], strict=True)), dict(zip(configs, first[1::2], strict=True))
    for name, mask in Ticket.load(tmp_path / "one.ticket").selection.items():
        assert torch.equal(halfway["ticket"][name] != 0, mask)
        assert torch.equal(found["ticket"][name] != 0, mask)
    # At half of the run 0.2 + 0.8·(1 − 0.5/0.9)³ of 1184 weights are to be left; the last cut before it comes no later.
    assert 1184 > sum(int((halfway["gradual"][name] != 0).sum()) for name in ("1.weight", "3.weight")) >= 319
    assert sum(int((found["gradual"][name] != 0).sum()) for name in ("1.weight", "3.weight")) == int(0.2 * 1184)
    for name, config in configs.items():
        train(config, tmp_path / f"one-{name}")
        for key, value in final_state(tmp_path / f"one-{name}")["model"].items():
            # Gradients added up in another order: a weight at the edge may fall on the other side.
            assert (value - found[name][key]).abs().gt(1e-4).float().mean() < 0.01, (name, key)
