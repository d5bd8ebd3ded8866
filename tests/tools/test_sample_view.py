"""``megapar data show``: a sample as stretches of text, in a terminal and as a page."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megapar.data.tokenizers.sentencepiece_tokenizer import train
from megapar.tools.main import main
from megapar.tools.sample_view import Stretch, page, terminal
from tests.support.chat import save_tokenizer, turns

ROWS = [
    Stretch(0, 0, 2, 0.0, "<b>hi</b>\n"),
    Stretch(0, 3, 4, 0.5, "\x1b[31mred"),
    Stretch(1, 0, 0, 0.0, "new"),
]


def test_a_terminal_gets_no_control_characters_of_the_data() -> None:
    assert terminal(ROWS, colour=False).splitlines() == [
        "document 0      0-2      weight      -  <b>hi</b>\\n",
        "document 0      3-4      weight    0.5  \\x1b[31mred",
        "document 1      0-0      weight      -  new",
    ]
    assert "\x1b[1;31m\\x1b[31mred\x1b[0m" in terminal(ROWS, colour=True)


def test_a_page_is_escaped_and_loads_nothing() -> None:
    text = page(ROWS, "sample of <a>")
    assert "&lt;b&gt;hi&lt;/b&gt;" in text
    assert "<h1>sample of &lt;a&gt;</h1>" in text
    assert '<b style="background:#dbeafe" title="document 0, positions 3 to 4, weight 0.5">' in text
    assert "http" not in text


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_tokenizer(tmp_path / "tokenizer")
    records = ({"messages": turns("Hi", "A river"), "n": n} for n in range(2))
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return [str(tmp_path / "chat.jsonl"), "--tokenizer-model", str(tmp_path / "tokenizer")]


def test_a_sample_of_conversations(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "page.html"
    assert main(["data", "show", *files, "--seq-length", "99", "--split", "100,0", "--html", str(target)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert "2 documents" in head
    learned = [line for line in lines if "weight      1" in line]
    assert [line.split("  ")[-1] for line in learned] == ["A river<|im_end|>"] * 2
    assert "A river&lt;|im_end|&gt;</b>" in target.read_text()


def test_prepared_conversations_are_shown_however_they_are_named(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, (data, *tokenizer) = str(tmp_path / "ch"), files
    assert main(["data", "prepare", data, *tokenizer, "--output", out, "--task", "sft", "--workers", "1"]) == 0
    line = ["--seq-length", "99", "--split", "100,0", *tokenizer]
    shown = []
    for name in (out, f"{out}.bin", f"{out}.idx", f"a={out}"):
        capsys.readouterr()
        assert main(["data", "show", name, *line]) == 0
        shown.append(capsys.readouterr().out.partition(": ")[2])
    assert len(set(shown)) == 1
    assert "learned tokens" in shown[0]


def test_text_is_shown_as_a_run_reads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"A river {n}."}) + "\n" for n in range(9)))
    model = tmp_path / "t.model"
    model.write_bytes(train(iter(f"A river {n} of words." for n in range(99)), 290))
    text = [str(tmp_path / "a.jsonl"), "--tokenizer-model", str(model)]
    assert main(["data", "show", *text, "--seq-length", "16", "--split", "100,0"]) == 0
    assert "A river" in capsys.readouterr().out
    assert main(["data", "show", *text[:1]]) == 2
    assert "--tokenizer-model is needed" in capsys.readouterr().err


def test_it_needs_no_torch(files: list[str]) -> None:
    """Where it is not installed; where it is, transformers imports it."""
    code = "import sys; sys.modules['torch'] = None; from megapar.tools.main import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", code, "data", "show", *files, "--split", "100,0"], check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("wrong", [("--chat-date", "26.7."), ("--seq-length", "0"), ("--sft-loss", "word")])
def test_flags_have_the_values_of_a_run(
    files: list[str], wrong: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["data", "show", *files, *wrong])
    assert wrong[0] in capsys.readouterr().err
