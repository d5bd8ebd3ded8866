"""The verdict on an argument, and what is written for it, follow from its value and the arguments beside it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import pytest

from megapar.arguments import parse
from megapar.model.decoder.sizes import DecoderSizes
from megapar.model.rope_scaling import RopeScaling
from megapar.tools.translation.translated import equivalent, implicit_defaults, translate
from megapar.tools.translation.verdict import CHANGING, RENAMED, SAME
from tests.tools.test_translate import arguments

# A section per framework. A row is a line, the verdict on its first argument, and the flags that are written for that.
ROWS = """
[megatron]
--num-query-groups 8 | unnecessary
--num-query-groups 8 --group-query-attention | same | --num-query-groups 8
--group-query-attention | renamed | --num-query-groups 1
--position-embedding-type yarn | another model
--position-embedding-type learned_absolute | renamed | --position-embedding-type learned
--qk-layernorm --normalization RMSNorm | renamed | --qk-norm
--qk-layernorm | another model
--sft | different results | --task sft --sft-overlong truncate
--sft --sft-tokenizer-prompt-format default | different results | --task sft --sft-overlong truncate
--sft-tokenizer-prompt-format default | unnecessary
--sft-tokenizer-prompt-format default --sft | implied
--sft-tokenizer-prompt-format identity --sft | left to you
--sft-loss-log-mode microbatch | unsupported
--rotary-percent 0.5 | same | --rotary-percent 0.5
--rope-scaling-factor 8 --use-rope-scaling | same | --rope-scaling-factor 8
--rope-scaling-factor 1 | unnecessary
--mtp-num-layers 1 | renamed | --mtp-depth 1 --mtp-block layer
--mtp-num-layers 2 | another model
--mtp-num-layers 0 | unnecessary
--moe-router-bias-update-rate 1e-3 | unnecessary
--moe-router-bias-update-rate 1e-3 --moe-router-enable-expert-bias | same | --moe-router-bias-update-rate 1e-3
--moe-router-bias-update-rate 1e-3 --moe-router-load-balancing-type noaux_tc | same \
    | --moe-router-bias-update-rate 1e-3
--moe-router-load-balancing-type noaux_tc --moe-router-bias-update-rate 1e-2 | implied
--moe-router-enable-expert-bias | renamed | --moe-router-bias-update-rate 1e-3
--moe-router-enable-expert-bias false | unnecessary
--moe-aux-loss-coeff 0.01 --moe-router-load-balancing-type none | unnecessary
--position-embedding-type none | another model
--position-embedding-type None | unnecessary
--qk-layernorm false --normalization RMSNorm | unnecessary
--group-query-attention false | unnecessary
--num-query-groups 8 --group-query-attention false | unnecessary
--profile false | unnecessary
--use-megatron-fsdp false | unnecessary
--data-parallel-sharding-strategy optim_grads --use-megatron-fsdp false | unnecessary
--sequence-parallel false --tensor-model-parallel-size 2 | unnecessary
--model.sequence_parallel false --tensor-model-parallel-size 2 | unnecessary
--finetune false --load x | unnecessary
--split 99,1,0 --mock-data false | same | --split 99,1,0
--lr-warmup-iters 0 --lr-warmup-fraction 0.1 --train-iters 100 | unnecessary
--lr-warmup-samples 0 --lr-warmup-iters 5 --global-batch-size 8 | unnecessary
--lr-warmup-fraction 0 --lr-warmup-iters 5 --train-iters 100 | unnecessary
--lr-warmup-iters 0 | same | --lr-warmup-iters 0
--moe-router-num-groups 8 --moe-router-group-topk 4 --moe-router-topk 8 | different results | --moe-router-num-groups 8
--moe-router-num-groups 8 --moe-router-group-topk 4 --moe-router-topk 4 | same | --moe-router-num-groups 8
--moe-router-num-groups 8 --moe-router-score-function sigmoid --moe-router-topk 8 | same | --moe-router-num-groups 8
--moe-router-score-function sqrtsoftplus | another model
--moe-layer-freq ([0]+[1]*15) | renamed | --first-k-dense 1
--moe-layer-freq ([0]*3+[1]*58) | renamed | --first-k-dense 3
--moe-layer-freq [0,0,1,1] | renamed | --first-k-dense 2
--moe-layer-freq 2 | same | --moe-layer-freq 2
--moe-layer-freq [1,0]*4 | same | --moe-layer-freq '[1,0]*4'
--moe-layer-freq [1,2] | another model
--moe-router-load-balancing-type global_aux_loss | different results
--moe-shared-expert-intermediate-size 2048 --moe-ffn-hidden-size 1024 | renamed | --moe-shared-experts 2
--moe-shared-expert-intermediate-size 1500 --moe-ffn-hidden-size 1024 | same \
    | --moe-shared-expert-intermediate-size 1500
--lr-warmup-init 1e-6 | different results
--lr-warmup-init 0.0 | unnecessary
--exp-avg-dtype bf16 | same | --exp-avg-dtype bf16
--exp-avg-dtype fp32 | implied
--exp-avg-sq-dtype fp8 | different results
--exp-avg-sq-dtype bf16 --optimizer sgd | unnecessary
--main-grads-dtype bf16 --bf16 | same | --main-grads-dtype bf16
--main-grads-dtype bf16 | different results
--main-grads-dtype bf16 --bf16 --optimizer sgd | different results
--main-params-dtype fp16 | different results
--use-mup | different results
--use-mup --mup-base-hidden-size 256 | implied
--mup-base-hidden-size 256 --use-mup | different results | --mup-base-hidden-size 256
--mup-base-hidden-size 256 | unnecessary
--mup-embedding-mult 12 --use-mup | renamed | --embedding-multiplier 12
--mup-output-mult 0.5 --use-mup | different results
--mup-base-head-dim 64 --use-mup | different results
--fp8-format hybrid | different results
--fp8-format hybrid --fp8-recipe blockwise | different results
--fp8-format e4m3 | different results
--fp8-format e4m3 --fp8-recipe blockwise | different results | --fp8
--fp8-format e4m3 --fp8-recipe blockwise --num-experts 8 | different results | --fp8 --fp8-experts
--fp8-format e4m3 --fp8-recipe blockwise --num-experts 8 --no-use-gmm-fp8 | different results | --fp8
--fp8-format e4m3 --fp8-recipe blockwise --num-experts 8 --tensor-model-parallel-size 2 | different results | --fp8
--fp8-format e4m3 --fp8-recipe blockwise --num-experts 8 --tensor-model-parallel-size 2 \
    --expert-tensor-parallel-size 1 | different results | --fp8 --fp8-experts
--fp8-format e4m3 --fp8-recipe tensorwise | different results | --fp8 --fp8-recipe tensorwise
--grad-reduce-in-bf16 --bf16 | renamed | --main-grads-dtype bf16
--grad-reduce-in-bf16 --bf16 --optimizer muon | renamed | --main-grads-dtype bf16
--grad-reduce-in-bf16 --bf16 --optimizer sgd | different results | --grad-reduce-dtype bf16
--grad-reduce-in-bf16 | unnecessary
--accumulate-allreduce-grads-in-fp32 --bf16 --grad-reduce-in-bf16 | unnecessary
--accumulate-allreduce-grads-in-fp32 --bf16 | renamed | --grad-reduce-dtype fp32
--fp8-format hybrid --fp8-recipe tensorwise | different results
--window-size 127,0 | renamed | --window-size 128
--window-size (127,0) | renamed | --window-size 128
--window-size 127,127 | another model
--window-size -1,0 | unnecessary
--window-size 127,0 --window-attn-skip-freq 1 | unnecessary
--window-attn-skip-freq 4 --window-size 127,0 | same | --window-attn-skip-freq 4
--window-attn-skip-freq ([1]*5+[0])*4 --window-size 127,0 | same | --window-attn-skip-freq '([1]*5+[0])*4'
--window-attn-skip-freq 4 | unnecessary
--window-attn-skip-freq [1,2] --window-size 127,0 | another model
--softmax-type learnable | renamed | --attention-sinks
--softmax-type off-by-one | another model
--quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 7.0 | renamed | --activation clamped_swiglu
--quick-geglu | another model
--glu-linear-offset 1.0 --quick-geglu --activation-func-clamp-value 7.0 | implied
--glu-linear-offset 1.0 | another model
--activation-func-clamp-value 7.0 --quick-geglu --glu-linear-offset 1.0 | implied
--activation-func-clamp-value 10 --quick-geglu --glu-linear-offset 1.0 | another model
--no-rope-freq 4 --position-embedding-type rope --num-layers 8 | same | --no-rope-freq 4
--no-rope-freq ([0]*3+[1])*2 --position-embedding-type rope --num-layers 8 | same | --no-rope-freq '([0]*3+[1])*2'
--no-rope-freq 1 --position-embedding-type rope --num-layers 8 | another model
--no-rope-freq [2] --position-embedding-type rope --num-layers 8 | another model
--no-rope-freq 4 --num-layers 8 | unnecessary
--apply-layernorm-1p | same | --apply-layernorm-1p
--enable-hyper-connections | another model
--cuda-graph-impl local | unsupported
--cp-comm-type a2a --context-parallel-size 2 | renamed | --context-parallel-algo ulysses_cp_algo
--cp-comm-type a2a+p2p --context-parallel-size 4 | unsupported
--data-parallel-sharding-strategy optim_grads | unnecessary
--data-parallel-sharding-strategy optim_grads --use-megatron-fsdp | renamed | --sharding-stage 2
--vocab-size 32000 | same | --vocab-size 32000
--vocab-size 50257 | renamed | --vocab-size 50304
--make-vocab-size-divisible-by 128 | left to you
--decoder-first-pipeline-num-layers 2 --num-layers 8 --pipeline-model-parallel-size 3 | renamed \
    | --pp-seg-method 0,2,5
--decoder-first-pipeline-num-layers 3 --num-layers 8 --pipeline-model-parallel-size 3 | left to you
--vocab-size 50257 --tensor-model-parallel-size 8 | renamed | --vocab-size 51200
--vocab-size 32000 --tokenizer-type NullTokenizer | renamed | --vocab-size 32128
--vocab-size 32000 --tokenizer-type NullTokenizer --no-pad-vocab-size | renamed | --vocab-size 32001
--moe-router-load-balancing-type none --moe-aux-loss-coeff 0.01 | renamed | --moe-aux-loss-coeff 0
--moe-shared-expert-intermediate-size 2048 --moe-intermediate-size 1024 --ffn-hidden-size 2048 | renamed \
    | --moe-shared-experts 2
--moe-router-bias-update-rate 1e-2 --moe-router-load-balancing-type noaux_tc | same \
    | --moe-router-bias-update-rate 1e-2
--cp-comm-type p2p --context-parallel-size 2 | renamed | --context-parallel-algo megatron_cp_algo
--decoder-last-pipeline-num-layers 2 --num-layers 8 --pipeline-model-parallel-size 3 | renamed | --pp-seg-method 0,3,6
--optimizer adam | implied
--optimizer muon | same | --optimizer muon
--optimizer dist_muon | renamed | --optimizer muon
--optimizer adaptive_muon | different results | --optimizer muon
--optimizer muon --swiglu | different results | --optimizer muon
--optimizer muon --num-experts 8 | different results | --optimizer muon
--optimizer soap | different results
--muon-momentum 0.95 --optimizer muon | same | --muon-momentum 0.95
--muon-momentum 0.95 --optimizer adam | unnecessary
--muon-extra-scale-factor 0.2 --optimizer dist_muon | same | --muon-extra-scale-factor 0.2
--muon-nesterov --optimizer muon | renamed | --muon-use-nesterov
--muon-use-nesterov --optimizer muon | renamed | --muon-use-nesterov
--muon-nesterov --optimizer sgd | unnecessary
--muon-no-split-qkv --optimizer muon | renamed | --muon-qkv-split fused
--muon-split-qkv --optimizer muon | implied
--muon-coefficient-type simple --optimizer muon | same | --muon-coefficient-type simple
--muon-coefficient-type aol --optimizer muon | different results
--muon-tp-mode blockwise --optimizer muon --tensor-model-parallel-size 2 | different results
--muon-tp-mode blockwise --optimizer muon | implied
--muon-tp-mode distributed --optimizer muon --tensor-model-parallel-size 2 | implied
--muon-fp32-matmul-prec high --optimizer muon | renamed | --muon-ns-dtype fp32
--muon-fp32-matmul-prec medium --optimizer muon | implied
--muon-scalar-optimizer adam --optimizer muon | implied
--muon-scalar-optimizer lion --optimizer muon | different results
--muon-use-syrk --optimizer muon | unnecessary
--optimizer sgd | same | --optimizer sgd
--sgd-momentum 0.5 --optimizer sgd | same | --sgd-momentum 0.5
--sgd-momentum 0.5 --optimizer adam | unnecessary
--adam-beta1 0.8 --optimizer sgd | unnecessary
--adam-eps 1e-6 --optimizer adam | same | --adam-eps 1e-6
--moe-router-pre-softmax --moe-router-topk 2 | same | --moe-router-pre-softmax
--moe-router-pre-softmax --moe-router-topk 1 | implied
--moe-router-dtype fp64 | different results
--moe-router-dtype fp32 | implied
--lr-decay-style tanh | different results
--lr-wsd-decay-style cosine --lr-decay-style WSD | same | --lr-wsd-decay-style cosine
--lr-wsd-decay-style cosine | unnecessary
--lr-decay-style WSD | renamed | --lr-decay-style wsd
--lr-decay-style linear | same | --lr-decay-style linear
--initial-loss-scale 4096 --bf16 | unnecessary
--initial-loss-scale 4096 --fp16 | same | --initial-loss-scale 4096
--loss-scale 1024 --fp16 | different results | --initial-loss-scale 1024 --min-loss-scale 1024
--eval-interval 9 --split 100,0,0 --eval-iters 2 | renamed | --eval-interval 0
--eval-interval 9 --split 99,1,0 --eval-iters 2 | same | --eval-interval 9
--valid-data-path c --eval-interval 9 --test-data-path d | renamed | --eval-data-path c
--test-data-path d --eval-interval 9 --valid-data-path c | unsupported
--num-experts 32 32 64 | another model
--num-experts 32 32 | same | --num-experts 32
--first-k-dense-replace -1 | unnecessary
--first-k-dense-replace 3 | renamed | --first-k-dense 3
--moe-layer-freq [0,1,0,1] | same | --moe-layer-freq '[0,1,0,1]'
--moe-loss-coeff 0.01 | same | --moe-aux-loss-coeff 0.01
--moe-token-drop-policy probs --moe-expert-capacity-factor 1 | different results | --moe-drop-policy probs
--moe-token-drop-policy probs | unnecessary
--moe-expert-capacity-factor 1.5 | different results \
    | --moe-model-type deepspeed_moe --moe-capacity-factor 1.5 --moe-min-capacity 1
--end-weight-decay .1 --weight-decay-incr-style cosine --start-weight-decay 0 | same | --end-weight-decay .1
--start-weight-decay 0 --weight-decay-incr-style cosine --end-weight-decay .1 | same | --start-weight-decay 0
--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay .1 \
    | same | --weight-decay-incr-style linear
--weight-decay .1 --weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay .1 | unnecessary
--start-weight-decay .1 --weight-decay-incr-style constant | renamed | --weight-decay .1
--weight-decay-incr-style constant | implied
--decoupled-lr 5e-4 | same | --decoupled-lr 5e-4
--decoupled-lr 5e-4 --decoupled-min-lr 4e-5 | same | --decoupled-lr 5e-4
--train-samples 1000 --global-batch-size 8 | renamed | --train-iters 125
--train-samples 1000 | different results
--train-samples 208 --rampup-batch-size 8 8 64 --global-batch-size 24 | renamed | --train-iters 12
--train-samples 1007 --global-batch-size 8 | renamed | --train-iters 125
--train-samples 100 --global-batch-size inf | different results
--lr-warmup-fraction nan --train-iters 10 | different results
--vocab-size inf | different results
--num-layers-per-virtual-pipeline-stage 2 --num-layers 8 --pipeline-model-parallel-size 0 | renamed \
    | --vpp-degree 4 --pp-schedule interleaved
--vocab-size 50257 --model-parallel-size 8 | renamed | --vocab-size 51200
--sequence-parallel --model-parallel-size 8 | same | --sequence-parallel
--moe-router-num-groups 1 --moe-router-group-topk 1 | unnecessary
--moe-router-group-topk 1 --moe-router-num-groups 1 | unnecessary
--moe-router-group-topk 2 --moe-router-num-groups 4 | same | --moe-router-group-topk 2
--lr-warmup-samples 80 --global-batch-size 8 | renamed | --lr-warmup-iters 10
--lr-decay-samples 80 --train-samples 80 --global-batch-size 8 | renamed | --lr-decay-iters 10
--rampup-batch-size 8 8 80 --lr-warmup-iters 5 | different results | --rampup-batch-size 8 8 80
--no-load-optim | unnecessary
--no-load-optim --load x | same | --no-load-optim
--moe-layer-freq -1 | implied
--ds-sequence-parallel-size 1 | unnecessary
--ds-sequence-parallel-size 4 | renamed | --cp-degree 4 --context-parallel-algo ulysses_cp_algo
--override-lr-scheduler | unnecessary
--override-lr-scheduler --load x | renamed | --override-opt-param-scheduler
--save None | unnecessary
--vocab-file f | left to you
--data-path <path> | left to you
--data-path /path/to/data | left to you
--use-rope-scaling | renamed | --rope-scaling-type llama3
--rotary-seq-len-interpolation-factor 4 | renamed | --rope-scaling-type linear --rope-scaling-factor 4
--rotary-scaling-factor 40 --multi-latent-attention | renamed | --rope-scaling-type yarn --rope-scaling-factor 40
--rotary-scaling-factor 40 --multi-latent-attention --rope-type yarn | renamed \
    | --rope-scaling-type yarn --rope-scaling-factor 40
--mscale 0.7 --multi-latent-attention --rotary-scaling-factor 40 --mscale-all-dim 0.7 | same | --mscale 0.7
--mscale-all-dim 0.7 --multi-latent-attention --rotary-scaling-factor 40 --mscale 0.7 | same | --mscale-all-dim 0.7
--mscale-all-dim 1.0 --multi-latent-attention --rotary-scaling-factor 40 | renamed | --mscale 1.0 --mscale-all-dim 1.0
--mscale 0.5 --multi-latent-attention --rotary-scaling-factor 40 | renamed | --rope-attention-factor 1.1844439727056968
--original-max-position-embeddings 512 --multi-latent-attention --rotary-scaling-factor 40 | same \
    | --original-max-position-embeddings 512
--rotary-scaling-factor 40 | unnecessary
--rotary-scaling-factor 1.0 --multi-latent-attention | unnecessary
--rotary-scaling-factor 40 --multi-latent-attention --rope-type rope | unnecessary
--rope-type yarn --multi-latent-attention --rotary-scaling-factor 40 | implied
--rope-type yarn | unnecessary
--rope-type yarn --multi-latent-attention | unnecessary
--mscale 1.0 --multi-latent-attention --rotary-scaling-factor 40 | unnecessary
--mscale-all-dim 0.0 --multi-latent-attention --rotary-scaling-factor 40 --mscale 1.0 | unnecessary
--mscale 0.7 | unnecessary
--mscale-all-dim 0.7 | unnecessary
--use-rope-scaling --multi-latent-attention | unnecessary
--rotary-percent 0.5 --multi-latent-attention | another model
--original-max-position-embeddings 512 | unnecessary
--rotary-seq-len-interpolation-factor 1 | unnecessary
--rotary-seq-len-interpolation-factor 4 --use-rope-scaling | another model
--kv-lora-rank 64 | unnecessary
--qk-rope-head-dim 64 | unnecessary
--padded-base-length 64 | unnecessary
--kv-channels 64 | renamed | --head-dim 64
--kv-channels 64 --multi-latent-attention | unnecessary
--zero-stage 3 | renamed | --sharding-stage 3
--swiglu | renamed | --activation swiglu
[deepspeed]
--num-experts 1 | renamed | --num-experts 0
--num-experts 32 32 64 | another model
--num-experts 8 --topk 2 --expert-interval 1 | same | --num-experts 8
--topk 2 | renamed | --moe-router-topk 2
--expert-interval 2 --num-experts 8 | another model
--mlp-type residual | another model
--moe-expert-parallel-size 4 | renamed | --ep-degree 4
--ds-sequence-parallel-size 4 | renamed | --cp-degree 4 --context-parallel-algo ulysses_cp_algo
--load-tag global_step500 | renamed | --ckpt-step 500
--lr-warmup-tokens 2048000 --global-batch-size 100 --seq-length 2048 | renamed | --lr-warmup-iters 10
--enable-zbh1-pipeline | renamed | --pp-schedule zero_bubble
--train-tokens 8192 --train-iters 10 --global-batch-size 8 --seq-length 128 | renamed | --train-iters 8
--train-tokens 8192 --train-iters 5 --global-batch-size 8 --seq-length 128 | renamed | --train-iters 5
--train-iters 10 --train-tokens 8192 --global-batch-size 8 --seq-length 128 | implied
--train-iters 10 --train-tokens 8192 --global-batch-size 8 | same | --train-iters 10
--train-iters 10 | same | --train-iters 10
[mindspeed]
--adaptive-recompute-device-size 61440 | same | --adaptive-recompute-device-size 61440
--adaptive-recompute-device-size -1 | unnecessary
--adaptive-recompute-device-swap | left to you
--adaptive-recompute-device-swap --adaptive-recompute-device-size 61440 | implied
--ampipe-degree 1 | unnecessary
--ampipe-degree 2 | same | --ampipe-degree 2
--ampipe-tp-sp-comm-overlap --ampipe-degree 2 | same | --ampipe-tp-sp-comm-overlap
--ampipe-tp-sp-comm-overlap | unnecessary
--moe-model-type deepspeed_moe | same | --moe-model-type deepspeed_moe
--moe-model-type deepspeed_moe --moe-no-drop | renamed | --moe-model-type megatron_moe
--moe-train-capacity-factor 1.1 --moe-model-type deepspeed_moe | renamed | --moe-capacity-factor 1.1
--moe-train-capacity-factor 1.1 | unnecessary
--moe-train-capacity-factor 1.1 --moe-model-type deepspeed_moe --moe-no-drop | unnecessary
--context-parallel-algo ulysses_cp_algo --context-parallel-size 2 | same | --context-parallel-algo ulysses_cp_algo
--context-parallel-algo hybrid_cp_algo --context-parallel-size 4 | renamed | --context-parallel-algo megatron_cp_algo
--context-parallel-algo hybrid_cp_algo | unnecessary
--expert-model-parallel-size 4 | renamed | --ep-degree 4
--expert-model-parallel-size 4 --moe-tp-extend-ep --tensor-model-parallel-size 8 | renamed | --ep-degree 32
--moe-router-load-balancing-type softmax_topk | renamed | --moe-aux-loss-coeff 0 --no-norm-topk-prob
--moe-router-load-balancing-type softmax_topk --norm-topk-prob | renamed | --moe-aux-loss-coeff 0
--moe-router-load-balancing-type sparsemixer_topk | different results
--enable-expert-placement | unnecessary
--enable-expert-placement --expert-model-parallel-size 4 --expert-placement-freq 20 | renamed \
    | --moe-rebalance-interval 20
--expert-placement-freq 20 | unnecessary
--add-qkv-bias --disable-bias-linear | same | --add-qkv-bias
--add-dense-bias --disable-bias-linear | another model
--add-qkv-bias | implied
--optimizer-selection fused_ema_adamw | unsupported
--noisy-gate-policy Jitter | different results
--noisy-gate-policy None | unnecessary
--pre-tockens 65536 --seq-length 4096 | unnecessary
--pre-tockens 1024 --seq-length 4096 | another model
--pre-tockens 1024 --seq-length 4096 --sparse-mode 2 | unnecessary
--num-layer-list 7,8,8,5 | renamed | --pp-seg-method 0,7,15,23
--pipeline-num-transformer-layers [[3],[5]] | renamed | --pp-seg-method 0,3
--pipeline-num-transformer-layers [[3,2],[5,1]] | unsupported
--rope-scaling-factor 40 | unnecessary
--rope-scaling-factor 40 --rope-scaling-type yarn | same | --rope-scaling-factor 40
--lora-r 16 | unnecessary
--lora-r 16 --lora-target-modules linear_qkv | different results
--stage sft | different results
--cla-share-factor 1 | unnecessary
--cla-share-factor 2 | another model
--quant-states fp8 | different results
--swiglu-limit 7.0 | another model
--shared-expert-gate | renamed | --moe-shared-expert-gate
--embedding-multiplier-scale 78.25 | renamed | --embedding-multiplier 78.25
--output-multiplier-scale 0.5 | renamed | --logits-scaling 2.0
--scale-emb 12 | renamed | --embedding-multiplier 12
--scale-depth 1.5 --num-layers 9 | renamed | --residual-multiplier 0.5
--scale-depth 1.5 | left to you
--dim-model-base 256 --hidden-size 2304 | renamed | --logits-scaling 9.0
--post-norm | another model
--npu-deterministic | renamed | --deterministic
--layerzero | renamed | --sharding-stage 3
--recompute-in-bubble | unsupported
--moe-tp-extend-ep --expert-model-parallel-size 2 --tensor-model-parallel-size 4 | renamed | --expert-mp-degree 1
--expert-model-parallel-size 2 --moe-tp-extend-ep --tensor-model-parallel-size 4 | renamed | --ep-degree 8
--rope-scaling-type yarn --rope-scaling-factor 40 | same | --rope-scaling-type yarn
--rope-scaling-beta-fast 16 --rope-scaling-type yarn --rope-scaling-factor 40 | renamed | --beta-fast 16
--rope-scaling-original-max-position-embeddings 4096 --rope-scaling-type yarn --rope-scaling-factor 40 | same \
    | --original-max-position-embeddings 4096
--low-freq-factor 1.0 --rope-scaling-type llama3 | renamed | --low-freq-factor 1.0
--partial-rotary-factor 0.5 | same | --rotary-percent 0.5
--rope-scaling-type longrope | another model
--beta-fast 16 | unnecessary
--partial-rotary-factor 0.0 | unnecessary
--long-mscale 1.2 | unnecessary
[paddle]
--tensor_parallel_degree 2 | renamed | --mp-degree 2
--tensor_parallel_degree -1 | unnecessary
--virtual_pp_degree 2 | renamed | --vpp-degree 2 --pp-schedule interleaved
--sharding stage2 | renamed | --sharding-stage 2
--sharding 'stage1 offload' | renamed | --sharding-stage 1 --optimizer-offload
--sharding true | renamed | --sharding-stage 3
--sharding stage9 | left to you
--sharding_parallel_degree 8 | renamed | --sharding-degree 8
--sharding_parallel_degree -1 | unnecessary
--sharding_group_size 8 | renamed | --sharding-degree 8
--sep_parallel_degree 4 | renamed | --cp-degree 4 --context-parallel-algo ulysses_cp_algo
--data_parallel_degree 4 | renamed | --hybrid-dp
--sequence_parallel 1 --tensor_parallel_degree 2 | renamed | --sequence-parallel
--sequence_parallel 1 | unnecessary
--max_steps -1 | left to you
--num_train_epochs 1 --max_steps 10 | unnecessary
--lr_scheduler_type linear | renamed | --lr-decay-style linear
--lr_scheduler_type polynomial | different results
--lr_scheduler wsd:900 --max_steps 1000 | renamed | --lr-decay-style wsd --lr-wsd-decay-iters 100
--lr_scheduler wsd --max_steps 1000 | renamed | --lr-decay-style wsd --lr-wsd-decay-iters 100
--lr_scheduler wsd:900 | left to you
--lr_scheduler wsd:231084 --max_steps 100 | renamed | --lr-decay-style constant
--decay_function 1-sqrt --lr_scheduler wsd:9 --max_steps 10 | renamed | --lr-wsd-decay-style minus_sqrt
--decay_function half_life --lr_scheduler wsd:9 --max_steps 10 | different results
--decay_function half_life --lr_scheduler wsd:90 --max_steps 10 | unnecessary
--warmup_ratio 0.1 --max_steps 1000 | renamed | --lr-warmup-iters 100
--warmup_ratio 0.1 --max_steps 1000 --warmup_steps 5 | unnecessary
--fp16_opt_level O2 --bf16 1 | implied
--fp16_opt_level O1 --bf16 1 | different results
--fp16_opt_level O1 | unnecessary
--amp_master_grad 0 --bf16 true | different results
--scale_loss 4096 --bf16 true | unnecessary
--scale_loss 4096 --fp16 true | renamed | --initial-loss-scale 4096
--amp_configs.decr_ratio 0.8 | different results
--amp_configs.decr_ratio 0.5 | implied
--recompute 1 | renamed | --recompute-interval 1
--recompute true --recompute_granularity core_attn | renamed \
    | --recompute-granularity selective --recompute-method uniform --recompute-num-layers 1
--recompute_granularity core_attn | unnecessary
--recompute_granularity full --recompute_method uniform | renamed | --recompute-granularity full
--num_hidden_layers 56 --remove_tail_layer 2 | renamed | --num-layers 54
--initializer_range 0.02 --hidden_size 8192 --moe_num_experts 64 | renamed | --init-std 0.00637856
--initializer_range 0.02 | renamed | --init-std 0.02
--moe_capacity 8 8 8 --moe_k 8 | different results
--moe_aux_loss_lambda 1e-5 --moe_k 8 | renamed | --moe-aux-loss-coeff 8e-05
--moe_aux_loss_lambda 1e-2 | renamed | --moe-aux-loss-coeff 0.02
--moe_aux_loss_lambda 1e-2 --moe_k 8 --moe_group_experts true | renamed | --moe-aux-loss-coeff 1e-2
--router_aux_loss_coef 1e-3 --moe_k 8 | renamed | --moe-aux-loss-coeff 1e-3
--moe_layer_interval 2 | another model
--moe_layer_interval 1 | unnecessary
--moe_norm_gate_logits false | different results
--moe_use_aux_free_update_coef 0.001 --moe_use_aux_free false | unnecessary
--moe_use_aux_free true | renamed | --moe-router-bias-update-rate 0.001
--moe_gate_lr_ratio 0.01 | different results | --moe-router-lr-ratio 0.01
--moe_gate_lr_ratio 0.01 --moe_layer_start_index 3 | unnecessary
--multi_token_pred_depth 2 | another model
--use_fp8_mlp true | different results
--use_fp8_mlp false | unnecessary
--optim adamw | implied
--optim muon | different results
--muon_momentum 0.95 | unnecessary
--lora_rank 8 | unnecessary
--lora true | different results
--stage SFT | different results
--stage PT | unnecessary
--input_dir '0.4 a 0.6 b' | renamed | --data-path 0.4 a 0.6 b
--eval_steps 100 | renamed | --eval-interval 0
--eval_steps 100 --do_eval true | renamed | --eval-interval 100
--sharding_parallel_config 'split_param enable_stage1_overlap' | implied
--sharding_parallel_config enable_wonders | different results
--pipeline_parallel_config 'enable_delay_scale_loss best_unbalanced_scheduler' | implied
--tensor_parallel_config 'sync_param sync_grad' | implied
--sharding_comm_buffer_size_MB 2048 | unsupported
--model_name_or_path meta-llama/Meta-Llama-3-8B | left to you
--resume_from_checkpoint out/checkpoint-100 | left to you
--gradient_merge_configs.k_steps 4 | renamed | --gradient-merge-acc-step 4
--localsgd true | different results
"""


def rows() -> Iterator[tuple[str, str, str, str]]:
    framework = ""
    for row in ROWS.strip().splitlines():
        if row.startswith("["):
            framework = row.strip("[]")
            continue
        line, verdict, ours = (cell.strip() for cell in f"{row} | ".split(" | ")[:3])
        yield framework, line, verdict, ours


@pytest.mark.parametrize(("framework", "line", "verdict", "ours"), rows())
def test_values_decide(framework: str, line: str, verdict: str, ours: str) -> None:
    item = translate(shlex.split(line), framework)[0]
    assert (item.verdict, item.ours) == (verdict, ours), item
    assert item.reason or item.verdict in (SAME, RENAMED)


# As scripts of Llama 3.1 8B are written for Megatron-LM; the batch, data and layout are left out.
LLAMA_3_1 = """
--swiglu --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention
--num-query-groups 8 --seq-length 8192 --max-position-embeddings 131072 --use-rotary-position-embeddings
--disable-bias-linear --normalization RMSNorm --norm-epsilon 1e-5 --rotary-base 500000 --vocab-size 128256
--kv-channels 128 --use-rope-scaling --rope-scaling-factor 8.0 --rotary-percent 1.0 --micro-batch-size 1
--untie-embeddings-and-output-weights --train-iters 10 --lr 1e-4 --mock-data --attention-dropout 0 --hidden-dropout 0
"""


def test_llama_3_1_is_the_published_model() -> None:
    items = translate(LLAMA_3_1.split(), "megatron")
    items += implicit_defaults(items, "megatron")
    assert [item for item in items if item.verdict in CHANGING] == []
    model = parse("moe", [word for text in equivalent(items)[1] for word in shlex.split(text)], {}).model
    assert isinstance(model, DecoderSizes)
    published = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert model.rope_scaling == RopeScaling(rope_type="llama3", original_max_position_embeddings=8192, **published)
    assert (model.rope_theta, model.rotary_dim, model.max_position_embeddings) == (500000.0, 128, 131072)


@pytest.mark.parametrize("name", ["deepseek_v3", "mindspeed_deepseek_v3"])
def test_a_launch_line_of_deepseek_v3_has_its_attention(name: str) -> None:
    """The line's source is in its file, ``tests/tools/scripts``."""
    items = translate(arguments(name))
    _, trainer = equivalent([*items, *implicit_defaults(items, "megatron")])
    given = " ".join(word for word in trainer if not word.startswith("--world-size")).split()
    # The first line's batch is too small for its own stages on the ranks of its experts.
    config = parse("moe", ["--rules-only", "--world-size", "1024", *given, "--global-batch-size", "3840"], {})
    sizes = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128}
    sizes |= {"multi_latent_attention": True, "head_dim": 192, "qk_norm": False}
    assert {key: config.value(key) for key in sizes} == sizes
    assert {item.flag: item for item in items}["--qk-layernorm"].verdict == "implied"
