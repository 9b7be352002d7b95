"""What the README tells a reader to type has the right form; an integration test executes it."""

from __future__ import annotations

import json
import re
import shlex

from support.guards import ROOT
from support.readme import blocks, commands

README = ROOT / "README.md"
SHELL_LANGUAGES = {"bash", "sh", "shell"}


def test_commands_stand_in_console_blocks_only() -> None:
    assert set() == SHELL_LANGUAGES & {language for language, _ in blocks(README)}


def test_every_line_of_a_console_block_is_a_command() -> None:
    lines = [
        line
        for language, body in blocks(README)
        if language == "console"
        for line in body.splitlines()
    ]

    assert [] == [line for line in lines if not line.startswith("$ ")]


def test_apt_line_names_what_make_needs() -> None:
    (line,) = [command for command in commands(README) if "apt-get" in command]

    assert ["sudo", "apt-get", "install", "--yes"] == shlex.split(line)[:4]
    assert {"git", "make", "python3", "python3-venv", "curl"} == set(shlex.split(line)[4:])


def test_the_clone_is_entered() -> None:
    steps = commands(README)
    clone = next(index for index, command in enumerate(steps) if command.startswith("git clone"))

    assert shlex.split(steps[clone])[-1] == steps[clone + 1].removeprefix("cd ")


def test_every_make_target_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = {command.split()[1] for command in commands(README) if command.startswith("make ")}

    assert {"up", "test", "lint", "bench"} == targets
    assert [] == [name for name in targets if not re.search(rf"^{name}:", makefile, re.MULTILINE)]


def test_the_curl_line_sends_json_to_the_router() -> None:
    (line,) = [command for command in commands(README) if command.startswith("curl")]
    words = shlex.split(line)

    assert "http://127.0.0.1:8000/v1/completions" in words
    assert {"model", "prompt", "max_tokens", "temperature"} == set(json.loads(words[-1]))


def test_every_named_document_exists() -> None:
    named = set(re.findall(r"`((?:docs/)?[\w/-]+\.md)`", README.read_text(encoding="utf-8")))

    assert named
    assert [] == [name for name in sorted(named) if not (ROOT / name).is_file()]
