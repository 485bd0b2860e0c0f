"""Results of recipes: rows that many processes add, files that are taken over, and the page that is made of them."""

import json
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dessilbi.applications import results
from dessilbi.applications.recipe import Recipe
from dessilbi.applications.results import Results
from dessilbi.report.results import page, table

FACTS = {"command": "dessilbi reproduce mine", "device": "a machine", "commit": "0123456789abcdef", "torch": "2.13.0",
         "date": "2026-11-19T10:00:00+00:00", "jobs": 1, "fast": False}  # fmt: skip
RECIPE = Recipe.of(
    "mine",
    {
        "title": "Mine",
        "section": "Weight pruning",
        "hours": 0.5,
        "hours_from": "estimated",
        "peers": [{"name": "Theirs", "accuracy": 91.0, "weights": 0.1}],
        "steps": {
            "dense": {"train": "paper/vgg16-weights", "paper": {"accuracy": 93.45}},
            "ft120": {
                "prune": "dense", "level": "weight", "at": 120, "finetune": 400,
                "paper": {"accuracy": 94.18, "weights": 0.06}, "goal": {"accuracy": 94.2, "weights": 0.05},
            },
        },
    },
)  # fmt: skip
GRID = Recipe.of(
    "grid",
    {
        "title": "Grid",
        "section": "Winning tickets",
        "steps": {
            "tickets": {
                "compare": "paper/vgg16-ticket", "keeps": [0.05, 0.02],
                "methods": ["dense", "dessilbi-lamp@5", "magnitude-lamp@5"],
            },
        },
    },
)  # fmt: skip


def row(step: str, seed: int, accuracy: float | None, recipe: Recipe = RECIPE, **more: Any) -> dict[str, Any]:
    settings = recipe.settings(recipe.steps[step], more.get("fast", False))
    return {**FACTS, "row": step, "seed": seed, "settings": settings, "accuracy": accuracy, "seconds": 90.0, **more}


def cells(text: str, start: str) -> list[str]:
    """Of the line of a table that starts so."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {start} |")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_a_seed_is_there_once_and_the_newest_stays(tmp_path: Path) -> None:
    mine = Results(tmp_path, "mine")
    mine.add([row("dense", 0, 0.93), row("dense", 1, 0.92)])
    mine.add([row("dense", 0, 0.94, date="2026-11-20T10:00:00+00:00")])
    mine.add([row("dense", 1, 0.10, date="2026-11-18T10:00:00+00:00")])  # an older one that came late
    assert {r["seed"]: r["accuracy"] for r in mine.rows()} == {0: 0.94, 1: 0.92}
    assert mine.rows()[0]["settings"] == RECIPE.settings(RECIPE.steps["dense"])
    assert mine.find(seed=1)[0]["accuracy"] == 0.92


def test_a_training_with_a_support_is_the_same_row_again(tmp_path: Path) -> None:
    mine = Results(tmp_path, "mine")
    mine.add([row("dense", 0, 0.93, support=0.06)])
    mine.add([row("dense", 0, 0.94, support=0.07, date="2026-11-20T10:00:00+00:00")])
    assert [r["accuracy"] for r in mine.rows()] == [0.94]


def test_cells_of_a_grid_stay_apart(tmp_path: Path) -> None:
    mine = Results(tmp_path, "grid")
    found = {("snip", 0.05): 0.9, ("snip", 0.02): 0.8, ("random", 0.02): 0.7}
    for (method, keep), accuracy in found.items():
        mine.add([row("tickets", 0, accuracy, GRID, method=method, keep=keep)])
    assert {(r["method"], r["keep"]): r["accuracy"] for r in mine.rows()} == found


def test_many_at_once_lose_nothing(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda seed: Results(tmp_path, "mine").add([row("dense", seed, seed / 100)]), range(40)))
    assert sorted(r["seed"] for r in Results(tmp_path, "mine").rows()) == list(range(40))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not the results of a recipe"),
        ('{"recipe": "other", "version": 1, "settings": {}, "rows": []}', "it is of the recipe 'other'"),
        ('{"recipe": "mine", "version": 2, "settings": {}, "rows": []}', "its format 2 is newer than 1"),
        ('{"recipe": "mine", "version": 1, "settings": {}, "rows": [{"settings": "abc"}]}', "it has no settings abc"),
    ],
)
def test_a_file_that_is_none_is_refused_by_name(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "mine.json").write_text(text)
    with pytest.raises(ValueError, match="mine.json") as error:
        Results(tmp_path, "mine").add([row("dense", 0, 0.9)])
    assert words in str(error.value)
    assert (tmp_path / "mine.json").read_text() == text


def test_results_of_another_machine_are_taken_over(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there" / "deeper"
    Results(here, "mine").add([row("dense", 0, 0.93)])
    Results(there, "mine").add([row("dense", 1, 0.92)])
    (there / "step_cost.json").write_text('{"rows": []}')
    assert results.merge(tmp_path / "there", here) == {"mine": 1}
    assert [r["seed"] for r in Results(here, "mine").rows()] == [0, 1]
    with pytest.raises(FileNotFoundError, match="no such folder of results"):
        results.merge(tmp_path / "nowhere", here)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no results of recipes"):
        results.merge(tmp_path / "empty", here)


def test_the_table_has_the_paper_the_peers_ours_and_the_difference(tmp_path: Path) -> None:
    accuracies = [0.9350, 0.9380, 0.9371]
    rows = [row("ft120", seed, value, weights=0.05 + seed / 1000) for seed, value in enumerate(accuracies)]
    text = table(RECIPE, rows)
    assert cells(text, "Theirs (of the paper)") == ["91.00 at 10 % of the weights", "", "", "", "", ""]
    assert cells(text, "dense") == ["93.45", "", "not measured yet", "", "", ""]
    percent = [100 * value for value in accuracies]
    mean, sd = statistics.fmean(percent), statistics.stdev(percent)
    assert cells(text, "FT 120") == [
        "94.18 at 6 % of the weights",
        "94.20 at 5 % of the weights",
        f"{mean:.2f} ± {sd:.2f} at 5.1 % of the weights",
        "3",
        f"{mean - 94.18:+.2f}",
        "90 s",
    ]
    assert "Measured on a machine, 2026-11-19, commit 0123456789, torch 2.13.0: `dessilbi reproduce mine`." in text


def test_what_is_not_measured_says_so_and_how() -> None:
    text = table(RECIPE, [])
    assert "Not measured yet: `dessilbi reproduce mine`, about 0.5 hours a seed on one H200 (estimated)." in text
    assert cells(text, "FT 120")[2:] == ["not measured yet", "", "", ""]


def test_bad_rows_stay_in() -> None:
    text = table(RECIPE, [row("dense", 0, 0.10), row("dense", 1, None, error="not a number in epoch 3")])
    assert cells(text, "dense")[2:5] == ["10.00; 1 diverged", "2", "-83.45"]


def test_a_training_says_what_it_has_selected() -> None:
    rows = [row("dense", seed, 0.93, sparse=0.90 + seed / 100, support=0.05 + seed / 50) for seed in range(2)]
    assert cells(table(RECIPE, rows), "dense")[2] == "93.00 ± 0.00 (6 % selected: 90.50)"


def test_a_processor_is_named_with_what_was_used_of_it() -> None:
    facts = {"threads": 1, "cores": 2}
    text = table(RECIPE, [row("dense", 0, 0.93, cuda=None, **facts), row("dense", 1, 0.93, cuda="13.0", **facts)])
    assert "Measured on a machine (1 of 2 cores), a machine, 2026-11-19" in text


def test_fast_and_earlier_settings_stand_apart() -> None:
    earlier = row("dense", 0, 0.80) | {"settings": {"train": {"epochs": 3}}}
    text = table(RECIPE, [row("dense", 0, 0.70, fast=True), earlier])
    assert cells(text.split("Development runs")[0], "dense")[2] == "not measured yet"
    fast, other = text.split("Development runs")[1].split("Measured with other settings")
    assert "70.00" in fast
    assert "80.00" not in fast
    assert "80.00" in other


def test_tickets_are_paired_by_seed() -> None:
    accuracies = {("dessilbi-lamp@5", 0.02): {0: 0.92, 1: 0.91}, ("magnitude-lamp@5", 0.02): {0: 0.90, 1: 0.905}}
    rows = [row("tickets", seed, value, GRID, method=method, keep=keep)
            for (method, keep), found in accuracies.items() for seed, value in found.items()]  # fmt: skip
    rows.append(row("tickets", 0, 0.94, GRID, method="dense", keep=1.0))
    text = table(GRID, rows)
    assert cells(text, "dense") == ["94.00 (1)", ""]
    assert cells(text, "dessilbi-lamp@5") == ["not measured yet", "91.50 ± 0.71 (2)"]
    assert cells(text, "dessilbi-lamp@5 − magnitude-lamp@5") == ["", "+1.25 ± 1.06 (2)"]


def test_the_page_has_all_recipes_and_the_other_files(tmp_path: Path) -> None:
    Results(tmp_path, "mine").add([row("dense", 0, 0.93)])
    Results(tmp_path, "unknown").add([row("dense", 0, 0.77)])
    (tmp_path / "step_cost.json").write_text(json.dumps({"device": "a machine", "date": "2026-11-18"}))
    text = page(tmp_path, [RECIPE, GRID])
    assert text.index("## Weight pruning") < text.index("### Mine") < text.index("## Winning tickets")
    assert "[step_cost.json](step_cost.json): a machine, 2026-11-18" in text
    assert "77.00" in text.split("## unknown, of a recipe that is not here")[1]


def test_comparisons_have_their_tables(tmp_path: Path) -> None:
    rows = [
        {"method": "dense", "keep": 1.0, "mean": 0.96, "sd": 0.009, "seeds": 3, "difference": None,
         "difference_sd": None, "at": 5.0, "cost": 1.0},
        {"method": "dessilbi@2", "keep": 0.05, "mean": 0.941, "sd": None, "seeds": 1, "difference": 0.0125,
         "difference_sd": 0.003, "at": 2.0, "cost": 0.4},
    ]  # fmt: skip
    grid = {"reference": "magnitude", "epochs": 5, "search": {"model": "lenet5", "data": "mnist"}}
    known = {"command": "dessilbi compare x", "date": "2026-11-19", "device": "a machine", "commit": "0123456789abcdef",
             "grid": grid, "rows": rows, "missing": 2}  # fmt: skip
    (tmp_path / "early.json").write_text(json.dumps(known))
    text = page(tmp_path, [RECIPE])
    assert cells(text, "dense | 100 %") == ["100 %", "96.00 ± 0.90", "3", "", "5", "1.00"]
    assert cells(text, "dessilbi@2 | 5 %") == ["5 %", "94.10", "1", "+1.25 ± 0.30", "2", "0.40"]
    assert (
        "lenet5 on mnist, 5 epochs: measured on a machine, 2026-11-19, commit 0123456789: `dessilbi compare x`." in text
    )
    assert "2 cells have not been measured." in text


def test_the_file_has_a_row_a_line(tmp_path: Path) -> None:
    mine = Results(tmp_path, "mine")
    mine.add([row("dense", seed, 0.9) for seed in range(3)])
    lines = (tmp_path / "mine.json").read_text().splitlines()
    assert sum('"seed"' in line for line in lines) == 3
    assert json.loads("\n".join(lines))["version"] == 1
