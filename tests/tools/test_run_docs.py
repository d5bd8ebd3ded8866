"""scripts/run_docs.py: what it takes for a command, and how it tells which one failed."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest

from scripts import run_docs

ROOT = Path(__file__).parents[2]

PAGE = """# A page

```bash
# a comment

echo one \\
    two
cat > file.txt <<'EOF'
text "with an open quote
EOF
```

```bash no-run
exit 9
```

```
not a command
```

```bash status=3
(exit 3)
```

```python
print("three")
```
"""


def test_commands_have_their_lines_and_stay_in_one_piece() -> None:
    found = run_docs.commands(PAGE)
    assert [(one.line, one.text.split()[0], one.status) for one in found] == [
        (6, "echo", 0),
        (8, "cat", 0),
        (22, "(exit", 3),
        (26, "python", 0),
    ]
    assert found[0].text == "echo one \\\n    two"
    assert found[1].text.endswith("quote\nEOF")


@pytest.mark.parametrize("text", ["```bash\necho one\n", "```bash\necho 'one\n```\n", "```bash\ncat <<EOF\n```\n"])
def test_what_has_no_end_is_an_error(text: str) -> None:
    with pytest.raises(run_docs.PageError, match=r"no end|ends inside a command"):
        run_docs.commands(text)


def test_a_page_runs_in_one_shell_and_a_failure_names_its_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE, encoding="utf-8")
    assert run_docs.run_page(page, tmp_path / "good")[0] == 4
    assert (tmp_path / "good/page/file.txt").read_text() == 'text "with an open quote\n'

    page.write_text("```bash\nwhere=here\ncd /\n[ $where = here ]\necho some words; false\n```\n", encoding="utf-8")
    with pytest.raises(run_docs.PageError, match=r"line 5: echo some words; false\n    some words\n    exit status 1"):
        run_docs.run_page(page, tmp_path / "bad")


def test_a_shell_that_is_killed_is_told_by_its_signal_and_leaves_nothing(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```bash\nsleep 600 & echo $! > pid\nkill -9 $$\n```\n")
    with pytest.raises(run_docs.PageError, match="killed by signal 9"):
        run_docs.run_page(page, tmp_path / "work")
    status = Path(f"/proc/{(tmp_path / 'work/page/pid').read_text().strip()}/stat")
    until = time.monotonic() + 20
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while status.read_text().rpartition(")")[2].split()[0] != "Z":  # ended, and not reaped yet
            assert time.monotonic() < until


def test_every_page_has_a_command_that_runs() -> None:
    assert [path.name for path in run_docs.pages([]) if not run_docs.commands(path.read_text(encoding="utf-8"))] == []


def test_an_unknown_page_is_named_with_all_pages() -> None:
    with pytest.raises(run_docs.PageError, match=r"no such page: none\.md\. Pages: README\.md, ampipe\.md"):
        run_docs.pages(["none.md"])


def test_pages_run_at_once_and_are_told_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of two pages waits for the other one's file."""
    root, work = tmp_path / "root", tmp_path / "work"
    root.mkdir()
    monkeypatch.setattr(run_docs, "ROOT", root)
    for own, other, then in (("one", "two", "false"), ("two", "one", "true")):
        text = f"touch ../{own}.here\nuntil [ -e ../{other}.here ]; do sleep 0.05; done\n{then}"
        (root / f"{own}.md").write_text(f"```bash\n{text}\n```\n", encoding="utf-8")
    assert run_docs.run_pages([root / "one.md", root / "two.md"], work, 2) == 1
    out, err = capsys.readouterr()
    assert out.startswith("two.md: 3 commands in ")
    assert err.startswith("one.md: line 4: false")
