"""Defaults of Megatron-LM that differ from megapar's.

Source: NVIDIA/Megatron-LM, megatron/training/arguments.py, megatron/training/config/training_config.py and
megatron/core/optimizer/optimizer_config.py of 2026.
"""

from __future__ import annotations

from collections.abc import Mapping

from megapar.tools.translation.verdict import Foreign, defaults

MEGATRON: Mapping[str, Foreign] = defaults("""
num-experts num-moe-experts | --num-experts 0 | a dense model
normalization | --normalization layernorm |
position-embedding-type use-rotary-position-embeddings no-position-embedding | --position-embedding-type learned |
swiglu activation squared-relu quick-geglu fused-swiglu geglu | --activation gelu |
add-bias-linear disable-bias-linear no-add-bias-linear | --add-bias-linear |
attention-dropout | --attention-dropout 0.1 |
hidden-dropout | --hidden-dropout 0.1 |
depth-scaled-init no-depth-scaled-init | --depth-scaled-init | output projections start with std / sqrt(2 x layers)
moe-aux-loss-coeff moe-loss-coeff |
    without num-experts num-moe-experts: unnecessary | the model has no experts
    else: --moe-aux-loss-coeff 0 | no load balancing loss without its coefficient
moe-router-load-balancing-type |
    else: implied | aux_loss
mtp-loss-scaling-factor |
    mtp-num-layers equals 0: unnecessary | multi-token prediction is off
    else: --mtp-loss-weight 0.1
calculate-per-token-loss |
    with eod-mask-loss: other numbers | tokens have equal weight, micro-batches in Megatron-LM
    else: implied | all micro-batches have the same number of tokens
optimizer | = adam |
adam-beta2 |
    optimizer is sgd: unnecessary | no effect with --optimizer sgd
    else: --adam-beta2 0.999
weight-decay start-weight-decay | --weight-decay 0.01 |
lr-decay-style | --lr-decay-style linear |
lr-wsd-decay-style | @wsd_style |
bf16 fp16 dtype | --dtype fp32 | neither --bf16 nor --fp16
initial-loss-scale loss-scale | = 4294967296 | applies if the loss is scaled
micro-batch-size | | the framework has no default either
seq-length encoder-seq-length | | the framework has no default either
hidden-size | | the framework has no default either
num-layers encoder-num-layers decoder-num-layers | | the framework has no default either
train-iters train-samples train-tokens | | the framework has no default either
split train-data-path valid-data-path test-data-path data-args-path mock-data |
    with data-path: --split 969,30,1
    else: unnecessary | no --data-path
eval-iters |
    eval-interval equals 0: unnecessary | nothing is evaluated
    not held out: unnecessary | nothing is evaluated
    else: --eval-iters 100
eval-interval |
    with eval-iters: implied | set with --eval-iters
    else: --eval-interval 0 | no evaluation during training
log-interval | --log-interval 100 |
lr | | the framework has no default either
num-attention-heads | | the framework has no default either
no-bias-gelu-fusion disable-bias-linear no-add-bias-linear swiglu activation squared-relu quick-geglu |
    else: other numbers | GELU is exact (erf); Megatron-LM's fusion with biases uses the tanh approximation
""")
