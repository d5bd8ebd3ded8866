"""Expansion of ``~`` and ``$NAME`` in the paths that flags name, as in a shell, and paths that are URLs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megapar.config.values import BadValue
from megapar.files.paths import is_url
from megapar.schema.flag import Flag

_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|([A-Za-z_]\w*))")


def expanded(flag: Flag, value: Any, environ: Mapping[str, str]) -> Any:
    """Apply ``expand`` to a flag's path or tuple of paths. Raises BadValue with the flag's name."""
    try:
        if isinstance(value, tuple):
            if not value and any(flag.defaults.values()):
                raise BadValue("value", "is an empty list.", "Leave it out, or name a path.")
            return tuple(expand(one, environ) for one in value)
        return expand(value, environ)
    except BadValue as error:
        raise BadValue(error.rule, f"{flag.spelling} {error}", error.fix) from None


def expand(path: str, environ: Mapping[str, str]) -> str:
    """Expand ``~``, ``$NAME`` and ``${NAME}``, looked up in ``environ`` and then in this process's environment.

    A path with an undefined variable that exists literally is returned unchanged. Raises BadValue for other undefined
    variables, and if the result is empty.
    """
    result = _expand(path, environ)
    if not result:
        raise BadValue("value", f"is an empty text{f' ({path})' if path else ''}.", "Leave it out, or name a path.")
    return result


def _expand(path: str, environ: Mapping[str, str]) -> str:
    known = {**os.environ, **environ}
    missing = [name for pair in _VARIABLE.findall(path) for name in pair if name and name not in known]
    if missing and not Path(path).exists():
        fix = "Set it in the shell that starts the run, or write the path out."
        raise BadValue("undefined-variable", f"{path}: ${missing[0]} is not set in the environment.", fix)
    if missing:
        return path
    path = _VARIABLE.sub(lambda match: known[match[1] or match[2]], path)
    if (path == "~" or path.startswith("~/")) and "HOME" in known:
        return known["HOME"] + path[1:]
    return os.path.expanduser(path)


def remote_paths(flags: Mapping[str, Flag], values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the flags whose paths are URLs, each with the first of them. Names of datasets may be anything."""
    found = []
    for name, flag in flags.items():
        value = values.get(name) if flag.path and name != "hf_dataset" else None
        paths = value if isinstance(value, tuple) else (value,)
        found += [f"{flag.spelling} {path}" for path in paths if isinstance(path, str) and is_url(path)][:1]
    return tuple(found)
