"""What scripts/mkdocs_hook.py changes of a page for the site."""

from __future__ import annotations

from scripts.mkdocs_hook import on_page_markdown, site_markdown

PAGE = """See [the file](../configs/tiny.yaml) and [flags](flags.md#model).

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
    assert site_markdown(PAGE) == PAGE.replace("[the file](../configs/tiny.yaml)", "the file").replace(" status=2", "")
    assert on_page_markdown(PAGE, page=None) == site_markdown(PAGE)
