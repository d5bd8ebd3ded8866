"""The generated pages: what the table of presets reads from the values and the headers of the files in configs/."""

from __future__ import annotations

from pathlib import Path

import pytest

from megapar.config.yaml_file import FOLDER
from megapar.tools.configs import header_title
from scripts.generated_pages import PAGES, header_source, main, preset_rows


def test_each_file_has_a_complete_row() -> None:
    found = preset_rows(FOLDER)
    assert [row[0].partition("`")[2].partition("`")[0] for row in found] == sorted(
        p.name for p in FOLDER.glob("*.yaml")
    )
    assert all(all(row) for row in found)


def test_a_row_says_what_the_file_says(tmp_path: Path) -> None:
    first = "# A small one (of 2; not 3): on 1,024 ranks; more. Then\n# others.\n#\n"
    header = f"{first}# Not.\n# source: a paper,\n#         its code\n"
    (tmp_path / "small.yaml").write_text(
        f"{header}script: pretrain_ernie.py\nworld_size: 1024\nernie_model: ernie3\nnum_layers: 2\nhidden_size: 2048\n",
        encoding="utf-8",
    )
    (row,) = preset_rows(tmp_path)
    assert row[:2] == ("[`small.yaml`](../configs/small.yaml)", "A small one: on 1,024 ranks")
    assert row[2:] == ("ERNIE 3.0, 2 layers of 2,048", "1,024", "a paper, its code")


def test_a_title_ends_with_its_sentence() -> None:
    assert header_title("# ERNIE-4.5 has 0.3 B. More.\n# source: x\n") == "ERNIE-4.5 has 0.3 B"
    assert header_title("# Minutes on a laptop.\n# source: x\n") == "Minutes on a laptop"
    assert header_source("# Nothing.\n") == ""


def test_pages_are_written_and_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--folder", str(tmp_path), "--check"]) == 1
    assert main(["--folder", str(tmp_path)]) == 0
    assert main(["--folder", str(tmp_path), "--check"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == set(PAGES)
    (tmp_path / "flags.md").write_text("old", encoding="utf-8")
    assert main(["--folder", str(tmp_path), "--check"]) == 1
    assert "flags.md is stale" in capsys.readouterr().err
