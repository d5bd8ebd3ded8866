"""Lines in, lines out: what ``megapar translate`` prints for words that stand around a known argument."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megapar.tools.main import main
from megapar.tools.translate import OTHER_TRAINING, SAME_TRAINING
from megapar.tools.translation.source import take_apart
from megapar.tools.translation.translated import equivalent, translate
from megapar.tools.translation.verdict import UNKNOWN
from tests.tools.translation.tables import declared

# A decoder that means the same in Megatron-LM and here, so that only what a test adds can change the status.
MODEL = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --bf16 "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1 "
    "--vocab-size 512 --tokenizer-type NullTokenizer --mock-data --eval-iters 0 --lr 1e-3"
)
PLAIN = f"{MODEL} --train-iters 10 --global-batch-size 32"


@pytest.fixture
def translated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return (status, output) of the command for a file of this name with this text."""

    def run(text: str, name: str = "train.sh", *options: str) -> tuple[int, str]:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        status = main(["translate", *options, str(path)])
        return status, capsys.readouterr().out

    return run


def head(output: str) -> str:
    return output.partition("\n\n")[0]


def command(output: str) -> str:
    """The command that is printed, on one line."""
    start = output.index("megapar launch")
    return " ".join(output[start:].partition("\n\n")[0].replace("\\\n", " ").split())


def test_a_switch_never_takes_the_open_word_after_it(translated: Any) -> None:
    tables = ("megatron_lm", "megatron_deepspeed", "mindspeed", "mindspeed_llm")
    rows = [row for table in tables for row in declared(table)]
    valued = {row.name for row in rows if row.kind == "value"}
    switches = sorted({row.name for row in rows if row.kind != "value"} - valued)
    assert len(switches) > 500
    words = " ".join(f"--{name} $AFTER_{place}" for place, name in enumerate(switches))
    _, output = translated(f"torchrun --nproc_per_node 8 pretrain_gpt.py {words}\n", "train.sh", "--json")
    items = json.loads(output)
    assert [item["flag"] for item in items if "AFTER" in item["value"] and item["flag"]] == []
    alone = [item for item in items if item["value"].startswith("$AFTER")]
    assert len(alone) == len(switches)
    assert {(item["verdict"], item["decides"]) for item in alone} == {("left to you", True)}


def test_an_argument_with_a_value_takes_the_open_word_after_it(translated: Any) -> None:
    rows = [row for table in ("megatron_lm", "mindspeed") for row in declared(table) if row.kind == "value"]
    names = sorted({row.name for row in rows} - {row.name for row in rows if row.default in ("true", "false")})
    words = " ".join(f"--{name} $VALUE_{place}" for place, name in enumerate(names))
    _, output = translated(f"torchrun --nproc_per_node 8 pretrain_gpt.py {words}\n", "train.sh", "--json")
    assert [item["value"] for item in json.loads(output) if not item["flag"]] == []


def test_a_switch_of_paddle_that_has_no_counterpart_takes_no_open_word(translated: Any) -> None:
    for words, named in (("--do_train $MORE", "$MORE"), ("--bf16 $BF16", "--dtype")):
        status, output = translated(f"torchrun run_pretrain.py --max_steps 10 {words}\n")
        assert status == OTHER_TRAINING
        assert f"# LEFT TO YOU: {named}\n" in output


def test_no_private_mark_is_printed(translated: Any) -> None:
    line = f"torchrun --standalone $A pretrain_gpt.py {PLAIN} --wandb-project $B --log-throughput $C --lr $D x-$E\n"
    for options in ((), ("--json",)):
        _, output = translated(line, "train.sh", *options)
        assert not re.search("[\ue000-\uf8ff]|ue00[0-9]", output)
        assert all(f"${name}" in output for name in "ABCDE")
    _, output = translated(f"torchrun pretrain_gpt.py {PLAIN}\ntorchrun $HERE/pretrain_gpt.py --lr 1\n")
    assert not re.search("[\ue000-\uf8ff]", output)


# Numbers.

BLOOM = (
    "--global-batch-size 2048 --rampup-batch-size 192 16 9_765_625 --train-samples 220_000_000 "
    "--lr-decay-samples 200_000_000 --lr-warmup-samples 183_105"
)


def test_every_number_that_python_reads_is_read(translated: Any) -> None:
    _, output = translated(f"torchrun --nproc_per_node 8 pretrain_gpt.py {MODEL} {BLOOM}\n")
    written = command(output)
    for flags in ("--train-iters 115311 ", "--lr-decay-iters 105545 ", "--lr-warmup-iters 910 "):
        assert flags in written + " "
    _, output = translated(
        f"torchrun --nproc_per_node 1_6 pretrain_gpt.py {PLAIN} --pipeline-model-parallel-size 1_6 --noop-layers 0,1 "
        "--num-layers 3_4 --make-vocab-size-divisible-by 1_28\n"
    )
    written = command(output)
    assert "--nproc-per-node 16 " in written
    assert "--num-layers 32 " in written
    assert "--vocab-size 640 " in written


@pytest.mark.parametrize(
    ("words", "flag", "unread"),
    [
        ("--rampup-batch-size 192 16 9,765 --train-samples 2200 --global-batch-size 256", "--train-samples", "9,765"),
        ("--global-batch-size many --train-samples 2200", "--train-samples", "many"),
        ("--lr-warmup-fraction nan --train-iters 10", "--lr-warmup-fraction", "nan"),
        ("--mtp-num-layers one", "--mtp-num-layers", "one"),
    ],
)
def test_a_number_that_cannot_be_read_is_named(translated: Any, words: str, flag: str, unread: str) -> None:
    status, output = translated(f"torchrun pretrain_gpt.py {MODEL} {words}\n", "train.sh", "--json")
    (item,) = [item for item in json.loads(output) if item["flag"] == flag]
    assert status == OTHER_TRAINING
    assert item["verdict"] == "different results"
    assert f"{unread} is not a number" in item["reason"]


# Shell scripts.


def test_what_a_branch_not_taken_assigns_is_empty(translated: Any) -> None:
    text = (
        'if [ "$LOAD" = "true" ]; then\n  load_option="--load x"\n  MORE=(--finetune)\nelse\n  other="--bf16"\nfi\n'
        '[ "$LOAD" = "true" ] && last="--finetune"\ncase a in b) word=--fp16;; esac\n'
        f"torchrun --nproc_per_node 8 pretrain_gpt.py {PLAIN} $load_option ${{MORE[@]}} $other $last $word\n"
    )
    status, output = translated(text)
    assert status == SAME_TRAINING
    assert "load_option" not in output
    assert "$LOAD is assumed to be empty in a condition" in head(output)
    status, output = translated(text.replace("MORE=(", "HOST=node0; MORE=(").replace("$word", "--save $HOST/x"))
    assert status == SAME_TRAINING
    assert "# Left to you: --save\n" in output  # a host may come from outside, options do not
    status, output = translated(text.replace("$word", "$elsewhere"))
    assert status == OTHER_TRAINING
    assert "# LEFT TO YOU: $elsewhere\n" in output


# Launchers.


# A line before the script's arguments, and what the launcher gets.
LAUNCHERS = r"""
msrun --master_addr node0 --master_port 6000 --node_rank 0 --worker_num 32 --local_worker_num 8 --log_dir=logs \
    --join=False | --nproc-per-node 8 --nnodes 4 --rdzv-endpoint node0:6000 --log-dir logs
msrun --worker_num 8 --local_worker_num 8 --join True | --nproc-per-node 8 --nnodes 1
msrun --worker_num 12 --local_worker_num 8 | --nproc-per-node 8
accelerate launch --multi_gpu --num_processes 16 --num_machines 2 --machine_rank 0 --main_process_ip node0 \
    --main_process_port 6000 | --nproc-per-node 8 --nnodes 2 --rdzv-endpoint node0:6000
accelerate launch --num_processes 8 | --nproc-per-node 8
python -m accelerate.commands.launch --num_processes 8 --num_cpu_threads_per_process 4 | --nproc-per-node 8
ft_launcher --nproc_per_node 8 --nnodes 2 --rdzv_endpoint h:1 --ft-cfg-path c.yaml --ft-rank-heartbeat-timeout 450 \
    | --nproc-per-node 8 --nnodes 2 --rdzv-endpoint h:1
colossalai run --nproc_per_node 8 --num_nodes 2 --hostfile h --master_addr a --master_port 7 \
    | --nproc-per-node 8 --nnodes 2 --rdzv-endpoint a:7
colossalai run --host a,b --nproc_per_node 8 --master_addr a | --nproc-per-node 8 --nnodes 2
docker run --rm -it --gpus all -v /d:/d img torchrun --nproc_per_node 8 | --nproc-per-node 8
singularity exec --nv -B /d img.sif torchrun --nproc_per_node 8 --nnodes 1 | --nproc-per-node 8 --nnodes 1
srun -N 2 numactl --interleave=all torchrun --nproc_per_node=8 --nnodes=2 | --nnodes 2 --nproc-per-node 8
srun -N 4 --gpus-per-node 8 --ntasks-per-node=8 -p fast python -u | --nnodes 4 --nproc-per-node 8
nohup torchrun --nproc_per_node 8 | --nproc-per-node 8
env NCCL_DEBUG=INFO OMP_NUM_THREADS=1 torchrun --nproc_per_node 8 | --nproc-per-node 8
nsys profile -o trace --trace=cuda python -u -m torch.distributed.run --nproc_per_node 8 | --nproc-per-node 8
torchrun --nproc_per_node 8 --nnodes 2 --master_addr h --master_port 6000 \
    | --nproc-per-node 8 --nnodes 2 --rdzv-endpoint h:6000
python -m torch.distributed.launch --nproc_per_node=8 --use-env | --nproc-per-node 8
python3 -m torch.distributed.run --nproc-per-node 8 --standalone | --nproc-per-node 8
deepspeed --master_port 29700 --num_nodes 1 --num_gpus 8 | --nnodes 1 --nproc-per-node 8
deepspeed --num_gpus 8 --num_nodes 2 --hostfile h | --nproc-per-node 8 --nnodes 2
A=1 mpirun -np 8 -x PATH python | --nproc-per-node 8
""".replace("\\\n", "").strip()


@pytest.mark.parametrize(("line", "launch"), [row.split(" | ") for row in LAUNCHERS.splitlines()])
def test_what_a_launcher_says_is_kept(translated: Any, line: str, launch: str) -> None:
    status, output = translated(f"{line} pretrain_gpt.py {PLAIN} --distributed-backend nccl\n")
    written = command(output).partition(" pretrain_moe.py ")[0].removeprefix("megapar launch ")
    assert sorted(f" {written}".split(" --")) == sorted(f" {launch}".split(" --"))
    assert "UNKNOWN" not in output
    words = [word.partition("=")[0].lstrip("-") for word in line.split() if word.startswith("--")]
    assert [word for word in words if word not in output] == []
    assert status == SAME_TRAINING


@pytest.mark.parametrize(
    ("line", "launcher", "script"),
    [
        ("pretrain_gpt.py", "", "pretrain_gpt.py"),
        (
            "python3 -m torch.distributed.run --nproc-per-node 8 x/pretrain_gpt.py",
            "--nproc-per-node 8",
            "pretrain_gpt.py",
        ),
        ("python -m pretrain_gpt", "", "pretrain_gpt.py"),
        ("torchrun --nproc_per_node 8 --module pretrain_gpt", "--nproc-per-node 8", "pretrain_gpt.py"),
        ("torchrun --nproc_per_node 8 -m megatron.pretrain_gpt", "--nproc-per-node 8", "pretrain_gpt.py"),
        ("torchrun --nproc_per_node 8 -m my.trainer", "--nproc-per-node 8", "my.trainer"),
        ("python -m paddle.distributed.launch --gpus 0,1,2,3 run_pretrain.py", "--nproc-per-node 4", "run_pretrain.py"),
    ],
)
def test_a_script_is_told_from_what_starts_it(line: str, launcher: str, script: str) -> None:
    apart = take_apart([*line.split(), *PLAIN.split()])
    assert apart.script.endswith(script)
    assert list(apart.arguments) == PLAIN.split()
    items = translate(apart.arguments, "megatron", apart.launcher)
    assert " ".join(equivalent(items)[0]) == launcher
    assert not [item for item in items if item.verdict == UNKNOWN]


# The words before the script, those behind it, and what the head of the output names.
NAMED = r"""
my_runner --ranks 8 --nodes=2 | | UNKNOWN: my_runner --ranks --nodes
docker run --rm img my_runner --ranks 8 | | UNKNOWN: my_runner --ranks
python -m my.runner --ranks 8 | | UNKNOWN: my.runner --ranks
python tools/run.py --ranks 8 | | UNKNOWN: tools/run.py --ranks
nohup my_runner | | UNKNOWN: my_runner
msrun --worker_num 8 --new_option 3 | | UNKNOWN: --new_option
accelerate launch --num_processes 8 --mixed_precision bf16 | | DIFFERENT RESULTS: --mixed_precision
accelerate launch --config_file c.yaml | | LEFT TO YOU: --config_file
$LAUNCHER | | LEFT TO YOU: $LAUNCHER
torchrun --standalone $DISTRIBUTED_ARGS | | LEFT TO YOU: $DISTRIBUTED_ARGS
torchrun --nproc_per_node 8 | --log-throughput $MORE | LEFT TO YOU: $MORE
torchrun --nproc_per_node 8 | --log-throughput ${MORE}$REST | LEFT TO YOU: $MORE$REST
torchrun --nproc_per_node 8 | --log-throughput more | UNKNOWN: more
torchrun --nproc_per_node 8 | --dataset MMAP $MORE | LEFT TO YOU: $MORE
torchrun --nproc_per_node 8 | --wandb-project $NAME $MORE | LEFT TO YOU: $MORE
torchrun --nproc_per_node 8 | --warp-speed $MORE | LEFT TO YOU: $MORE
 | --optimizer soap | DIFFERENT RESULTS: --optimizer
 | --num-experts 4 8 | ANOTHER MODEL: --num-experts
 | --warp-speed 9 | UNKNOWN: --warp-speed
 | --num-attention-heads 3 | REFUSED here for 1 rank (the minimum for its layout): see the last section
 | --kv-channels '<size>' | LEFT TO YOU: --head-dim
 | --eod-mask-loss | DIFFERENT RESULTS: --calculate-per-token-loss (not set)
""".strip("\n")


@pytest.mark.parametrize(("before", "behind", "named"), [row.split("|") for row in NAMED.splitlines()])
def test_every_word_has_a_verdict_and_the_status_says_that_it_is_another_training(
    translated: Any, before: str, behind: str, named: str
) -> None:
    line = f"{before} pretrain_gpt.py {PLAIN} {behind}\n"
    status, output = translated(line.strip() + "\n")
    assert status == OTHER_TRAINING
    assert f"# {named.strip()}\n" in head(output) + "\n"
    accepted, _ = translated(line.strip() + "\n", "train.sh", "--accept")
    assert accepted == (OTHER_TRAINING if "REFUSED" in named else SAME_TRAINING)


# Frameworks.


def test_a_guess_says_that_it_is_one_and_adds_no_defaults(translated: Any) -> None:
    keys = "--model.model_name_or_path /m --parallel.fsdp_size 8 --training.per_device_train_batch_size 1"
    for script in ("train_fsdp2.py", "my_trainer.py"):
        status, output = translated(f"torchrun --nproc_per_node 8 --nnodes 1 {script} config.yaml {keys}\n")
        assert status == OTHER_TRAINING
        assert "not set by the script" not in output
        assert "--lr" not in output
        assert not output.startswith("# Paddle:")
    assert "a guess" in head(output)
    _, output = translated(f"torchrun --nproc_per_node 8 my_gpt.py {PLAIN}\n")
    assert head(output).startswith("# Megatron-LM (a guess from the arguments): my_gpt.py, started by torchrun")
    assert "--adam-beta2 0.999" in command(output)
    _, output = translated(f"torchrun --nproc_per_node 8 pretrain_gpt.py {PLAIN}\n")
    assert head(output).startswith("# Megatron-LM: pretrain_gpt.py, started by torchrun in line 1\n")


DICTIONARY = """{
    "sharding_segment_strategy": "segment_broadcast_MB",
    "segment_broadcast_MB": 32,
    "segment_anchors": None,
    "sharding_degree": 8,
    "mp_degree": 1,
    "hybrid_dp": True,
    "gradient_merge_acc_step": 4,
}"""


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (DICTIONARY, "flat.yaml"),
        (f"sharding: True\nsharding_configs: {DICTIONARY}", "nested.yaml"),
        (
            "import paddle.distributed.fleet as fleet\ndist_strategy = fleet.DistributedStrategy()\n"
            f"dist_strategy.sharding = True\ndist_strategy.sharding_configs = {DICTIONARY}\nfleet.init(1 / 0)\n",
            "train.py",
        ),
    ],
)
def test_a_dictionary_of_sharding_is_paddles_in_every_form(translated: Any, text: str, name: str) -> None:
    _, output = translated(text, name)
    assert head(output).startswith("# Paddle")
    written = command(output) + " "
    for flags in ("--sharding-stage 3", "--sharding-degree 8", "--hybrid-dp", "--gradient-merge-acc-step 4"):
        assert f"{flags} " in written
    assert "--segment-broadcast-MB 32 " in written


def test_values_that_only_python_computes_are_left_open(translated: Any) -> None:
    text = (
        'strategy.hybrid_configs = {"mp_degree": args.mp, "pp_degree": 2}\n'
        'if x:\n    strategy.hybrid_configs = {"mp_degree": 1 + 1, "pp_degree": 4, **more}\n'
    )
    status, output = translated(text, "train.py")
    assert status == OTHER_TRAINING
    assert "--pp-degree 4" in command(output)
    assert "1 + 1" in output
    assert "line 3: hybrid_configs is assigned again" in head(output)
    with pytest.raises(SystemExit):
        translated("print(1)\n", "other.py")
