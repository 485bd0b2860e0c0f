"""The pages of the documentation, and what is written in their blocks."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def blocks(page: str, *languages: str) -> list[tuple[str, str]]:
    """Language and text of the fenced blocks of a page, from top to bottom."""
    found = re.findall(r"^```(\w+)\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [(language, text) for language, text in found if language in languages]


def commands(text: str) -> list[str]:
    """The commands of a block of shell, without their comments and with their lines joined."""
    lines = text.replace("\\\n", " ").splitlines()
    return [line.split("  #")[0].strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
