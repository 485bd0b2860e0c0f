"""Runs that start from a network of a file and keep a mask, and the checkpoints that stay."""

import os
import signal
from pathlib import Path

import pytest
import torch

from dessilbi import Path as SelectionPath
from dessilbi import Selection, load_shrunk, save_shrunk, shrink
from dessilbi.training import Config, train
from dessilbi.training.run import Run
from tests.training.nets import tiny
from tests.training.runs import SMALL, Stops, final_state, numbers, same

WEIGHTS, HEAD = "0.weight", "5.weight"
SGD = SMALL.replace(optimizer="sgd", keep=None, checkpoint_every=5)


def a_mask() -> Selection:
    """A third of the head's weights, and four of six filters."""
    chosen = torch.rand(10, 54, generator=torch.Generator().manual_seed(1)) < 1 / 3
    return Selection({WEIGHTS: torch.tensor([1, 0, 1, 1, 0, 1]).bool(), HEAD: chosen}, level="filter")


@pytest.fixture
def mask(tmp_path: Path) -> Path:
    a_mask().save(tmp_path / "mine.safetensors")
    return tmp_path / "mine.safetensors"


def zeros_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t == 0 for name, t in final_state(folder)["model"].items()}


def check_masked(folder: Path) -> None:
    """What the mask leaves out is zero: the filters 1 and 4 with bias and normalisation, and nothing else."""
    found, out = zeros_of(folder), torch.tensor([0, 1, 0, 0, 1, 0]).bool()
    for name in ("0.weight", "0.bias", "1.weight", "1.bias"):
        assert torch.equal(found[name].flatten(1).all(1) if found[name].ndim > 1 else found[name], out), name
    assert torch.equal(found[HEAD], ~a_mask()[HEAD])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optimizer": "adam", "lr": 1e-3, "precision": "fp16"},
        {"optimizer": "dessilbi", "keep": 0.3, "channels_last": True},
    ],
)
def test_a_mask_holds_to_the_end_and_through_a_resumption(
    changes: dict[str, object], mask: Path, tmp_path: Path
) -> None:
    config = SGD.replace(mask=str(mask), epochs=2, **changes)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(config, whole)
    check_masked(whole)

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, parts, progress=Stops(1, 7, stop))
    check_masked(parts)
    mask.unlink()  # the run has its own
    train(config, parts, resume=True)
    assert numbers(parts) == numbers(whole)
    assert same(final_state(parts), final_state(whole))


def test_the_mask_ends_with_the_run(mask: Path, tmp_path: Path) -> None:
    from torch.optim.optimizer import _global_optimizer_post_hooks as hooks

    before = list(hooks)
    train(SGD.replace(mask=str(mask), epochs=1), tmp_path / "run")
    assert list(hooks) == before


def test_without_a_mask_nothing_is_zero(tmp_path: Path) -> None:
    train(SGD.replace(epochs=1), tmp_path / "run")
    assert not zeros_of(tmp_path / "run")[WEIGHTS].any()


def a_small_network(file: Path) -> torch.nn.Module:
    torch.manual_seed(3)
    small = shrink(tiny(), Selection({WEIGHTS: torch.arange(6) < 4}, level="filter"), torch.randn(1, 1, 8, 8))
    save_shrunk(small, file)
    return small


def test_a_run_starts_from_the_network_of_a_file(tmp_path: Path) -> None:
    small = a_small_network(tmp_path / "small.safetensors")
    config = SGD.replace(start=str(tmp_path / "small.safetensors"), lr=0.0, momentum=0.0, epochs=1)
    folder = tmp_path / "run"
    train(config, folder)
    trained = final_state(folder)["model"]
    assert trained["0.weight"].shape == (4, 1, 3, 3)
    assert trained["5.weight"].shape == (10, 36)
    assert all(torch.equal(p, trained[name]) for name, p in small.named_parameters())
    assert Run.open(folder).network_file.read_bytes() == (tmp_path / "small.safetensors").read_bytes()
    # And it learns, and goes on, without the file that it came from.
    learning = config.replace(lr=0.05, momentum=0.9, epochs=2, schedule="constant")
    train(learning, tmp_path / "whole")
    train(learning.replace(epochs=1), tmp_path / "parts")
    (tmp_path / "small.safetensors").unlink()
    train(learning, tmp_path / "parts", resume=True)
    assert same(final_state(tmp_path / "parts"), final_state(tmp_path / "whole"))
    assert numbers(tmp_path / "whole")[-1]["dense"] > 0.5


def test_a_name_is_looked_up_in_the_run_folder_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    a_small_network(tmp_path / "network.safetensors")
    config = SGD.replace(start="network.safetensors", epochs=1)
    train(config, "run")  # here, since the folder is new
    again = load_shrunk(Run.open("run").network_file, tiny)
    assert again.get_submodule("0").out_channels == 4
    (tmp_path / "network.safetensors").write_bytes(b"something else")
    train(config, "run", overwrite=True)
    assert Run.open("run").status == "finished"


def test_files_that_are_not_there(tmp_path: Path) -> None:
    for name in ("start", "mask"):
        with pytest.raises(FileNotFoundError, match=f"{name}='none.safetensors': there is no such file, neither in"):
            train(SGD.replace(**{name: "none.safetensors"}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_mask_of_another_network(tmp_path: Path) -> None:
    Selection({"conv.weight": torch.ones(4).bool()}).save(tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"'conv.weight', which is no parameter of the model"):
        train(SGD.replace(mask=str(tmp_path / "other.safetensors")), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_sharded_runs_keep_no_mask() -> None:
    with pytest.raises(ValueError, match=r"mask='x' with fsdp=True: .* set fsdp=False"):
        Config(mask="x", fsdp=True)


# -- checkpoints that stay -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("kept") / "run"
    train(SMALL.replace(epochs=5, keep_epochs=(2, 5, 9), keep_checkpoints=1, checkpoint_every=7), folder)
    return Run.open(folder)


def test_the_checkpoints_of_chosen_epochs_stay(kept: Run, tmp_path: Path) -> None:
    names = sorted(f.name for f in kept.checkpoints.iterdir())
    assert names == ["000000060.safetensors", "epoch-2.safetensors", "epoch-5.safetensors"]
    # Epoch 2 is where a run of the same schedule stands that is stopped there.
    state = kept.at_epoch(2)
    assert (state["epoch"], state["step"], state["steps"]) == (2, 0, 24)

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(kept.config, tmp_path / "run", progress=Stops(3, 1, stop))
    assert same(Run.open(tmp_path / "run").at_epoch(2)["model"], state["model"])
    points = [p["point"] for p in SelectionPath.load(kept.path_file).points]
    assert points[state["points"] - 1] == 2


def test_an_epoch_that_was_not_kept(kept: Run) -> None:
    with pytest.raises(ValueError, match=r"of the end of epoch 3, only of 2, 5: train with keep_epochs=\[3\]"):
        kept.at_epoch(3)


def test_the_newest_checkpoints_are_of_epochs_too(tmp_path: Path) -> None:
    train(SMALL, tmp_path / "run")
    run = Run.open(tmp_path / "run")
    assert run.at_epoch(2)["steps"] == 24
    assert same(run.at_epoch(3), run.latest())
    with pytest.raises(ValueError, match="epoch 1, only of 2, 3"):
        run.at_epoch(1)


def test_a_run_that_is_killed_keeps_them_too(tmp_path: Path) -> None:
    config = SMALL.replace(epochs=2, keep_epochs=(1,), keep_checkpoints=1)
    train(config, tmp_path / "whole")
    child = os.fork()
    if child == 0:
        train(config, tmp_path / "run", progress=Stops(2, 3, lambda: os.kill(os.getpid(), signal.SIGKILL)))
        os._exit(0)
    os.waitpid(child, 0)
    train(config, tmp_path / "run", resume=True)
    one, other = (Run.open(tmp_path / name) for name in ("run", "whole"))
    assert same(one.at_epoch(1)["model"], other.at_epoch(1)["model"])
    assert same(one.at_epoch(2)["model"], other.at_epoch(2)["model"])


@pytest.mark.parametrize("value", [(-1,), (1.5,), "60", (True,)])
def test_what_is_no_list_of_epochs(value: object) -> None:
    with pytest.raises(ValueError, match="keep_epochs="):
        Config(keep_epochs=value)  # type: ignore[arg-type]


def test_a_new_folder_without_its_configuration_is_no_run(tmp_path: Path) -> None:
    def write(run: Run) -> None:
        run.network_file.write_bytes(b"x")
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        Run.create(tmp_path / "run", SMALL, write=write)
    with pytest.raises(FileNotFoundError, match="is not a run folder"):
        Run.open(tmp_path / "run")
    Run.create(tmp_path / "run", SMALL, overwrite=True)
    assert not Run.open(tmp_path / "run").network_file.exists()
