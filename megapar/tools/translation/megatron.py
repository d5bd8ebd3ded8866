"""Arguments of Megatron-LM and MindSpeed scripts that are no flags here, and what becomes of each.

A row: names, what to write here, reason; rows are grouped by verdict. What to write is a text with ``{value}``, or
``@`` and a function of ``decided`` or ``megatron_values`` where the value or other arguments matter. Flags and
aliases of the trainers need no row, but where Megatron-LM means something else by the name. ``features``: what is not
here at all.
"""

from __future__ import annotations

from megapar.tools.translation import features
from megapar.tools.translation.verdict import (
    ANOTHER,
    IMPLIED,
    LEFT,
    RENAMED,
    UNNECESSARY,
    UNSUPPORTED,
    Foreign,
    rows,
)

_RENAMED = """
nproc-per-node | megapar launch --nproc-per-node {value} | belongs to the launcher
nnodes | megapar launch --nnodes {value} | belongs to the launcher
node-rank | @node_rank |
no-load-optim no-load-rng finetune ckpt-step override-opt-param-scheduler | @loading |
master-addr master-port | @rendezvous | the launcher's rendezvous, address and port in one
rdzv-id rdzv-backend rdzv-endpoint rdzv-conf | megapar launch --{name} {value} | belongs to the launcher
encoder-num-layers decoder-num-layers | --num-layers {value} |
encoder-seq-length | --seq-length {value} |
batch-size | --micro-batch-size {value} | its old name
model-parallel-size | --mp-degree {value} | its old name
decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers | @stages |
account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split | --pp-seg-method balanced | by their cost
num-query-groups | @query_groups |
group-query-attention | @grouped |
vocab-size | @vocabulary |
make-vocab-size-divisible-by | @padding |
padded-vocab-size | --vocab-size {value} | the rows of the embedding, padding included
position-embedding-type | @position_type |
rope-type | @rope_type |
rotary-percent | @rotary_share |
rotary-scaling-factor rope-scaling-factor mscale mscale-all-dim | @rope_factor |
no-position-embedding | @positions |
softmax-type | @sink |
qk-layernorm | @query_norm |
add-qkv-bias | @query_bias |
apply-layernorm-1p | @zero_centred |
spec | @specification |
mtp-num-layers | @blocks_after |
moe-router-enable-expert-bias | @bias |
moe-router-bias-update-rate | @bias_rate |
moe-router-num-groups | @router_groups |
moe-router-group-topk | @chosen_groups |
moe-router-score-function | @score_function |
moe-shared-expert-intermediate-size | @shared_width |
moe-layer-freq | @layers_with_experts |
moe-router-load-balancing-type | @balanced_by |
use-torch-fsdp2 | --sharding-stage 3 |
use-megatron-fsdp use-custom-fsdp | @own_fsdp |
data-parallel-sharding-strategy | @sharding |
cp-comm-type | @communication |
lr-warmup-iters | @warmup_steps |
lr-warmup-samples | @warmup_samples | runs are counted in steps
lr-warmup-init | @warmup_start |
main-grads-dtype main-params-dtype exp-avg-dtype exp-avg-sq-dtype | @kept_in |
megatron-fsdp-main-params-dtype megatron-fsdp-main-grads-dtype megatron-fsdp-grad-comm-dtype | @kept_in |
dataloader-type | @loader |
dataloader-inter-document-masking | @document_masks |
vocab-extra-ids | @extra_ids |
load | --load {value} | a folder of our checkpoints; those of Megatron-LM are not read
pretrained-checkpoint | --load {value} --finetune | a folder of our checkpoints; those of Megatron-LM are not read
persistent-save-interval | --save-interval {value} |
non-persistent-save-interval | --local-checkpoint-interval {value} | in the node's memory, with a copy on the next node
non-persistent-local-ckpt-dir | --local-checkpoint-dir {value} |
check-weight-hash-across-dp-replicas-interval | --replica-check-interval {value} |
distribute-saved-activations | --recompute-partition | for recomputed units
verify-integrity | --checkpoint-verify full |
num-layers-per-virtual-pipeline-stage | @chunks | chunks per stage are counted, not layers per chunk
num-virtual-stages-per-pipeline-rank | --vpp-degree {value} --pp-schedule interleaved |
lr-warmup-fraction | @warmup | warm-up is given in steps
train-samples | @samples | runs are counted in steps
lr-decay-samples | @decay_samples | runs are counted in steps
lr-wsd-decay-samples | @wsd_samples | runs are counted in steps
rampup-batch-size | @ramped |
num-key-value-heads | --num-query-groups {value} |
recompute-activation-function | --recompute-granularity selective | activation functions and attention's core together
attention-backend | @attention |
transformer-impl | @implementation |
moe-train-capacity-factor moe-expert-capacity-factor | @capacity |
num-shared-experts n-shared-experts | --moe-shared-experts {value} |
moe-intermediate-size | --moe-ffn-hidden-size {value} |
first-k-dense-replace | @leading |
num-experts num-moe-experts | @experts |
n-group | --moe-router-num-groups {value} |
topk-group | --moe-router-group-topk {value} |
routed-scaling-factor | --moe-router-topk-scaling-factor {value} |
moe-token-drop-policy | @drops |
moe-aux-loss-coeff moe-loss-coeff | @coefficient |
seq-aux | @sequence |
moe-tp-extend-ep | --expert-mp-degree 1 | mp ranks hold whole experts
noop-layers | @noop |
num-layers | @layers |
tokenizer-name-or-path | --tokenizer-model {value} |
exit-duration-in-mins | --exit-duration-minutes {value} |
grad-reduce-in-bf16 | --grad-reduce-dtype bf16 |
swap-optimizer | --optimizer-offload |
sequence-parallel | @cut |
context-parallel-algo | @algorithm |
split | @split |
eval-iters | @evaluations |
eval-interval | @evaluated |
save-interval | @saved |
use-rotary-position-embeddings | --position-embedding-type rope |
valid-data-path | @held_out_path |
test-data-path | @test_path |
optimizer | @optimizer |
moe-router-dtype | @router_dtype |
moe-router-pre-softmax | @pre_softmax |
lr-decay-style | @decay_style |
lr-wsd-decay-style | @wsd_style |
weight-decay-incr-style start-weight-decay end-weight-decay | @decay_increments |
initial-loss-scale | @loss_scale |
loss-scale | @fixed_scale |
accumulate-allreduce-grads-in-fp32 | --grad-reduce-dtype fp32 | the default
profile profile-step-start profile-step-end | @profile | both ends in one flag
optimizer-cpu-offload offload-optimizer | --optimizer-offload |
checkpoint-activations | --recompute-interval 1 |
checkpoint-num-layers | --recompute-interval {value} |
recompute-method-uniform | --recompute-method uniform |
"""

_IMPLIED = """
moe-grouped-gemm use-fused-moe-token-permute-and-unpermute moe-permute-fusion | | experts always run as grouped products
moe-token-dispatcher-type | | tokens always travel by all-to-all
moe-shared-expert-overlap | | shared experts run while tokens travel
enable-shared-expert | | --moe-shared-experts says it
enable-token-rearrange-opt | | tokens are always sorted, never multiplied by masks
use-fused-rotary-pos-emb use-fused-swiglu use-fused-rmsnorm | | the device's fused kernels are taken where they are
use-fused-ring-attention-update use-cp-send-recv-overlap | | ring attention always overlaps
apply-rope-fusion | | the device's fused kernels are taken where they are
bias-swiglu-fusion masked-softmax-fusion cross-entropy-loss-fusion | | fused where the device has it
enable-recompute-layers-per-pp-rank | | --recompute-method block counts layers of a stage
log-throughput | | always logged
distributed-backend | | follows the device
local-rank | | set by the launcher
tokenizer-type | | found from --tokenizer-model
data-impl | | found from the file
no-rope-fusion | | the device's fused kernels are taken where they are
ckpt-format dist-ckpt-format use-dist-ckpt auto-detect-ckpt-format | | one format, which loads on any layout
norm-topk-prob | | the weights of the chosen experts always sum to one
router-gating-in-fp32 | | the router computes in fp32
moe-permutation-async-comm | | all-to-alls are launched and waited for apart
mtp-mem-efficient-logits | | logits are made in chunks
calculate-per-token-loss | | every loss has its denominator over the global batch
log-timers-to-tensorboard log-memory-to-tensorboard log-world-size-to-tensorboard | | always written
log-learning-rate-to-tensorboard log-batch-size-to-tensorboard log-loss-scale-to-tensorboard | | always written
log-straggler | | --straggler-factor names slow ranks
exit-signal-handler exit-signal-handler-for-training exit-signal-handler-for-dataloader | | SIGTERM saves and stops
exit-on-missing-checkpoint | | --load without a checkpoint is refused, but where --save is the same folder
check-for-spiky-loss check-for-large-grads | | --spike-sigmas tells of them
attention-softmax-in-fp32 cross-entropy-fusion-impl | | softmax and loss are in fp32 at least
ddp-param-name-patterns-for-fp32-local-accumulation | | gradients are always summed in fp32
use-precision-aware-optimizer | | --main-params-dtype, --exp-avg-dtype and the like say what is kept how
no-use-tokenizer-model-from-checkpoint-args disable-use-tokenizer-model-from-checkpoint-args | | said by a flag
no-pad-vocab-size disable-pad-vocab-size | | --vocab-size counts the rows there are
onnx-safe | | there is nothing to work around
moe-extended-tp | | mp ranks split experts: --expert-mp-degree
rotary-interleaved | | which features make a pair is a permutation of a head's, all drawn alike
"""

_UNNECESSARY = """
use-mcore-models use-legacy-models | | there is one model
no-masked-softmax-fusion no-bias-dropout-fusion no-bias-swiglu-fusion | | nothing to switch off
no-gradient-accumulation-fusion gradient-accumulation-fusion | | main gradients are kept in fp32 by sharding
no-async-tensor-model-parallel-allreduce | | nothing to switch off
disable-async-tensor-model-parallel-allreduce no-persist-layer-norm | | nothing to switch off
no-barrier-with-level-1-timing timing-log-option timing-log-level | | waits are always metered by axis and collective
reuse-fp32-param | | the bf16 copy is a rounding of the master
num-workers | | one thread reads ahead of the step
data-cache-path | | indexes are closed formulas, nothing is cached
no-mmap-bin-files | | files are mapped
ddp-bucket-size ddp-num-buckets bucket-size-mb | | segments: --segment-broadcast-MB
tensorboard-queue-size tensorboard-log-interval | | written every --log-interval
no-create-attention-mask-in-dataloader create-attention-mask-in-dataloader | | masks are never built
manual-gc-eval | | evaluations do not collect
no-check-for-nan-in-loss-and-grad check-for-nan-in-loss-and-grad | | losses and norms are checked at every log interval
delay-grad-reduce no-delay-grad-reduce | | reductions follow one planned order
delay-param-gather align-grad-reduce align-param-gather | | reductions follow one planned order
use-ascend-coc coc-parallel-num | | --tp-comm-overlap hides the same
max-padding-length | | samples are packed
train-mode dataset | | pre-training on --data-path
extra-vocab-size | | --vocab-size counts all rows
moe-use-legacy-grouped-gemm | | experts always run as grouped products
moe-pad-expert-input-to-capacity | | kept rows travel, not padding
use-tp-pp-dp-mapping | | --rank-order
empty-unused-memory-level | | the allocator's memory is not given back between steps
finetune-hf-dataset | | pre-training on --data-path
no-overlap-p2p-communication | | sends never block here
profile-ranks use-pytorch-profiler | | rank 0 is traced, by torch's profiler
gemm-gradient-accumulation-fusion no-shared-storage | | main gradients are kept in fp32 by sharding
swap-optimizer-times | | state comes and goes with each parameter group's step
use-cpu-initialization | | weights are drawn on the host, the same on every layout
no-initialization | | weights are drawn block by block, whatever the layout
no-query-key-layer-scaling apply-query-key-layer-scaling | | divides scores by the layer's number, and back
no-bias-gelu-fusion | | the exact gelu, as here
data-parallel-random-init | | replicas begin with one model's weights
no-manual-gc-eval disable-manual-gc-eval | | evaluations do not collect
no-scatter-gather-tensors-in-pipeline | | sends are cut over mp ranks where sequences are
optimizer-offload-fraction optimizer-offload-policy | | all of the state or none: --optimizer-offload
train-sync-interval | | the host is never more than a step ahead
te-rng-tracker lazy-mpu-init deprecated-use-mcore-models | | there is one way, for every device
num-dataset-builder-threads per-dataset-sequences-path mid-level-dataset-surplus | | indexes are closed formulas
allow-ambiguous-pad-tokens | | samples are packed, nothing is padded
no-clone-scatter-output-in-embedding disable-clone-scatter-output-in-embedding | | views are never kept
enable-experimental test-mode fake-process-group | | no hidden features; megapar plan --trace steps on fake groups
tokenizer-hf-no-use-fast | | the fast one, where there is one
log-params-norm log-num-zeros-in-grad log-validation-ppl-to-tensorboard | | losses and the gradient's norm are written
no-log-loss-scale-to-tensorboard disable-log-loss-scale-to-tensorboard | | written where the loss is scaled
no-save-tokenizer-assets disable-save-tokenizer-assets | | --save-hf writes the tokenizer's files
logging-level | | the log has one level
warmup | | Megatron-LM refuses it: --lr-warmup-iters
"""

_ANOTHER = """
multi-head-latent-attention qk-rope-head-dim qk-nope-head-dim | | latent attention (MLA) is not built
rope-scaling-beta-fast rope-scaling-beta-slow rope-scaling-mscale rope-scaling-mscale-all-dim | | rope is plain
rope-scaling-original-max-position-embeddings rope-scaling-type | | rope is plain
attention-sink-k sliding-window | | attention sees everything before it
num-experts-per-layer | | experts are the same in all layers
"""

_UNSUPPORTED = """
swap-attention | | swapping single operators to the host is not built; --recompute-offload keeps units' inputs there
moe-fb-overlap | | one micro-batch's forward never runs under another's backward; --ampipe-degree hides all-to-alls
schedules-method | | schedules are 1f1b, gpipe, interleaved and zero_bubble
coc-fused-kernel | | fused kernels of products and collectives
fused-padded-mla-attention mla-fa-without-pad | | a kernel of latent attention, which is not built
wandb-project wandb-exp-name wandb-save-dir wandb-entity | | --metrics-jsonl and --tensorboard-dir have the same numbers
use-ascend-mc2 | | fused kernels of products and collectives
tp-2d tp-x tp-y | | tensor parallelism is along one axis
"""

_LEFT = """
vocab-file merge-file | | --tokenizer-model is a folder with these files, as Hugging Face lays them out
adaptive-recompute-device-swap | | --adaptive-recompute-device-size is the memory it may use
"""

ROWS: dict[str, Foreign] = {
    **features.ROWS,
    **rows(_RENAMED, RENAMED),
    **rows(_LEFT, LEFT),
    **rows(_IMPLIED, IMPLIED),
    **rows(_UNNECESSARY, UNNECESSARY),
    **rows(_UNSUPPORTED, UNSUPPORTED),
    **rows(_ANOTHER, ANOTHER),
}
