"""Suggestions for mistakes: names that other programs use, similar names of flags and files, numbers with units."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import MappingProxyType

from megapar.schema.rule import either

TRANSLATE = (
    "--help lists all flags; `megapar translate -- ARGUMENTS` translates those of Megatron-LM, MindSpeed, DeepSpeed "
    "and PaddlePaddle."
)


def _names(text: str) -> dict[str, str]:
    """Parse lines of the form ``names | hint``."""
    pairs = (line.split("|") for line in text.strip().splitlines())
    return {name: hint.strip() for names, hint in pairs for name in names.split()}


ELSEWHERE: Mapping[str, str] = MappingProxyType(
    _names("""
learning-rate | --lr
batch-size train-batch-size | --micro-batch-size (of one data rank) or --global-batch-size
epochs num-epochs num-train-epochs | --train-iters, or with --task sft --train-epochs
steps max-steps num-steps iterations max-iters | --train-iters
data dataset train-data train-file input data-dir | --data-path
resume resume-from resume-from-checkpoint checkpoint ckpt load-dir | --load
output output-dir out-dir save-dir checkpoint-dir | --save
pretrained model-path model-name-or-path | --load-hf
save-steps save-every | --save-interval
eval-steps eval-every | --eval-interval
logging-steps log-every | --log-interval
log-dir logdir logging-dir tensorboard | --tensorboard-dir
wandb use-wandb wandb-project-name | --wandb-project
wandb-run-name wandb-name run-name | --wandb-exp-name, --mlflow-run-name or --swanlab-exp-name
mlflow mlflow-experiment-name | --mlflow-experiment
mlflow-uri | --mlflow-tracking-uri
swanlab use-swanlab swanlab-project-name | --swanlab-project
swanlab-experiment-name swanlab-run-name | --swanlab-exp-name
report-to | --wandb-project, --mlflow-experiment, --swanlab-project or --tensorboard-dir
tokenizer tokenizer-path tokenizer-name | --tokenizer-model
layers n-layer n-layers num-hidden-layers | --num-layers
heads num-heads n-head n-heads | --num-attention-heads
kv-heads | --num-query-groups
hidden hidden-dim d-model n-embd | --hidden-size
intermediate-size ffn-size d-ff | --ffn-hidden-size
seq-len sequence-length max-seq-length max-length context-length block-size | --seq-length
experts n-experts | --num-experts
topk top-k experts-per-token | --moe-router-topk
dropout | --hidden-dropout or --attention-dropout
tp tp-size tensor-parallel-size mp | --mp-degree
pp pp-size pipeline-parallel-size | --pp-degree
cp cp-size | --cp-degree
ep ep-size expert-parallel-size | --ep-degree
dp dp-size data-parallel-size | --hybrid-dp: data parallelism uses the ranks left by the other degrees
zero zero-stage | --sharding-stage
grad-accum gradient-accumulation-steps accumulation-steps | --gradient-merge-acc-step
warmup warmup-steps lr-warmup-steps | --lr-warmup-iters
max-grad-norm grad-clip gradient-clipping | --clip-grad
precision mixed-precision amp | --dtype
recompute gradient-checkpointing activation-checkpointing | --recompute-interval 1
adaptive-recompute-device-swap | In MindSpeed it enables adaptive recompute; set --adaptive-recompute-device-size MB, \
the memory to fill, instead. Nothing is swapped to host memory.
sep-degree sep-parallel-degree | --cp-degree with --context-parallel-algo ulysses_cp_algo
order hybrid-parallel-topo-order | --rank-order
optimize-offload offload-optim | --optimizer-offload
pp-allreduce-in-optimize | --gradient-merge-mode step
optimize-cast | Leave it out: parameters are always kept in the compute dtype, next to fp32 master weights.
init-loss-scaling | --initial-loss-scale
incr-every-n-steps | --loss-scale-window
decr-every-n-nan-or-inf | --hysteresis
incr-ratio decr-ratio | --loss-scale-factor, by which the scale grows and shrinks
k-steps | --gradient-merge-acc-step
enable | To turn a block's feature off, leave the whole block out.
sliding-window attention-window local-window | --window-size
fp8-format | --fp8
fp32 tf32 | --dtype fp32
muon use-muon | --optimizer muon
lora lora-rank lora-r lora-alpha lora-dim lora-dropout use-lora peft adapter qlora load-in-4bit | All weights are \
trained: adapters (LoRA) are outside megapar (docs/not_here.md).
dpo grpo ppo reward-model | Reinforcement learning is outside megapar (docs/not_here.md).
s3 s3-bucket bucket | --save and --load take URIs such as s3://BUCKET/FOLDER.
chat chat-data messages | --task sft
avg | Gradients of merged micro-batches are always averaged: only true is supported.
topology | --rank-order and the degrees of the axes
loss-fn | Leave it out: the last stage ends with the trainer's loss (docs/pipeline.md).
amp-configs | Write its keys as flags: --dtype fp16, --initial-loss-scale, --loss-scale-window, --hysteresis.
pipeline tensor-parallel gradient-merge dist-strategy | This switch of PaddlePaddle's strategies is on here if the \
degree or number of steps is above 1: set --pp-degree, --mp-degree or --gradient-merge-acc-step.
sharding | --sharding-degree with --sharding-stage
assume device-kind | Pass it to `megapar plan`, or set it as a key of a configuration file.
gpus num-gpus nproc nproc-per-node nnodes node-rank rdzv-endpoint max-restarts | \
Pass it to the launcher, before the script: megapar launch --nproc-per-node N SCRIPT FLAGS.
vocab-file merge-file | Put these files into a folder in Hugging Face's layout, and pass it with --tokenizer-model.
tokenizer-type | Leave it out: the kind of a tokenizer is detected from --tokenizer-model.
tokenizer-name-or-path | --tokenizer-model
train-samples | --train-iters: lengths are in steps, not in samples
lr-decay-samples | --lr-decay-iters: lengths are in steps, not in samples
lr-wsd-decay-samples | --lr-wsd-decay-iters: lengths are in steps, not in samples
lr-warmup-samples | --lr-warmup-iters: lengths are in steps, not in samples
lr-warmup-fraction | --lr-warmup-iters: lengths are in steps, not shares of the decay
num-layers-per-virtual-pipeline-stage | --vpp-degree with --pp-schedule interleaved: \
the chunks of a stage, not the layers of a chunk
exit-duration-in-mins | --exit-duration-minutes
grad-reduce-in-bf16 | --grad-reduce-dtype bf16
optimizer-cpu-offload | --optimizer-offload
use-torch-fsdp2 use-megatron-fsdp | --sharding-stage 3
cp-comm-type | --context-parallel-algo
moe-router-load-balancing-type | --moe-aux-loss-coeff or --moe-seq-aux-loss-coeff
moe-grouped-gemm | Leave it out: experts always run as a grouped GEMM.
moe-token-dispatcher-type moe-enable-deepep moe-flex-dispatcher-backend | Leave it out: --moe-dispatch auto \
chooses how tokens travel.
group-query-attention | Leave it out: --num-query-groups alone sets it.
use-mcore-models transformer-impl | Leave it out: there is one implementation of the model.
ckpt-format auto-detect-ckpt-format | Leave it out: there is one format, which loads on any layout.
log-throughput | Leave it out: the throughput is always logged.
exit-signal-handler | Leave it out: any signal saves and stops.
""")
)

CHOICES: Mapping[str, str] = MappingProxyType(
    _names("""
gpu nvidia | cuda
ascend | npu
float float32 | fp32
bfloat16 | bf16
half float16 | fp16
double float64 | fp64
1-sqrt | minus_sqrt
f-then-b fthenb | gpipe
""")
)


FEATURES = Path(__file__).parents[1] / "tools" / "translation" / "tables" / "features.txt"
"""Features of Megatron-LM that megapar does not have: sections ``[verdict | reason]``, each with its arguments."""


@cache
def absent_features() -> Mapping[str, str]:
    """Return the reasons why arguments of Megatron-LM have no flag here, by their names."""
    found: dict[str, str] = {}
    reason = ""
    for line in FEATURES.read_text(encoding="utf-8").partition("\n\n")[2].splitlines():
        if line.startswith("["):
            reason = line.rstrip("]").partition(" | ")[2]
        else:
            found |= {name.rstrip("="): reason for name in line.split()}
    return MappingProxyType(found)


def near_flag(name: str, known: Iterable[str]) -> str:
    """Suggest a replacement for an unknown flag; all names are in normal form, without leading hyphens.

    What other programs call it comes before names that are spelled alike.
    """
    if name in ELSEWHERE:
        hint = ELSEWHERE[name]
        return f"Did you mean {hint}?" if hint.startswith("--") else hint
    if reason := absent_features().get(name):
        return f"In Megatron-LM this is a feature that megapar does not have: {reason}."
    known = list(known)
    longer = sorted((other for other in known if other.startswith(f"{name}-")), key=len)[:3]
    close = longer or get_close_matches(name, known, 3, 0.85)
    near = close or get_close_matches(name, known, 3, 0.65)
    if not near:
        return TRANSLATE
    asked = f"Did you mean {either([f'--{other}' for other in near])}?"
    return asked if close else f"{asked} {TRANSLATE}"  # as likely another program's flag as a mistyped one


def of_block(name: str) -> str:
    """Suggest a replacement for a block of another program; "" if only a single flag is known for it."""
    hint = ELSEWHERE.get(name, "")
    return "" if hint.startswith("--") else hint


def near_choice(value: str, choices: Sequence[str]) -> str:
    """Suggest the choice most similar to a value, as a question; "" if there is none."""
    other = CHOICES.get(value.lower())
    near = [other] if other in choices else get_close_matches(value.lower(), choices, 1, 0.5)
    return f"Did you mean {near[0]}?" if near else ""


def plain_number(text: str, unit: str = "") -> str:
    """Suggest a plain number for one written with a unit, a multiplier or commas; "" if the text is none of these."""
    text = text.strip()
    if re.fullmatch(r"[+-]?[1-9]\d{0,2}(,\d{3})+", text):
        return f"Write it without commas: {text.replace(',', '')}."
    if re.fullmatch(r"[+-]?\d+,\d+", text):
        return f"Write it with a decimal point: {text.replace(',', '.')}."
    match = re.fullmatch(r"([+-]?\d+(?:\.\d+)?)\s*([A-Za-z]+)", text)
    if match is None:
        return ""
    number, suffix = match.groups()
    power = {"k": 1, "m": 2, "b": 3, "g": 3}.get(suffix.lower())
    megabytes = {"mb": 1, "mib": 1, "g": 1024, "gb": 1024, "gib": 1024, "tb": 1 << 20, "tib": 1 << 20}.get(
        suffix.lower()
    )
    if megabytes and unit == "MB":
        return f"Write only the number, in MB (2^20 bytes): {float(number) * megabytes:g}."
    if power and unit != "MB":
        return f"Write all digits: {float(number) * 1000**power:.0f}, or {float(number) * 1024**power:.0f}."
    return f"Write only the number{f', in {unit}' if unit else ''}: {number}."
