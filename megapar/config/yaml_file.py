"""Configuration files: those of the package, which ``--config NAME`` finds by name, and YAML with safe types alone.

The files of the package are those of the repository's ``configs/``, which a wheel contains as ``megapar/configs/``.

An alias of YAML (``*name``) repeats the value marked by ``&name``. Sixty lines of aliases to aliases expand to more
values than fit into any memory, and code that prints or traverses such a value never finishes. Configurations do not
need aliases.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import yaml

FOLDER = Path(__file__).parents[1] / "configs"
"""Folder of the configurations, in a checkout a link to ``configs/`` at its root."""

YAML_FORM = "Write every setting as a line `key: value` that starts at the left margin, without tabs."
SUFFIX = ".yaml"


def preset_names() -> list[str]:
    """Return the names of all configurations in alphabetical order."""
    return sorted(path.name.removesuffix(SUFFIX) for path in FOLDER.glob(f"*{SUFFIX}"))


def config_path(path: str) -> str:
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


MAX_BYTES = 1 << 20
"""Maximum size of a configuration or a script. A thousand lines are about 40 kB."""


def loader(base: Any) -> Any:
    """Return a subclass of ``base``, a PyYAML loader, that raises yaml.YAMLError with the line of an alias."""
    from yaml.composer import ComposerError
    from yaml.events import AliasEvent

    class PlainLoader(base):
        """Loader that refuses aliases."""

        def compose_node(self, parent: yaml.Node | None, index: Any) -> Any:
            """Compose a node as PyYAML does, and raise ComposerError for an alias."""
            if self.check_event(AliasEvent):
                event = self.peek_event()
                problem = f"aliases (*{event.anchor:.40}) are not supported, write the value out"
                raise ComposerError(None, None, problem, event.start_mark)
            return super().compose_node(parent, index)

    return PlainLoader


class Pairs(list[tuple[str, Any]]):
    """Keys and values of a mapping in file order, with repeated keys; a value may be Pairs itself."""

    def plain(self) -> dict[str, Any]:
        """Return nested dicts, for settings that refuse a mapping."""
        return {key: value.plain() if isinstance(value, Pairs) else value for key, value in self}


def load_pairs(text: str) -> Pairs:
    """Return the mapping of a YAML file. Raises yaml.YAMLError, ValueError, RecursionError."""
    import yaml

    base: Any = loader(yaml.SafeLoader)

    class FlagLoader(base):
        """Loader that keeps numbers as strings, which the flags parse: YAML reads 3:4 as 184, 010 as 8, 1.10 as 1.1."""

    def pairs_of(node: yaml.MappingNode) -> Pairs:
        merged = next((key for key, _ in node.value if key.tag == "tag:yaml.org,2002:merge"), None)
        if merged is not None:
            problem = "merge keys (<<) are not supported, write the keys out"
            raise yaml.constructor.ConstructorError(problem=problem, problem_mark=merged.start_mark)
        return Pairs(
            (
                str(reader.construct_object(k, deep=True)),
                pairs_of(v) if isinstance(v, yaml.MappingNode) else reader.construct_object(v, deep=True),
            )
            for k, v in node.value
        )

    FlagLoader.yaml_implicit_resolvers = {
        first: [pair for pair in pairs if pair[0] not in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    reader = FlagLoader(text)
    try:
        node = reader.get_single_node()
        if node is None:
            return Pairs()
        if not isinstance(node, yaml.MappingNode):
            raise ValueError("the top level does not consist of key: value lines")
        return pairs_of(node)
    finally:
        reader.dispose()


def problem_of(error: Exception, text: str) -> str:
    """Describe a YAML error, with the line in which it occurs."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or problem is None:
        return " ".join(str(error).split())
    lines = text.splitlines()
    line = lines[mark.line].rstrip() if mark.line < len(lines) else ""
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}: {line[:80]!r}"
