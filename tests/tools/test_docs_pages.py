"""Pages of docs/: links lead somewhere, all are in the index and the site (for which a hook changes them), and quoted
messages are printed.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import yaml

from megapar.arguments import FLAGS
from megapar.compatibility import RULES
from megapar.model.architectures import ARCHITECTURES
from megapar.schema.rule import REFUSE
from scripts.mkdocs_hook import on_page_markdown, site_markdown
from tests.equivalence import table

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TOP = ("README", "CONTRIBUTING", "ARCHITECTURE", "AGENTS")
PAGES = (*sorted(DOCS.glob("*.md")), *(ROOT / f"{name}.md" for name in TOP))


def prose(path: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@cache
def anchors(path: Path) -> frozenset[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    titles = re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(target)
    assert broken == []


def test_every_page_is_in_the_index() -> None:
    linked = set(re.findall(r"\]\(([\w-]+\.md)", prose(DOCS / "index.md")))
    assert {path.name for path in DOCS.glob("*.md")} - {"index.md"} == linked


def test_every_page_is_in_the_site() -> None:
    class Loader(yaml.SafeLoader):
        """Reads the tags for Python objects, of which mkdocs' configuration has one, as their names."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)
    site = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)  # noqa: S506 (a safe loader)
    named = re.findall(r"'([\w-]+\.md)'", str(site["nav"]))
    assert sorted(named) == sorted(path.name for path in DOCS.glob("*.md"))


def test_every_picture_is_shown() -> None:
    shown = {name for page in PAGES for name in re.findall(r"\]\(pictures/([\w.-]+)\)", prose(page))}
    assert shown == {path.name for path in (DOCS / "pictures").iterdir()}


@cache
def code() -> str:
    """The text of the package, with string literals that continue on the next line joined."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "megapar").rglob("*.py")))
    return re.sub(r'"\s*\n\s*f?"', "", text)


def test_quoted_messages_are_in_the_code() -> None:
    missing = []
    for row in re.findall(r"^\| (`[^|]*`)", prose(DOCS / "troubleshooting.md"), re.MULTILINE):
        for message in re.findall(r"`([^`]+)`", row):
            parts = [part.strip(" .") for part in message.split("...")]
            missing += [part for part in parts if len(part) > 3 and part not in code()]
    assert missing == []


def test_a_choice_of_a_flag_is_where_its_others_are() -> None:
    """In the table of flags, and wherever a page lists them as ``--flag A|B``."""
    by_spelling = {flag.spelling: flag for flag in FLAGS.values() if flag.choices}
    rows = (DOCS / "flags.md").read_text(encoding="utf-8").splitlines()
    for spelling, flag in by_spelling.items():
        (row,) = (row for row in rows if row.startswith(f"| `{spelling}` |"))
        assert [choice for choice in flag.choices if f"`{choice}`" not in row] == [], spelling
    listed = [
        (page.name, spelling, words.replace("\\|", "|").split("|"))
        for page in PAGES
        for spelling, words in re.findall(
            r"(--[a-z][\w-]*) ((?:[\w.-]+\\?\|)+[\w.-]+)", page.read_text(encoding="utf-8")
        )
        if spelling in by_spelling
    ]
    assert len(listed) > 2
    assert [one for one in listed if {*one[2]} != {*map(str, by_spelling[one[1]].choices)}] == []


def stripped(text: str) -> str:
    """A text without the indentation of its lines."""
    return "\n".join(line.strip() for line in text.strip().splitlines())


def test_examples_of_contributing_are_in_the_code() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    examples = re.findall(r"^```python\n# (\S+)\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(examples) > 10
    code_of = {path: stripped((ROOT / path).read_text(encoding="utf-8")) for path, _ in examples}
    assert [path for path, text in examples if stripped(text) not in code_of[path]] == []


def test_sizes_in_the_comparison_hold() -> None:
    sizes = {
        "layouts and options": len(
            (
                *(*table.ROWS, *table.LATENT_ROWS, *table.LATENT_CONTEXT_ROWS, *table.NODE_ROWS),
                *(*table.WINDOW_ROWS, *table.SHARED_WINDOW_ROWS),
            )
        ),
        "rules": sum(rule.kind == REFUSE for rule in RULES),
        "classes": len(ARCHITECTURES),
    }
    page = (DOCS / "compare.md").read_text(encoding="utf-8")
    for what, size in sizes.items():
        stated = re.findall(rf"[Oo]ver (\d+) {what}", page)
        assert stated != [], what
        assert all(size > int(number) for number in stated), (what, size)


def test_issue_templates_and_workflows_are_valid_yaml() -> None:
    files = [*(ROOT / ".github").rglob("*.yml")]
    assert len(files) > 3
    for path in files:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert isinstance(content, dict), path
        if path.parent.name == "ISSUE_TEMPLATE" and path.name != "config.yml":
            assert {"name", "description", "body"} <= set(content), path
            assert all(field["type"] in ("markdown", "textarea", "input", "dropdown") for field in content["body"]), (
                path
            )


SITE_PAGE = """See [the file](../configs/tiny.yaml) and [flags](flags.md#model).

```bash status=2
echo [a](../b)
```

```
plain
```
"""


def test_what_belongs_to_an_item_stays_in_it() -> None:
    page = "* one\n\n  more of it\n  * nested\n    and more\n\n1. first\n   more\n"
    site = "* one\n\n    more of it\n    * nested\n        and more\n\n1. first\n    more\n"
    assert site_markdown(page) == site
    assert site_markdown("```\n  code\n```\n") == "```\n  code\n```\n"


def test_fences_are_plain_and_links_out_of_docs_are_names() -> None:
    assert site_markdown(SITE_PAGE) == SITE_PAGE.replace("[the file](../configs/tiny.yaml)", "the file").replace(
        " status=2", ""
    )
    assert on_page_markdown(SITE_PAGE, page=None) == site_markdown(SITE_PAGE)
