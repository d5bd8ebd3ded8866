"""What scripts/release.py refuses to release."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from scripts.release import complaints, section, wheel_complaints

CHANGELOG = """# Changelog

## Unreleased

## 0.3.0 (2026-12-01)

### Added

* A line.

## 0.2.0 (2026-11-23)

* Another line.
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "megapar").mkdir()
    (tmp_path / "megapar/__init__.py").write_text('__version__ = "0.3.0"\n')
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "megapar"\nversion = "0.3.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    return tmp_path


def test_a_release_has_its_version_everywhere(checkout: Path) -> None:
    assert list(complaints("v0.3.0", checkout)) == []
    assert section("0.3.0", checkout) == "### Added\n\n* A line."
    assert list(complaints("0.3", checkout)) == ["0.3 is not a release: tags are v1.2.3 or v1.2.3rc1"]
    assert list(complaints("v0.2.0", checkout)) == [
        "pyproject.toml has version 0.3.0, not 0.2.0",
        "megapar/__init__.py has version 0.3.0, not 0.2.0",
    ]


def test_the_changelog_has_a_section_and_nothing_is_left(checkout: Path) -> None:
    (checkout / "CHANGELOG.md").write_text(CHANGELOG.replace("## Unreleased\n", "## Unreleased\n\n* Not moved.\n"))
    assert ["under Unreleased" in one for one in complaints("v0.3.0", checkout)] == [True]
    (checkout / "CHANGELOG.md").write_text(CHANGELOG.replace("* A line.", ""))
    assert ["has no section" in one for one in complaints("v0.3.0", checkout)] == [True]


def test_a_wheel_has_what_it_needs_and_nothing_else(tmp_path: Path) -> None:
    whole = {
        "megapar-0.3.0.dist-info/METADATA": "Name: megapar\nVersion: 0.3.0\n",
        "megapar-0.3.0.dist-info/entry_points.txt": "[console_scripts]\nmegapar = megapar.tools.main:main\n",
        "megapar-0.3.0.dist-info/licenses/LICENSE": "",
        "megapar/trainer.py": "",
        "megapar/core/device/kinds.yaml": "",
        "megapar/tools/translation/tables/paddle.txt": "",
    }

    def wrong(files: dict[str, str]) -> list[str]:
        path = tmp_path / "a.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name, text in files.items():
                archive.writestr(name, text)
        return list(wheel_complaints(path, "0.3.0"))

    assert wrong(whole) == []
    for name in whole:
        assert len(wrong({other: text for other, text in whole.items() if other != name})) == 1, name
    assert wrong({**whole, "tests/a.py": ""}) == ["a.whl contains tests, which is not part of the package"]
