import subprocess
import sys
from pathlib import Path

import pytest

from dessilbi.training import presets
from dessilbi.training.config import Config, differences


@pytest.mark.parametrize("name", presets.names())
def test_toml_round_trip_of_every_preset(name: str, tmp_path: Path) -> None:
    config = presets.get(name)
    (tmp_path / "c.toml").write_text(config.to_toml(), encoding="utf-8")
    assert Config.from_toml(tmp_path / "c.toml") == config


def test_toml_round_trip_of_awkward_values(tmp_path: Path) -> None:
    config = Config(
        model_options={"widths": [4, 8], "nested": {"a b": True, "ü": 'quo"te\n\\'}},
        data_root='/odd "path"/\u00fc\U0001f600\x7f',
        nu=float("inf"),
        lr=1e-7,
        exclude=("a.weight", "b"),
        keep=0.06,
        clip=None,
        fused=False,
        conv=None,  # type: ignore[arg-type]
    )
    (tmp_path / "c.toml").write_text(config.to_toml(), encoding="utf-8")
    back = Config.from_toml(tmp_path / "c.toml")
    assert back == config
    assert back.conv == "none"
    assert Config.from_dict(config.to_dict()) == config


def test_toml_is_complete() -> None:
    text = Config().to_toml()
    assert all(name in text for name in Config().to_dict())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": -1}, r"lr=-1.0: must be a number of at least 0"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"lr": "fast"}, "lr='fast': must be a number, not str"),
        ({"epochs": 1.5}, "epochs=1.5: must be a whole number"),
        ({"epochs": True}, "epochs=True"),
        ({"epochs": 0}, "epochs=0: must be a whole number of at least 1"),
        ({"keep": 0}, r"keep=0.0: must be a fraction in \(0, 1\]"),
        ({"keep": 1.5}, "keep=1.5"),
        ({"schedule": "linear"}, "schedule='linear': must be one of step, cosine, constant"),
        ({"precision": "float16"}, "must be one of float32, bf16, fp16"),
        ({"conv": "row"}, "conv='row'"),
        ({"momentum": 1.0}, "momentum=1.0"),
        ({"nesterov": True, "momentum": 0}, "nesterov=True needs a momentum"),
        ({"precision": "fp16", "compile": "graph"}, "take precision='bf16'"),
        ({"optimizer": "sgd", "keep": 0.1}, "needs optimizer='dessilbi'"),
        ({"keep": 0.1, "conv": "none", "linear": "none"}, "nothing is penalised"),
        ({"exclude": "fc"}, "exclude='fc': must be a list of names"),
        ({"optimizer_options": {"betas": {1, 2}}}, "cannot be written to a file"),
        ({"model": " "}, "model=' '"),
        ({"learning_rate": 0.1}, "unknown setting 'learning_rate'"),
        ({"lamb": 0.1}, "did you mean 'lam'"),
    ],
)
def test_bad_values_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config().replace(**changes)


def test_bad_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such configuration file"):
        Config.from_toml(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("lr = = 1")
    with pytest.raises(ValueError, match="bad.toml: not a TOML file"):
        Config.from_toml(tmp_path / "bad.toml")
    (tmp_path / "odd.toml").write_text("epoch = 3")
    with pytest.raises(ValueError, match="odd.toml: unknown setting 'epoch': did you mean 'epochs'"):
        Config.from_toml(tmp_path / "odd.toml")


def test_differences() -> None:
    assert differences(Config(), Config()) == []
    assert differences(Config(lr=0.1), Config(lr=0.05, keep=0.1)) == ["lr: 0.1 -> 0.05", "keep: None -> 0.1"]


def test_presets_of_the_paper() -> None:
    names = set(presets.names())
    rows = ("sgd", "sgd-mom", "sgd-mom-wd", "adam", "dessilbi-naive", "dessilbi-mom", "dessilbi-mom-wd")
    networks = ("lenet-mnist", "resnet20-cifar10", "resnet18-imagenet", "alexnet-imagenet")
    assert {f"paper/{network}-{row}" for network in networks for row in rows} <= names
    structure = (
        "vgg16-weights resnet50-weights vgg16-filters resnet56-filters vgg16-layers resnet56-layers vgg16-ticket"
    )
    assert {f"paper/{name}" for name in [*structure.split(), "resnet50-ticket"]} <= names
    assert all(presets.describe(name) for name in names)
    mom = presets.get("paper/lenet-mnist-dessilbi-mom")
    assert (mom.epochs, mom.lr, mom.lr_drop, mom.lr_every, mom.nu, mom.momentum) == (100, 0.1, 10, 30, 10, 0.9)
    weights = presets.get("paper/vgg16-weights")
    assert (weights.keep, weights.lr_drop, weights.lr_every, weights.weight_decay) == (0.06, 5, 60, 5e-4)
    ticket = presets.get("paper/resnet50-ticket")
    assert (ticket.nu, ticket.lam, ticket.schedule) == (500, 0.05, "constant")


def test_an_unknown_preset_suggests_the_nearest() -> None:
    with pytest.raises(ValueError, match="unknown preset 'paper/vgg-weights': did you mean 'paper/vgg16-weights'"):
        presets.get("paper/vgg-weights")
    with pytest.raises(ValueError, match="unknown preset 'zzz'"):
        presets.describe("zzz")


def test_listing_presets_imports_no_torch() -> None:
    code = (
        "import sys; from dessilbi.training import presets, config; presets.names(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
