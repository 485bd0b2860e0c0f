"""What needs neither library."""

import importlib
import sys

import pytest

from dessilbi.adapters.recorder import Settings


@pytest.mark.parametrize(
    ("module", "libraries", "remedy"),
    [
        ("lightning", ("lightning", "lightning.pytorch", "pytorch_lightning"), "pip install lightning"),
        ("huggingface", ("transformers",), "pip install transformers"),
    ],
)
def test_a_missing_library_is_named(monkeypatch, module, libraries, remedy):
    for library in libraries:
        monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"dessilbi.adapters.{module}", raising=False)
    with pytest.raises(ImportError, match=remedy) as error:
        importlib.import_module(f"dessilbi.adapters.{module}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keep": 0.0}, "keep .*0.0"),
        ({"keep": 6}, "keep .*6"),
        ({"every_n_epochs": 0}, "every_n_epochs .*0"),
        ({"early": -1}, "early .*-1"),
        ({"early": 2.5}, "early .*2.5"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        Settings(**arguments)
