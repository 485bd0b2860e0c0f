import statistics
import subprocess
import sys
import time

import pytest

import dessilbi

HEAVY = ("torch", "numpy", "rich", "scipy", "sklearn", "PIL", "requests", "pooch", "safetensors")
HELP = [("--help",), ("train", "--help"), ("data",), ("models",), ("presets",)]


@pytest.mark.parametrize("arguments", HELP, ids=" ".join)
def test_help_and_lists_import_nothing_heavy(arguments):
    code = (
        "import sys; from dessilbi.cli import main; status = main(sys.argv[1:]); "
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "[]\n")


@pytest.mark.parametrize("arguments", HELP[:2], ids=" ".join)
def test_help_is_quick(arguments):
    def seconds() -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "dessilbi.cli", *arguments], capture_output=True, check=True)
        return time.perf_counter() - start

    # 0.3 s is the promise, about 0.1 s the measurement; a busy machine is allowed twice the promise.
    assert statistics.median(seconds() for _ in range(5)) < 0.6


def test_version(cli):
    assert cli("--version") == (0, f"dessilbi {dessilbi.__version__}\n", "")


def test_without_a_command_the_help_is_shown(cli):
    plain, asked = cli(), cli("--help")
    assert plain == asked
    assert plain.status == 0
    assert all(f"\n  {name} " in plain.out for name in ("data", "models", "presets", "train", "show"))


@pytest.mark.parametrize("arguments", ["data", "data get", "data show", "models", "presets", "train", "show"])
def test_every_command_teaches(cli, arguments):
    result = cli(*arguments.split(), "--help")
    assert (result.status, result.err) == (0, "")
    assert arguments == "data show" or "Examples:" in result.out


def test_the_commands_of_the_first_page_exist(cli):
    lines = [line.split("  ")[0] for line in cli("--help").out.replace("    dessilbi", "\0").split("\0")[1:]]
    for line in lines:
        arguments = line.split()
        # Nothing is run: an unknown command, preset or option is a matter of the arguments.
        extra = {"train": ["--dry-run"], "models": [], "presets": []}.get(arguments[0], ["--help"])
        assert cli(*arguments, *extra).status == 0, line
