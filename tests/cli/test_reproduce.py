"""`dessilbi reproduce` and `dessilbi results`, on digits."""

import json
from pathlib import Path

import pytest
from tests.cli.conftest import Cli

RECIPE = """
title = "A tiny network on digits"
section = "Training"
seeds = 2
hours = 0.001
hours_from = "estimated"
settings = {model = "tests.training.nets:tiny", epochs = 4}

[steps.sgd]
train = "paper/lenet-mnist-sgd"
settings = {data = "digits"}
words = "SGD"
paper = {accuracy = 90.0}

[steps.dessilbi]
train = "quick/lenet-digits"
paper = {accuracy = 90.0}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    (tmp_path / "tiny.toml").write_text(RECIPE)
    return "tiny.toml"


def test_a_recipe_from_the_list_to_the_page(cli: Cli, recipe: str) -> None:
    todo = cli("reproduce", recipe, "--todo", "--seeds", "1")
    assert (todo.status, todo.out.splitlines()) == (0, ["sgd, seed 0", "dessilbi, seed 0"])
    made = cli("reproduce", recipe, "--device", "cpu", "--row", "dessilbi")
    assert made.status == 0, made.err
    assert "results/tiny.json" in made.out
    found = json.loads(Path("results/tiny.json").read_text())
    assert [(row["row"], row["seed"]) for row in found["rows"]] == [("dessilbi", 0), ("dessilbi", 1)]
    for row in found["rows"]:
        assert row["command"] == "dessilbi reproduce tiny.toml --device cpu --row dessilbi"
        assert row["date"].startswith("20")
        assert row["commit"]
        assert row["device"]
    assert cli("reproduce", recipe, "--todo").out.splitlines() == ["sgd, seed 0", "sgd, seed 1"]
    assert "all is measured" in cli("reproduce", recipe, "--row", "dessilbi").out
    assert cli("reproduce", recipe, "--device", "cpu", "--fast", "--seed", "3", "--row", "sgd").status == 0

    assert cli("results").out.strip() == "results/README.md"
    page = Path("results/README.md").read_text()
    assert "Not measured yet: `dessilbi reproduce weights-vgg16`" in page
    part = page.split("## tiny, of a recipe that is not here")[1]
    mean = 100 * sum(row["accuracy"] for row in found["rows"]) / 2
    assert f"{mean:.2f}" in part


def test_the_list_says_what_is_measured(cli: Cli) -> None:
    listed = cli("reproduce")
    assert listed.status == 0
    lines = {line.split()[0]: line for line in listed.out.splitlines()}
    assert "0 of 24" in lines["weights-vgg16"]
    assert "105" in lines["imagenet-resnet18"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["weights-vgg61"], "did you mean 'weights-vgg16'?"),
        (["weights-vgg16", "--row", "ft121"], "row 'ft121': weights-vgg16 has dense, ft60, ft120"),
        (["weights-vgg16", "--seeds", "0"], "0 is not in the range"),
        (["weights-vgg16", "--jobs", "0"], "0 is not in the range"),
        (["none.toml"], "no such recipe"),
    ],
)
def test_mistakes_are_said(cli: Cli, arguments: list[str], words: str) -> None:
    failed = cli("reproduce", *arguments)
    assert failed.status != 0
    assert words in failed.err
    assert "Traceback" not in failed.err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ('title = ""', "title is missing"),
        ('section = "Elsewhere"', "section='Elsewhere': must be one of Weight pruning"),
        ('hours_from = ""', "hours=0.001: say in hours_from"),
        ('secton = "Training"', "a recipe has 'secton': did you mean 'section'?"),
    ],
)
def test_a_recipe_that_is_wrong_is_named(cli: Cli, change: str, words: str) -> None:
    name = change.split(" ")[0]
    lines = [line for line in RECIPE.splitlines() if not line.startswith(f"{name} =")]
    Path("wrong.toml").write_text("\n".join([change, *lines]))
    failed = cli("reproduce", "wrong.toml")
    assert failed.status != 0
    assert words in failed.err


def test_data_that_are_missing_are_said(cli: Cli) -> None:
    failed = cli("reproduce", "training-lenet-short", "--row", "sgd", "--seeds", "1", "--device", "cpu")
    assert failed.status == 1
    assert "the same command tries again" in failed.err
    assert "dessilbi data get mnist" in failed.err
