"""Runs of scripts/trace_cuda.py and their budgets of GPU work: a row per figure, with its reason.

A figure above its bound fails ("rows" of a product: below it). Rows are keyed by operator and call label, the name of
the calling function, not by file, because files move. If a change reduces the work, tighten the bound of its row.
scripts/tracing/kernels.py defines the kernels per operator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

COMMON = "--data-path mock --device cuda --bf16 --train-iters 1 --eval-interval 0"
SMALL = f"{COMMON} --num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 512 --micro-batch-size 2"
SMALL += " --seq-length 64"
DENSE = f"{SMALL} --num-experts 0 --num-query-groups 2"
FP8 = "--fp8 --hidden-size 256 --ffn-hidden-size 768 --head-dim 64"
DENSE_FP8 = f"{DENSE} {FP8}"
MOE = f"{SMALL} --num-query-groups 2 --num-experts 4 --moe-ffn-hidden-size 64 --moe-router-topk 2 --first-k-dense 0"
GPT_OSS = "--activation clamped_swiglu --add-bias-linear --moe-router-linear-bias --attention-sinks --window-size 16"
UNEVEN = f"{MOE} --moe-model-type megatron_moe --ep-degree 2"
EVEN = f"{MOE} --moe-model-type deepspeed_moe --ep-degree 2"
BY_NODE = "--moe-dispatch node --ranks-per-node"
SLICES = f"{EVEN} --ampipe-degree"
PIECES = f"{EVEN} --use-pipe-experts --pipe-experts-multi-data 2"
MP2 = "--mp-degree 2 --sequence-parallel"
DROPLESS_SLICES = f"{UNEVEN} --ampipe-degree"
ERNIE3 = f"{SMALL} --ernie-model ernie3 --task-num-layers 1 --task-hidden-size 64 --task-num-attention-heads 4"
ERNIE3 += " --task-type-vocab-size 5"
PIPED_EXPERTS = f"{UNEVEN} --pp-degree 2 --gradient-merge-acc-step 4"
PIPED = f"{DENSE} --num-layers 8 --gradient-merge-acc-step 8 --pp-degree"

LATENT = "--multi-latent-attention --qk-head-dim 24 --qk-pos-emb-head-dim 16 --v-head-dim 24"
LATENT += " --q-lora-rank 48 --kv-lora-rank 32"
LATENT_DENSE = f"{SMALL} --num-experts 0 {LATENT}"
LATENT_BLOCKS = f"{LATENT_DENSE} --cp-degree 2 --mla-cp-exchange latent --context-parallel-algo"
LATENT_SLICES = f"{EVEN} --ampipe-degree".replace("--num-query-groups 2", LATENT)


class Run(NamedTuple):
    """A run, traced as its last rank; ``counts`` is the allowed number of waits per step for rows per expert."""

    name: str
    model: str
    world: int
    flags: str
    counts: int = 0


TWO_BYTES = "--main-grads-dtype bf16 --store-param-remainders --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
OLMO2 = "--qk-norm --qk-norm-scope width --norm-placement output"
MULTIPLIED = "--embedding-multiplier 12 --residual-multiplier 0.22 --softmax-scale 0.1 --logits-scaling 8"
MP8 = f"{DENSE} --num-attention-heads 8 --num-query-groups 8 --mp-degree 8"
RECIPE = "--config configs/ernie-4.5-21b-a3b.yaml --data-path mock --device cuda --num-layers 3 --eval-interval 0"
RECIPE += " --gradient-merge-acc-step 2 --global-batch-size 32"

RUNS = (
    Run("dense", "moe", 1, DENSE),
    Run("dense, fp16", "moe", 1, f"{DENSE} --fp16".replace("--bf16 ", "")),
    Run("dense, norms of queries and keys", "moe", 1, f"{DENSE} --qk-norm"),
    Run("dense, norms of OLMo 2", "moe", 1, f"{DENSE} {OLMO2}"),
    Run("dense, norms of OLMo 2, mp 8", "moe", 8, f"{MP8} {OLMO2}"),
    Run("dense, multipliers", "moe", 1, f"{DENSE} {MULTIPLIED}"),
    Run("dense, sharding 2", "moe", 2, DENSE),
    Run("dense, sharding 24, rows of odd lengths", "moe", 24, f"{DENSE} --hidden-size 2560"),
    Run("dense, cuDNN", "moe", 1, f"{DENSE} --attention-backend cudnn"),
    Run("dense, FlashAttention by name", "moe", 1, f"{DENSE} --attention-backend flash"),
    Run("dense, documents", "moe", 1, f"{DENSE} --reset-attention-mask --reset-position-ids"),
    Run("dense, documents, plain products", "moe", 1, f"{DENSE} --reset-attention-mask --no-use-flash-attn"),
    Run("dense, window, plain products", "moe", 1, f"{DENSE} --window-size 16 --no-use-flash-attn"),
    Run("dense, one document per sample", "moe", 1, f"{DENSE} --no-packing"),
    Run("dense, two bytes of everything", "moe", 2, f"{DENSE} {TWO_BYTES}"),
    Run("dense, two bytes of everything, one rank", "moe", 1, f"{DENSE} {TWO_BYTES}"),
    Run("dense, two bytes, fp16", "moe", 1, f"{DENSE} --exp-avg-sq-dtype bf16 --fp16".replace("--bf16 ", "")),
    Run("dense, Muon", "moe", 2, f"{DENSE} --optimizer muon"),
    Run("dense, Muon, fp16", "moe", 1, f"{DENSE} --optimizer muon --fp16".replace("--bf16 ", "")),
    Run("dense, QK-clip", "moe", 2, f"{DENSE} --optimizer muon --qk-clip-threshold 100"),
    Run("dense, window", "moe", 1, f"{DENSE} --window-size 16"),
    Run("dense, window, cp 2", "moe", 2, f"{DENSE} --window-size 16 --cp-degree 2"),
    Run("dense, norms of updates", "moe", 1, f"{DENSE} --log-update-norms --log-interval 1"),
    Run("dense, offloaded optimizer", "moe", 2, f"{DENSE} --optimizer-offload"),
    Run("dense, sharding 2, state digested", "moe", 2, f"{DENSE} --state-digest-steps 1"),
    Run("dense, offloaded optimizer, state digested", "moe", 2, f"{DENSE} --optimizer-offload --state-digest-steps 1"),
    Run("dense, recompute with offload", "moe", 1, f"{DENSE} --recompute-interval 1 --recompute-offload"),
    Run("dense, multi-token prediction", "moe", 1, f"{DENSE} --mtp-depth 1"),
    Run("dense, mp 8", "moe", 8, MP8),
    Run("dense, mp 8, sequence parallel", "moe", 8, f"{MP8} --sequence-parallel"),
    Run("dense, fp8", "moe", 1, DENSE_FP8),
    Run("dense, fp8, mp 2, sequence parallel", "moe", 2, f"{DENSE_FP8} {MP2}"),
    Run("dense, fp8, mp 2", "moe", 2, f"{DENSE_FP8} --mp-degree 2"),
    Run("dense, fp8, tensorwise", "moe", 1, f"{DENSE_FP8} --fp8-recipe tensorwise"),
    Run("dense, fp8, stage 3", "moe", 2, f"{DENSE_FP8} --sharding-stage 3"),
    Run("pipeline, fp8, zero bubble", "moe", 4, f"{PIPED} 4 --use-nanopipe {FP8}"),
    Run("experts, one rank", "moe", 1, f"{MOE} --moe-model-type megatron_moe"),
    Run("experts, dropless", "moe", 2, UNEVEN, counts=2),
    Run("experts, GPT-OSS", "moe", 2, f"{UNEVEN} {GPT_OSS}", counts=2),
    Run("experts, fp8", "moe", 2, f"{UNEVEN} {FP8} --fp8-experts", counts=2),
    Run("experts that move", "moe", 2, f"{UNEVEN} --moe-rebalance-interval 100", counts=2),
    Run("experts, by node", "moe", 4, f"{UNEVEN} --ep-degree 4 {BY_NODE} 2", counts=2),
    Run("experts, by node, mp 2", "moe", 4, f"{UNEVEN} --mp-degree 2 --sequence-parallel {BY_NODE} 2", counts=2),
    Run("slices 2, by node", "moe", 4, f"{SLICES} 2 --ep-degree 4 {BY_NODE} 2", counts=4),
    Run("pieces, by node", "moe", 4, f"{EVEN} --ep-degree 4 --use-pipe-experts {BY_NODE} 2", counts=2),
    Run("experts, capacity", "moe", 2, EVEN),
    Run("experts, dropless, mp 2", "moe", 4, f"{UNEVEN} --mp-degree 2 --sequence-parallel", counts=2),
    Run("experts, capacity, mp 2", "moe", 4, f"{EVEN} --mp-degree 2 --sequence-parallel", counts=2),
    Run("experts, capacity, cp 2", "moe", 2, f"{EVEN} --cp-degree 2", counts=2),
    Run("experts, dropless, recompute", "moe", 2, f"{UNEVEN} --recompute-interval 1", counts=2),
    Run("slices 2", "moe", 2, f"{SLICES} 2", counts=4),
    Run("slices 4", "moe", 2, f"{SLICES} 4", counts=8),
    Run("slices 2, cross-layer", "moe", 2, f"{SLICES} 2 --ampipe-cross-layer", counts=4),
    Run("slices 4, cross-layer", "moe", 2, f"{SLICES} 4 --ampipe-cross-layer", counts=8),
    Run("slices 2, capacity of a slice", "moe", 2, f"{SLICES} 2 --ampipe-capacity slice"),
    Run("slices 2, dropless", "moe", 2, f"{DROPLESS_SLICES} 2", counts=4),
    Run("slices 4, dropless, cross-layer", "moe", 2, f"{DROPLESS_SLICES} 4 --ampipe-cross-layer", counts=8),
    Run("slices 2, documents", "moe", 2, f"{SLICES} 2 --reset-attention-mask", counts=4),
    Run("slices 2, cp 2", "moe", 2, f"{SLICES} 2 --cp-degree 2", counts=4),
    Run("slices 2, mp 2", "moe", 4, f"{SLICES} 2 {MP2} --ampipe-tp-sp-comm-overlap", counts=4),
    Run("pieces of experts", "moe", 2, PIECES, counts=2),
    Run("pieces of experts, mp 2", "moe", 4, f"{PIECES} {MP2}", counts=2),
    Run("cp 2, ring", "moe", 2, f"{DENSE} --cp-degree 2"),
    Run("cp 2, heads", "moe", 2, f"{DENSE} --cp-degree 2 --context-parallel-algo ulysses_cp_algo"),
    Run("cp 2, gathered", "moe", 2, f"{DENSE} --cp-degree 2 --context-parallel-algo allgather_cp_algo"),
    Run("pipeline, 1f1b", "moe", 4, f"{PIPED} 4"),
    Run("pipeline, gpipe", "moe", 4, f"{PIPED} 4 --pp-schedule gpipe"),
    Run("pipeline, interleaved", "moe", 4, f"{PIPED} 4 --pp-schedule interleaved --vpp-degree 2"),
    Run("pipeline, zero bubble", "moe", 4, f"{PIPED} 4 --use-nanopipe"),
    Run("pipeline, experts", "moe", 4, PIPED_EXPERTS, counts=4),
    Run("pipeline, experts, zero bubble", "moe", 4, f"{PIPED_EXPERTS} --use-nanopipe", counts=4),
    Run("latent attention, experts, slices 2", "moe", 2, f"{LATENT_SLICES} 2", counts=4),
    Run("latent attention, mp 2", "moe", 2, f"{LATENT_DENSE} --mp-degree 2"),
    Run("latent attention, mp 2, sequence parallel", "moe", 2, f"{LATENT_DENSE} --mp-degree 2 --sequence-parallel"),
    Run("latent attention, cp 2", "moe", 2, f"{LATENT_DENSE} --cp-degree 2"),
    Run("latent attention, cp 2, keys and values", "moe", 2, f"{LATENT_DENSE} --cp-degree 2 --mla-cp-exchange kv"),
    Run("latent attention, cp 2, heads", "moe", 2, f"{LATENT_BLOCKS} ulysses_cp_algo"),
    Run("latent attention, cp 2, gathered", "moe", 2, f"{LATENT_BLOCKS} allgather_cp_algo"),
    Run("latent attention, slices 2, cp 2", "moe", 2, f"{LATENT_SLICES} 2 --cp-degree 2", counts=4),
    Run("latent attention, stage 3", "moe", 2, f"{LATENT_DENSE} --sharding-stage 3"),
    Run("stage 2", "moe", 4, f"{UNEVEN} --sharding-stage 2", counts=2),
    Run("stage 3", "moe", 2, f"{DENSE} --sharding-stage 3"),
    Run("stage 3, experts", "moe", 4, f"{UNEVEN} --sharding-stage 3", counts=2),
    Run("ernie", "ernie", 1, SMALL),
    Run("ernie, no dropout", "ernie", 1, f"{SMALL} --attention-dropout 0 --hidden-dropout 0"),
    Run("ernie, padding computed, cp 2", "ernie", 2, f"{SMALL} --cp-degree 2 --context-parallel-algo ulysses_cp_algo"),
    Run("ernie, mp 2, sharding 2", "ernie", 4, f"{SMALL} --mp-degree 2 --sequence-parallel"),
    Run("ernie 3.0", "ernie", 1, ERNIE3),
    Run("ernie 3.0, segments with a memory", "ernie", 1, f"{ERNIE3} --generation-segments 2 --memory-length 16"),
    Run("recipe of ERNIE 4.5 21B, three layers", "moe", 8, RECIPE, counts=4),
)

# Layers of real sizes on one GPU of the layout. The cost of a layer is the difference between two depths.
BATCH = "--micro-batch-size 1 --global-batch-size 1 --vocab-size 103424 --seq-length 8192"
DENSE_4096 = f"{COMMON} {BATCH} --num-experts 0 --hidden-size 4096 --num-attention-heads 32 --num-query-groups 8"
DENSE_4096 += " --ffn-hidden-size 14336"
ERNIE_21B = f"{COMMON} --num-experts 64 --moe-router-topk 6 --moe-shared-experts 2 --moe-ffn-hidden-size 1536"
ERNIE_21B += " --first-k-dense 0 --hidden-size 2560 --num-attention-heads 20 --num-query-groups 4 --seq-length 4096"
ERNIE_21B += " --vocab-size 103424 --micro-batch-size 2 --global-batch-size 16 --ep-degree 8 --sharding-degree 8"
DEEPSEEK = "--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64"
DEEPSEEK += " --v-head-dim 128"
DEEPSEEK_DENSE = f"{COMMON} {BATCH} --num-experts 0 --hidden-size 7168 --num-attention-heads 128"
DEEPSEEK_DENSE += f" --ffn-hidden-size 18432 {DEEPSEEK}"
GPT_OSS_20B = f"{COMMON} {GPT_OSS.removesuffix(' 16')} 128 --num-experts 32 --moe-router-topk 4 --first-k-dense 0"
GPT_OSS_20B += " --moe-ffn-hidden-size 2880 --hidden-size 2880 --num-attention-heads 64 --num-query-groups 8"
GPT_OSS_20B += " --head-dim 64 --seq-length 4096 --vocab-size 103424 --micro-batch-size 2 --global-batch-size 16"
GPT_OSS_20B += " --ep-degree 8"
GEMMA_1B = f"{COMMON} {BATCH} --num-experts 0 --hidden-size 1152 --num-attention-heads 4 --num-query-groups 1"
GEMMA_1B += " --head-dim 256 --ffn-hidden-size 6912 --activation geglu --norm-placement both --apply-layernorm-1p"
GEMMA_1B += " --qk-norm --scale-embedding --window-size 512"
ENCODER = f"{COMMON} --hidden-size 2048 --num-attention-heads 16 --seq-length 512 --vocab-size 40000"
ENCODER += " --micro-batch-size 16 --global-batch-size 16"

LAYERS = (
    Run("dense", "moe", 1, DENSE_4096),
    Run("dense, fp8", "moe", 1, f"{DENSE_4096} --fp8"),
    Run("dense, compiled", "moe", 1, f"{DENSE_4096} --compile on"),
    Run("mp 8", "moe", 8, f"{DENSE_4096} --mp-degree 8"),
    Run("mp 8, sequence parallel", "moe", 8, f"{DENSE_4096} --mp-degree 8 --sequence-parallel"),
    Run("experts, dropless", "moe", 8, f"{ERNIE_21B} --moe-model-type megatron_moe"),
    Run("experts, by node", "moe", 8, f"{ERNIE_21B} --moe-model-type megatron_moe {BY_NODE} 4"),
    Run("experts, dropless, compiled", "moe", 8, f"{ERNIE_21B} --moe-model-type megatron_moe --compile on"),
    Run("experts, capacity", "moe", 8, f"{ERNIE_21B} --moe-model-type deepspeed_moe"),
    Run("slices 2", "moe", 8, f"{ERNIE_21B} --moe-model-type megatron_moe --ampipe-degree 2"),
    Run("latent attention", "moe", 1, DEEPSEEK_DENSE),
    Run("experts, GPT-OSS", "moe", 8, GPT_OSS_20B),
    Run("dense, Gemma 3", "moe", 1, GEMMA_1B),
    Run("encoder", "ernie", 1, ENCODER),
)


class Row(NamedTuple):
    """Bound of a figure.

    Attributes:
        layer: Name of one of ``LAYERS``; "NAME, beside" for the rest of that run without its layers.
        operator: Pattern of the operator.
        label: Pattern of the function that calls it.
        figure: kernels; products; rows of the smallest product, summed over its batches (a minimum); megabytes outside
            products; waits of the host.
        bound: Maximum of the figure, minimum of rows.
        reason: Explanation of the bound.
    """

    layer: str
    operator: str
    label: str
    figure: str
    bound: float
    reason: str


def _rows(text: str) -> Iterator[Row]:
    """Yield the rows below each line that names a layer; their columns are the other attributes of ``Row``."""
    layer = ""
    for line in text.strip().splitlines():
        if line.endswith(":"):
            layer = line[:-1]
        else:
            operator, label, figure, bound, reason = (cell.strip() for cell in line.split(" | "))
            yield Row(layer, operator, label, figure, float(bound), reason)


BUDGETS = tuple(
    _rows("""
dense:
  * | * | kernels | 45 | 44: 31 for the layer, 13 for its share of norm, update and cast
  * | * | products | 12 | four weights: one product forward, two backward
  * | * | rows | 8192 | all tokens of the micro-batch, unsharded
  * | * | megabytes | 9700 | 9,440, including 5,670 for norm, update and cast
  _fused_adamw_ | * | kernels | 10 | 218 million elements; torch takes 20,971,520 in a launch
  * | rotary_heads* | kernels | 2 | one in each direction, which also splits the heads
  swiglu* | * | kernels | 2 | one in each direction
  swiglu* | * | megabytes | 1900 | 1,880: one pass in each direction
  copy_ | * | kernels | 1 | the cast of parameters: products are added to the bucket of gradients
  * | _norms | kernels | 2 | one reduction of the large range; a multi-tensor norm of all small ones
dense, fp8:
  * | * | kernels | 53 | 52: those of bf16, a cast for four of eight products, and one for each of four weights
  * | * | products | 12 | four weights: one product forward, two backward
  _scaled_mm_v2 | * | kernels | 8 | forward and input gradient of four weights
  * | * | megabytes | 11500 | 11,200: a cast moves 3 bytes of an element, in norm and swiglu 1, of a weight 4
  cast_rows | * | kernels | 4 | attention's output, and the gradients of down, proj and qkv
  norm_cast | * | kernels | 2 | both norms, with the casts of their results
  swiglu_cast* | * | kernels | 2 | swiglu and its backward, with the casts of their results
  zeros | * | kernels | 0 | casts have no gradients
  cast_weight | * | kernels | 4 | once for an update, as it is and transposed
dense, beside:
  * | *LinearCrossEntropy* | rows | 1024 | a chunk of the logits that fills the device
  * | * | products | 6 | three for each of two chunks of the logits
  * | * | megabytes | 31500 | 30,540: two passes over the logits in fp32; products add to the output layer's gradient
  * | * | kernels | 104 | 101: 22 for the update, 14 for the embedding, three per chunk of logits
  * | *_norms | kernels | 4 | one large range, and the small ones of the whole model
dense, compiled:
  * | * | kernels | 41 | 40: 27 for the layer, of which 6 generated, and 13 for its share of norm, update and cast
  triton | * | kernels | 6 | two sums with their norms forward, four backward: a weight's gradient takes two
  * | * | products | 12 | four weights: one product forward, two backward
  * | * | megabytes | 9350 | 9,040, including 5,670 for norm, update and cast
  swiglu* | * | megabytes | 1900 | 1,880: one pass in each direction, as uncompiled
  rotary_heads* | * | kernels | 2 | one in each direction, as uncompiled
mp 8:
  * | * | kernels | 49 | 48
  * | * | products | 16 | split only as far as the saved link time justifies it
  * | * | rows | 4096 | two parts; a product with less than 1,024 rows does not fill 132 units
mp 8, beside:
  * | * | kernels | 108 | 105: the statistics of the logits are reduced over mp
mp 8, sequence parallel:
  * | * | kernels | 68 | 66: products of own and other ranks' rows, and their messages
  * | * | products | 20 | own and other ranks' rows in one product; 26 on other ranks
  * | * | rows | 1024 | a product with fewer rows does not fill 132 units
  * | * | megabytes | 1400 | 1,350
experts, dropless:
  * | * | kernels | 100 | 96, of which 11 for the router and its input; 100 where no Triton kernel stands in
  * | pack_bucket_cuda | kernels | 2 | a table of addresses, and one kernel per bucket
  * | unpack_bucket_cuda | kernels | 2 | a table of addresses, and one kernel per bucket
  copy_ | Bucket.* | kernels | 3 | casts of masters
  add_gradient | * | kernels | 2 | two gradients of experts, in fp32 by a kernel with loads of 16 bytes
  * | * | products | 21 | seven weights: one product forward, two backward
  * | * | rows | 8192 | all tokens of the micro-batch
  * | * | megabytes | 9950 | 9,670: weight gradients, dispatch and combine, activations in one pass
  * | * | waits | 1 | the counts, once per layer
  route* | * | kernels | 2 | scores, choices, weights and sums of tokens; the gradient of logits
  route* | * | megabytes | 20 | 19: logits in three parts, and gradients in four
  split_matrix | * | kernels | 2 | three bf16 parts of the router's weight, in each direction
  * | FanOut* | kernels | 0 | tokens enter products in bf16
  topk | * | kernels | 0 | the kernel chooses
  sort | * | kernels | 0 | pairs are sorted by counting
  * | sort_pairs | kernels | 2 | counts of blocks of pairs, then their rows
  * | order_runs | kernels | 1 | places of the received rows, counts and ends
  * | *_rows | kernels | 7 | messages packed and split both ways, rows back both ways, a token's sum and its gradient
  * | sum_message | kernels | 1 | gradients of tokens and weights in one pass
  * | _Start.forward | kernels | 0 | tokens of messages are one zero, made once
  alltoall_base_ | * | kernels | 5 | dispatch and combine, forward and backward, and the counts
  swiglu* | * | kernels | 4 | routed and shared experts, one in each direction
  swiglu* | * | megabytes | 1650 | 1,610: one pass, times the gate weights
  * | *aux* | kernels | 0 | losses are computed once for all layers
  add | * | kernels | 5 | sums around norms, and the gradients of the router's input
  add_ | * | kernels | 0 | that of the router is added by its product
experts, by node:
  * | * | kernels | 180 | 177: 81 more than plain, for orders, fields of rows and relays
  * | * | waits | 1 | the counts, once per layer
  alltoall_base_ | * | kernels | 8 | two hops of dispatch and combine, in both directions
  sort | * | kernels | 10 | the choices of each token; rows are sorted by counting
  sort_pairs | * | kernels | 6 | rows to nodes, to ranks and to experts
  * | * | megabytes | 10750 | 10,450: 9,670 of plain dispatch, relayed rows, and sums on each rank and node
experts, dropless, compiled:
  * | * | kernels | 94 | 92
  * | * | products | 21 | seven weights: one product forward, two backward
  * | * | megabytes | 9700 | 9,420: weight gradients, dispatch and combine, which are not compiled
  * | * | waits | 1 | the counts, once per layer
experts, capacity:
  * | * | kernels | 146 | 142
  * | * | products | 21 | seven weights: one product forward, two backward
  * | * | rows | 8192 | all tokens of the micro-batch
  * | * | megabytes | 9980 | 9,690: weight gradients, dispatch and combine, activations in one pass
  * | * | waits | 0 | even splits need no counts
  sort | * | kernels | 10 | one sort of 64-bit keys, for the kept tokens
  * | order_runs | kernels | 1 | places of rows, of which each expert has as many
  alltoall_base_ | * | kernels | 4 | dispatch and combine, forward and backward
  swiglu* | * | kernels | 4 | routed and shared experts, one in each direction
slices 2:
  * | * | kernels | 224 | 219
  * | * | products | 39 | products of two slices; keys and values of attention once
  * | * | rows | 4096 | all tokens of a slice
  * | * | megabytes | 13050 | 12,640: weight gradients, dispatch and combine, activations in one pass
  * | * | waits | 2 | the counts, once per slice
  sort | * | kernels | 0 | pairs are sorted by counting
  * | order_runs | kernels | 2 | places of the received rows of each slice, counts and ends
  alltoall_base_ | * | kernels | 10 | dispatch and combine, forward and backward, and the counts
  swiglu* | * | kernels | 8 | routed and shared experts of each slice, one in each direction
experts, dropless, beside:
  * | * | rows | 1024 | a chunk of the logits that fills the device
  * | * | kernels | 106 | 104
  * | * | megabytes | 17900 | 17,300: two passes over the logits in fp32
experts, GPT-OSS:
  * | * | kernels | 155 | 150: torch's operators route, because the router has a bias
  * | * | products | 15 | five weights: one product forward, two backward
  * | * | rows | 8192 | all tokens of the micro-batch
  * | * | megabytes | 15480 | 15,030: experts take four rows of a token, with biases
  * | * | waits | 1 | the counts, once per layer
  swiglu* | * | kernels | 2 | one in each direction, clamped
  _flash_attention* | * | kernels | 5 | one call in the window, four kernels back
  * | _Sink.* | kernels | 13 | two weigh the output; the sinks' gradient is a sum over rows
  * | _Sink.* | megabytes | 1210 | 1,170: outputs and their gradients, in fp32 for the sum
  alltoall_base_ | * | kernels | 5 | dispatch and combine, forward and backward, and the counts
  * | _AddOnce.* | kernels | 1 | biases of the second product
dense, Gemma 3:
  * | * | kernels | 118 | 114: six norms of 1 + w, each with copies in fp32
  * | * | products | 12 | four weights: one product forward, two backward
  * | * | rows | 8192 | all tokens of the micro-batch
  * | * | megabytes | 5890 | 5,720: 970 in norms, 1,160 in copies of their inputs and gradients
  _fused_rms_norm* | * | kernels | 18 | one forward, two backward
  * | geglu | kernels | 2 | GELU, and the product with the gate
  _varlen_attn* | * | kernels | 5 | one call in the window, four kernels back
encoder:
  * | * | kernels | 42 | 41: 34 for the layer, 7 for its share of gradients, norm, update and cast
  * | * | products | 12 | four weights: one product forward, two backward
  * | * | rows | 6226 | all tokens of the micro-batch; 1,966 of its 8,192 positions are padding
  * | * | megabytes | 2900 | 2,810, and 32 of the sums of rows inside operators: none for padding
  cat | * | kernels | 1 | gradients of queries, keys and values, as rows of a matrix
  sum | * | kernels | 1 | the bias of queries, keys and values: gelu's and the norms' backward sum the others
  native* | backward | kernels | 0 | one kernel has the gradients of a norm and of dropout, and three sums of columns
  norm_backward | * | kernels | 4 | after attention and after the MLP, each with a kernel for the sums of sums
  norm_backward | * | megabytes | 237 | 230: two tensors and a mask read, two tensors written
  *efficient* | * | kernels | 0 | no mask, so no kernel that needs one
  _flash_attention* | * | kernels | 5 | one call for samples of all lengths, four kernels back
latent attention:
  * | * | kernels | 111 | 109: 78 for the layer, 31 for its share of norm, update and cast
  * | * | products | 19 | six weights: one product forward, two backward; keys and values again
  mm | *.remaker.* | kernels | 1 | one product makes keys and values again
  * | * | rows | 8192 | all tokens of the micro-batch
  * | * | megabytes | 29400 | 28,580, including 15,170 for norm, update and cast
  * | *JoinHeads.forward | megabytes | 2830 | 2,750: keys and values are written twice, once for the backward
  * | *JoinHeads.backward | megabytes | 1250 | 1,210: one pass, and the rotary key's sum
  * | *turn* | megabytes | 3100 | 2,980: one pass of the rotated features in fp32
encoder, beside:
  * | * | kernels | 150 | 149: 42 for embeddings
""")
)

# Function that may wait for the device -> (waits per step, reason). For rows per expert see ``Run.counts``.
WAITS: Mapping[str, tuple[int, str]] = MappingProxyType(
    {"Stepper._apply_votes": (1, "gradient norm and log sums of the previous step, which is complete by then")}
)

# Function that may copy between host and device without a wait -> reason.
COPIES: Mapping[str, str] = MappingProxyType(
    {
        "MicroBatch.to": "the micro-batch, from page-locked memory",
        "DeviceMask.of": "starts of documents, a few numbers",
        "Ernie._context": "lengths of samples, a few numbers, from page-locked memory; with padding under cp",
        "_reorder": "order of the parts of a message, which the host computes from the counts",
        "Accelerator.host_copy": "counts and log sums, to page-locked memory with an event",
        "Bucket.start_param_gather": "offloaded master weights, to the device",
        "OffloadedOptimizer._load": "master weights and moments from the host",
        "OffloadedOptimizer._store": "the same, back",
        "SavedTensor._send": "saved tensors of offloaded units",
        "SavedTensor.fetch": "the same, back",
    }
)

# Functions that use fp64 on purpose -> reason. GPUs have little fp64 throughput.
FP64: Mapping[str, str] = MappingProxyType(
    {
        "global_norm": "sum of squares, independent of the order of ranks; a few numbers",
        "all_reduce": "for the gradient norm",
        "parts": "the same sum, independent of the places of experts",
        "total": "the same",
        "Accelerator.host_copy": "for the log sums",
        "RoundedAdamW._numbers": "a few numbers of a step, from its number, as a host would compute them",
        "UpdateNorms.take": "norms of updates, in steps that log them, if they are asked for",
    }
)
