"""The commands of a Markdown file: the lines that begin with `$` in its ```console blocks."""

from __future__ import annotations

import re
from pathlib import Path

BLOCK = re.compile(r"^```(?P<language>\w*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(path: Path) -> list[tuple[str, str]]:
    """Language and body of every fenced block, in order."""
    text = path.read_text(encoding="utf-8")
    return [(found["language"], found["body"]) for found in BLOCK.finditer(text)]


def commands(path: Path) -> list[str]:
    """Every command that a reader is told to type, in order."""
    return [
        line.removeprefix("$ ")
        for language, body in blocks(path)
        if language == "console"
        for line in body.splitlines()
        if line.startswith("$ ")
    ]
