#!/usr/bin/env python3
"""Check that the checkout is the release that a tag names, and build its wheel in dist/.

    scripts/release.py v0.3.0 --check    version, changelog and clean tree; builds nothing
    scripts/release.py v0.3.0            also builds the wheel and checks what is in it

Prints the changelog's section of the version, which is the text of the release. Exit status 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NUMBERS = re.compile(r"v(\d+\.\d+\.\d+(?:rc\d+)?)")


def complaints(tag: str, root: Path) -> Iterator[str]:
    """Yield what is wrong with the checkout as the release of a tag."""
    named = NUMBERS.fullmatch(tag)
    if named is None:
        yield f"{tag} is not a release: tags are v1.2.3 or v1.2.3rc1"
        return
    version = named[1]
    for file, pattern in (
        ("pyproject.toml", r'^version = "(.*)"$'),
        ("megapar/__init__.py", r'^__version__ = "(.*)"$'),
    ):
        found = re.search(pattern, (root / file).read_text(encoding="utf-8"), re.MULTILINE)
        if found is None or found[1] != version:
            yield f"{file} has version {found[1] if found else 'none'}, not {version}"
    text = section(version, root)
    if not text:
        yield f"CHANGELOG.md has no section '## {version} (YEAR-MONTH-DAY)' with a line in it"
    elif section("Unreleased", root):
        yield "CHANGELOG.md has lines under Unreleased: move them into the section of the version"


def section(name: str, root: Path) -> str:
    """Return the lines of the changelog under a version, or under Unreleased; "" without any."""
    head = rf"## {re.escape(name)}" + ("" if name == "Unreleased" else r" \(\d{4}-\d\d-\d\d\)")
    text = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    found = re.search(rf"^{head}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    lines = found[1].strip() if found else ""
    return lines if re.search(r"^\* ", lines, re.MULTILINE) else ""


def wheel_complaints(wheel: Path, version: str) -> Iterator[str]:
    """Yield what is wrong with a built wheel: its version, the license, the command, data files and the package."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        info = f"megapar-{version}.dist-info"
        text = {
            name: archive.read(name).decode()
            for name in names
            if name.startswith(f"{info}/") and "licenses" not in name
        }
    if f"\nVersion: {version}\n" not in text.get(f"{info}/METADATA", ""):
        yield f"{wheel.name} is not of version {version}"
    if "megapar = megapar.tools.main:main" not in text.get(f"{info}/entry_points.txt", ""):
        yield f"{wheel.name} has no megapar command"
    if not any(name.startswith(f"{info}/licenses/") for name in names):
        yield f"{wheel.name} has no license"
    for needed in ("trainer.py", "core/device/kinds.yaml", "tools/translation/tables/paddle.txt"):
        if f"megapar/{needed}" not in names:
            yield f"{wheel.name} lacks megapar/{needed}"
    outside = sorted({name.split("/")[0] for name in names} - {"megapar", info})
    if outside:
        yield f"{wheel.name} contains {', '.join(outside)}, which is not part of the package"


def main() -> int:
    """Check, build, and print the text of the release."""
    parser = argparse.ArgumentParser(description="Check a release, and build its wheel in dist/.")
    parser.add_argument("tag", help="v1.2.3")
    parser.add_argument("--check", action="store_true", help="build nothing")
    options = parser.parse_args()
    version = options.tag.removeprefix("v")
    wrong = list(complaints(options.tag, ROOT))
    changed = subprocess.run(
        ["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    wrong += [f"files are not committed:\n{changed.rstrip()}"] if changed else []
    if not wrong and not options.check:
        dist = ROOT / "dist"
        with tempfile.TemporaryDirectory() as clean:  # setuptools packs what an earlier build left in build/lib
            archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
            subprocess.run(["tar", "-x", "-C", clean], input=archive, check=True)
            command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(dist), clean]
            subprocess.run(command, check=True)
        wrong += wheel_complaints(dist / f"megapar-{version}-py3-none-any.whl", version)
    for one in wrong:
        print(f"release: {one}", file=sys.stderr)
    if not wrong:
        print(section(version, ROOT))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
