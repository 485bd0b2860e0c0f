"""Pruning, against what is known by hand: masks, initial weights, parameters, files, accuracy."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.nets import tiny
from tests.training.runs import SMALL, Stops, final_state
from torch import nn

from dessilbi import Path as SelectionPath
from dessilbi import Selection, load_shrunk
from dessilbi.applications.schedules import finetuning, retraining
from dessilbi.applications.sparsify import finish, prune, read_table
from dessilbi.data import Batches, read
from dessilbi.models import create
from dessilbi.training import Config, presets, train
from dessilbi.training.opening import open_network
from dessilbi.training.run import Run

FILTERS = SMALL.replace(
    model="lenet5", model_options={"widths": [4, 6, 12, 10]}, linear="neuron", keep=0.6, epochs=4, keep_epochs=(2,),
    checkpoint_every=7, lr=0.05, nu=100.0, seed=5,
)  # fmt: skip
WEIGHTS = SMALL.replace(conv="weight", keep=0.5, epochs=2, seed=5, schedule="step", lr_every=1)


@pytest.fixture(scope="module")
def filters(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("filters") / "run"
    train(FILTERS, folder)
    return Run.open(folder)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("weights") / "run"
    train(WEIGHTS, folder)
    return Run.open(folder)


def pruned(run: Run, folder: Path, **options: Any) -> Run:
    return prune(run, folder, **{"level": "filter", "rounds": 0, **options})


def rows(run: Run) -> dict[str, dict[str, Any]]:
    return {row["network"]: row for row in read_table(run)["rows"]}


def accuracy(model: nn.Module) -> float:
    images, labels = next(iter(Batches(read("digits", split="test"), 1000)))
    with torch.no_grad():
        return float((model.eval()(images).argmax(1) == labels).double().mean())


def of_epoch(run: Run, epoch: int) -> nn.Module:
    model = create(run.config.model, 10, 1, **run.config.model_options)
    model.load_state_dict(run.at_epoch(epoch)["model"])
    return model


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_what_it_leaves(filters: Run, tmp_path: Path) -> None:
    notes: list[str] = []
    run = pruned(filters, tmp_path / "half", keep=0.5, finetune=2, command="as typed", note=notes.append)
    assert {f.name for f in run.folder.iterdir()} == {
        "config.toml", "network.safetensors", "selection.safetensors", "table.json", "environment.json", "checkpoints",
    }  # fmt: skip
    assert run.environment["command"] == "as typed"
    assert (run.status, Run.open(run.folder).config) == ("new", run.config)
    assert run.config == finetuning(FILTERS, 2).replace(start="network.safetensors")
    assert notes == ["epoch 4, level filter: 50 % of the groups kept"]
    sel = Selection.load(run.selection_file)
    assert (sel.level, sel.source["keep"], sel.source["point"]) == ("filter", 0.5, 4)
    # 32 filters and neurons, of which the ten outputs are not to be selected from.
    assert sum(m.numel() for m in sel.values()) == 32
    assert sum(int(m.sum()) for m in sel.values()) == 16
    assert "classifier.2.weight" not in sel


def test_the_table(filters: Run, tmp_path: Path) -> None:
    run = pruned(filters, tmp_path / "half", keep=0.5)
    found, dense = rows(run), of_epoch(filters, 4)
    assert list(found) == ["dense", "selected", "shrunk"]
    small = load_shrunk(run.network_file)
    sel = Selection.load(run.selection_file)
    a, b, c, d = (int(sel[f"{name}.weight"].sum()) for name in (*(f"features.{i}" for i in (0, 3, 6)), "classifier.0"))
    # Convolutions of 5x5 on 32x32, 14x14 and 5x5, and two linear layers.
    size = a * 26 + b * (25 * a + 1) + c * (25 * b + 1) + d * (c + 1) + 10 * (d + 1)
    macs = 28**2 * 25 * a + 10**2 * 25 * a * b + 25 * b * c + c * d + 10 * d
    assert found["shrunk"]["parameters"] == parameters(small) == size
    assert found["shrunk"]["macs"] == macs
    assert found["dense"]["parameters"] == found["selected"]["parameters"] == parameters(dense)
    assert found["dense"]["nonzero"] == sum(int((p != 0).sum()) for p in dense.parameters())
    assert found["selected"]["nonzero"] < found["dense"]["nonzero"]
    assert found["selected"]["macs"] == found["dense"]["macs"] > macs
    assert found["shrunk"]["bytes"] == pytest.approx(run.network_file.stat().st_size, abs=100)
    assert found["dense"]["bytes"] > 4 * parameters(dense)
    assert found["dense"]["accuracy"] == accuracy(dense) == filters.metrics()[-1]["dense"]
    with sel.applied(dense):
        assert found["selected"]["accuracy"] == accuracy(dense) == found["shrunk"]["accuracy"]
        x = torch.randn(5, 1, 8, 8)
        torch.testing.assert_close(small.eval()(x), dense.eval()(x))
    assert all(row["latency"] is None for row in found.values())


def test_an_earlier_epoch(filters: Run, tmp_path: Path) -> None:
    run = pruned(filters, tmp_path / "early", at=2)
    path = SelectionPath.load(filters.path_file)
    index = [p["point"] for p in path.points].index(2)
    sel = Selection.load(run.selection_file)
    assert list(sel) == path.names[:-1]
    empty = [name for name in sel if not path.support(name, index).any()]
    assert 0 < len(empty) < len(sel)
    for name in sel:
        # At least one filter is left, the nearest to the support.
        best = torch.arange(len(sel[name])) == path.norms(name).v[index].argmax()
        assert torch.equal(sel[name], best if name in empty else path.support(name, index)), name
    assert rows(run)["dense"]["accuracy"] == accuracy(of_epoch(filters, 2)) == filters.metrics()[1]["dense"]


def test_a_layer_of_which_nothing_is_left(filters: Run, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="nothing of layer 'features.0' is selected, but the network needs it"):
        run = pruned(filters, tmp_path / "early", at=2, min_keep=0)
    assert not Selection.load(run.selection_file)["features.0.weight"].any()
    assert load_shrunk(run.network_file).features[0].out_channels == 1


def test_finetuning_to_the_end(filters: Run, tmp_path: Path) -> None:
    run = pruned(filters, tmp_path / "half", macs="50%", finetune=10)
    table = finish(run, command="again")
    assert [row["network"] for row in table["rows"]] == ["dense", "selected", "shrunk", "fine-tuned"]
    assert table == read_table(run)
    last, before = table["rows"][-1], table["rows"][-2]
    assert last["accuracy"] > before["accuracy"] + 0.05
    assert before["macs"] <= table["rows"][0]["macs"] / 2
    # By hand: the network of the folder, the weights of its checkpoint.
    model = load_shrunk(run.network_file)
    model.load_state_dict(final_state(run.folder)["model"])
    assert accuracy(model) == last["accuracy"] == accuracy(open_network(run.folder)[0])
    assert (last["parameters"], last["epochs"]) == (parameters(model), 10)
    assert [e["command"] for e in run.environment["resumed"]] == ["again"]
    assert finish(run) == table  # there is nothing left to train


def test_what_is_interrupted_goes_on(filters: Run, tmp_path: Path) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    run, whole = (pruned(filters, tmp_path / name, keep=0.5, finetune=2) for name in ("run", "whole"))
    with pytest.raises(KeyboardInterrupt):
        finish(run, Stops(1, 5, stop))
    assert list(rows(run)) == ["dense", "selected", "shrunk"]
    train(run.config, run.folder, resume=True)
    again = finish(run)["rows"]
    assert again == finish(whole)["rows"]


def test_retraining_starts_from_the_first_weights(filters: Run, tmp_path: Path) -> None:
    run = pruned(filters, tmp_path / "rt", keep=0.5, retrain=3)
    torch.manual_seed(FILTERS.seed)
    new = create("lenet5", 10, 1, widths=[4, 6, 12, 10]).eval()
    small, sel = load_shrunk(run.network_file).eval(), Selection.load(run.selection_file)
    x = torch.randn(5, 1, 8, 8)
    with sel.applied(new):
        torch.testing.assert_close(small(x), new(x))
    shapes = pruned(filters, tmp_path / "ft", keep=0.5)
    assert parameters(load_shrunk(shapes.network_file)) == parameters(small)
    assert run.config == retraining(FILTERS, 3).replace(start="network.safetensors")
    assert finish(run)["rows"][-1]["network"] == "retrained"


def test_weights_stay_as_zeros(weights: Run, tmp_path: Path) -> None:
    run = pruned(weights, tmp_path / "sparse", level="weight", keep=0.2, finetune=2)
    sel = Selection.load(run.selection_file)
    assert sum(int(m.sum()) for m in sel.values()) == int(0.2 * (6 * 9 + 540))
    start, trained = load_shrunk(run.network_file, tiny), of_epoch(weights, 2)
    for name, p in start.named_parameters():
        kept = sel.get(name, torch.ones(()).bool())
        assert torch.equal(p, trained.get_parameter(name) * kept), name
    last = finish(run)["rows"][-1]
    for name, mask in sel.items():
        assert torch.equal(final_state(run.folder)["model"][name] != 0, mask), name
    biases = 6 + 10 + 2 * 6
    assert last["nonzero"] == biases + sum(int(m.sum()) for m in sel.values())
    assert last["parameters"] == parameters(start) == 54 + 540 + biases
    assert last["accuracy"] > 0.4


def test_weights_retrained(weights: Run, tmp_path: Path) -> None:
    run = pruned(weights, tmp_path / "rt", level="weight", at=1, retrain=2)
    torch.manual_seed(WEIGHTS.seed)
    new, sel = tiny(), Selection.load(run.selection_file)
    for name, p in load_shrunk(run.network_file, tiny).named_parameters():
        assert torch.equal(p, new.get_parameter(name) * sel.get(name, torch.ones(()).bool())), name
    finish(run)
    for name, mask in sel.items():
        assert not final_state(run.folder)["model"][name][~mask].any()


def test_layers_that_are_left_out(tmp_path: Path) -> None:
    config = SMALL.replace(
        model="resnet20", model_options={"widths": [3, 4, 4]}, conv="layer", linear="none", keep=0.8, epochs=1
    )
    train(config, tmp_path / "run")
    whole = Run.open(tmp_path / "run")
    run = pruned(whole, tmp_path / "less", level="layer", keep=0.6, finetune=1)
    sel = Selection.load(run.selection_file)
    off = {name for name, mask in sel.items() if not mask.any()}
    assert len(sel) == 19
    assert len(off) == 19 - int(0.6 * 19)
    # By hand: channels of zeros in place of the first convolution, and nothing from a branch that is not whole.
    assert "conv1.weight" in off
    dense = of_epoch(whole, 1)
    dense.conv1, dense.bn1 = nn.ZeroPad3d((0, 0, 0, 0, 0, 2)), nn.Identity()
    blocks = [name for name, module in dense.named_modules() if type(module).__name__ == "BasicBlock"]
    for block in blocks:
        if {f"{block}.conv1.weight", f"{block}.conv2.weight"} & off:
            norm = dense.get_submodule(f"{block}.bn2")
            norm.weight.data.zero_()
            norm.bias.data.zero_()
    small, x = load_shrunk(run.network_file), torch.randn(5, 1, 8, 8)
    torch.testing.assert_close(small.eval()(x), dense.eval()(x))
    found = rows(run)
    assert found["shrunk"]["accuracy"] == accuracy(dense)
    assert found["shrunk"]["macs"] < found["dense"]["macs"]
    finish(run)
    # What the network needs but the selection leaves out is still zero after fine-tuning.
    left = Selection.load(run.mask_file) if run.mask_file.exists() else {}
    trained = final_state(run.folder)["model"]
    assert all(not trained[name][~mask].any() for name, mask in left.items())


def test_pruning_what_was_pruned(weights: Run, tmp_path: Path) -> None:
    once = pruned(weights, tmp_path / "once", level="weight", keep=0.4, finetune=1)
    first = Selection.load(once.selection_file)
    ours = WEIGHTS.replace(start=str(once.network_file), mask=str(once.mask_file), keep=0.5, epochs=1, seed=6)
    train(ours, tmp_path / "again")
    twice = pruned(Run.open(tmp_path / "again"), tmp_path / "twice", level="weight", keep=0.5, finetune=1)
    finish(twice)
    second, trained = Selection.load(twice.selection_file), final_state(twice.folder)["model"]
    for name in first:
        assert torch.equal(trained[name] != 0, first[name] & second[name]), name


def test_a_tensor_that_is_starved_is_said(filters: Run, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"features.6.weight keeps 1 of 12 groups.*max_prune") as told:
        run = pruned(filters, tmp_path / "starved", keep=0.16)
    masks = Selection.load(run.selection_file)
    starved = {name for name, mask in masks.items() if int(mask.sum()) == 1}
    assert 0 < len(starved) < len(masks)
    assert {str(w.message).partition(" ")[0] for w in told} == starved


def test_latency_is_measured(filters: Run, tmp_path: Path) -> None:
    run = pruned(filters, tmp_path / "timed", keep=0.5, rounds=1)
    found = rows(run)
    for row in found.values():
        assert row["latency"].keys() == {"1", "64"}
        assert all(time["seconds"] > 0 and time["ratio"] > 0 for time in row["latency"].values())
    assert found["dense"]["latency"]["1"]["ratio"] == 1
    assert "control" in [row["name"] for row in read_table(run)["timing"]["rows"]]


def test_a_run_that_was_not_finished(tmp_path: Path) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(FILTERS, tmp_path / "run", progress=Stops(3, 2, stop))
    run = pruned(Run.open(tmp_path / "run"), tmp_path / "half", keep=0.5)
    assert read_table(run)["epoch"] == 2
    model = create("lenet5", 10, 1, widths=[4, 6, 12, 10])
    model.load_state_dict(final_state(tmp_path / "run")["model"])
    assert rows(run)["dense"]["accuracy"] == accuracy(model)


# -- settings ----------------------------------------------------------------------------------------------------------


def test_the_schedules_of_the_paper() -> None:
    config = presets.get("paper/vgg16-weights")
    assert config.keep_epochs == (60, 120, 200)
    tuned, again = finetuning(config, 400), retraining(config, 200)
    assert (tuned.optimizer, tuned.momentum, tuned.weight_decay, tuned.keep) == ("sgd", 0.9, 5e-4, None)
    assert (tuned.schedule, tuned.epochs, tuned.lr_drop, tuned.lr_every) == ("step", 400, 5, 120)
    assert tuned.lr == pytest.approx(0.01)
    assert (again.optimizer, again.momentum, again.weight_decay, again.keep) == ("sgd", 0.9, 5e-4, None)
    assert (again.schedule, again.epochs, again.lr, again.lr_drop, again.lr_every) == ("step", 200, 0.1, 5, 60)
    assert finetuning(config, 10).lr_every == 3
    assert finetuning(config, 1).lr_every == 1
    assert all(presets.get(f"paper/{name}").keep_epochs for name in ("resnet56-filters", "vgg16-layers"))


def test_other_schedules() -> None:
    config = presets.get("quick/lenet-digits")
    tuned, again = finetuning(config, 3), retraining(config, 3)
    assert (tuned.schedule, tuned.lr, tuned.warmup) == ("cosine", pytest.approx(config.lr / 10), 0)
    assert (again.schedule, again.lr, again.warmup) == ("cosine", config.lr, config.warmup)
    adam = Config(optimizer="dessiadamw", lr=1e-3, optimizer_options={"betas": [0.9, 0.95]}, kappa=2.0)
    assert finetuning(adam, 3).optimizer == "adamw"
    assert finetuning(adam, 3).optimizer_options == {"betas": [0.9, 0.95]}
    assert finetuning(adam, 3).lr == pytest.approx(2e-4)


# -- what cannot be pruned ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"at": 9}, "epoch 9 is not on its path, which has epochs 1 to 4"),
        ({"at": 1}, "no checkpoint of the end of epoch 1, only of 2, 4: train with keep_epochs"),
        ({"macs": 10}, "macs=10 cannot be reached: with min_keep=1 the least is"),
        ({"params": "0.1%", "max_prune": 0.5}, "cannot be reached: with min_keep=1 and max_prune=0.5"),
        ({"macs": "half"}, "macs='half': give a number, or a part"),
        ({"macs": 10, "keep": 0.5}, "2 targets"),
        ({"level": "weight"}, "recorded by groups of kind 'filter'"),
        ({"level": "row"}, "level must be one of"),
        ({"finetune": 1, "retrain": 1}, "give one of them"),
        ({"device": "cuda:99"}, "device='cuda:99'"),
    ],
)
def test_what_cannot_be(options: dict[str, Any], message: str, filters: Run, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        pruned(filters, tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


def test_folders_that_will_not_do(filters: Run, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is the run to be pruned"):
        pruned(filters, filters.folder, overwrite=True)
    run = pruned(filters, tmp_path / "half", keep=0.5)
    with pytest.raises(FileExistsError, match="exists already"):
        pruned(filters, run.folder, keep=0.5)
    assert read_table(pruned(filters, run.folder, keep=0.4, overwrite=True))["selection"]["keep"] == 0.4
    with pytest.raises(ValueError, match="was not made by pruning"):
        finish(filters)
    run.table_file.write_text("{}")
    with pytest.raises(ValueError, match="not a table of pruning"):
        read_table(run)


def test_runs_that_leave_no_path(filters: Run, tmp_path: Path) -> None:
    run = pruned(filters, tmp_path / "half", keep=0.5, finetune=1)
    with pytest.raises(ValueError, match="a run of sgd leaves no path to select from"):
        pruned(run, tmp_path / "quarter", keep=0.5)
    with pytest.raises(ValueError, match="has no path yet"):
        pruned(Run.create(tmp_path / "new", FILTERS), tmp_path / "quarter", keep=0.5)


def test_one_process(filters: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="prune first, then train the new folder under torchrun"):
        pruned(filters, tmp_path / "half", keep=0.5)


def test_an_error_leaves_no_folder_that_looks_like_a_run(
    filters: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Run, facts: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(Run, "add_environment", full)
    with pytest.raises(OSError, match="no space"):
        pruned(filters, tmp_path / "half", keep=0.5)
    with pytest.raises(FileNotFoundError, match="not a run folder"):
        Run.open(tmp_path / "half")
