"""`pdctl plan` and `pdctl size` as a user types them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pdctl.__main__ import main

ROOT = Path(__file__).parents[3]
LOCAL = str(ROOT / "examples/local.yaml")
GLM = str(ROOT / "examples/glm-5.3.yaml")


def rows(text: str) -> dict[str, str]:
    return {line[:16].strip(): line[16:].strip() for line in text.splitlines()}


def test_plan_prints_the_plan_as_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == main(["plan", "-f", LOCAL])

    plan = yaml.safe_load(capsys.readouterr().out)
    assert ["local-prefill-0", "local-decode-0"] == [pod["instance"] for pod in plan["pods"]]


def test_size_of_glm_5_3_needs_its_config_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == main(["size", "-f", GLM, "--memory-gb", "140"])

    table = rows(capsys.readouterr().out)
    assert "53,940 B" == table["bytes per token"]
    assert "16,384" == table["pages for it"]
    assert "56.6 GB" == table["bytes for it"]
    assert table["decode fits"].startswith("no: the longest prompt needs 16,384 pages")


def test_size_says_yes_where_there_is_room(capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == main(["size", "-f", GLM, "--memory-gb", "1000"])

    assert "yes, 2 such prompts at once" == rows(capsys.readouterr().out)["decode fits"]


def test_size_takes_stated_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = yaml.safe_load(Path(LOCAL).read_text())
    document["spec"]["decode"]["args"] = ["--pages=100"]
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump(document))

    assert 0 == main(["size", "-f", str(path)])

    table = rows(capsys.readouterr().out)
    assert table["decode pool"].startswith("100 pages, 6,400 tokens")
    assert table["decode fits"].startswith("no")
    assert table["prefill fits"].startswith("yes")


@pytest.mark.parametrize(
    ("expected", "source"),
    [
        ("model folder", "file://nowhere"),
        ("has no readable config.json", "file://."),
        ("there are builtin://tiny-deepseek, builtin://tiny-glm,", "builtin://tiny"),
        ("its config.json is not on this machine", "hf://a/b"),
    ],
)
def test_a_source_without_config_is_refused_in_one_line(
    expected: str, source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = yaml.safe_load(Path(LOCAL).read_text())
    document["spec"]["model"]["source"] = source
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump(document))

    assert 2 == main(["size", "-f", str(path)])

    told = capsys.readouterr().err
    assert expected in told
    assert 1 == told.count("\n")


def test_broken_config_json_is_refused_with_its_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = yaml.safe_load(Path(LOCAL).read_text())
    document["spec"]["model"]["source"] = "file://."
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(document))
    (tmp_path / "config.json").write_text("[")

    assert 2 == main(["size", "-f", str(tmp_path / "x.yaml")])

    assert f"{tmp_path / 'config.json'}: is no JSON object" in capsys.readouterr().err


def test_memory_must_be_positive(capsys: pytest.CaptureFixture[str]) -> None:
    assert 2 == main(["size", "-f", LOCAL, "--memory-gb", "0"])
    assert "--memory-gb is 0.0; it must be positive" in capsys.readouterr().err
