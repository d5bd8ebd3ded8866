"""What a checkpoint knows of its run, and what is refused, told and kept where a run goes on from it."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megapar.arguments import parse
from megapar.checkpoints.ownership.data_facts import DataFacts
from megapar.checkpoints.ownership.identity import HELDOUT_ORDER, Identity, code_hash
from megapar.config.files import chat_day
from megapar.data.cache import cache_folder
from megapar.data.fingerprint import Fingerprint
from megapar.data.tokenizers.load import load_stored_tokenizer, store_tokenizer
from megapar.data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from megapar.data.tokenizers.sentencepiece_tokenizer import train as train_model
from megapar.errors import CheckpointError, ConfigError
from megapar.files.location import Location
from megapar.files.tokenizer_files import FACTS, FOLDER
from megapar.trainer import Outcome, train
from megapar.training.loop.outline import outline
from tests.support.stores import put
from tests.support.training import SMALL, last_wins

WORDS = ("red", "green", "blue", "river", "stone", "ancient", "quickly", "walks", "sees", "under", "mountain", "paper")
BASE = (
    *("--micro-batch-size", "1", "--global-batch-size", "8", "--lr", "1e-2", "--eval-interval", "0"),
    *("--log-interval", "100", "--lr-decay-iters", "9", "--vocab-size", "280", "--dtype", "fp64"),
)


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def write_text(path: Path, seed: int, documents: int = 60) -> str:
    draw = random.Random(seed)
    lines = (json.dumps({"text": " ".join(draw.choices(WORDS, k=30)) + "."}) for _ in range(documents))
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


class Runs:
    """Runs of one small model that save into, and go on from, a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "c"
        self.a, self.b = (write_text(folder / f"{name}.jsonl", seed) for seed, name in enumerate("ab"))

    def line(self, data: Sequence[str], *flags: str) -> list[str]:
        places = ("--save", str(self.root), "--load", str(self.root))
        return ["--data-path", *data, *last_wins((*SMALL["moe"], *BASE, *places), flags)]

    def run(self, steps: int, data: Sequence[str], *flags: str, **environ: str) -> Outcome:
        line = self.line(data, "--train-iters", str(steps), *flags)
        return train(parse("moe", line, environ), keep_records=True)

    def asked(self, steps: int, data: Sequence[str], *flags: str) -> str:
        """What --validate-only adds, or the refusal."""
        try:
            return outline(parse("moe", [*self.line(data, "--train-iters", str(steps), *flags), "--validate-only"], {}))
        except ConfigError as error:
            return str(error)

    def identity(self, step: int) -> Any:
        return json.loads((self.root / f"iter_{step:07d}" / "scalars.json").read_text())["identity"]


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def test_a_checkpoint_says_what_it_was_trained_on(runs: Runs) -> None:
    runs.run(2, ["1", runs.a, "1", runs.b])
    found = runs.identity(2)
    (phase,) = found["phases"]
    assert [source["name"] for source in phase["sources"]] == [runs.a, runs.b]
    assert (phase["start"], phase["lanes"]) == (0, ["mixture/0/", "mixture/1/"])
    assert (phase["split"], phase["seed"], phase["seq_length"]) == ("95,5", 1234, 16)
    assert (found["made_by"]["code"], found["made_by"]["ranks"]) == (code_hash(), 1)
    assert found["flags"]["lr"] == 0.01
    assert "save" not in found["flags"]
    kept = json.loads((runs.root / FOLDER / "megapar.json").read_text())
    assert found["tokenizer"]["fingerprint"] == kept["fingerprint"]
    identity = Identity.from_json(found)
    assert identity.to_json() == found


def test_text_that_was_read_as_other_documents_is_refused_with_the_flag(runs: Runs) -> None:
    folder = runs.folder / "texts"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number}.txt").write_text(f"{' '.join(WORDS[:9])} {number}\n\n{' '.join(WORDS[3:])}\n")
    runs.run(2, [str(folder)], "--document-per", "paragraph")
    assert runs.identity(2)["flags"]["document_per"] == "paragraph"
    told = f"{folder} has different content here than there"
    advice = "Text was read with --document-per paragraph there, and with auto here."

    def refused() -> str:
        said = runs.asked(4, [str(folder)])
        with pytest.raises(ConfigError) as started:
            runs.run(4, [str(folder)])
        assert said.partition("]")[2].partition("trained on")[2] == str(started.value).partition("trained on")[2]
        return said

    said = refused()
    assert told in said
    assert advice in said
    older = runs.identity(2)
    del older["flags"]["document_per"]
    assert Identity.from_json(older).document_per == "paragraph"  # as it was before there was the flag
    assert runs.run(4, [str(folder)], "--document-per", "paragraph").iteration == 4
    assert "trained on" not in runs.asked(6, [runs.a, runs.b], "--override-data", "sources")


def test_other_data_is_refused_all_at_once_by_the_question_and_by_the_start(runs: Runs) -> None:
    mixed, other = ["1", runs.a, "1", runs.b], ["3", runs.a, "1", runs.b]
    runs.run(2, mixed)
    for data, flags, words in (
        ([runs.b], (), [f"{runs.a} is read there only", "--override-data sources "]),
        (other, (), ["weights are", "3, ", "--override-data weights "]),
        (mixed, ("--seed", "99"), ["--seed is 1234 there and 99 here", "--override-data seed "]),
        (mixed, ("--seq-length", "32"), ["--seq-length is 16 there and 32 here", "--override-data seq-length "]),
        (mixed, ("--split", "90,10"), ["--split 95,5 there and by --split 90,10 here", "--override-data split "]),
        (mixed, ("--eval-data-path", runs.b), ["by --eval-data-path here", "--override-data split "]),
        (["mock"], (), [f"{runs.a}, {runs.b} are read there only, mock is read here only"]),
        (
            *(other, ("--seed", "99", "--seq-length", "32", "--override-data", "seed")),
            ["weights are", "--seq-length", "--override-data seed,weights,seq-length "],
        ),
    ):
        said = runs.asked(4, data, *flags)
        assert [word for word in ("[checkpoint-data]", *words) if word not in said] == [], said
        with pytest.raises(ConfigError) as started:
            runs.run(4, data, *flags)
        assert said.partition("]")[2].partition("trained on")[2] == str(started.value).partition("trained on")[2]
    assert "trained on" not in runs.asked(4, ["2", runs.a, "2", runs.b], "--split", "950,50", "--override-data", "seed")
    assert runs.run(2, [runs.b], "--save-interval", "1").iteration == 2  # no step is left: nothing is trained on it


@pytest.fixture
def knowing(tmp_path: Path) -> Callable[..., Any]:
    """Runs of ERNIE 3.0 on triples: called with whether only to ask, steps, a file of triples and more flags."""
    root, text = str(tmp_path / "e"), write_text(tmp_path / "a.jsonl", 0)
    for number, name in enumerate(("t1.tsv", "t2.tsv")):
        draw = random.Random(number)
        triples = ([*draw.choices(WORDS, k=3), " ".join(draw.choices(WORDS, k=6))] for _ in range(99))
        (tmp_path / name).write_text("".join("\t".join(one) + "\n" for one in triples))
    places = ("--data-path", text, "--save", root, "--load", root, "--checkpoint-verify", "off")
    ernie = (
        *("--ernie-model", "ernie3", "--task-num-layers", "1", "--task-hidden-size", "24"),
        *("--task-num-attention-heads", "4", "--task-type-vocab-size", "5", "--ernie-tasks", "knowledge_text:1.0"),
    )

    def call(asked: bool, steps: int, triples: str, *flags: str) -> Any:
        more = ("--triples-file", str(tmp_path / triples), "--train-iters", str(steps), *flags)
        line = last_wins((*SMALL["ernie"], *BASE, *places, *ernie), more)
        if not asked:
            return train(parse("ernie", line, {}), keep_records=True)
        try:
            return outline(parse("ernie", [*line, "--validate-only"], {}))
        except ConfigError as error:
            return str(error)

    return call


def test_another_file_of_triples_is_other_data(knowing: Callable[..., Any], tmp_path: Path) -> None:
    knowing(False, 2, "t1.tsv")
    words = "--triples-file has different content here than there"
    assert words in knowing(True, 4, "t2.tsv")
    with pytest.raises(ConfigError, match=rf"{words}.*--override-data knowledge "):
        knowing(False, 4, "t2.tsv")
    (tmp_path / "t1.tsv").rename(tmp_path / "t3.tsv")  # the same one elsewhere
    assert "trained on" not in knowing(True, 4, "t3.tsv")
    kept = tmp_path / "e" / "iter_0000002" / "scalars.json"
    assert list(json.loads(kept.read_text())["identity"]["phases"][0]["knowledge"]) == ["--triples-file"]
    assert knowing(False, 4, "t2.tsv", "--override-data", "knowledge").iteration == 4
    assert knowing(False, 6, "t2.tsv").iteration == 6
    assert words in knowing(True, 8, "t3.tsv")


def test_a_checkpoint_that_does_not_say_which_triples_is_taken(knowing: Callable[..., Any], tmp_path: Path) -> None:
    knowing(False, 2, "t1.tsv")
    kept = tmp_path / "e" / "iter_0000002" / "scalars.json"
    scalars = json.loads(kept.read_text())
    del scalars["identity"]["phases"][0]["knowledge"]
    kept.write_text(json.dumps(scalars))
    assert "trained on" not in knowing(True, 4, "t2.tsv")
    assert knowing(False, 4, "t2.tsv").iteration == 4
    assert "has different content" in knowing(True, 6, "t1.tsv")


def test_folders_in_the_place_of_the_tokenizer_are_renamed_and_none_is_lost(store_root: Location) -> None:
    facts = {0: None, 1: "{}", 2: '{"fingerprint": "/../../x"}', 3: '{"fingerprint": "../abcdef"}'}
    tokenizer = SentencePieceTokenizer(train_model(iter(["some words of a text"] * 40), 280))
    for number, text in facts.items():
        put(store_root / FOLDER / f"file-{number}", b"")
        if text:
            put(store_root / FOLDER / FACTS, text.encode())
        (note,) = store_tokenizer(tokenizer, store_root)
        assert "is now tokenizer-unknown" in note
        stored = load_stored_tokenizer(store_root)
        assert stored.fingerprint() == tokenizer.fingerprint()
        (store_root / FOLDER).publish(store_root / f"stored-{number}")
    names = ["tokenizer-unknown", *(f"tokenizer-unknown-{number}" for number in (2, 3, 4))]
    assert all((store_root / name / f"file-{number}").is_file() for number, name in enumerate(names))


def test_another_tokenizer_is_refused_and_the_kept_one_is_taken(runs: Runs, told: list[str]) -> None:
    """Documents were added: the tokenizer of a run that names none would be trained anew, and every id be another."""
    runs.run(2, [runs.a])
    kept = runs.root / FOLDER
    write_text(Path(runs.a), 0, documents=90)
    assert f"{runs.a} has different content here than there" in runs.asked(4, [runs.a])
    assert runs.run(4, [runs.a], "--override-data", "sources").iteration == 4
    assert runs.identity(4)["tokenizer"] == runs.identity(2)["tokenizer"]
    line = runs.line([runs.a], "--train-iters", "4")
    assert parse("moe", line, {}).data.tokenizer_model == str(kept)
    line.remove("--load"), line.remove(str(runs.root)), line.remove("--save")
    line = [one for one in line if one != str(runs.root)]
    again = parse("moe", [*line, "--save", str(runs.root)], {"TORCHELASTIC_RESTART_COUNT": "1"})
    assert again.data.tokenizer_model == str(kept)
    assert again.model.vocab_size == runs.identity(2)["flags"]["vocab_size"]
    assert parse("moe", [*line, "--save", str(runs.root)], {}).data.tokenizer_model is None
    moved = kept.rename(runs.folder / "moved")
    with pytest.raises(ConfigError, match=r"checkpoint-tokenizer.*of another tokenizer"):
        runs.run(6, [runs.a])
    assert not kept.exists()  # what was refused has not taken the place of the run's own
    assert runs.run(6, [runs.a], "--tokenizer-model", str(moved)).iteration == 6
    other = runs.folder / "other.model"
    other.write_bytes(train_model(iter(["a text of other words", "and some more of them"] * 40), 280))
    assert "checkpoint-tokenizer" in runs.asked(8, [runs.a], "--tokenizer-model", str(other))


def test_under_an_override_sources_go_on_and_the_checkpoint_is_of_the_new_run(runs: Runs, told: list[str]) -> None:
    one, two = ["1", runs.a, "1", runs.b], ["3", runs.a, "1", runs.b]
    runs.run(2, one)
    fields = ("--override-data", "weights")
    straight = runs.run(8, two, *fields, "--save-interval", "3")
    assert (
        f"other data from sample 16 on: {runs.a} continues after 8 samples, {runs.b} continues after 8 samples" in told
    )
    first, second = runs.identity(8)["phases"]
    assert (first["start"], second["start"], second["lanes"]) == (0, 16, first["lanes"])
    assert [source["weight"] for source in second["sources"]] == ["3", "1"]
    told.clear()
    (runs.root / "latest").write_text("iter_0000003\n")
    for flags in ((), fields):  # the override is not applied twice, and is not needed again
        again = runs.run(8, two, *flags, "--ckpt-step", "3", "--save", str(runs.folder / "other"))
        assert [r.loss for r in again.records] == [r.loss for r in straight.records[1:]]
    assert not any("other data" in line for line in told)
    assert "weights are" in runs.asked(9, one)


def test_what_a_run_that_was_overridden_is_worth_on_other_data(runs: Runs, told: list[str]) -> None:
    """With no step left the phases stay those of the checkpoint, and other data is only evaluated on."""
    runs.run(2, [runs.a])
    mixed = ["1", runs.a, "1", runs.b]
    runs.run(4, mixed, "--override-data", "sources")
    other = write_text(runs.folder / "other.jsonl", 7)
    worth = []
    for data in ([other], ["1", runs.b, "1", runs.a], mixed):
        told.clear()
        found = runs.run(4, data, "--eval-interval", "1")
        assert found.iteration == 4
        assert found.evaluation is not None
        worth.append(found.evaluation)
        assert any("no step is left to train, so" in line for line in told) is (data == [other])
    assert worth[0] != worth[2]
    assert runs.run(6, mixed).iteration == 6  # the phases are still the checkpoint's


def test_a_restart_goes_on_with_the_data_that_was_overridden(runs: Runs) -> None:
    """Before its first own checkpoint a job goes on from --load and is overridden; after it, from that."""
    runs.run(2, [runs.a])
    line = ("--override-data", "sources,weights,seed", "--seed", "5", "--save-interval", "2")
    data, job = ["2", runs.a, "1", runs.b], {"TORCHELASTIC_RUN_ID": "job-a"}
    own = runs.folder / "own"
    want = runs.run(8, data, *line, "--save", str(runs.folder / "straight"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_RUN_ID", "job-a")
        runs.run(8, data, *line, "--save", str(own), "--exit-interval", "5", **job)
        patch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        job["TORCHELASTIC_RESTART_COUNT"] = "1"
        again = runs.run(8, data, *line, "--save", str(own), **job)
    assert [record.iteration for record in again.records] == [6, 7, 8]
    assert [record.loss for record in again.records] == [record.loss for record in want.records[3:]]


def test_what_is_told_and_never_refused(runs: Runs, told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    runs.run(2, [runs.a])
    monkeypatch.setattr("megapar.checkpoints.ownership.identity.code_hash", lambda: "0123456789ab")
    runs.run(4, [runs.a], "--weight-decay", "0.2", "--log-interval", "7")
    (line,) = (line for line in told if line.startswith("changed since "))
    assert line.endswith(f"code {code_hash()} -> 0123456789ab, --weight-decay 0.1 -> 0.2")


def test_a_run_that_goes_on_from_evaluations_of_other_samples_says_so_once(runs: Runs, told: list[str]) -> None:
    runs.run(2, ["mock"])
    path = runs.root / "iter_0000002" / "scalars.json"
    scalars = json.loads(path.read_text())
    del scalars["identity"]["heldout_order"]  # as in 0.2
    path.write_text(json.dumps(scalars))
    evaluates = ("--eval-interval", "2", "--eval-iters", "1")
    runs.run(4, ["mock"], *evaluates, "--checkpoint-verify", "off")
    (line,) = (line for line in told if "evaluations" in line)
    assert line == f"evaluations are of other held-out samples than before {path.parent}, unless they read all of them"
    assert runs.identity(4)["heldout_order"] == HELDOUT_ORDER  # so the next start says nothing


ADAMW, SGD, PLAIN = ("--optimizer", "adamw"), ("--optimizer", "sgd"), ("--optimizer", "sgd", "--sgd-momentum", "0")


@pytest.mark.parametrize(("there", "here"), [(ADAMW, SGD), (ADAMW, PLAIN), (SGD, ADAMW), (SGD, PLAIN), (PLAIN, SGD)])
def test_another_optimizer_is_refused_by_name(runs: Runs, there: tuple[str, ...], here: tuple[str, ...]) -> None:
    first = runs.run(2, ["mock"], *there)
    words = f"of another optimizer: {' '.join(there)} there and {' '.join(here)} here. "
    said = runs.asked(4, ["mock"], *here)
    assert "[checkpoint-optimizer]" in said
    assert f"{words}Pass {' '.join(there)}, --no-load-optim " in said.replace("\n", " ").replace("  ", " ")
    with pytest.raises(CheckpointError, match=re.escape(words)):
        runs.run(4, ["mock"], *here)
    assert "another optimizer" not in runs.asked(4, ["mock"], *here, "--no-load-optim")
    again = runs.run(4, ["mock"], *here, "--no-load-optim", "--save", str(runs.folder / "other"))
    assert [record.iteration for record in (*first.records, *again.records)] == [1, 2, 3, 4]


@pytest.mark.parametrize("flags", [SGD, PLAIN])
def test_sgd_goes_on_where_it_was(runs: Runs, flags: tuple[str, ...]) -> None:
    """Without momentum a checkpoint has no optimizer state, and is a run's, not a converted model."""
    elsewhere = str(runs.folder / "straight")
    straight = runs.run(4, ["mock"], *flags, "--save", elsewhere, "--load", elsewhere)
    first, again = runs.run(2, ["mock"], *flags), runs.run(4, ["mock"], *flags)
    assert [record.loss for record in (*first.records, *again.records)] == [r.loss for r in straight.records]
    scalars = json.loads((runs.root / "iter_0000004" / "scalars.json").read_text())
    assert (scalars["identity"]["optimizer"], scalars["optimizer_steps"]) == ("sgd", 4)


def test_a_checkpoint_that_does_not_name_its_optimizer_is_of_adamw(runs: Runs) -> None:
    runs.run(2, ["mock"])
    path = runs.root / "iter_0000002" / "scalars.json"
    scalars = json.loads(path.read_text())
    del scalars["identity"]["optimizer"], scalars["identity"]["flags"]["optimizer"]
    path.write_text(json.dumps(scalars))
    assert "of another optimizer: --optimizer adamw there" in runs.asked(4, ["mock"], *SGD)
    del scalars["identity"]  # as in 0.1
    path.write_text(json.dumps(scalars))
    with pytest.raises(CheckpointError, match="of another optimizer: --optimizer adamw there"):
        runs.run(4, ["mock"], *SGD, "--checkpoint-verify", "off")
    assert runs.run(4, ["mock"], "--checkpoint-verify", "off").iteration == 4


def test_a_checkpoint_of_an_older_version_is_taken_and_told(runs: Runs, told: list[str]) -> None:
    runs.run(2, ["mock"])
    path = runs.root / "iter_0000002" / "scalars.json"
    scalars = json.loads(path.read_text())
    for identity in ({}, {"phases": [{"start": -1}]}, 3, []):
        path.write_text(json.dumps({**scalars, "identity": identity}))
        with pytest.raises(CheckpointError, match="no run wrote: identity is"):
            runs.run(4, ["mock"], "--seed", "7", "--checkpoint-verify", "off")
    del scalars["identity"]
    path.write_text(json.dumps(scalars))
    assert "trained on" not in runs.asked(4, ["mock"], "--seed", "7")
    assert runs.run(4, ["mock"], "--seed", "7", "--checkpoint-verify", "off").iteration == 4
    assert any("does not record what it was trained on" in line for line in told)
    assert runs.identity(4)["phases"][0]["seed"] == 7


def test_the_question_reads_no_large_data(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.run(2, [runs.a])
    monkeypatch.setattr("megapar.checkpoints.ownership.identity.READ_AT_ONCE", 1000)
    write_text(Path(runs.a), 5)
    size = Path(runs.a).stat().st_size / 1e9
    assert f"data: not compared with that of iter_0000002, {size:.3g} GB would be read" in runs.asked(4, [runs.a])
    before = sorted(cache_folder().glob("hashes/*"))
    assert "--seed is" in runs.asked(4, [runs.a], "--seed", "7")
    assert sorted(cache_folder().glob("hashes/*")) == before
    with pytest.raises(ConfigError, match="different content"):
        outline(parse("moe", runs.line([runs.a], "--train-iters", "4"), {}))
    write_text(Path(runs.a), 6)
    monkeypatch.setattr("megapar.checkpoints.ownership.identity.READ_AT_ONCE", 1 << 20)
    assert "different content" in runs.asked(4, [runs.a])


CHAT = {"template": "a", "day": "2026-07-26", "turns": "all", "packing": "best_fit", "overlong": "stop", "packs": "1"}


@pytest.mark.parametrize(
    ("there", "here", "text"),
    [
        (CHAT, CHAT, None),
        (CHAT, {**CHAT, "day": "2026-07-27"}, None),  # the template does not ask
        (CHAT, {**CHAT, "packs": "2"}, "packs is 1 there and 2 here"),
        (CHAT, {**CHAT, "packs": "2", "turns": "last"}, "other samples: turns is all there and last here$"),
        (CHAT, {}, "conversations there and text here"),
        (None, CHAT, "text there and conversations here"),
        (CHAT, None, None),  # not read yet
        (None, {}, None),
    ],
)
def test_conversations_are_compared_by_their_packs(
    there: dict[str, str] | None, here: dict[str, str] | None, text: str | None
) -> None:
    facts = DataFacts((Fingerprint("a", "1", None, "text"),), "95,5", 7, 64)
    before = DataFacts.from_json(replace(facts, chat=there).to_json())
    found = before.differences(replace(facts, chat=here))
    assert [one.field for one in found] == ([] if text is None else ["chat"])
    assert text is None or re.search(text, found[0].text)


def test_the_day_of_conversations_is_that_of_the_last_phase_of_a_checkpoint(store_root: Location) -> None:
    assert chat_day(store_root) == ""
    for step, phases in ((2, [{"chat": {"day": "2024-02-28"}}]), (4, [{}, {"chat": {"day": "2024-02-29"}}])):
        text = json.dumps({"identity": {"phases": phases}})
        put(store_root / f"iter_{step:07}" / "scalars.json", text.encode())
    assert (chat_day(store_root), chat_day(store_root, 2)) == ("2024-02-29", "2024-02-28")
