"""The steps of a run of N epochs, what follows from them, and what is known of them before the data is read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megapar.arguments import Config, parse
from megapar.data.conversation_blend import ChatOptions
from megapar.data.corpus import of_conversations
from megapar.data.tokens.prepare import prepare
from megapar.errors import ConfigError
from megapar.tools.main import main
from megapar.training.building.epochs import with_epochs, with_known_epochs
from megapar.training.loop.outline import outline
from tests.support.chat import CHATML, save_tokenizer, write_conversations

SFT = ("--task", "sft", "--vocab-size", "400", "--micro-batch-size", "2", "--global-batch-size", "4")


def config(*flags: str, tokenizer: str = "t", data: str = "c.jsonl") -> Config:
    return parse("moe", ("--rules-only", *SFT, "--tokenizer-model", tokenizer, "--data-path", data, *flags))


def test_whole_global_batches_of_all_epochs_are_the_steps() -> None:
    made = with_epochs(config("--train-epochs", "3"), 10)
    assert made.training.train_iters == 7  # of 30 samples, two are not read
    assert (made.optimizer.lr_decay_iters, made.optimizer.lr_wsd_decay_iters) == (7, 1)
    assert with_epochs(config("--train-epochs", "3", "--lr-decay-iters", "50"), 10).optimizer.lr_decay_iters == 50


def test_without_epochs_nothing_changes() -> None:
    given = config("--train-iters", "5")
    assert with_epochs(given, 10) is with_known_epochs(given) is given


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--train-epochs", "1"), "do not fill a global batch of 4"),
        (("--train-epochs", "2", "--lr-warmup-iters", "1"), "warmup"),
    ],
)
def test_too_few_steps_are_refused(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_epochs(config(*flags), 3)


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """A tokenizer and the prefix of prepared conversations."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tokenizer, prefix = str(tmp_path / "tokenizer"), str(tmp_path / "chat")
    save_tokenizer(tmp_path / "tokenizer")
    source = str(write_conversations(tmp_path / "chat.jsonl", 40, words=6))
    prepare(prefix, [source], tokenizer, workers=1, chat=ChatOptions(day="2026-07-26").settings_of(tokenizer))
    return tokenizer, prefix


@pytest.mark.parametrize("flags", [(), ("--sft-packing", "pad"), ("--split", "100,0", "--eval-interval", "0")])
def test_the_steps_of_prepared_conversations_are_those_of_the_run(
    prepared: tuple[str, str], flags: tuple[str, ...]
) -> None:
    tokenizer, prefix = prepared
    given = config("--train-epochs", "3", "--seq-length", "160", *flags, tokenizer=tokenizer, data=prefix)
    made = with_known_epochs(given)
    chat = ChatOptions(day="2026-07-26", packing=given.data.sft_packing)
    paths = {"data_path": (prefix,), "eval_data_path": (), "tokenizer_model": tokenizer, "split": given.data.split}
    run = of_conversations(chat, **paths, vocab_size=400, seq_length=160, seed=given.training.seed)
    assert made.training.train_iters == 3 * len(run.train) // 4
    assert made.notes[-1] == f"--train-epochs 3 of {len(run.train)} samples: {made.training.train_iters} steps"


def test_of_other_conversations_a_note_says_what_is_not_known(tmp_path: Path) -> None:
    made = with_known_epochs(config("--train-epochs", "3"))
    assert made.training.train_iters == 100
    assert "is known when the conversations are encoded, and 100 is assumed here" in made.notes[-1]


def test_what_the_run_would_refuse_is_refused(prepared: tuple[str, str]) -> None:
    tokenizer, prefix = prepared
    with pytest.raises(ConfigError, match="have more than 33 tokens"):
        with_known_epochs(config("--train-epochs", "3", "--seq-length", "32", tokenizer=tokenizer, data=prefix))


def test_a_plan_and_validate_only_tell_the_steps(
    prepared: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer, prefix = prepared
    flags = (*SFT, "--tokenizer-model", tokenizer, "--data-path", prefix, "--train-epochs", "3", "--seq-length", "160")
    assert main(["plan", *flags, "--device-kind", "h100-80g"]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if "--train-epochs 3 of" in line]
    script = Path(__file__).parents[3] / "pretrain_moe.py"
    done = subprocess.run([sys.executable, str(script), *flags, "--validate-only"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert told[0].strip().removeprefix("note: ") in done.stdout


def test_validate_only_refuses_conversations_of_another_template(prepared: tuple[str, str], tmp_path: Path) -> None:
    tokenizer, prefix = prepared
    (tmp_path / "other.jinja").write_text(CHATML + "{# of another version #}")
    flags = ("--validate-only", *SFT, "--tokenizer-model", tokenizer, "--data-path", prefix)
    with pytest.raises(ConfigError, match=r"were encoded with template .* where the run has"):
        outline(parse("moe", (*flags, "--chat-template", str(tmp_path / "other.jinja"))))
    assert with_known_epochs(same := parse("moe", flags)) is same
    Path(f"{prefix}.chat").unlink()
    assert "chat.chat is missing, so what encoded the conversations is not compared" in outline(same)


def test_steps_are_not_compared_before_they_are_known() -> None:
    for flags in (("--lr-warmup-iters", "200"), ("--lr-decay-style", "wsd", "--lr-wsd-decay-iters", "200")):
        made = config("--train-epochs", "30", *flags)
        assert with_epochs(made, 10_000).training.train_iters == 75_000
        with pytest.raises(ConfigError, match="lr-"):
            with_epochs(made, 10)
