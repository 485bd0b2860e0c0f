import errno
import subprocess
import sys

import pytest

from dessilbi.cli import main

MISUSED = [
    ("tran", "there is no command 'tran': did you mean 'train'?"),
    ("qqq", "there is no command 'qqq': choose one of data, models, presets, train, grow, show"),
    ("data gte mnist", "there is no command 'gte': did you mean 'get'?"),
    ("data get mnis", "unknown data set 'mnis': did you mean 'mnist'?"),
    ("data show cifar", "unknown data set 'cifar': did you mean 'cifar10'?"),
    ("data get imagenet", "ImageFolder"),
    ("data get mnist --source web", "'web' is not one of 'official', 'package'"),
    ("presets paper/vgg16-weight", "paper/vgg16-weights"),
    ("train --preset paper/vgg16-weight", "paper/vgg16-weights"),
    ("train --nuu 3", "--nu"),
    ("train --nu much", "'much' is not a valid float"),
    ("train --nu -3", "nu"),
    ("train --model-options widths", "'widths' is not KEY=VALUE"),
    ("train --config nowhere.toml", "nowhere.toml"),
    ("train --resume --overwrite", "give one of them"),
    ("show", "RUN"),
    ("show x --last 0", "--last"),
]


@pytest.mark.parametrize(("arguments", "text"), MISUSED)
def test_a_wrong_call_is_one_line_that_helps(cli, trained, arguments, text):
    result = cli(*arguments.split())
    assert result.status == 2
    assert result.out == ""
    assert text in result.err
    assert result.err.count("\n") == 1
    assert result.err.startswith("dessilbi")
    assert result.err.rstrip().endswith("--help)")
    assert not trained


FAILED = [
    (
        ValueError("loss is NaN at step 12:\n  lr above the bound"),
        "dessilbi: loss is NaN at step 12: lr above the bound",
    ),
    (FileExistsError("runs/x: exists: add --resume"), "dessilbi: runs/x: exists: add --resume"),
    (OSError(errno.ENOSPC, "No space left on device", "runs/x"), "runs/x: No space left on device: free space or"),
    (PermissionError(errno.EACCES, "Permission denied", "runs"), "runs: Permission denied: choose a folder that you"),
    (ModuleNotFoundError("No module named 'rich'", name="rich"), "pip install 'dessilbi[train]'"),
    (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0"), "CUDA out of memory: use a smaller --batch"),
    (KeyError("gamma"), "dessilbi: KeyError: 'gamma' (add --debug to see where)"),
]


@pytest.mark.parametrize(("error", "text"), FAILED)
def test_a_failure_is_one_line(cli, trained, error, text):
    trained.error = error
    result = cli("train")
    assert result.status == 1
    assert text in result.err
    assert result.err.count("\n") == 1
    assert "Traceback" not in result.err


@pytest.mark.parametrize("arguments", [("--debug", "train"), ("train", "--debug")])
def test_debug_shows_the_traceback(cli, trained, arguments):
    trained.error = KeyError("gamma")
    result = cli(*arguments)
    assert result.status == 1
    assert "Traceback" in result.err
    assert "in train\n" in result.err


def test_ctrl_c_says_how_to_go_on(cli, trained):
    trained.error = KeyboardInterrupt()
    result = cli("train", "--run", "my runs/x")
    assert result.status == 130
    assert result.err == "dessilbi: interrupted: go on with `dessilbi train --run 'my runs/x' --resume`\n"


def test_sigterm_keeps_its_exit_code(cli, trained):
    trained.error = SystemExit(143)
    result = cli("train", "--run", "x")
    assert (result.status, result.err) == (143, "dessilbi: interrupted: go on with `dessilbi train --run x --resume`\n")


def test_ctrl_c_before_there_is_a_folder(cli, trained, tmp_path):
    trained.error = KeyboardInterrupt()
    (tmp_path / "runs").write_text("in the way")
    assert cli("train", "--run", "runs/x").status == 1
    trained.clear()
    import dessilbi.cli.train as command

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "training_progress", interrupted)
        result = cli("train", "--run", "y")
    assert (result.status, result.err) == (130, "dessilbi: interrupted before anything was saved\n")


def test_an_error_of_another_process_says_which(cli, trained, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    trained.error = ValueError("no")
    assert cli("train").err == "[rank 3] dessilbi: no\n"


def test_a_reader_that_goes_away_is_no_error():
    show = subprocess.Popen(
        [sys.executable, "-m", "dessilbi.cli", "train", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert show.stdout is not None
    assert show.stderr is not None
    show.stdout.close()
    assert b"Traceback" not in show.stderr.read()
    show.stderr.close()
    show.wait()


def test_a_terminal_without_greek_letters():
    done = subprocess.run(
        [sys.executable, "-m", "dessilbi.cli", "train", "--help"],
        env={"PYTHONIOENCODING": "ascii", "PATH": ""},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_without_click_the_remedy_is_named(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith("dessilbi.cli.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "click", None)
    assert main(["--help"]) == 1
    assert capsys.readouterr().err == "dessilbi: the command line needs click: pip install 'dessilbi[train]'\n"
