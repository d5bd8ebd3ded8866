"""What a start refuses, ``--validate-only`` refuses: the same complaints, status 2, and no torch on either way."""

from __future__ import annotations

import gzip
import importlib.util
import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from megapar.arguments import parse, parse_or_exit
from megapar.schema.flag import SCRIPTS
from megapar.training.loop.outline import outline
from megapar.training.step.schedules import make_learning_rate
from tests.support.token_files import write_tokens

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "numpy", "yaml", "transformers", "sentencepiece", "datasets", "pyarrow", "wandb")
STEPS = "--train-iters 6"

ERNIE3 = (
    "pretrain_ernie.py --ernie-model ernie3 --task-type-vocab-size 5 --ernie-tasks knowledge_mlm:1,knowledge_text:1"
)

MISTAKES = [
    # line, words of the complaint; an ERNIE line begins with pretrain_ernie.py
    ("--no-such-flag --lr x", "2 complaints", "[unknown-flag] flag --no-such-flag", "[value] --lr"),
    ("pretrain_ernie.py --no-such-flag --lr x", "2 complaints", "[unknown-flag] flag --no-such-flag", "[value] --lr"),
    ("--multi-latent-attention --qk-norm", "[latent-extras]"),
    ("--recompute-in-bubble", "[not-built-recompute-in-bubble]"),
    ("--data-path no.jsonl", "[file-missing] --data-path no.jsonl does not exist"),
    ("--data-path texts/wrong.jsonl --eval-data-path mock", "[data-alone]"),
    ("--data-path mock --eval-data-path a.jsonl", "[data-alone]"),
    ("--load=", "[value] --load is an empty text. Leave it out"),
    ("--data-source hf --hf-dataset=", "--hf-dataset is an empty text"),
    (f"--save {'a' * 300}", f"{'a' * 300}: File name too long."),
    (f"--data-path no.jsonl --load-hf {'a' * 300}", "File name too long"),
    ("--data-path data/corpus", "Did you mean data/corpus_text_document?"),
    ("--data-path data", "a folder of indexed files", "Write --data-path data/corpus_text_document"),
    ("--data-path half", "half.idx exists, but half.bin does not"),
    ("--data-path blank.jsonl", "[file] --data-path blank.jsonl contains no text"),
    ("--data-path late.jsonl", "late.jsonl, line 3: no field 'text'"),
    ("--data-path texts", "texts/wrong.jsonl, line 1: no field 'text'"),
    ("--data-path a.jsonl.xz", "cannot be read as text", "compressed in an unsupported way"),
    ("--data-path cut.jsonl.gz", "not a readable gzip file"),
    ("--data-path no.parquet.parquet", "is not a parquet file, or is cut off"),
    ("--data-path columns.parquet", "columns.parquet has no column 'text'"),
    ("--data-path data/corpus_text_document --vocab-size 100", "is 5999, but the vocabulary has ids 0 to 99"),
    ("--data-path short", "short.bin: 2 bytes, where short.idx implies 6"),
    ("--data-path data/corpus_text_document a.jsonl", "the text next to it (a.jsonl)", "Set --tokenizer-model"),
    (
        "--hf-dataset wikitext --data-source hf",
        "--hf-dataset wikitext is not a file or folder",
        "hf download wikitext --repo-type",
    ),
    ("--hf-dataset saved --data-source hf", "--hf-dataset saved has no column 'text'; it has 'body'"),
    ("--tokenizer-model gpt2", "--tokenizer-model gpt2 does not exist", "hf download gpt2 --local-dir gpt2"),
    ("--tokenizer-model a.jsonl", "[tokenizer] --tokenizer-model a.jsonl cannot be read", "not a sentencepiece model"),
    ("--tokenizer-model words --vocab-size 8", "the tokenizer words has 10 ids, more than the 8 rows"),
    (
        "--tokenizer-model words --load run",
        "10 ids, more than the 9 rows",
        "Pass the tokenizer that the weights were trained",
    ),
    ("pretrain_ernie.py --tokenizer-model words", "words has no mask token, which pretrain_ernie.py needs"),
    (f"{ERNIE3} --triples-file triples.tsv", "triples.tsv, line 2: 3 cells instead of HEAD, RELATION, TAIL, SENTENCE"),
    (f"{ERNIE3} --phrase-file blank.jsonl", "--phrase-file blank.jsonl contains no entries"),
    ("--load run --num-layers 2", "[checkpoint-model]", "--num-layers is 4 there and 2 here"),
    ("--load run --train-iters 12", "[checkpoint-schedule]", "--lr-decay-iters is 6 there and 12 here", "Pass --lr-d"),
    ("--load run --train-iters 6 --lr 1", "[checkpoint-schedule]", "--lr is", "--override-opt-param-scheduler"),
    ("--load foreign", "[checkpoint-foreign]", "Megatron-LM", "--load-hf"),
    ("--load run --ckpt-step 7", "no checkpoint of --ckpt-step 7", "It has those of 6"),
    ("--load data --save data --ckpt-step 5", "data has no checkpoint of --ckpt-step 5", "Leave --ckpt-step out"),
    ("--load gone --save gone", "gone/latest names 'iter_0000002', which is not there", "Remove gone/latest"),
    ("--load broken --ckpt-step 5", "broken contains no checkpoint", "It contains only an unfinished save"),
    (
        "--load downloaded",
        "[checkpoint-missing]",
        "downloaded contains no checkpoint",
        "did you mean --load-hf downloaded?",
    ),
    ("--save run", "[checkpoint] --save run contains checkpoints of another run, up to iteration 6"),
    ("--data-path mock --wandb-project p", "[package]", 'pip install "megapar[wandb]"'),
    ("--load-hf model", "--load-hf model has a config.json but no weights"),
    (
        "--load-hf half_model",
        "--load-hf half_model lacks model-2.safetensors, listed in its model.safetensors.index.json",
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with a file for each mistake."""
    place = tmp_path_factory.mktemp("mistakes")
    for name, text in {
        "a.jsonl": '{"text": "a"}\n',
        "blank.jsonl": "\n \n",
        "late.jsonl": '\n\n{"body": "a"}\n',
        "a.jsonl.xz": "?",
        "triples.tsv": "a\tis\tb\ta is b\na\tis\tb\n",
        "no.parquet.parquet": "PAR",
    }.items():
        (place / name).write_text(text, encoding="utf-8")
    (place / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 9)[:20])
    footer = b"\x15\x00body"
    (place / "columns.parquet").write_bytes(b"PAR1" + footer + struct.pack("<I", len(footer)) + b"PAR1")
    for name in ("data", "texts", "saved", "words", "foreign", "model", "half_model", "broken", "downloaded", "gone"):
        (place / name).mkdir()
    (place / "texts/wrong.jsonl").write_text('{"body": "a"}\n', encoding="utf-8")
    (place / "saved/dataset_info.json").write_text('{"features": {"body": {}}}', encoding="utf-8")
    (place / "words/vocab.json").write_text(json.dumps({f"w{i}": i for i in range(10)}), encoding="utf-8")
    (place / "foreign/latest_checkpointed_iteration.txt").write_text("5", encoding="utf-8")
    (place / "foreign/iter_0000005").mkdir()
    (place / "gone/latest").write_text("iter_0000002\n", encoding="utf-8")
    (place / "broken/iter_0000001.tmp-0123456789ab").mkdir()
    for name in ("config.json", "metadata.json"):
        (place / "downloaded" / name).write_text("{}", encoding="utf-8")
    (place / "model/config.json").write_text("{}", encoding="utf-8")
    (place / "half_model/config.json").write_text("{}", encoding="utf-8")
    (place / "half_model/model-1.safetensors").touch()
    weights = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (place / "half_model/model.safetensors.index.json").write_text(json.dumps(weights), encoding="utf-8")
    write_tokens(place / "data/corpus_text_document", [[5, 6, 5999]])
    write_tokens(place / "short", [[5, 6, 7]])
    (place / "short.bin").write_bytes(b"\x05\x00")
    write_tokens(place / "half", [[5]])
    (place / "half.bin").unlink()
    _checkpoint(place / "run")
    _checkpoint(place / "converted")
    (place / "converted/iter_0000006/scalars.json").write_text('{"schedule": {}}', encoding="utf-8")
    return place


def _checkpoint(root: Path) -> None:
    """What --validate-only reads of one: of a run of 6 steps on a vocabulary of 9."""
    config = parse("moe", ["--vocab-size", "9", *STEPS.split()], {})
    step = root / "iter_0000006"
    step.mkdir(parents=True)
    (root / "latest").write_text("iter_0000006\n", encoding="utf-8")
    facts = json.dumps(config.model.facts(), sort_keys=True)
    (step / "layout.json").write_text(f'{{"sha256": "",\n"version": 1,\n"model": {facts},\n', encoding="utf-8")
    (step / "scalars.json").write_text(json.dumps({"schedule": make_learning_rate(config).to_dict()}))


def start(place: Path, script: str, line: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """The script as a process of its own, which also says what of HEAVY it has imported."""
    probe = (
        "import atexit, runpy, sys\n"
        f"heavy = set({HEAVY!r})\n"
        "atexit.register(lambda: print('heavy:', sorted(heavy & set(sys.modules)), file=sys.stderr))\n"
        f"sys.argv = [{script!r}, *{line.split()!r}]\n"
        f"runpy.run_path({str(ROOT / script)!r}, run_name='__main__')\n"
    )
    env = {"PATH": "", "PYTHONPATH": str(ROOT), "HF_HOME": str(place / "none"), "HOME": str(place), **environ}
    return subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, env=env, cwd=place, timeout=60)


@pytest.mark.parametrize("row", MISTAKES, ids=[row[0] for row in MISTAKES])
def test_a_mistake_is_the_same_to_the_question_and_to_the_start(
    row: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line, *words = row
    if ("--hf-dataset" in line or "columns.parquet" in line) and importlib.util.find_spec("datasets") is None:
        words = ["the package datasets"]
    script = SCRIPTS["ernie"] if line.startswith(SCRIPTS["ernie"]) else SCRIPTS["moe"]
    flags = line.removeprefix(script).strip()
    started = start(folder, script, flags)
    assert started.returncode == 2, started.stderr
    *_, heavy = started.stderr.splitlines()
    assert heavy == "heavy: []" or ("[checkpoint-schedule]" in started.stderr and heavy == "heavy: ['yaml']")
    assert started.stdout == ""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HOME", str(folder / "none"))
    kind = next(kind for kind, name in SCRIPTS.items() if name == script)
    with pytest.raises(SystemExit) as ended:
        parse_or_exit(kind, [*flags.split(), "--validate-only"], {}, outline=outline)
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.splitlines() == started.stderr.splitlines()[:-1]
    assert [word for word in words if word not in said] == [], said


def test_a_whole_configuration_is_accepted_without_torch_and_remarks_come_last(folder: Path) -> None:
    line = f"--load run {STEPS} --data-path a.jsonl --validate-only --fuse-broadcast-MB 32"
    done = start(folder, "pretrain_moe.py", line)
    assert (done.returncode, done.stderr) == (0, "heavy: []\n")
    assert "accepted for 1 rank\n" in done.stdout
    row = next(row for row in done.stdout.splitlines() if row.startswith("  --vocab-size"))
    assert row.split() == ["--vocab-size", "9", "derived"]
    assert "old name" in done.stdout.splitlines()[-1]


def test_groups_are_printed_without_torch(folder: Path) -> None:
    line = "--data-path a.jsonl --validate-only --world-size 32 --sharding-degree 4 --mp-degree 2 --hybrid-dp"
    done = start(folder, "pretrain_moe.py", line)
    assert (done.returncode, done.stderr) == (0, "heavy: []\n")
    assert "dp 4: 8 groups: 0 8 16 24 | 1 9 17 25" in done.stdout
    assert "sharding 4: 8 groups: 0 2 4 6 | 1 3 5 7" in done.stdout
    assert "mp 2: 16 groups: 0 1 | 2 3" in done.stdout
    row = next(line for line in done.stdout.splitlines() if line.startswith("  --mp-degree"))
    assert row.split() == ["--mp-degree", "2", "flag"]


def test_only_rank_0_speaks(folder: Path) -> None:
    places = ({"RANK": rank, "WORLD_SIZE": "2"} for rank in "01")
    first, second = (start(folder, "pretrain_moe.py", "--no-such-flag", **place) for place in places)
    assert (first.returncode, second.returncode) == (2, 2)
    assert "unknown-flag" in first.stderr
    assert "unknown-flag" not in second.stderr


def test_help_needs_no_torch(folder: Path) -> None:
    done = start(folder, "pretrain_moe.py", "--help model")
    assert (done.returncode, done.stderr) == (0, "heavy: []\n")
    assert "--hidden-size INT" in done.stdout
    assert "[features]" in done.stdout


def test_a_checkpoint_without_a_schedule_is_weights_alone(folder: Path) -> None:
    line = f"--load converted {STEPS} --data-path a.jsonl --validate-only"
    assert start(folder, "pretrain_moe.py", line).returncode == 0


def test_the_machine_is_not_asked_for_by_validate_only(folder: Path) -> None:
    """The question is put before the queue: there is no GPU here, and nobody has set RANK."""
    line = "--data-path a.jsonl --device npu --validate-only --world-size 2"
    assert start(folder, "pretrain_moe.py", line).returncode == 0
    assert start(folder, "pretrain_moe.py", "--data-path a.jsonl --device npu").returncode == 2


def test_the_rules_alone_look_at_no_file(folder: Path) -> None:
    line = "--rules-only --data-path no.jsonl --load nowhere --tokenizer-model none.model --world-size 8 --save run"
    done = start(folder, "pretrain_moe.py", line)
    assert (done.returncode, done.stderr) == (0, "heavy: []\n")
    assert "satisfies the rules for 8 ranks; files were only read for the model's sizes" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("  --vocab-size 4096 is assumed")
    assert start(folder, "pretrain_moe.py", f"{line} --mp-degree 3").returncode == 2
    assert "Keep one of them" in start(folder, "pretrain_moe.py", f"{line} --validate-only").stderr
