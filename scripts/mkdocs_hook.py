"""Changes of a page for the site of docs/. GitHub shows the pages as they are, and scripts/run_docs.py runs them.

* Fences such as ``bash no-run`` lose the words that are for scripts/run_docs.py.
* Links to files outside of docs/, such as ``../configs/tiny.yaml``, become names: the site contains only docs/.
* What belongs to an item of a list is indented by four characters for each level: GitHub takes two, which end the list
  for the site.
"""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the text of a page as the site's Markdown reads it. Called by mkdocs for each page."""
    return site_markdown(markdown)


def site_markdown(page: str) -> str:
    """Return a page with plain fences, and without links that lead out of docs/."""
    lines, in_code = [], False
    for line in page.splitlines():
        if line.startswith("```"):
            in_code = not in_code
            line = re.sub(r"^```(\w*).*$", r"```\1", line)
        elif not in_code:
            line = re.sub(r"\[([^\]]+)\]\(\.\./[^)]*\)", r"\1", line)
            text = line.lstrip(" ")
            line = " " * 4 * ((len(line) - len(text)) // 2) + text
        lines.append(line)
    return "\n".join(lines) + "\n"
