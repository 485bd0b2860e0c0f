import json

import pytest

from dessilbi import latency

FEW = ("--rounds", "2", "--batch", "1", "--batch", "3", "--threads", "1")


def test_the_table(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    result = cli("latency", "lenet5", "lenet5", *FEW)
    assert result.status == 0
    lines = [line.split() for line in result.out.splitlines() if line.strip()]
    assert "torch, cpu, 1 threads, inputs 1x28x28, 2 rounds" in result.out
    assert lines[1] == ["model", "parameters", "batch", "median", "speed", "middle", "half"]
    rows = [line for line in lines if "61,706" in line]
    assert [" ".join(row[: row.index("61,706")]) for row in rows] == ["lenet5", "lenet5 (2)", "control"] * 2
    assert [row[row.index("61,706") + 1] for row in rows] == ["1"] * 3 + ["3"] * 3
    assert rows[0][-4:] == ["1.00x", "1.00", "-", "1.00"]
    assert all(row[-5] == "ms" for row in rows)


def test_json(cli):
    result = cli("latency", "lenet5", "--backend", "onnxruntime", "--json", *FEW)
    assert result.status == 0
    found = json.loads(result.out)
    assert found["backend"] == "onnxruntime"
    assert [(row["name"], row["batch"]) for row in found["rows"]] == [
        ("lenet5", 1),
        ("control", 1),
        ("lenet5", 3),
        ("control", 3),
    ]
    assert all(row["speed"]["seconds"] > 0 for row in found["rows"])


@pytest.fixture
def measured(monkeypatch):
    """Calls of `measure`, whose control is off."""
    calls = []

    def process(file, threads):
        calls.append(json.loads(file.read_text()))
        return {"version": "a clock", "samples": [{"lenet5": [1.0], latency.CONTROL: [2.0]}] * 2}

    monkeypatch.setattr(latency, "_in_its_own_process", process)
    return calls


def test_a_control_that_is_off_is_said(cli, measured):
    result = cli("latency", "lenet5")
    assert result.status == 0
    lines = result.err.splitlines()
    assert [line[:26] for line in lines] == ["dessilbi latency: batch 1:", "dessilbi latency: batch 64"]
    assert all("reads 0.50 times" in line for line in lines)
    assert "0.50x" in result.out


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        ("", 2, "MODEL"),
        ("lenet6", 1, "did you mean 'lenet5'"),
        ("lenet5 resnet20", 1, "resnet20 takes inputs of 3x32x32 and lenet5 of 1x28x28"),
        ("lenet5 --backend tvm", 2, "'tvm' is not one of"),
        ("lenet5 --batch 0", 2, "--batch"),
        ("lenet5 --input-shape 3,32", 2, "'3,32' is not a shape"),
        ("lenet5 --backend onnxruntime --device cuda", 1, "onnxruntime is measured on the CPU"),
        ("dessilbi.models.lenet:LeNet5", 1, "--input-shape 3x32x32"),
    ],
)
def test_wrong_calls(cli, measured, arguments, status, text):
    result = cli("latency", *arguments.split())
    assert (result.status, result.out) == (status, "")
    assert text in result.err
    assert result.err.count("\n") == 1
    assert not measured


def test_it_teaches(cli):
    result = cli("latency", "--help")
    assert (result.status, result.err) == (0, "")
    assert "Examples:" in result.out
