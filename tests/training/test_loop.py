import errno
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from dessilbi import Path as SelectionPath
from dessilbi import files
from dessilbi.path import early_points
from dessilbi.training import Config, TrainingDiverged, train
from dessilbi.training.run import Run
from dessilbi.training.schedule import step_size
from tests.training.runs import SMALL, numbers

STEPS = 12  # an epoch of 1442 digits in batches of 128


class Watch:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def start(self, *arguments: Any) -> None:
        self.calls.append(("start", *arguments))

    def step(self, epoch: int, step: int, loss: float) -> None:
        self.calls.append(("step", epoch, step))
        assert loss > 0

    def epoch(self, metrics: dict[str, Any]) -> None:
        self.calls.append(("epoch", metrics["epoch"]))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("loop") / "a" / "run"
    train(SMALL, folder, command="dessilbi train --fast")
    return Run.open(folder)


def test_what_a_run_leaves(run: Run) -> None:
    assert run.config == SMALL
    assert run.status == "finished"
    names = {f.name for f in run.folder.iterdir()}
    assert names == {
        "config.toml",
        "metrics.jsonl",
        "path.safetensors",
        "environment.json",
        "status.json",
        "checkpoints",
    }
    assert [f.name for f in sorted(run.checkpoints.iterdir())] == ["000000024.safetensors", "000000036.safetensors"]
    assert run.environment["command"] == "dessilbi train --fast"
    assert run.environment["torch"] == torch.__version__


def test_metrics(run: Run) -> None:
    metrics = run.metrics()
    assert [m["epoch"] for m in metrics] == [1, 2, 3]
    assert [m["steps"] for m in metrics] == [STEPS, 2 * STEPS, 3 * STEPS]
    last = metrics[-1]
    assert last["dense"] > 0.6
    assert last["loss"] < metrics[0]["loss"]
    assert last["keep"] == pytest.approx(0.3, abs=0.005)
    assert last["lam"] > 0
    assert last["time"] == pytest.approx(sum(step_size(SMALL, i, STEPS) for i in range(3 * STEPS)))
    assert last["images_per_second"] == pytest.approx(1442 / last["seconds"])
    assert {"test_loss", "sparse", "lr"} <= last.keys()


def test_path(run: Run) -> None:
    path = SelectionPath.load(run.path_file)
    assert [p["point"] for p in path.points] == [n / STEPS for n in early_points(STEPS)] + [1, 2, 3]
    assert path.points[-1]["sparse"] == run.metrics()[-1]["sparse"]
    assert float(path.keep()[-1]) == pytest.approx(run.metrics()[-1]["keep"])


def test_sparse_accuracy_is_that_of_the_masked_network(run: Run) -> None:
    from dessilbi.data import Batches, read
    from tests.training.nets import tiny

    state, path = run.latest(), SelectionPath.load(run.path_file)
    assert state is not None
    model = tiny()
    model.load_state_dict(state["model"])
    out = ~path.support("0.weight")
    for p in (model[0].weight, model[0].bias, model[1].weight, model[1].bias):
        p.data[out] = 0
    model[5].weight.data[~path.support("5.weight")] = 0
    model.eval()
    images, labels = next(iter(Batches(read("digits", split="test"), 1000)))
    assert float((model(images).argmax(1) == labels).float().mean()) == pytest.approx(run.metrics()[-1]["sparse"])


def test_a_run_can_be_repeated_from_its_configuration(run: Run, tmp_path: Path) -> None:
    train(Config.from_toml(run.folder / "config.toml"), tmp_path / "again")
    assert numbers(tmp_path / "again") == numbers(run.folder)


def test_progress(tmp_path: Path) -> None:
    watch = Watch()
    train(SMALL.replace(epochs=1), tmp_path / "run", progress=watch)
    assert watch.calls == [("start", 1, STEPS), *[("step", 1, i + 1) for i in range(STEPS)], ("epoch", 1)]


def test_nothing_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train(SMALL.replace(epochs=1), tmp_path / "run")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("optimizer", ["sgd", "Adam", "AdamW", "nadam", "RMSprop"])
def test_optimizers_of_torch_leave_no_path(optimizer: str, tmp_path: Path) -> None:
    config = Config(model="tests.training.nets:tiny", data="digits", epochs=1, optimizer=optimizer, lr=1e-2)
    summary = train(config.replace(momentum=0.0), tmp_path / "run")
    assert not {"sparse", "keep", "lam", "time"} & summary.keys()
    assert not Run.open(tmp_path / "run").path_file.exists()
    assert summary["dense"] > 0.12


def test_nothing_penalised_leaves_no_path(tmp_path: Path) -> None:
    config = SMALL.replace(conv="none", linear="none", keep=None, epochs=1)
    assert "sparse" not in train(config, tmp_path / "run")


def test_without_coupling_ours_is_sgd(tmp_path: Path) -> None:
    shared = SMALL.replace(keep=None, weight_decay=1e-3, nesterov=True)
    train(shared.replace(optimizer="sgd"), tmp_path / "sgd")
    train(shared.replace(nu=float("inf")), tmp_path / "ours")
    for mine, theirs in zip(numbers(tmp_path / "ours"), numbers(tmp_path / "sgd"), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


def test_optimizer_options_reach_the_optimizer(tmp_path: Path) -> None:
    config = SMALL.replace(epochs=1, optimizer="adamw", keep=None, lr=1e-3, optimizer_options={"betas": [0.5, 0.6]})
    train(config, tmp_path / "run")
    state = Run.open(tmp_path / "run").latest()
    assert state is not None
    assert list(state["optimizer"]["param_groups"][0]["betas"]) == [0.5, 0.6]
    with pytest.raises(ValueError, match="optimizer_options=.*momenta"):
        train(config.replace(optimizer_options={"momenta": 1}), tmp_path / "bad")


def test_early_stopping_and_its_resumption(tmp_path: Path) -> None:
    config = SMALL.replace(epochs=9, lr=0.0, patience=2, schedule="constant", keep=None)
    summary = train(config, tmp_path / "run")
    assert summary["stopped_early"]
    assert (summary["epoch"], summary["best_epoch"]) == (3, 1) or summary["epoch"] - summary["best_epoch"] == 2
    assert train(config, tmp_path / "run", resume=True)["stopped_early"]


def test_schedules() -> None:
    config = Config(lr=1.0, lr_drop=10, lr_every=2, epochs=6)
    assert [step_size(config, i * 5, 5) for i in range(6)] == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])
    warm = config.replace(warmup=2, schedule="constant")
    assert [step_size(warm, i, 5) for i in (0, 1, 8, 9, 10, 20)] == pytest.approx([0.1, 0.2, 0.9, 1, 1, 1])
    cosine = config.replace(schedule="cosine")
    assert [step_size(cosine, i, 5) for i in (0, 15, 30)] == pytest.approx([1, 0.5, 0])
    both = config.replace(schedule="cosine", warmup=2)
    assert [step_size(both, i, 5) for i in (9, 10, 20, 30)] == pytest.approx([1, 1, 0.5, 0])


# -- what goes wrong ---------------------------------------------------------------------------------------------


def test_an_existing_folder_is_refused(run: Run) -> None:
    before = sorted((f.name, f.stat().st_mtime_ns) for f in run.folder.rglob("*"))
    with pytest.raises(FileExistsError, match="exists already: resume the run, overwrite it"):
        train(SMALL, run.folder)
    assert sorted((f.name, f.stat().st_mtime_ns) for f in run.folder.rglob("*")) == before


def test_overwriting_takes_run_folders_only(tmp_path: Path) -> None:
    one = SMALL.replace(epochs=1)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match="'thesis.txt' and is not a run folder"):
        train(one, tmp_path / "mine", overwrite=True)
    train(SMALL.replace(epochs=2), tmp_path / "run")
    (tmp_path / "run" / "notes.txt").write_text("keep me")
    train(one, tmp_path / "run", overwrite=True)
    assert len(numbers(tmp_path / "run")) == 1
    assert (tmp_path / "run" / "notes.txt").exists()
    with pytest.raises(ValueError, match="resume=True goes on and overwrite=True"):
        train(one, tmp_path / "run", resume=True, overwrite=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": "digitz"}, "data='digitz': did you mean 'digits'"),
        ({"model": "lenet"}, "did you mean 'lenet5'"),
        ({"model": "tests.training.nets:wrong_classes"}, r"returns \(2, 7\) for 2 images where digits has 10 classes"),
        ({"model": "vgg16"}, r"model='vgg16' cannot take the images of digits, 1x8x8"),
        ({"optimizer": "sdg", "keep": None}, "optimizer='sdg': did you mean 'sgd'"),
        ({"optimizer": "lbfgs", "keep": None}, "optimizer='lbfgs' does not work with mini-batches"),
        ({"device": "gpu"}, "device='gpu': must be auto"),
        ({"compile": "graph"}, "compile='graph' needs a CUDA device"),
        ({"exclude": ["fc"]}, "exclude names 'fc'"),
    ],
)
def test_bad_settings_leave_no_folder(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        train(SMALL.replace(**changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_missing_data_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="dessilbi data get mnist"):
        train(Config(data_root=str(tmp_path)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("keep", [0.3, None])
def test_divergence_names_the_step_and_keeps_the_last_good_state(keep: float | None, tmp_path: Path) -> None:
    config = SMALL.replace(model="tests.training.nets:exploding", keep=keep, lam=1.0 if keep else 0.01)
    with pytest.raises(TrainingDiverged, match=r"the loss is nan at step 30 \(epoch 3, step 6 of 12\): lower lr") as e:
        train(config, tmp_path / "run")
    assert "2/(κ(L + 2/ν))" in str(e.value)
    run = Run.open(tmp_path / "run")
    assert run.status == "diverged"
    state = run.latest()
    assert state is not None
    assert state["steps"] == 24
    assert all(v.isfinite().all() for v in state["model"].values())


def test_a_step_size_that_is_far_too_large(tmp_path: Path) -> None:
    config = Config(model="tests.training.nets:plain", data="digits", lr=1e30, epochs=4, checkpoint_every=1, lam=1e9)
    with pytest.raises(TrainingDiverged):
        train(config, tmp_path / "run")
    state = Run.open(tmp_path / "run").latest()
    assert state is None or all(v.isfinite().all() for v in state["model"].values())


@pytest.mark.parametrize("victim", ["checkpoint", "path", "metrics"])
def test_a_full_disk_keeps_the_last_good_checkpoint(
    victim: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, append = files.write_atomically, Run.append

    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def writing(file: Any, data: bytes) -> None:
        name, late = os.fspath(file), "000000024" in os.fspath(file)
        if (victim == "checkpoint" and late) or (victim == "path" and name.endswith("path.safetensors") and filled):
            full()
        if name.endswith("path.safetensors"):
            filled.append(name)
        write(file, data)

    def appending(self: Run, metrics: Any) -> None:
        if victim == "metrics" and metrics["epoch"] == 2:
            self.metrics_file.open("a").write('{"epo')
            full()
        append(self, metrics)

    filled: list[str] = []
    monkeypatch.setattr(files, "write_atomically", writing)
    monkeypatch.setattr(Run, "append", appending)
    with pytest.raises(OSError, match=r"No space left on device.*the last good checkpoint is kept.*resume") as caught:
        train(SMALL, tmp_path / "run")
    assert "\n" not in str(caught.value)
    monkeypatch.undo()
    stopped = Run.open(tmp_path / "run")
    assert stopped.status == "failed"
    assert stopped.latest()["steps"] == STEPS  # type: ignore[index]
    assert not list(stopped.folder.rglob(".*"))
    train(SMALL, tmp_path / "run", resume=True)
    assert numbers(tmp_path / "run") == numbers(run.folder)


def test_damaged_metrics_are_named(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", SMALL)
    run.append({"epoch": 1})
    run.append({"epoch": 2})
    run.metrics_file.write_bytes(run.metrics_file.read_bytes().replace(b'{"epoch": 1}', b'{"epoch": 1'))
    with pytest.raises(ValueError, match="line 1 is not JSON"):
        run.metrics()


def test_a_checkpoint_holds_what_states_are_made_of(tmp_path: Path) -> None:
    from dessilbi.training import checkpoint

    state = {
        "bf16": torch.randn(3, 2).bfloat16(),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.zeros(0, 4),
        "strided": torch.randn(4, 3).T,
        "bool": torch.tensor([True, False]),
        0: {"tuple": (1, None, 2**100), "list": [1.5, float("inf"), "ü"]},
        "$odd": {"a": True},
    }
    checkpoint.save(tmp_path / "c", state)
    back = checkpoint.load(tmp_path / "c")
    assert back.keys() == state.keys()
    for name in ("bf16", "scalar", "empty", "strided", "bool"):
        assert back[name].dtype == state[name].dtype
        assert torch.equal(back[name], state[name])
    assert back[0] == state[0]
    assert back["$odd"] == state["$odd"]
    with pytest.raises(TypeError, match="object"):
        checkpoint.save(tmp_path / "d", {"x": object()})


def test_tensorboard_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tensorboard", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match="needs the package tensorboard: pip install tensorboard"):
        train(SMALL.replace(tensorboard=True), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_tensorboard_gets_the_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[str, int]] = []

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int | None) -> None:
            written.append((folder, purge_step or 0))

        def add_scalar(self, name: str, value: float, epoch: int) -> None:
            written.append((name, epoch))

        def flush(self) -> None: ...
        def close(self) -> None: ...

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(torch.utils, "tensorboard", module, raising=False)
    config = SMALL.replace(tensorboard=True, epochs=1, schedule="constant")
    train(config, tmp_path / "run")
    assert written[0] == (str(tmp_path / "run" / "tensorboard"), 0)
    assert {("dense", 1), ("sparse", 1), ("loss", 1)} <= set(written)
    written.clear()
    train(config.replace(epochs=2), tmp_path / "run", resume=True)
    assert written[0] == (str(tmp_path / "run" / "tensorboard"), 2)


def test_metrics_are_json(run: Run) -> None:
    for line in run.metrics_file.read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_images_streamed_from_files(tmp_path: Path) -> None:
    from PIL import Image

    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", 12), ("val", 6)):
        for label in range(2):
            folder = tmp_path / "data" / split / f"class{label}"
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = torch.randint(128 * label, 128 * label + 100, (20, 24, 3), generator=generator)
                Image.fromarray(pixels.to(torch.uint8).numpy()).save(folder / f"{i}.png")
    config = SMALL.replace(
        model="tests.training.nets:pooled",
        data="imagenet",
        data_root=str(tmp_path / "data"),
        batch=5,
        epochs=2,
        workers=0,
        checkpoint_every=2,
    )
    train(config, tmp_path / "whole")

    class Stop:
        def step(self, epoch: int, step: int, loss: float) -> None:
            if (epoch, step) == (2, 3):
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", progress=Stop())
    train(config, tmp_path / "run", resume=True)
    assert numbers(tmp_path / "run") == numbers(tmp_path / "whole")
    assert numbers(tmp_path / "run")[-1]["dense"] == 1


def test_a_writer_in_the_background_writes_what_was_there_then() -> None:
    from dessilbi.training.writer import Writer

    writer, weight, written = Writer(background=True), torch.zeros(3), []
    state = writer.take({"model": {"w": weight}, "best": (0.5, weight), "list": [weight]})
    weight.fill_(1)
    writer(lambda: written.append(state))
    writer.wait()
    assert not any(t.any() for t in (written[0]["model"]["w"], written[0]["best"][1], written[0]["list"][0]))

    def full() -> None:
        raise OSError(errno.ENOSPC, "full")

    writer(full)
    with pytest.raises(OSError, match="full"):
        writer.wait()
    writer.wait()
    writer.close()


@pytest.mark.compile
def test_a_compiled_run_is_an_eager_run(tmp_path: Path) -> None:
    config = SMALL.replace(epochs=1, model="tests.training.nets:plain")
    train(config, tmp_path / "eager")
    train(config.replace(compile="compile"), tmp_path / "compiled")
    one, other = numbers(tmp_path / "compiled")[0], numbers(tmp_path / "eager")[0]
    assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
    # Its checkpoints name the weights as the network itself does.
    assert "1.weight" in Run.open(tmp_path / "compiled").latest()["model"]  # type: ignore[index]
