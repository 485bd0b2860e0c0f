"""The recipes: that they say what the paper says, and that every one of them starts."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.applications import tinydata

from dessilbi.applications import recipe as recipes
from dessilbi.applications.recipe import Recipe
from dessilbi.applications.reproduction import Reproduction
from dessilbi.training import presets

# SPEC.md, section 4, by recipe and row: accuracy in %, and the size that it was reached with.
PAPER: dict[str, dict[str, tuple[float, ...]]] = {
    "training-lenet": {
        "sgd": (98.87,), "sgd-l1": (98.52,), "sgd-mom": (99.16,), "sgd-mom-wd": (99.23,), "adam": (99.19,),
        "dessilbi-naive": (99.02,), "dessilbi-mom": (99.19,), "dessilbi-mom-wd": (99.20,),
    },
    "training-resnet20": {
        "sgd": (86.46,), "sgd-l1": (67.60,), "sgd-mom": (89.44,), "sgd-mom-wd": (90.31,), "adam": (89.14,),
        "dessilbi-naive": (89.26,), "dessilbi-mom": (89.72,), "dessilbi-mom-wd": (89.95,),
    },
    "imagenet-resnet18": {
        "sgd-mom-wd": (69.76,), "adam": (59.66,), "dessilbi-naive": (65.26,), "dessilbi-mom": (68.55,),
        "dessilbi-mom-wd": (70.55,),
    },
    "imagenet-alexnet": {"sgd-mom-wd": (56.55,), "dessilbi-mom-wd": (57.09,)},
    "weights-resnet50": {
        "dense": (94.13,), "ft60": (91.70,), "ft120": (92.64,), "ft200": (92.54,), "rt60": (90.68,), "rt120": (91.35,),
        "rt200": (91.48,), "ft200-10": (90.03,),
    },
    "weights-vgg16": {
        "dense": (93.45,), "ft60": (93.80,), "ft120": (94.18,), "ft200": (93.89,), "rt60": (93.08,), "rt120": (93.60,),
        "rt200": (93.20,), "ft200-10": (91.11,),
    },
    "filters-resnet56": {"dense": (93.46,), "ft60": (93.30,), "ft120": (93.59,), "ft200": (93.94,)},
    "filters-vgg16": {"dense": (93.43,), "ft60": (93.00,), "ft120": (93.21,), "ft200": (93.59,)},
    "layers-resnet56": {"ft200": (93.47, 0.449, 0.416, 2)},
    "layers-vgg16": {"ft200": (94.06, 0.338, 0.1095, 6)},
}  # fmt: skip
OTHERS = [
    "training-lenet-short",
    "tuning-lenet",
    "growing-resnet56",
    "growing-resnet56-cifar100",
    "growing-vgg16",
    "growing-vgg19",
]
GRIDS = ("tickets-resnet50", "tickets-vgg16", "transfer-cifar10-0-4", "transfer-cifar10-5-9", "transfer-fashion-mnist",
         "transfer-mnist")  # fmt: skip
# Networks of the same depth, a few filters wide.
NARROW = {
    "vgg16": [4] * 14, "vgg19": [4] * 17, "resnet20": [4, 4, 4], "resnet50": [4, 4, 4], "resnet56": [4, 4, 4],
    "lenet5": [4, 4, 8, 8], "resnet18": [4, 4, 4, 4], "alexnet": [4] * 7,
}  # fmt: skip


def text_of(name: str) -> dict[str, Any]:
    return tomllib.loads((recipes.folder() / f"{name}.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("data")
    tinydata.write_cifar(place)
    tinydata.write_cifar(place, 100, 100)
    for name in ("mnist", "fashion-mnist"):
        tinydata.write_digits(place, name)
    return place


@pytest.mark.parametrize("name", PAPER)
def test_a_recipe_has_the_papers_figures(name: str) -> None:
    steps = Recipe.load(name).steps
    for row, figures in PAPER[name].items():
        paper = steps[row].paper
        assert isinstance(paper, dict)
        sizes = (paper["macs"], paper["parameters"], paper["dropped"]) if len(figures) > 1 else ()
        assert (paper["accuracy"], *sizes) == figures, row
    measured = {key for key, step in steps.items() if step.paper and step.kind != "compare"}
    assert measured - set(PAPER[name]) <= {"dense"}


def test_the_schedules_of_the_paper() -> None:
    for name in ("weights-vgg16", "weights-resnet50", "filters-vgg16", "filters-resnet56"):
        steps = Recipe.load(name).steps
        dense = steps["dense"].config()
        assert (dense.epochs, dense.lr, dense.lr_every, dense.lr_drop, dense.batch) == (200, 0.1, 60, 5.0, 128)
        assert dense.weight_decay == 5e-4
        for key, step in steps.items():
            if key[:2] in ("ft", "rt"):
                at = int(key[2:].split("-")[0])
                wanted = {"finetune": 10 if key.endswith("-10") else 400} if key[:2] == "ft" else {"retrain": 200}
                found = step.pruning()
                assert found["at"] == at
                assert {n: found[n] for n in ("finetune", "retrain") if n in found} == wanted
    for name in ("training-lenet", "training-resnet20", "imagenet-resnet18", "imagenet-alexnet"):
        for step in Recipe.load(name).steps.values():
            config = step.config()
            assert (config.epochs, config.lr_every, config.lr_drop, config.kappa) == (100, 30, 10.0, 1.0)
            assert config.nu == (1000.0 if name.startswith("imagenet") else 10.0)
    for name, (nu, lam) in {"tickets-vgg16": (200.0, 0.03), "tickets-resnet50": (500.0, 0.05)}.items():
        grid = Recipe.load(name).steps["tickets"].grid((0,))
        assert (grid.search.nu, grid.search.lam, grid.search.schedule) == (nu, lam, "constant")
        assert (grid.epochs, grid.rewind) == (160, 2)
        asked = {at: f"dessilbi-lamp@{at}" for at in (2, 5, 10, 20, 40)}
        rivals = {"magnitude-lamp", "iterative-lamp", "snip", "random", "dense"}
        assert {*asked.values(), *rivals} <= set(grid.methods)


def test_every_recipe_says_how_long_it_takes_and_where_that_is_from() -> None:
    for name in recipes.names():
        recipe = Recipe.load(name)
        assert recipe.hours
        assert recipe.hours_from.startswith(("estimated", "measured", "an estimate"))
        assert recipe.seeds == (1 if name.startswith("imagenet") else 3)


def test_no_recipe_goes_unchecked() -> None:
    assert set(recipes.names()) == {*PAPER, *GRIDS, *OTHERS}


def changed(name: str, network: str | None = None, **settings: Any) -> Recipe:
    """The recipe with narrow networks, or another network; of a grid, with the epochs up to 5 and one fraction."""
    values = text_of(name)
    for step in values["steps"].values():
        kind = next(kind for kind in recipes.KINDS if kind in step)
        if kind in ("prune", "grow"):
            continue
        known = presets.get(step[kind]).model
        mine = {"model": network} if network else {"model_options": {"widths": NARROW[known]}}
        step["settings"] = {**step.get("settings", {}), **mine, **settings}
        if kind == "compare":
            methods = [m for m in step["methods"] if "@" not in m or m.endswith("@5")]
            step |= {"methods": methods, "keeps": [0.3], "repeats": 1, "epochs": 5}
    return Recipe.of(name, values)


@pytest.fixture
def go(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Carry a recipe out for seed 0, with a hundredth of its epochs; its rows."""
    monkeypatch.setattr(recipes, "FASTER", 100)

    def call(recipe: Recipe, rows: Sequence[str] = (), fast: bool = True, data: Path = root) -> list[dict[str, Any]]:
        work = Reproduction(recipe, runs=tmp_path / "runs", results=tmp_path / "results", fast=fast,
                            place={"data_root": str(data), "device": "cpu"})  # fmt: skip
        assert work.go(work.todo((0,), rows)) == []
        assert not work.todo((0,), rows)
        return work.results.rows()

    return call


@pytest.mark.parametrize("name", [name for name in PAPER if not name.startswith("imagenet")] + OTHERS)
def test_what_a_recipe_trains_starts(name: str, go: Any) -> None:
    """With its networks, data and optimizers, a step or two."""
    recipe = changed(name)
    rows = [key for key, step in recipe.steps.items() if step.kind in ("train", "grow")]
    rows = rows[:1] if name.startswith("growing") else rows
    found = go(recipe, rows)
    assert {row["row"] for row in found} == set(rows)
    for row in found:
        assert 0 <= row["accuracy"] <= 1
        assert row["command"] is not None
        assert row["seed"] == 0
        assert {"commit", "device", "date", "settings", "torch"} <= row.keys()


# Not filters-vgg16: its budgets need the depth of VGG16 where a layer may lose 60 % at most.
PRUNED = {
    "weights-vgg16": ("ft120", "rt60"), "weights-resnet50": ("ft200-10",), "filters-resnet56": ("ft60", "macs39"),
    "layers-vgg16": ("ft200",), "layers-resnet56": ("ft200",),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:nothing of layer:UserWarning", "ignore:.*may not recover:UserWarning")
@pytest.mark.parametrize("name", PRUNED)
def test_what_a_recipe_prunes_meets_its_sizes(name: str, go: Any) -> None:
    """Its budgets and what follows, on a small network; what it starts from is trained first."""
    recipe = changed(name, "tests.applications.tinydata:network")
    rows = {row["row"]: row for row in go(recipe, PRUNED[name])}
    assert rows.keys() >= set(PRUNED[name])
    for key in PRUNED[name]:
        row, options = rows[key], recipe.steps[key].pruning(True)
        if "macs" in options:
            assert 0 < row["macs"] <= float(options["macs"].rstrip("%")) / 100 * row["dense_macs"]
        assert 0 < row["weights"] < 1
        assert row["epochs"] == options.get("finetune", options.get("retrain"))


@pytest.mark.parametrize("name", GRIDS)
def test_what_a_recipe_compares_starts(name: str, go: Any) -> None:
    """Every method of its grid, at one fraction, of a small network on its data."""
    recipe = changed(name, "tests.applications.tinydata:network")
    (step,) = recipe.steps.values()
    found = go(recipe, fast=False)
    assert sorted(row["method"] for row in found) == sorted(step.options["methods"])
    assert all(row["weights"] == pytest.approx(0.3, abs=0.01) for row in found if row["method"] != "dense")


def test_the_imagenet_recipes_run_on_an_image_folder(go: Any, tmp_path: Path) -> None:
    """End to end: all rows of both, on a thousand classes of one image."""
    tinydata.write_folders(tmp_path)
    for name, side in (("imagenet-resnet18", 32), ("imagenet-alexnet", 64)):
        recipe = changed(name, workers=0, input_shape=[3, side, side], eval_batch=500)
        rows = go(recipe, data=tmp_path)
        assert {row["row"] for row in rows} == PAPER[name].keys()
        assert all(round(1000 * row["accuracy"], 9).is_integer() for row in rows)
