"""Manifests: the sizes and SHA-256 digests of a complete file or folder.

{"name": "tokens/4f2a..", "files": {"corpus.bin": [size, "sha256"], ...}}
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megapar.files.location import at
from megapar.files.regular_file import read_json

FILE_NAME = "manifest.json"
MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class Manifest:
    """The recorded content of a file or folder.

    Attributes:
        name: The name it was written under, so that a moved copy is not mistaken for something else.
        files: Path in the folder ("" for a single file) to (size in bytes, SHA-256 in hexadecimal).
    """

    name: str
    files: dict[str, tuple[int, str]]

    @classmethod
    def of(cls, name: str, path: Path) -> Manifest:
        """Make the manifest of the file or folder at this path."""
        return cls(name, {part: (file.stat().st_size, at(file).sha256()) for part, file in _files(path)})

    @classmethod
    def read(cls, path: Path) -> Manifest | None:
        """Read a manifest. Return None if the file is missing or is not a manifest."""
        try:
            record = read_json(path, MAX_BYTES)
            files = {str(part): (_number(size), str(digest)) for part, (size, digest) in record["files"].items()}
            return cls(str(record["name"]), files)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def to_bytes(self) -> bytes:
        """Return the content of the manifest's file."""
        return json.dumps({"name": self.name, "files": self.files}, indent=1, sort_keys=True).encode() + b"\n"

    @property
    def bytes(self) -> int:
        """The size of all files together."""
        return sum(size for size, _ in self.files.values())

    def wrong_sizes(self, path: Path) -> str:
        """Describe the first file at the path that is missing, unknown or of another size, or return ""."""
        actual = {part: file.stat().st_size for part, file in _files(path)}
        for part in sorted(self.files.keys() | actual.keys()):
            name = part or path.name
            if part not in actual:
                return f"lacks {name}"
            if part not in self.files:
                return f"holds {name}, which does not belong to it"
            if actual[part] != self.files[part][0]:
                return f"is damaged: {name} has {actual[part]:,} bytes instead of {self.files[part][0]:,}"
        return ""

    def wrong_content(self, path: Path) -> str:
        """Describe the first difference as ``wrong_sizes`` does, after reading and hashing every byte."""
        for part, file in _files(path):
            if part in self.files and at(file).sha256() != self.files[part][1]:
                return f"is damaged: {part or path.name} does not have the SHA-256 that it was written with"
        return self.wrong_sizes(path)


def _files(path: Path) -> Iterator[tuple[str, Path]]:
    """Yield every file at the path in order of name, except the manifest itself and hidden files (of NFS)."""
    if not path.is_dir():
        if path.exists():
            yield "", path
        return
    for folder, folders, files in os.walk(path):
        folders.sort()
        for name in sorted(files):
            file = Path(folder, name)
            part = str(file.relative_to(path))
            if part != FILE_NAME and not name.startswith("."):
                yield part, file


def _number(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.100} is not a size")
    return value
