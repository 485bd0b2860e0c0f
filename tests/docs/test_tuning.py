"""The figures of `docs/tuning.md` are those of the stored study, and the study is that of the recipe."""

import re
import statistics
from typing import Any

from tests.docs.pages import DOCS, ROOT

from dessilbi.applications.recipe import Recipe
from dessilbi.applications.results import Results

RECIPE = Recipe.load("tuning-lenet")
ROWS = Results(ROOT / "results", "tuning-lenet").rows()
PAGE = (DOCS / "tuning.md").read_text(encoding="utf-8")


def said(rows: list[dict[str, Any]], name: str) -> str:
    values = [100 * row[name] for row in rows if row.get(name) is not None]
    return f"{statistics.fmean(values):.2f} ± {statistics.stdev(values):.2f}" if values else ""


def test_every_setting_is_in_the_table_with_its_figures() -> None:
    lines = re.findall(r"^\| (.+?) \| (.*?) \| (.*?) \| (.*?) \|$", PAGE.split("## Measured")[1], re.MULTILINE)
    table = {line[0].strip(): [cell.strip() for cell in line[1:]] for line in lines}
    for name, step in RECIPE.steps.items():
        mine = [row for row in ROWS if row["row"] == name]
        assert [row["seed"] for row in mine] == [0, 1, 2], name
        assert table[step.words] == [said(mine, "accuracy"), said(mine, "sparse"), said(mine, "support")], name


def test_the_study_is_what_the_recipe_says() -> None:
    for row in ROWS:
        assert row["settings"] == RECIPE.settings(RECIPE.steps[row["row"]])
        assert not row["commit"].endswith("+")
    assert RECIPE.steps["nu500"].config().nu == 500.0


def test_half_the_path_time_takes_half_the_threshold() -> None:
    """What the page says of λ, in the stored study: the support of a halved run and a halved λ is the whole one's."""
    support = {name: statistics.fmean(row["support"] for row in ROWS if row["row"] == name)
               for name in ("lam001", "lam001-half", "lam0005-half")}  # fmt: skip
    assert abs(support["lam0005-half"] / support["lam001"] - 1) < 0.1
    assert support["lam001-half"] / support["lam001"] < 0.6
    for name, value in support.items():
        assert f"{100 * value:.0f} %" in PAGE, name
