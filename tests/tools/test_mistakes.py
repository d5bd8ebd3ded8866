"""The likeliest mistakes on a command line: each message says what was wrong, with the value, and what to do."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import re
from pathlib import Path

import pytest

from megapar.arguments import FLAGS, parse, parse_or_exit
from megapar.config.hints import ELSEWHERE
from megapar.config.read import normal, spellings
from megapar.errors import ConfigError
from megapar.files import bucket, uri
from megapar.files.paths import near_path
from megapar.machine import memory_bytes
from megapar.tools.launcher.launch import _validate
from megapar.tools.launcher.launch_options import read
from megapar.tools.main import main
from megapar.training.loop.outline import outline
from megapar.training.step.schedules import make_learning_rate

YAML = {
    "typo.yaml": "num_layers: 4\nhiden_size: 64\n",
    "indented.yaml": "num_layers: 4\n hidden_size: 64\n",
    "nocolon.yaml": "num_layers 4\nhidden_size 64\n",
    "tabs.yaml": "num_layers: 4\n\thidden_size: 64\n",
    "grouped.yaml": "network:\n  num_layers: 4\n",
    "types.yaml": "num_layers: four\n",
    "no.yaml": "save: no\n",
    "layers.yaml": "window_attn_skip_freq: [1, 0]\n",
}

RECORDS = {
    "cut.jsonl.gz": b'{"text": "a"}\n',
    "table.csv": b"id,text\n1,a\n",
    "corpus.tar.gz": gzip.compress(b"corpus"),
    "tables/README.md": b"Tables.\n",
    "tables/table.csv": b"id,text\n1,a\n",
    "hf.json": b'{"architectures": ["A"], "model_type": "a"}',
    "chat.jsonl": b'{"messages": [{"role": "user", "content": "a"}]}\n',
    "body.jsonl": b'{"body": "a"}\n',
    "latin.jsonl": b'{"text": "caf\xe9"}\n',
    "latin.txt": b"caf\xe9\n",
    "array.json": b'[\n{"text": "a"}\n]\n',
    "number.jsonl": b'{"text": 1}\n',
}

MISTAKES = [
    # a flag that has another name, here or everywhere
    ("--micro-batchsize 2", "--micro-batchsize is unknown", "Did you mean --micro-batch-size?"),
    ("--learning-rate 1e-3", "--learning-rate is unknown", "Did you mean --lr?"),
    ("--epochs 3", "--epochs is unknown", "--train-iters, or with --task sft --train-epochs"),
    ("--resume runs/a", "--resume is unknown", "Did you mean --load?"),
    ("--tokenizer-typ X --attention-softmax-in-fp32", "-in-fp32 is unknown", "`megapar translate -- ARGUMENTS`"),
    ("--moe-permute-fusion", "--moe-permute-fusion is unknown", "Did you mean --", "`megapar translate -- ARGUMENTS`"),
    ("--use-mcore-models", "--use-mcore-models is unknown", "Leave it out: there is one implementation"),
    ("--vocab-file v.json", "--vocab-file is unknown", "pass it with --tokenizer-model"),
    ("--train-samples 1000", "--train-samples is unknown", "--train-iters: lengths are in steps, not in samples"),
    ("--num-layers-per-virtual-pipeline-stage 2", "stage is unknown", "--vpp-degree", "not the layers of a chunk"),
    ("--nproc-per-node 2", "--nproc-per-node is unknown", "before the script: megapar launch --nproc-per-node N"),
    ("-lr 1e-3", "'-lr' was found where a flag was expected", "Did you mean --lr?"),
    ("lr=1e-3", "'lr=1e-3' was found where a flag was expected", "Did you mean --lr=1e-3?"),
    ("--mlm-probability 0.2", "is a flag of pretrain_ernie.py", "no effect in pretrain_moe.py", "Leave it out"),
    # a value of the wrong kind, or out of bounds
    ("--train-iters 1k", "--train-iters takes a whole number, got '1k'", "Write all digits: 1000, or 1024"),
    ("--train-iters 1T", "got '1T'", "Write all digits: 1000000000000, or 1099511627776"),
    ("--train-iters 5epochs", "got '5epochs'", "Write only the number, in steps."),
    ("--train-iters 5steps", "got '5steps'", "Write only the number, in steps: 5."),
    ("--step-timeout-seconds 500ms", "Write only the number, in seconds: 0.5."),
    ("--step-timeout-seconds 10m", "takes a number, got '10m'", "Write only the number, in seconds: 600."),
    ("--exit-duration-minutes 2h", "takes a number, got '2h'", "Write only the number, in minutes: 120."),
    ("--exit-duration-minutes 230minutes", "got '230minutes'", "Write only the number, in minutes: 230."),
    ("--device-memory-gib 80g", "takes a number, got '80g'", "Write only the number, in GiB (2^30 bytes): 80."),
    ("--segment-broadcast-MB 32MB", "takes a number, got '32MB'", "Write only the number, in MB (2^20 bytes): 32."),
    ("--adaptive-recompute-device-size 1GB", "got '1GB'", "in MB (2^20 bytes): 1024."),
    ("--adaptive-recompute-device-size 64", "is in MB", "Write 65536 for 64 GiB"),
    ("--adaptive-recompute-device-size 68719476736", "is in MB", "Write 65536 for 68719476736 bytes"),
    ("--adaptive-recompute-device-swap", "is unknown", "--adaptive-recompute-device-size", "host memory"),
    ("--seq-length 1,024", "got '1,024'", "without commas: 1024"),
    ("--lr 0,001", "got '0,001'", "with a decimal point: 0.001"),
    ("--num-layers -2", "--num-layers must be at least 1", "got -2"),
    ("--lr", "--lr needs a value", "a number"),
    ("--num-workers 4", "--num-workers is unknown", "Leave it out: one thread of a rank reads ahead"),
    ("--lr-scheduler-type cosine", "is unknown", "Did you mean --lr-decay-style?"),
    ("--pp-schedule dualpipe", "got 'dualpipe'", "Did you mean zero_bubble?"),
    ("--num-experts-per-tok 2", "is unknown", "Did you mean --moe-router-topk?"),
    ("--save s3:/bucket/run", "--save s3:/bucket/run is a path on a disk, not in a bucket", "Write s3://bucket/run."),
    ("--save s3:/me:secret@bucket/run", "--save s3:/***@bucket/run is a path on a disk", "Write s3://***@bucket/run."),
    ("--save az://bucket/run", "is of no store that is built", "Use s3:// or gs://"),
    ("--config hf.json", "is a config.json of transformers", "configs --from-hf hf.json"),
    ("--world-size 4 --mp-degree 3 --num-query-groups 2", "Nearest legal: --mp-degree 2; --mp-degree 1; or"),
    ("--data-path chat.jsonl", "no field 'text'", "--task sft trains on these"),
    ("--dtype float32", "got 'float32'", "Did you mean fp32?"),
    ("--device gpu", "got 'gpu'", "Did you mean cuda?"),
    # sizes and ranks that do not fit
    ("--world-size 8 --mp-degree 4 --hybrid-dp", "Choose --sharding-degree 1."),
    ("--world-size 1440 --mp-degree 64 --num-attention-heads 8", "Nearest legal: --mp-degree 8"),
    (
        "--world-size 4 --pp-degree 4 --rampup-batch-size 4 4 1000 --global-batch-size 16 --micro-batch-size 4",
        "Choose multiples of 16 as START and INCREMENT of --rampup-batch-size",
    ),
    ("--world-size 6 --mp-degree 4", "--world-size 6", "--mp-degree 4", "Nearest legal", "start 4 or 8 ranks"),
    ("--world-size 3 --mp-degree 2 --pp-degree 2", "Nearest legal: --mp-degree 1 --pp-degree 3; --mp-degree 1 --pp"),
    ("--world-size 2 --mp-degree 2 --ep-degree 2", "Choose --ep-degree 1, or --expert-mp-degree 1, with which"),
    ("--world-size 2 --mp-degree 2 --ep-degree 3 --num-experts 9", "Choose --ep-degree 1."),
    ("--world-size 8 --sharding-degree 4", "--world-size 8", "--sharding-degree 4 --hybrid-dp", "start 4 ranks"),
    ("--mp-degree 2", "--world-size 1", "start 2 ranks", "megapar launch --nproc-per-node N"),
    ("--pp-degree 8 --num-layers 4", "--pp-degree 8", "Choose --pp-degree up to 4, or --num-layers 8"),
    ("--hidden-dropout 1.5", "--hidden-dropout must be at most 0.99", "got 1.5"),
    ("--fp8 --device npu --bf16", "--device npu", "Leave --fp8 out"),
    ("--fp8 --hidden-size 192", "--hidden-size 192", "Choose --hidden-size 128 or 256"),
    ("--fp8 --num-experts 0 --world-size 2 --mp-degree 2 --ffn-hidden-size 384", "Choose --ffn-hidden-size 256 or 512"),
    ("--fp8 --num-attention-heads 4 --head-dim 48", "Choose --head-dim 32 or 64"),
    ("--fp8 --multi-latent-attention --v-head-dim 20 --num-attention-heads 16", "Choose --v-head-dim 16 or 24"),
    ("--fp8 --moe-shared-experts 1 --moe-ffn-hidden-size 192", "--moe-shared-expert-intermediate-size 128 or 256"),
    ("--bf16 --fp16", "--bf16 and --fp16 set the same flag to different values", "Keep one"),
    ("--seq-length 64 --max-position-embeddings 32", "Choose --max-position-embeddings 64"),
    ("--mp-degre 2 --dtype float --data-path nix", "3 complaints", "--mp-degree?", "fp32?", "contain 'nix'"),
    ("--num-attention-heads 3", "--num-attention-heads 3", "Choose --num-attention-heads 1, 2, 4"),
    ("--world-size 4 --ep-degree 4 --num-experts 6", "--num-experts 6", "Choose --ep-degree 1, 2, 3 or 6"),
    ("--world-size 4 --global-batch-size 10", "--global-batch-size 10", "Choose --global-batch-size 16"),
    # files and folders
    ("--data-path corpus.jsnl", "--data-path corpus.jsnl does not exist", "Did you mean corpus.jsonl?"),
    (
        "--data-path part-*.jsonl",
        "part-*.jsonl does not exist",
        "Patterns and commas are not expanded",
        "without quotes",
    ),
    ("--data-path a.jsonl,b.jsonl", "a.jsonl,b.jsonl does not exist", "Patterns and commas", "apart, or their folder"),
    ("--save dangling/run", "dangling is a link to a folder that does not exist", "Create the folder, or remove"),
    ("--data-path builtn", "--data-path builtn does not exist", "Did you mean builtin?"),
    ("--tokenizer-model none/t.model", "--tokenizer-model none/t.model does not exist", "does not contain 'none'"),
    ("--tokenizer-model run", "--tokenizer-model run contains no tokenizer", "Pass a sentencepiece model"),
    ("--load-hf baidu/ERNIE", "--load-hf baidu/ERNIE does not exist", "megapar downloads nothing"),
    ("--load-hf run", "run contains no config.json"),
    ("--data-path empty.jsonl", "--data-path empty.jsonl is empty", "Pass a file that contains text"),
    ("--data-path body.jsonl", "body.jsonl, line 1: no field 'text'; the record has 'body'", "--text-field body"),
    ("--data-path cut.jsonl.gz", "cut.jsonl.gz: not a readable gzip file"),
    ("--data-path table.csv", "table.csv cannot be read as text", "Dataset.from_csv('table.csv')"),
    ("--data-path corpus.tar.gz", "corpus.tar.gz cannot be read as text. It is an archive: unpack it"),
    ("--data-path tables", "the folder contains only README.md (about the data), table.csv (a table)"),
    ("--text-field body --data-path builtin", "--text-field applies to JSONL and parquet files", "Set --data-path"),
    ("--data-path latin.jsonl", "latin.jsonl, line 1: not a JSON record ('utf-8' codec", "--on-bad-record skip"),
    ("--data-path 1 corpus.jsonl 1 latin.txt", "latin.txt, line 1: not UTF-8 text", "iconv", "--on-bad-record skip"),
    ("--data-path array.json", "array.json is a JSON array", "jq -c '.[]'"),
    ("--eval-data-path number.jsonl", "--eval-data-path number.jsonl, line 1: field 'text' is of type int"),
    ("--load run", "--load run contains no checkpoint", "Did you mean run/checkpoints?"),
    ("--load run/checkpoints/iter_0000005", "is a single checkpoint", "run/checkpoints"),
    ("--load model", "--load model contains no checkpoint", "did you mean --load-hf model?"),
    ("--load run/checkpoints --ckpt-step 4", "no checkpoint of --ckpt-step 4", "It has those of 5"),
    ("--load-hf model", "--load-hf model has a config.json but no weights (*.safetensors)"),
    ("--load-hf model --save-hf model", "--save-hf model is also the folder of --load-hf"),
    ("--data-path blank", "--data-path blank: the folder contains no files; text, JSONL and parquet"),
    ("--metrics-jsonl run", "run is a folder", "run/metrics.jsonl"),
    ("--profile 6:7 --train-iters 5", "--profile starts after the last step", "Choose --profile 5:5"),
    ("--save corpus.jsonl/run", "--save", "corpus.jsonl is a file, not a folder"),
    ("--config nocol", "--config nocol does not exist", "Did you mean nocolon.yaml?"),
    ("typo.yaml", "'typo.yaml' was found where a flag was expected", "Did you mean --config typo.yaml?"),
    ("--hybrid-dp yes", "--sharding-degree or --dp-degree", "out: no ranks are left for replicas"),
    ("--config tab.yaml", "--config tab.yaml does not exist", "Did you mean tabs.yaml?"),
    # YAML
    ("--config typo.yaml", "in typo.yaml, key hiden_size is unknown", "--hidden-size"),
    ("--config indented.yaml", "line 2, column 13", "' hidden_size: 64'", "starts at the left margin"),
    ("--config nocolon.yaml", "does not consist of key: value lines", "`key: value`"),
    ("--config tabs.yaml", "line 2", "without tabs"),
    ("--config grouped.yaml", "key network is unknown", "the keys under it (num_layers)"),
    ("--config types.yaml", "--num-layers takes a whole number, got 'four'"),
    ("--config no.yaml", "--save takes a string, got false", "Leave the key out to turn it off"),
    ("--config layers.yaml", "takes a string, got ['1', '0']", 'Put it in quotes: "[1,0]"'),
]

TRAIN = "data train-tokenizer --input corpus.jsonl"
TOOLS = [
    ("lunch", "lunch is not a command", "Did you mean launch?"),
    ("launch --nproc 2 pretrain_moe.py", "--nproc.", "Did you mean --nproc-per-node?"),
    ("launch --nproc-per-node two pretrain_moe.py", "'two' is not a whole number >= 1"),
    ("launch corpus.json", "script corpus.json does not exist", "Did you mean corpus.jsonl?"),
    ("data prepare --inputs a --output b --tokenizer-model c", "Did you mean --input?"),
    ("data prepare --output b --tokenizer-model c", "pass --input or --hf-dataset"),
    ("data prepare --input a --output b --tokenizer-model c --sft-turns last", "--sft-turns: no effect with --task p"),
    (
        "data prepare --input a --output b --tokenizer-model c --task sft --field x",
        "--field: no effect with --task sft",
    ),
    ("plan --device-kind h1000", "--device-kind h1000 is not in the table", "h100-80g"),
    ("plan --load-hf meta-llama/Llama-3-8B", "does not exist", "megapar downloads nothing"),
    ("plan --search --global-batch-size 8 --load-hf no/model", "--load-hf no/model does not exist"),
    ("report run", "run contains no metrics", "--metrics-jsonl"),
    ("report kept", "kept contains no metrics", "Did you mean kept/again or kept/checkpoints?"),
    ("evaluate run", "run contains no readable checkpoint", "Did you mean run/checkpoints?"),
    ("generate model --prompt a", "model is a model of transformers, not the folder of a run", "is --load-hf"),
    ("generate run --prompt a", "run has no checkpoint", "Did you mean run/checkpoints?"),
    ("plan --world-size -1", "'-1' is not a whole number >= 1"),
    ("plan typo.yaml", "Did you mean --config typo.yaml?"),
    ("rules show mp-head", "mp-head is not a row. Did you mean mp-heads", "or"),
    ("rules show", "show needs the name of a row"),
    ("convert hf-to-megapar run out", "megapar convert: run contains no config.json"),
    ("convert hf-to-megapar org/model out", "convert: org/model does not exist; `hf download` fetches"),
    ("convert megapar-to-hf run out --shard-mb 0", "'0' is not a whole number >= 1"),
    (f"{TRAIN} --vocab-size 300 --output corpus.jsonl", "--output corpus.jsonl already exists"),
    (f"{TRAIN} --vocab-size 9 --output corpus.jsonl --overwrite", "is one of the inputs; pass another file"),
    ("data show corpus.jsonl 0.5 --tokenizer-model t.model", "corpus.jsonl 0.5: a weight follows its path"),
    ("data show s3://b/day=1/x.jsonl", "s3://b/day=1/x.jsonl"),
    ("data train-tokenizer corpus.jsonl --vocab-size 9 --output s3://b/k=v/t.model", "s3://b/k=v/t.model"),
    (f"{TRAIN} --vocab-size 300 --output run", "--output run is a folder; pass a file, such as run/tokenizer.model"),
    ("data prepare --input corpus.jsonl --tokenizer-model t.model --output run/", "--output run/ is a folder"),
]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in YAML.items():
        Path(name).write_text(text, encoding="utf-8")
    Path("corpus.jsonl").write_text('{"text": "a"}\n', encoding="utf-8")
    Path("run/checkpoints/iter_0000005").mkdir(parents=True)
    Path("run/checkpoints/latest").write_text("iter_0000005\n", encoding="utf-8")
    Path("run/checkpoints/iter_0000005/layout.json").write_text("{}", encoding="utf-8")
    for run in ("again", "checkpoints"):
        Path("kept", run).mkdir(parents=True)
        Path("kept", run, "metrics.jsonl").write_text('{"iteration": 1}\n', encoding="utf-8")
    Path("empty.jsonl").touch()
    Path("tables").mkdir()
    for name, content in RECORDS.items():
        Path(name).write_bytes(content)
    Path("model").mkdir()
    Path("blank").mkdir()
    Path("dangling").symlink_to("nowhere")
    Path("model/config.json").write_text("{}", encoding="utf-8")


@pytest.mark.parametrize("row", MISTAKES, ids=[row[0] for row in MISTAKES])
def test_a_mistake_in_a_run_is_told_kindly(row: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    line, *words = row
    environ = {}
    if "--world-size" in line:  # as if so many had been launched: files are judged, too
        environ["WORLD_SIZE"] = line.split()[1]
    with pytest.raises(SystemExit) as ended:
        parse_or_exit("moe", line.split(), environ)
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert [word for word in words if word not in said] == [], said


def test_a_record_that_may_be_passed_over_is() -> None:
    assert parse("moe", ["--data-path", "latin.jsonl", "--on-bad-record", "skip"], {}).data.data_path == (
        "latin.jsonl",
    )


def test_a_mistake_in_many_files_or_in_two_flags_is_told_once() -> None:
    Path("texts").mkdir()
    for number in range(6):
        Path(f"texts/{number}.txt").write_text("text\n", encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        parse("moe", ["--task", "sft", "--data-path", "texts"], {})
    (said,) = (str(one) for one in refused.value.complaints if one.rule == "file")
    assert "texts/0.txt: conversations are read from" in said
    assert said.endswith("The same of 5 more: 1.txt, 2.txt, 3.txt and 2 more.")
    with pytest.raises(ConfigError) as refused:
        parse("moe", ["--data-path", "texts/none", "--eval-data-path", "texts/none"], {})
    assert [one.message for one in refused.value.complaints] == ["--eval-data-path texts/none does not exist."]


@pytest.mark.parametrize("line", ["generate a --prompt a --max-new-token 5", "convert megapar-to-hf a b --shard 5"])
def test_names_of_options_are_written_out(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(line.split()) == 2
    assert f"unrecognized arguments: {' '.join(line.split()[-2:])}. Did you mean" in capsys.readouterr().err


def status_of(words: list[str]) -> object:
    """The status of a command."""
    try:
        return main(words)
    except SystemExit as end:  # argparse
        return end.code or 0


@pytest.mark.parametrize("row", TOOLS, ids=[row[0] for row in TOOLS])
def test_a_mistake_with_a_tool_is_told_kindly(row: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    line, *words = row
    status = status_of(line.split())
    said = capsys.readouterr().err
    assert status in (1, 2)
    assert [word for word in words if word not in said] == [], said
    assert "Traceback" not in said


# The trainer, its flags, what the checkpoint's record of the model says otherwise, and the refusal if there is one.
STORED = [
    ("moe", "", {}, ""),
    ("moe", "--num-layers 2", None, "--num-layers is 4 there and 2 here"),
    ("moe", "--num-experts 4", None, "--num-experts is 8 there and 4 here"),
    ("moe", "--num-experts 0", None, "moe is given there and none here"),
    ("moe", "--ckpt-step 5 --vocab-size 99", None, "iter_0000005 is a checkpoint of another model"),
    ("moe", "--ckpt-step 5 --vocab-size 99", None, "--vocab-size is 4096 there"),
    ("moe", "", {"max_position_embeddings": 64}, ""),  # rotary positions have no table
    (
        "moe",
        "--position-embedding-type learned",
        {"max_position_embeddings": 64},
        "--max-position-embeddings is 64",
    ),
    ("moe", "--mtp-depth 1", {"mtp_depth": 0}, "--mtp-depth is 0 there and 1 here"),
    ("moe", "--mtp-depth 1 --finetune", {"mtp_depth": 0}, ""),
    ("moe", "--finetune", {"mtp_depth": 1}, ""),
    ("moe", "--finetune", {"num_layers": 5}, "--num-layers is 5 there and 4 here"),
    ("ernie", "--finetune", {"sop": False}, ""),
]


@pytest.mark.parametrize(
    ("kind", "line", "stored", "refusal"), STORED, ids=[f"{k} {w} {s} {t}" for k, w, s, t in STORED]
)
def test_a_checkpoint_of_another_model_is_told_before_the_start(
    kind: str, line: str, stored: dict[str, object] | None, refusal: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--load", "run/checkpoints", *line.split()]
    config = parse(kind, [] if stored is None else flags, {})
    facts = config.model.facts() | (stored or {})
    head = f'{{"sha256": "",\n"version": 1,\n"model": {json.dumps(facts, sort_keys=True)},\n'
    Path("run/checkpoints/iter_0000005/layout.json").write_text(head)
    schedule = make_learning_rate(config).to_dict()  # without one it would be of weights alone
    Path("run/checkpoints/iter_0000005/scalars.json").write_text(json.dumps({"schedule": schedule}))
    if not refusal:
        assert parse_or_exit(kind, flags, {}, outline=outline).model
        return
    with pytest.raises(SystemExit) as ended:
        parse_or_exit(kind, flags, {}, outline=outline)
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert refusal in said
    assert "Pass the flags that it was trained with" in said


SRUN = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "77"}
MPIRUN = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"}
MPICH = {"PMI_SIZE": "4", "PMI_RANK": "2"}
MOE = str(Path(__file__).parents[2] / "pretrain_moe.py")
PLACE = {"LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (SRUN, "This is task 2 of 4 of a Slurm step, but RANK and WORLD_SIZE are not set"),
        (MPIRUN, "This is task 2 of 4 of mpirun"),
        (MPICH, "This is task 2 of 4 of an MPI job"),
        ({**SRUN, "SLURM_PROCID": "0"}, "This is task 0 of 4"),
        ({"RANK": "3"}, "RANK is 3, but WORLD_SIZE is not set"),
        ({**PLACE, "RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2 and WORLD_SIZE is 2, but ranks are 0 to 1."),
        ({**PLACE, "RANK": "abc", "WORLD_SIZE": "2"}, "RANK is 'abc', not the number of a rank."),
        ({**PLACE, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "x"}, "LOCAL_RANK is 'x', not the number of a rank."),
        (
            {**PLACE, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "-1"},
            "LOCAL_RANK is '-1', not the number of a rank.",
        ),
        ({**PLACE, "WORLD_SIZE": "2"}, "WORLD_SIZE is 2, but RANK is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "WORLD_SIZE is 2, but MASTER_ADDR is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "megapar launch or torchrun"),
        ({**PLACE, "RANK": "0", "WORLD_SIZE": "2"}, ""),
        ({**SRUN, **PLACE, "RANK": "1", "WORLD_SIZE": "4"}, ""),  # a rank of torchrun, accelerate or a script
        ({**MPIRUN, "WORLD_SIZE": "1", "RANK": "0"}, ""),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}, ""),  # srun -n 1, and the interactive step of salloc
        ({**SRUN, "SLURM_PTY_PORT": "39000"}, ""),  # srun -n 4 --pty bash: one shell
        ({"SLURM_JOB_ID": "77", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, ""),  # a batch script
        ({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, ""),
        ({"RANK": "0"}, ""),
    ],
)
def test_a_task_of_an_unknown_launcher_does_not_train_alone(
    environ: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What concerns one rank is said by that rank."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    if not message:
        assert parse_or_exit("moe", []).grid
        return
    with pytest.raises(SystemExit, match="2"):
        parse_or_exit("moe", [])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("environ", [SRUN, MPIRUN, MPICH])
@pytest.mark.parametrize(
    "words",
    [
        ["plan", "--config", "tiny"],
        ["translate", "pretrain_gpt.py", "--num-layers", "2"],
        ["data", "--help"],
        ["pretrain", "moe", "--config", "tiny", "--validate-only"],
        ["launch", "--nproc-per-node", "2", MOE, "--config", "tiny", "--validate-only"],
    ],
)
def test_a_task_of_an_unknown_launcher_may_do_anything_else(
    environ: dict[str, str], words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert status_of(words) == 0 or words[0] == "translate"
    assert "task 2" not in capsys.readouterr().err


@pytest.mark.parametrize("environ", [SRUN, MPIRUN, MPICH])
def test_python_code_in_a_task_of_an_unknown_launcher_decides_itself(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``megapar.train`` parses like this, and the launcher stands for its ranks, whose variables it sets."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert parse("moe", []).grid.world_size == 1
    checked = _validate(read(["--nproc-per-node", "1", MOE])[0])
    assert checked is not None


ON_DISKS = [flag.spelling for flag in FLAGS.values() if flag.path and not flag.store and flag.name != "hf_dataset"]
REMOTE = "only checkpoints, exports and data lie in object stores; other paths are those of mounted file systems"


@pytest.mark.parametrize(
    "flags",
    [
        *([name, "s3://bucket/x"] for name in ON_DISKS),
        ["--tensorboard-dir", "$BUCKET/x"],
        ["--config", "bucket.yaml"],
    ],
)
def test_paths_in_object_stores_are_refused_in_one_sentence(flags: list[str]) -> None:
    Path("bucket.yaml").write_text("tensorboard_dir: s3://bucket/x\n")
    ernie = [flag.spelling for flag in FLAGS.values() if flag.models == ("ernie",)]
    kind = "ernie" if flags[0] in ernie else "moe"
    with pytest.raises(ConfigError) as refused:
        parse(kind, flags, {"BUCKET": "s3://b"}, starting=True)
    about = [complaint for complaint in refused.value.complaints if complaint.rule == "remote-paths"]
    assert len(about) == 1
    assert REMOTE in str(about[0])
    assert not [one for one in refused.value.complaints if "exist" in str(one)]


@pytest.mark.parametrize(
    "words",
    [
        ["data", "prepare", "--input", "corpus.jsonl", "--tokenizer-model", "t.model", "--output=s3://bucket/x"],
        ["launch", "--log-dir", "s3://bucket/logs", "pretrain_moe.py"],
    ],
)
def test_commands_write_nothing_to_object_stores(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(Path.cwd().iterdir())
    assert status_of(words) == 2
    assert REMOTE in capsys.readouterr().err
    assert sorted(Path.cwd().iterdir()) == before


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--save=hf://org/x"], "--save hf://org/x is of no store"),
        (["--load", "s3://b//x"], "--load s3://b//x is not s3://BUCKET/NAME"),
        (["--save-hf", "s3://me:secret@b/x"], "--save-hf s3://***@b/x contains a user or a password"),
        (["--save", "gs://b/x"], 'Install it with: pip install "megapar[gcs]"'),
        (["--save", "memory://x", "--world-size", "2", "--validate-only"], "is the memory of one process"),
        (["--save", "memory://x"], ""),
        (["--data-path", "1", "corpus.jsonl", "2", "gs://b/c.jsonl"], "--data-path gs://b/c.jsonl needs the package"),
    ],
)
def test_stores_are_looked_at_by_their_form(flags: list[str], part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uri, "find_spec", lambda name: None if name == "gcsfs" else object())
    monkeypatch.setattr(bucket, "objects_of", lambda scheme: pytest.fail("the store is asked"))
    try:
        parse("moe", ["--data-path", "mock", *flags], {}, starting=True)
        said = ""
    except ConfigError as refused:
        said = str([str(one) for one in refused.complaints if one.rule in ("store", "package")])
    assert part in said
    assert bool(part) is bool(said)
    assert "secret" not in said


@pytest.mark.parametrize(
    "words",
    [
        ["convert", "hf-to-megapar", "s3://me:secret@b/x", "made"],
        ["report", "s3://me:secret@b/x"],
        ["report", "kept/checkpoints", "--output", "s3://me:secret@b/x.html"],
    ],
)
def test_commands_refuse_secrets_of_stores(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(words) == 2
    said = capsys.readouterr().err
    assert "secret" not in said
    assert "s3://***@b/x" in said
    assert "contains a user or a password" in said


def test_a_file_uri_is_its_path() -> None:
    here = Path.cwd()
    config = parse(
        "moe", ["--data-path", "mock", "--save", f"file://{here}/x", "--tensorboard-dir", f"file://{here}/b"]
    )
    assert (config.checkpoint.save, config.logging.tensorboard_dir) == (f"{here}/x", f"{here}/b")
    assert config.logging.metrics_file == f"{here}/x/metrics.jsonl"


def test_a_run_that_saves_into_a_store_has_no_metrics_there() -> None:
    config = parse("moe", ["--data-path", "mock", "--save", "memory://x/y"], {})
    assert config.logging.metrics_file is None


def test_names_that_are_urls_are_taken() -> None:
    line = ["--mlflow-tracking-uri", "https://tracker:5000", "--mlflow-experiment", "x"]
    with pytest.raises(ConfigError) as refused:
        parse("moe", [*line, "--tensorboard-dir", "s3://b"], {})
    assert "tracker" not in "".join(str(one) for one in refused.value.complaints if one.rule == "remote-paths")


def test_a_rank_that_is_left_in_the_environment_keeps_nobody_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_or_exit("moe", ["--learning-rate", "1"], {"RANK": "1"})
    assert "Did you mean --lr?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse_or_exit("moe", ["--learning-rate", "1"], {"RANK": "1", "WORLD_SIZE": "2"})
    assert capsys.readouterr().err == ""


def test_another_runs_checkpoints_are_not_written_over() -> None:
    line, scalars = ["--save", "run/checkpoints"], Path("run/checkpoints/iter_0000005/scalars.json")
    told = r"contains checkpoints of another run, up to iteration 5. Resume from them with --load run/"
    with pytest.raises(ConfigError, match=told):
        parse("moe", line, {}, starting=True)
    parse("moe", [*line, "--load", "run/checkpoints/"], {}, starting=True)
    parse("moe", line, {"TORCHELASTIC_RESTART_COUNT": "1"}, starting=True)  # what it has saved itself
    scalars.write_text('{"job": "a"}', encoding="utf-8")
    parse("moe", line, {"TORCHELASTIC_RUN_ID": "a"}, starting=True)
    with pytest.raises(ConfigError, match=told):
        parse("moe", line, {"TORCHELASTIC_RUN_ID": "b"}, starting=True)


def test_a_preset_s_data_gives_way_to_a_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    Path("preset.yaml").write_text("data_path: corpus.jsonl\non_bad_record: skip\n", encoding="utf-8")
    line = ["--config", "preset.yaml", "--data-source", "hf", "--hf-dataset", "blank"]
    assert parse("moe", line, {}).data.data_path == ("builtin",)
    Path("both.yaml").write_text("data_path: corpus.jsonl\ndata_source: hf\nhf_dataset: blank\n", encoding="utf-8")
    for wrong in ([*line, "--data-path", "corpus.jsonl"], ["--config", "both.yaml"]):
        with pytest.raises(ConfigError, match="--data-source hf reads only --hf-dataset"):
            parse("moe", wrong, {})


def test_yaml_numbers_are_what_stands_there() -> None:
    Path("base.yaml").write_text(
        "profile: 3:4\nmetrics_jsonl: 010\ntrain_iters: 0_9\n--num-layers: 3\n", encoding="utf-8"
    )
    config = parse("moe", ["--config", "base.yaml"], {})
    assert (config.logging.profile, config.logging.metrics_jsonl) == ("3:4", "010")
    assert (config.training.train_iters, config.model.num_layers) == (9, 3)
    Path("ramp.yaml").write_text(
        "rampup_batch_size: 2 2 8\nglobal_batch_size: 8\nmicro_batch_size: 2\n", encoding="utf-8"
    )
    assert parse("moe", ["--config", "ramp.yaml"], {}).training.rampup_batch_size == (2, 2, 8)


@pytest.mark.parametrize(
    ("kind", "reason"), [("cuda", "there is no GPU driver (libcuda.so.1)"), ("npu", "torch_npu is not installed")]
)
def test_a_device_that_is_not_here_is_told_with_all_else(
    kind: str, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megapar.machine._loads", lambda library: False)
    monkeypatch.setattr("pathlib.Path.exists", lambda path: False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    line = ["--device", kind, "--dtype", "bf16"]
    with pytest.raises(SystemExit) as ended:
        parse_or_exit("moe", [*line, "--num-attention-heads", "3"])
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert "2 complaints" in said
    assert f"--device is {kind}, but {reason} on this machine. Set --device to cpu or auto." in said
    assert parse("moe", line, {}).runtime.device == kind  # plans and launchers speak of other machines


@pytest.mark.parametrize("flag", ["--fp8", "--attention-backend cudnn"])
def test_kernels_of_a_gpu_without_a_gpu_are_told(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megapar.machine._loads", lambda library: False)
    line = [*flag.split(), "--dtype", "bf16"]
    with pytest.raises(ConfigError, match=rf"{flag} needs an NVIDIA GPU.* but there is no GPU driver"):
        parse("moe", line, {}, starting=True)
    parse("moe", line, {})


def test_a_folder_that_cannot_be_written_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(SystemExit):
        parse_or_exit("moe", ["--save", "run/new"], {})
    assert re.search(r"--save: folder \S*/run is not writable", capsys.readouterr().err)


def test_a_script_that_is_queued_again_may_name_one_folder_in_two_ways() -> None:
    assert parse_or_exit("moe", ["--load", "new/", "--save", "new"], {}).checkpoint.load == "new/"


def test_names_from_elsewhere_are_no_flags_and_lead_to_flags() -> None:
    assert [name for name in ELSEWHERE if normal(name) in spellings()] == []
    written = {flag.spelling for flag in FLAGS.values()} | {"--nproc-per-node"}
    for hint in ELSEWHERE.values():
        assert set(re.findall(r"--[a-z][\w-]*", hint)) <= written


def test_what_stands_behind_a_mistyped_folder_must_be_there() -> None:
    assert near_path("runs/checkpoints") == "Did you mean run/checkpoints?"
    assert "does not contain 'runs'" in near_path("runs/other")


def test_a_dataset_needs_the_package_that_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "datasets" else found(name))
    with pytest.raises(ConfigError, match=r"needs the package datasets. Install it: pip install datasets"):
        parse("moe", ["--data-source", "hf", "--hf-dataset", "corpus"], {})


@pytest.mark.parametrize(
    ("groups", "limits", "least"),
    [
        ("0::/a/b\n", {"a/memory.max": "4096\n", "a/b/memory.max": "max\n"}, 4096),
        ("4:memory:/job\n1:cpu:/\n", {"memory/job/memory.limit_in_bytes": "8192\n"}, 8192),
        ("4:memory:/job\n", {"memory/memory.limit_in_bytes": f"{2**63 - 4096}\n"}, None),
        ("", {}, None),
    ],
)
def test_the_memory_of_a_machine_is_that_of_its_control_group(
    groups: str, limits: dict[str, str], least: int | None, tmp_path: Path
) -> None:
    for name, text in limits.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups, encoding="ascii")
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert memory_bytes(tmp_path) == (least or whole)


def test_a_model_larger_than_the_machine_is_refused_before_torch(capsys: pytest.CaptureFixture[str]) -> None:
    from megapar.tools.pretrain import checked_outline

    line = ["--hidden-size", "8192", "--num-layers", "64", "--num-attention-heads", "64", "--device", "cpu"]
    line += ["--num-experts", "0", "--data-path", "mock", "--micro-batch-size", "1", "--seq-length", "128"]
    with pytest.raises(ConfigError) as error:
        checked_outline(parse("moe", line, {}))
    said = str(error.value)
    assert "[memory]" in said
    assert re.search(r"needs \d+ GiB .* this machine has \d+ GiB", said)
    assert "--no-memory-check" in said
    assert capsys.readouterr().err == ""
    assert checked_outline(parse("moe", [*line, "--no-memory-check", "--seq-length", "100000"], {}))
    assert re.search(r"a step takes about [\d,]+ minutes on this CPU", capsys.readouterr().err)
    assert checked_outline(parse("moe", [*line, "--validate-only"], {}))
