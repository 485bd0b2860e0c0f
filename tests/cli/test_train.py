import contextlib
import dataclasses
import os
from pathlib import Path

import pytest

from dessilbi.cli.options import SECTIONS
from dessilbi.training import presets
from dessilbi.training.config import Config

FIELDS = [field.name for field in dataclasses.fields(Config)]


def configured(cli, *arguments: str) -> Config:
    """The configuration that `dessilbi train ARGUMENTS` would train with, read back from what --dry-run prints."""
    result = cli("train", "--dry-run", *arguments)
    assert (result.status, result.err) == (0, "")
    file = Path("printed.toml")
    file.write_text(result.out)
    return Config.from_toml(file)


def preset_with(field: str) -> str:
    """A preset that does not leave `field` at its default."""
    return next(name for name in presets.names() if getattr(presets.get(name), field) != getattr(Config(), field))


def test_every_field_is_an_option_with_words(cli):
    text = cli("train", "--help").out
    assert [name for name in FIELDS if f"--{name.replace('_', '-')} " not in text] == []
    assert {name for section in SECTIONS.values() for name in section} == set(FIELDS)
    assert all(f"\n{title}:\n" in text for title in SECTIONS)


def test_no_option_is_the_default(cli):
    assert configured(cli) == Config()


def test_dry_run_writes_nothing(cli, trained, tmp_path):
    assert cli("train", "--dry-run").status == 0
    assert list(tmp_path.iterdir()) == []
    assert not trained


def test_what_comes_later_wins(cli):
    preset = preset_with("momentum")
    base = presets.get(preset)
    assert configured(cli, "--preset", preset) == base
    Path("mine.toml").write_text("nu = 7.0\nkappa = 3.0\n")
    assert configured(cli, "--preset", preset, "--config", "mine.toml") == base.replace(nu=7.0, kappa=3.0)
    both = configured(cli, "--nu", "9", "--preset", preset, "--config", "mine.toml")
    assert both == base.replace(nu=9.0, kappa=3.0)
    assert configured(cli, "--config", "mine.toml") == Config(nu=7.0, kappa=3.0)


def test_only_the_sum_of_all_has_to_make_sense(cli):
    preset = preset_with("keep")
    Path("mine.toml").write_text('optimizer = "sgd"\n')  # which knows no keep
    assert cli("train", "--preset", preset, "--config", "mine.toml").status == 2
    config = configured(cli, "--preset", preset, "--config", "mine.toml", "--keep", "none")
    assert (config.optimizer, config.keep) == ("sgd", None)


def test_a_default_that_is_given_counts(cli):
    preset = preset_with("momentum")
    default = Config().momentum
    assert configured(cli, "--preset", preset, "--momentum", str(default)) == presets.get(preset).replace(
        momentum=default
    )


def test_options_have_the_types_of_the_fields(cli):
    arguments = (
        "--nu 20 --lam 0.5 --keep 0.06 --batch 64 --decoupled-weight-decay --flip --nesterov --momentum 0.9 "
        "--exclude conv1.weight --exclude fc* --model-options widths=[4,8] --model-options kind=wide --lr 1e-3"
    )
    config = configured(cli, *arguments.split())
    assert config == Config(
        nu=20.0,
        lam=0.5,
        keep=0.06,
        batch=64,
        decoupled_weight_decay=True,
        flip=True,
        nesterov=True,
        momentum=0.9,
        exclude=("conv1.weight", "fc*"),
        model_options={"widths": [4, 8], "kind": "wide"},
        lr=1e-3,
    )


def test_none_and_no_take_back(cli):
    Path("mine.toml").write_text("keep = 0.1\nflip = true\n")
    config = configured(cli, "--config", "mine.toml", "--keep", "none", "--no-flip")
    assert config.keep is None
    assert config.flip is False


def test_the_printed_file_starts_the_same_run(cli):
    first = cli("train", "--dry-run", "--nu", "20", "--keep", "0.06").out
    Path("mine.toml").write_text(first)
    assert cli("train", "--dry-run", "--config", "mine.toml").out == first


@pytest.mark.parametrize("text", ["nu = ", "nu = 'much'", "nuu = 3.0", "nu = -1.0"])
def test_a_file_that_is_wrong(cli, trained, text):
    Path("mine.toml").write_text(text)
    result = cli("train", "--config", "mine.toml")
    assert result.status == 2
    assert result.err.count("\n") == 1
    assert not trained


def test_what_train_is_called_with(cli, trained):
    result = cli("train", "--nu", "20", "--run", "my run", "--overwrite")
    assert (result.status, result.err) == (0, "")
    (call,) = trained
    assert call.config == Config(nu=20.0)
    assert call.folder == Path("my run")
    assert (call.options["resume"], call.options["overwrite"]) == (False, True)
    assert call.options["command"] == "dessilbi train --nu 20 --run 'my run' --overwrite"
    assert result.out.splitlines()[-1] == "done: dessilbi show 'my run'"


def test_the_run_folder_is_named_after_what_runs(cli, trained):
    preset = presets.names()[0]
    cli("train", "--preset", preset)
    cli("train", "--model", "resnet20", "--data", "cifar10")
    assert [call.folder for call in trained] == [Path("runs", preset.replace("/", "-")), Path("runs/resnet20-cifar10")]


def test_not_on_a_terminal_there_is_one_plain_line_an_epoch(cli, trained):
    assert cli("train", "--run", "x").out.splitlines() == [
        "epoch 1/2  loss 0.5000  dense 90.00 %  keep 0.06  λ 1.25  time 3.0 s",
        "epoch 2/2  loss 0.5000  dense 90.00 %  sparse 87.50 %  keep 0.06  λ 1.25  time 3.0 s",
        "a note",
        "done: dessilbi show x",
    ]


def test_only_the_first_process_shows_progress(cli, trained, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert cli("train") == (0, "", "")
    assert trained[0].options["progress"] is None


@pytest.mark.skipif(os.name != "posix", reason="pseudo-terminals")
@pytest.mark.parametrize("colour", [True, False])
def test_on_a_terminal_there_is_a_bar(trained, tmp_path, monkeypatch, colour):
    import pty
    import sys

    from dessilbi.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "RANK", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    if not colour:
        monkeypatch.setenv("NO_COLOR", "1")
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        assert main(["train"]) == 0
        terminal.flush()
        monkeypatch.undo()
    shown = _read_all(ours).decode()
    assert "epoch 2/2  loss 0.5000  dense 90.00 %  sparse 87.50 %" in shown
    assert "━" in shown
    assert ("\x1b[3" in shown or "\x1b[9" in shown) == colour


def _read_all(handle: int) -> bytes:
    """What was written to a pseudo-terminal whose other end is closed; it comes in pieces."""
    read = b""
    with contextlib.suppress(OSError):  # Linux says so when there is no more
        while piece := os.read(handle, 1 << 16):
            read += piece
    os.close(handle)
    return read
