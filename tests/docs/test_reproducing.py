"""`docs/reproducing.md` names every recipe, with the hours that the recipe expects."""

import re

from tests.docs.pages import DOCS

from dessilbi.applications import recipe as recipes
from dessilbi.applications.recipe import Recipe

PAGE = (DOCS / "reproducing.md").read_text(encoding="utf-8")


def test_every_recipe_is_there_with_its_hours() -> None:
    hours: dict[str, float] = {}
    for line in re.findall(r"^\| \d+ \|.*$", PAGE, re.MULTILINE):
        *_, commands, amount, _ = line.split("|")
        for name in re.findall(r"(?:reproduce|…) ([a-z][\w-]+)", commands):
            hours[name] = float(amount.replace("each", ""))
    expected = {name: Recipe.load(name).hours for name in recipes.names()}
    elsewhere = {name: expected.pop(name) for name in list(expected)
                 if name.startswith(("imagenet", "tuning")) or name.endswith("short")}  # fmt: skip
    assert hours == expected
    for name in elsewhere:
        assert name in PAGE
    for name in ("imagenet-resnet18", "imagenet-alexnet"):
        assert f"{elsewhere[name]:g}" in PAGE
    whole = sum(value for name, value in expected.items() if value and not name.startswith("transfer"))
    assert f"{whole:.0f} hours a seed" in PAGE
