"""Real runs of a small network on scikit-learn's digits, pruned."""

import json
import os
import shlex
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dessilbi import Selection
from dessilbi.cli import main
from dessilbi.cli.progress import Lines

TRAINED = (
    "train --model lenet5 --model-options widths=[4,6,12,10] --data digits --linear neuron --keep 0.6 --batch 128 "
    "--lr 0.05 --nu 20 --epochs 3 --keep-epochs 2 --seed 5 --device cpu --run run"
)
SMALL = "--level filter --keep 0.5 --rounds 0 --min-keep 2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of three epochs, which kept its second checkpoint."""
    place = tmp_path_factory.mktemp("pruned")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr(sys, "path", list(sys.path))
        assert main(shlex.split(TRAINED)) == 0
    return place


@pytest.fixture
def prune(cli, folder, monkeypatch):
    """`prune("run --level filter")`, in that folder."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "path", list(sys.path))
    return lambda arguments: cli("prune", *shlex.split(arguments))


def table(name: str) -> dict[str, Any]:
    return json.loads(Path(name, "table.json").read_text())


def shown(out: str, *names: str) -> list[list[str]]:
    """The words of the table's lines."""
    return [line.split() for line in out.splitlines() if line.strip().startswith(names)]


def test_select_shrink_and_fine_tune(prune):
    result = prune(f"run {SMALL} --finetune 2")
    assert (result.status, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0] == "epoch 3, level filter: 50 % of the groups kept"
    assert [line.split()[:2] for line in lines[1:3]] == [["epoch", "1/2"], ["epoch", "2/2"]]
    assert lines[3] == "run-filter: lenet5 on digits, from epoch 3 of run"
    assert shown(result.out, "network") == [["network", "accuracy", "params", "non-zero", "MACs", "file"]]
    rows = table("run-filter")["rows"]
    found = shown(result.out, *(row["network"] for row in rows))
    assert [line[0] for line in found] == ["dense", "selected", "shrunk", "fine-tuned"]
    assert [line[1] for line in found] == [f"{100 * row['accuracy']:.2f}" for row in rows]
    # Three convolutions of 25 a filter and channel, two linear layers, all biases; on 32x32, 14x14 and 5x5.
    assert found[0][3] == "2.76K"
    assert (4 * 26 + 6 * 101 + 12 * 151 + 10 * 13 + 10 * 11) == rows[0]["parameters"] == 2762
    assert found[0][5] == "140K"
    assert 28**2 * 25 * 4 + 100 * 25 * 24 + 25 * 72 + 120 + 100 == rows[0]["macs"] == 140420
    command = json.loads(Path("run-filter/environment.json").read_text())["command"]
    assert command == f"dessilbi prune run {SMALL} --finetune 2"


def test_first_the_selection_and_then_the_training(prune):
    result = prune("run --level filter --at 2 --macs 50% --rounds 0")
    assert result.status == 0
    assert result.out.startswith("epoch 2, level filter: ")
    assert result.out.splitlines()[-1] == "fine-tune it for 3 epochs: dessilbi prune run-filter-2 --resume"
    before = table("run-filter-2")["rows"]
    assert before[2]["macs"] <= before[0]["macs"] / 2
    assert [row["network"] for row in before] == ["dense", "selected", "shrunk"]
    again = prune("run-filter-2 --resume")
    assert (again.status, again.err) == (0, "")
    assert [line.split()[1] for line in again.out.splitlines()[:3]] == ["1/3", "2/3", "3/3"]
    after = table("run-filter-2")["rows"]
    assert after[:3] == before
    assert after[3]["network"] == "fine-tuned"
    once_more = prune("run-filter-2 --resume")
    assert not [line for line in once_more.out.splitlines() if line.startswith("epoch")]
    assert table("run-filter-2")["rows"] == after


def test_retrain(prune):
    result = prune(f"run {SMALL} --retrain 1 --run again")
    assert (result.status, result.err) == (0, "")
    assert [line[0] for line in shown(result.out, "dense", "selected", "shrunk", "re")] == [
        "dense", "selected", "shrunk", "retrained"
    ]  # fmt: skip
    rows = table("again")["rows"]
    assert rows[3]["epochs"] == 1
    assert rows[3]["parameters"] == rows[2]["parameters"] < rows[0]["parameters"]


def test_layers(prune):
    result = prune("run --level layer --keep 0.7 --rounds 0 --finetune 1")
    assert result.status == 0
    assert result.out.splitlines()[0].startswith("epoch 3, level layer: ")
    assert table("run-layer")["rows"][3]["network"] == "fine-tuned"


def test_weights(cli, prune):
    arguments = TRAINED.replace("--linear neuron", "--conv weight --linear weight").replace("--run run", "--run single")
    assert cli(*shlex.split(arguments)).status == 0
    result = prune("single --level weight --keep 0.1 --rounds 0 --finetune 1 --run sparse")
    assert (result.status, result.err) == (0, "")
    rows = {row["network"]: row for row in table("sparse")["rows"]}
    chosen = sum(int(mask.sum()) for mask in Selection.load("sparse/selection.safetensors").values())
    assert chosen == (100 + 600 + 1800 + 120 + 100) // 10
    assert chosen <= rows["fine-tuned"]["nonzero"] <= chosen + 4 + 6 + 12 + 10 + 10
    assert rows["selected"]["nonzero"] == rows["fine-tuned"]["nonzero"]
    assert rows["fine-tuned"]["parameters"] == 2762


def test_latency_is_in_the_table(prune):
    result = prune("run --level filter --keep 0.5 --rounds 1 --run timed")
    assert result.status == 0
    timed = {(row["name"], row["batch"]): row for row in table("timed")["timing"]["rows"]}
    (dense, _, shrunk) = shown(result.out, "dense", "selected", "shrunk")
    assert dense[-4:] == [
        f"{1e3 * timed['dense', 1]['seconds']:.3g}", "1.00x", f"{1e3 * timed['dense', 64]['seconds']:.3g}", "1.00x"
    ]  # fmt: skip
    assert shrunk[-1] == f"{timed['shrunk', 64]['ratio']:.2f}x"
    controls = [f"{timed['control', batch]['ratio']:.2f}x" for batch in (1, 64)]
    assert f"a copy of dense: {', '.join(controls)}" in result.out


def test_what_is_worth_a_warning_is_a_line(prune):
    result = prune("run --level filter --keep 0 --min-keep 0 --rounds 0 --run nothing")
    assert result.status == 0
    assert result.err.splitlines() == [
        f"dessilbi prune: nothing of layer '{name}' is selected, but the network needs it: one channel of zeros stays"
        for name in ("features.0", "features.3", "features.6", "classifier.0")
    ]


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_and_resume(prune, monkeypatch):
    def interrupt(self: Lines, metrics: Mapping[str, Any]) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Lines, "epoch", interrupt)
        result = prune(f"run {SMALL} --finetune 2 --run 'cut off'")
    assert result.status == 130
    assert "dessilbi prune 'cut off' --resume" in result.err
    result = prune("'cut off' --resume")
    assert result.status == 0
    assert result.out.splitlines()[0].split()[1] == "2/2"
    assert table("cut off")["rows"][-1]["epochs"] == 2


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        ("", 2, "RUN"),
        ("run", 2, "say what is selected: --level weight, filter or layer"),
        ("run --level row", 2, "'row' is not one of"),
        ("run --level filter --keep 1.5", 2, "--keep"),
        ("run --level filter --keep 0.5 --macs 50%", 2, "--keep and --macs are 2 targets"),
        ("run --level filter --macs half", 2, "'half' is neither a number nor a part of the dense network"),
        ("run --level filter --finetune 1 --retrain 1", 2, "give one of them"),
        ("run --level filter --finetune 0", 2, "--finetune"),
        ("run --resume --keep 0.5", 2, "leave out --keep"),
        ("nowhere --level filter", 1, "nowhere: no such run folder"),
        ("nowhere --resume", 1, "nowhere: no such run folder"),
        ("run --resume", 1, "run: was not made by pruning"),
        ("run --level filter --at 9", 1, "epoch 9 is not on its path, which has epochs 1 to 3"),
        ("run --level filter --at 1", 1, "no checkpoint of the end of epoch 1"),
        ("run --level filter --macs 1 --run never", 1, "macs=1 cannot be reached: with min_keep=1 the least is"),
        (
            "run --level filter --params 1% --max-prune 0.5 --run never",
            1,
            "with min_keep=1 and max_prune=0.5 the least is",
        ),
        ("run --level weight", 1, "recorded by groups of kind 'filter'"),
        ("run --level filter --run run --overwrite", 1, "run: is the run to be pruned"),
    ],
)
def test_wrong_calls(prune, arguments, status, text):
    before = sorted(Path().iterdir())
    result = prune(arguments)
    assert (result.status, result.out) == (status, "")
    assert text in result.err
    assert result.err.count("\n") == 1
    assert sorted(Path().iterdir()) == before


def test_a_folder_that_exists_is_replaced_only_when_asked(prune):
    assert prune(f"run {SMALL} --run mine").status == 0
    before = table("mine")
    result = prune("run --level filter --keep 0.8 --rounds 0 --run mine")
    assert (result.status, result.err.count("\n")) == (1, 1)
    assert "--overwrite" in result.err
    assert table("mine") == before
    assert prune("run --level filter --keep 0.8 --rounds 0 --run mine --overwrite").status == 0
    assert table("mine")["selection"]["keep"] == 0.8


def test_it_teaches(prune):
    result = prune("--help")
    assert (result.status, result.err) == (0, "")
    assert "Examples:" in result.out
