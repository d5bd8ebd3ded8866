"""URIs of object stores: their form, the packages that they need, and their secrets, which no text shows.

    s3://BUCKET/NAME    gs://BUCKET/NAME    memory://NAME, in this process

Standard library only, and nothing is imported or asked for: a URI that cannot be used is refused before ranks start.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from megapar.errors import Complaint, ConfigError

PACKAGES: Mapping[str, tuple[str, str]] = MappingProxyType({"s3": ("s3fs", "s3"), "gs": ("gcsfs", "gcs")})
"""Scheme -> (the module that fsspec needs for it, the extra of megapar that installs it)."""

MEMORY = "memory"
SCHEMES = (*PACKAGES, MEMORY)
DISK = "file://"  # before a whole path on a disk

_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
# Secret keys may contain slashes, and only what is behind a colon, but not a port, may be one.
_SECRET = re.compile(r"(?<=://)(?:[^/\s'\"@]*:(?!\d{1,5}/)[^\s'\"@]*|[^/\s'\"@]*)(?:@[^/\s'\"@]*)*@")


def split_uri(text: str) -> tuple[str, str] | None:
    """Return (scheme in lower case, the rest without slashes at its end), or None if a text is not a URI."""
    match = _URI.fullmatch(text)
    return None if match is None else (match[1].lower(), match[2].rstrip("/") or match[2][:1])


def is_stored(text: str) -> bool:
    """Return True if a text is the URI of an object store."""
    parts = split_uri(text)
    return parts is not None and parts[0] in SCHEMES


def wrong_uri(text: str) -> tuple[str, str]:
    """Return (what prevents the use of a URI, what to do), or ("", ""). Only its form and packages are looked at."""
    problem, fix = wrong_form(text)
    return (problem, fix) if problem else missing_package(text)


def wrong_form(text: str) -> tuple[str, str]:
    """Return (what is wrong with a URI on any machine, what to do), or ("", "")."""
    parts = split_uri(text)
    if parts is None or parts[0] not in SCHEMES:
        known = " or ".join(f"{scheme}://" for scheme in PACKAGES)
        return "is of no store that is built", f"Use {known} (docs/launch.md#object-stores)."
    scheme, rest = parts
    if masked(text) != text:
        fix = "Leave them to the store's own ways, such as AWS_PROFILE or a role of the machine."
        return "contains a user or a password, which would be in logs and process lists", fix
    if any(part in ("", ".", "..") for part in rest.split("/")) or any(letter in rest for letter in "?#*"):
        return f"is not {scheme}://BUCKET/NAME", "Write the names of the bucket and of the folder in it."
    return "", ""


def missing_package(text: str) -> tuple[str, str]:
    """Return (what this machine lacks for a URI of good form, what to do), or ("", "")."""
    module, extra = PACKAGES.get(text.partition("://")[0].lower(), ("fsspec", ""))
    if find_spec(module) is None:
        wanted = f'"megapar[{extra}]"' if extra else module
        return f"needs the package {module}, which is not installed", f"Install it with: pip install {wanted}"
    return "", ""


def with_both_slashes(text: str) -> str:
    """Return the URI that a path such as ``s3:/BUCKET`` is meant to be; "" for any other text."""
    scheme, colon, rest = text.partition(":/")
    scheme = scheme.lower()
    return f"{scheme}://{rest}" if colon and scheme in SCHEMES and not rest.startswith("/") else ""


def refuse_wrong(text: str) -> None:
    """Raise ConfigError for a URI that cannot be used; any other text, and file://PATH, is a path."""
    problem, fix = wrong_uri(text) if "://" in text and not text.startswith(DISK) else ("", "")
    if problem:
        raise ConfigError([Complaint("store", f"{masked(text)} {problem}.", fix)])


def without_secrets(value: Any) -> Any:
    """Return the value of a flag with its texts masked, and lists for tuples."""
    if isinstance(value, (tuple, list)):
        return [without_secrets(item) for item in value]
    return masked(value) if isinstance(value, str) else value


def masked(text: str) -> str:
    """Return a text in which the user and the password of every URI are ``***``."""
    return _SECRET.sub("***@", text)
