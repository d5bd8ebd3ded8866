"""YAML as it is read here: the safe types, no aliases, a file of bounded size.

An alias (``*name``) stands for what ``&name`` marks. Sixty lines of aliases to aliases stand for more values than any
memory holds, and whoever shows such a value, or only walks through it, never comes to an end. No configuration here
needs one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import yaml

MAX_BYTES = 1 << 20
"""Of a configuration or a script. A thousand lines have 40 kB."""


def loader(base: Any) -> Any:
    """``base``, one of PyYAML's loaders, that raises yaml.YAMLError with the line where it meets an alias."""
    from yaml.composer import ComposerError
    from yaml.events import AliasEvent

    class PlainLoader(base):
        """See ``loader``."""

        def compose_node(self, parent: yaml.Node | None, index: Any) -> Any:
            """PyYAML's own, but for aliases."""
            if self.check_event(AliasEvent):
                event = self.peek_event()
                problem = f"aliases (*{event.anchor:.40}) are not read, write the value out"
                raise ComposerError(None, None, problem, event.start_mark)
            return super().compose_node(parent, index)

    return PlainLoader
