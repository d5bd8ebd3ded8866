"""Restricted YAML: only safe types, no aliases, and files of bounded size.

An alias (``*name``) repeats the value marked by ``&name``. Sixty lines of aliases to aliases expand to more values than
fit into any memory, and code that prints or traverses such a value never finishes. Configurations do not need aliases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import yaml

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
