"""`docs/tutorial.md` runs as it stands, on the 5 000 digits that lie beside the tests."""

import re
import shlex
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tests.docs.pages import ROOT, blocks, commands

from dessilbi.cli import main
from dessilbi.training.run import Run

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install 'dessilbi[onnx]'")


def test_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    done = []
    for language, text in blocks("tutorial.md", "bash", "python"):
        if language == "python":
            exec(text, names)
            continue
        for command in commands(text):
            program, *arguments = shlex.split(command)
            done.append(arguments[0] if program == "dessilbi" else program)
            if program == "pip":
                # What it would install has to be there under this name.
                extras = re.fullmatch(r"dessilbi\[(.*)\]", arguments[-1])
                assert extras
                known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
                assert set(extras[1].split(",")) <= known.keys()
            elif arguments[:2] == ["data", "get"]:
                shutil.copytree(ROOT / "tests" / "data" / "mnist-5000", tmp_path / "data" / arguments[2])
            else:
                assert program == "dessilbi"
                assert main(arguments) == 0, (command, capsys.readouterr().err)
    assert done == ["pip", "data", "train", "show", "presets", "prune", "export", "report"]

    assert names["sel"].keep == pytest.approx(0.5, abs=0.01)
    small = Run.open(tmp_path / "runs" / "small")
    assert names["accuracy"] == pytest.approx(small.metrics()[-1]["dense"], abs=2e-3)
    assert names["accuracy"] > 0.9
    assert (tmp_path / "small.onnx").stat().st_size < 200_000  # the weights of the dense one are 247 kB
    assert "</html>" in (tmp_path / "report.html").read_text(encoding="utf-8")
    shown = capsys.readouterr().out
    assert "with onnxruntime" in shown
