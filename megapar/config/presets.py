"""Configurations that are part of the package: ``--config NAME`` finds them by name.

They are the files of the repository's ``configs/``, which a wheel contains as ``megapar/configs/``.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "configs"
"""Folder of the configurations, in a checkout a link to ``configs/`` at its root."""

SUFFIX = ".yaml"


def preset_names() -> list[str]:
    """Return the names of all configurations in alphabetical order."""
    return sorted(path.name.removesuffix(SUFFIX) for path in FOLDER.glob(f"*{SUFFIX}"))


def located(path: str) -> str:
    """Return the file that ``--config`` names: the path itself, or a configuration of the package.

    A name has no folder; its suffix ``.yaml`` is optional. An existing file takes precedence over a name, so that
    ``./tiny`` and ``tiny`` are the same file where there is one.
    """
    name = path.removesuffix(SUFFIX)
    if Path(name).name != name or Path(path).is_file():
        return path
    preset = FOLDER / f"{name}{SUFFIX}"
    return str(preset) if preset.is_file() else path


def near_preset(path: str) -> str:
    """Return the name of the configuration of the package that a missing file may mean; "" if none is similar."""
    return next(iter(get_close_matches(Path(path).name.removesuffix(SUFFIX), preset_names(), 1, 0.75)), "")
