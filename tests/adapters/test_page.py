"""The page `docs/your-own-loop.md` runs as it stands."""

import re
from pathlib import Path as FilePath

import pytest

from dessilbi import Path

PAGE = FilePath(__file__).parents[2] / "docs" / "your-own-loop.md"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("chapters", "libraries", "files"),
    [
        (("A plain loop", "With a scheduler"), (), ["run.path"]),
        (("Lightning",), ("lightning",), ["lightning.path"]),
        (("Hugging Face",), ("transformers", "accelerate"), ["bert.path", "bert/checkpoint-16/dessilbi.path"]),
        (("Accelerate",), ("accelerate",), ["accelerate.path"]),
    ],
)
def test_the_page_runs(tmp_path, monkeypatch, chapters, libraries, files):
    for library in libraries:
        pytest.importorskip(library, reason=f"{library} is not installed: pip install {library}")
    monkeypatch.chdir(tmp_path)
    first, *rest = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    parts = [first, *(part for part in rest if part.startswith(chapters))]
    code = [block for part in parts for block in re.findall(r"```python\n(.*?)```", part, re.DOTALL)]
    assert len(code) == 1 + len(chapters)
    names: dict[str, object] = {}
    for block in code:
        exec(block, names)
    for file in files:
        assert float(Path.load(file).keep()[-1]) == pytest.approx(0.1, abs=1e-3)
