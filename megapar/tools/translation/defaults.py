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
moe-aux-loss-coeff moe-loss-coeff | @no_balance | no load balancing loss without its coefficient
moe-router-load-balancing-type | @per_layer |
mtp-loss-scaling-factor | @mtp_weight |
calculate-per-token-loss | @per_token |
optimizer | @adam |
adam-beta2 | @without optimizer=sgd: --adam-beta2 0.999 else no effect with --optimizer sgd |
weight-decay start-weight-decay | --weight-decay 0.01 |
lr-decay-style | --lr-decay-style linear |
lr-wsd-decay-style | @wsd_style |
bf16 fp16 dtype | --dtype fp32 | neither --bf16 nor --fp16
initial-loss-scale loss-scale | @first_loss_scale | applies if the loss is scaled
micro-batch-size | | the framework has no default either
seq-length encoder-seq-length | | the framework has no default either
hidden-size | | the framework has no default either
num-layers encoder-num-layers decoder-num-layers | | the framework has no default either
train-iters train-samples train-tokens | | the framework has no default either
split train-data-path valid-data-path test-data-path data-args-path mock-data \
    | @with data-path: --split 969,30,1 else no --data-path |
eval-iters | @usual_eval_iters |
eval-interval | @usual_eval_interval |
log-interval | --log-interval 100 |
lr | | the framework has no default either
num-attention-heads | | the framework has no default either
no-bias-gelu-fusion disable-bias-linear no-add-bias-linear swiglu activation squared-relu quick-geglu | @gelu |
""")
