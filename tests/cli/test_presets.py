from pathlib import Path

from dessilbi.training import presets
from dessilbi.training.config import Config


def test_the_list(cli):
    lines = cli("presets").out.splitlines()
    assert [line.split()[0] for line in lines] == list(presets.names())
    assert all(presets.describe(line.split()[0]) in line for line in lines)


def test_the_toml_is_the_preset(cli):
    for name in presets.names():
        Path("printed.toml").write_text(cli("presets", name).out)
        assert Config.from_toml("printed.toml") == presets.get(name)
