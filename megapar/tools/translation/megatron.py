"""Translation table for arguments of Megatron-LM and MindSpeed that are not flags of megapar.

A row is ``names | megapar flags | reason``; rows are grouped by verdict. The flags contain ``{value}``, or are ``@``
and a function of ``decided`` or ``megatron_values`` if the result depends on the value or on other arguments. A name
ends in ``=`` if the argument takes a value and the flags do not show it; another one is a switch. Flags and aliases of
the trainers need no row, unless the name has a different meaning in Megatron-LM. Unsupported features are in
``features``.
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
nproc-per-node | megapar launch --nproc-per-node {value} | handled by the launcher
nnodes | megapar launch --nnodes {value} | handled by the launcher
node-rank= | @node_rank |
no-load-optim no-load-rng finetune ckpt-step= override-opt-param-scheduler | @loading |
master-addr= master-port= | @rendezvous | the launcher takes address and port as one flag
rdzv-id rdzv-backend rdzv-endpoint rdzv-conf | megapar launch --{name} {value} | handled by the launcher
encoder-num-layers decoder-num-layers | --num-layers {value} |
encoder-seq-length | --seq-length {value} |
batch-size | --micro-batch-size {value} | old name of this argument
model-parallel-size | --mp-degree {value} | old name of this argument
decoder-first-pipeline-num-layers= decoder-last-pipeline-num-layers= | @stages |
account-for-embedding-in-pipeline-split | --pp-seg-method balanced | layers are balanced by their cost
account-for-loss-in-pipeline-split | --pp-seg-method balanced | layers are balanced by their cost
num-query-groups= | @with group-query-attention: same --num-query-groups {value} \
    else no effect in Megatron-LM without --group-query-attention |
group-query-attention | @grouped |
vocab-size= | @vocabulary |
make-vocab-size-divisible-by= | @padding |
padded-vocab-size | --vocab-size {value} | rows of the embedding, including padding
position-embedding-type= | @position_type |
rope-type= | @rope_type |
rotary-percent= | @rotary_share |
use-rope-scaling | @rope_llama3 |
rope-scaling-factor= | @rope_factor |
rotary-scaling-factor= | @rope_latent_factor |
rotary-seq-len-interpolation-factor= | @rope_interpolated |
original-max-position-embeddings= | @rope_original |
mscale= | @rope_mscale |
mscale-all-dim= | @rope_mscale_all_dim |
no-position-embedding | @positions |
softmax-type= | @sink |
qk-layernorm | @query_norm |
kv-channels= | @head_size |
multi-head-latent-attention | --multi-latent-attention |
q-lora-rank= | @latent_queries |
kv-lora-rank= | @latent_keys |
qk-head-dim= | @latent_plain |
qk-pos-emb-head-dim= | @latent_rotated |
qk-nope-head-dim= | @latent_nope |
qk-rope-head-dim= | @latent_rope |
v-head-dim= | @latent_values |
attention-latent-norm-epsilon= | @latent_epsilon |
fused-padded-mla-attention mla-fa-without-pad | @latent_kernel |
add-qkv-bias | @query_bias |
apply-layernorm-1p | @zero_centred |
spec= | @specification |
mtp-num-layers= | @blocks_after |
moe-router-enable-expert-bias | @bias |
moe-router-bias-update-rate= | @bias_rate |
moe-router-num-groups= | @router_groups |
moe-router-group-topk= | @chosen_groups |
moe-router-score-function= | @score_function |
moe-shared-expert-intermediate-size= | @shared_width |
moe-layer-freq= | @layers_with_experts |
moe-router-load-balancing-type= | @balanced_by |
use-torch-fsdp2 | --sharding-stage 3 |
use-megatron-fsdp use-custom-fsdp | @own_fsdp |
data-parallel-sharding-strategy= | @sharding |
cp-comm-type= | @communication |
lr-warmup-iters= | @warmup_steps |
lr-warmup-samples= | @warmup_samples | run lengths are given in steps
lr-warmup-init= | @warmup_start |
main-grads-dtype= main-params-dtype= exp-avg-dtype= exp-avg-sq-dtype= megatron-fsdp-main-params-dtype= | @kept_in |
megatron-fsdp-main-grads-dtype= megatron-fsdp-grad-comm-dtype= | @kept_in |
dataloader-type= | @loader |
dataloader-inter-document-masking | @document_masks |
vocab-extra-ids= | @extra_ids |
load | --load {value} | a folder of megapar checkpoints; Megatron-LM's are not supported
pretrained-checkpoint | --load {value} --finetune | a folder of megapar checkpoints; Megatron-LM's are not supported
persistent-save-interval | --save-interval {value} |
non-persistent-save-interval | --local-checkpoint-interval {value} | in node memory, with a copy on the next node
non-persistent-local-ckpt-dir | --local-checkpoint-dir {value} |
check-weight-hash-across-dp-replicas-interval | --replica-check-interval {value} |
distribute-saved-activations | --recompute-partition | for recomputed units
verify-integrity | --checkpoint-verify full |
num-layers-per-virtual-pipeline-stage= | @chunks | counts chunks per stage, not layers per chunk
num-virtual-stages-per-pipeline-rank | --vpp-degree {value} --pp-schedule interleaved |
lr-warmup-fraction= | @warmup | warmup is given in steps
train-samples= | @samples | run lengths are given in steps
lr-decay-samples= | @decay_samples | run lengths are given in steps
lr-wsd-decay-samples= | @wsd_samples | run lengths are given in steps
rampup-batch-size= | @ramped |
recompute-activation-function | --recompute-granularity selective | includes activation functions and core attention
attention-backend= | @attention |
transformer-impl= | @implementation |
moe-train-capacity-factor= moe-expert-capacity-factor= | @capacity |
num-shared-experts n-shared-experts | --moe-shared-experts {value} |
moe-intermediate-size | --moe-ffn-hidden-size {value} |
first-k-dense-replace= | @above 0: --first-k-dense {value} else all layers have experts |
num-experts= num-moe-experts= | @experts |
n-group | --moe-router-num-groups {value} |
topk-group | --moe-router-group-topk {value} |
routed-scaling-factor | --moe-router-topk-scaling-factor {value} |
moe-token-drop-policy= | @drops |
moe-aux-loss-coeff= moe-loss-coeff= | @coefficient |
seq-aux | @sequence |
moe-tp-extend-ep | --expert-mp-degree 1 | mp ranks hold whole experts
noop-layers= | @noop |
num-layers= | @layers |
tokenizer-name-or-path | --tokenizer-model {value} |
exit-duration-in-mins | --exit-duration-minutes {value} |
grad-reduce-in-bf16 | --grad-reduce-dtype bf16 |
swap-optimizer optimizer-cpu-offload offload-optimizer | --optimizer-offload |
sequence-parallel | @cut |
context-parallel-algo= | @algorithm |
split= | @split |
eval-iters= | @evaluations |
eval-interval= | @evaluated |
save-interval= | @~with save: same --save-interval {value} else nothing is saved without --save |
valid-data-path= | @held_out_path |
test-data-path= | @test_path |
optimizer= | @optimizer |
adam-beta1= | @without optimizer=sgd: same --adam-beta1 {value} else no effect with --optimizer sgd |
adam-beta2= | @without optimizer=sgd: same --adam-beta2 {value} else no effect with --optimizer sgd |
adam-eps= | @without optimizer=sgd: same --adam-eps {value} else no effect with --optimizer sgd |
sgd-momentum= | @with optimizer=sgd: same --sgd-momentum {value} else no effect without --optimizer sgd |
moe-router-dtype= | @router_dtype |
moe-router-pre-softmax | @pre_softmax |
lr-decay-style= | @decay_style |
lr-wsd-decay-style= | @wsd_style |
weight-decay-incr-style= start-weight-decay= end-weight-decay= | @decay_increments |
initial-loss-scale= | @loss_scale |
loss-scale= | @fixed_scale |
accumulate-allreduce-grads-in-fp32 | --grad-reduce-dtype fp32 | the default
profile profile-step-start= profile-step-end= | @profile | start and end are one flag
checkpoint-activations | --recompute-interval 1 |
checkpoint-num-layers | --recompute-interval {value} |
recompute-method-uniform | --recompute-method uniform |
"""

_IMPLIED = """
moe-grouped-gemm use-fused-moe-token-permute-and-unpermute moe-permute-fusion | | experts always run as a grouped GEMM
moe-token-dispatcher-type= | | all-to-alls; --moe-dispatch auto sends a token to each node once where that is faster
moe-enable-deepep moe-flex-dispatcher-backend= | | --moe-dispatch auto sends as few rows, by torch's all-to-all
moe-shared-expert-overlap | | shared experts always overlap with the token dispatch
enable-shared-expert | | set by --moe-shared-experts
enable-token-rearrange-opt | | tokens are always sorted, never masked
use-fused-rotary-pos-emb use-fused-swiglu use-fused-rmsnorm | | fused kernels are used if the device has them
apply-rope-fusion no-rope-fusion | | fused kernels are used if the device has them
use-fused-ring-attention-update use-cp-send-recv-overlap | | ring attention always overlaps its communication
bias-swiglu-fusion masked-softmax-fusion cross-entropy-loss-fusion | | fused if the device supports it
enable-recompute-layers-per-pp-rank | | --recompute-method block counts layers per stage
log-throughput | | always logged
distributed-backend= | | chosen by device type
local-rank= | | set by the launcher
tokenizer-type= | | detected from --tokenizer-model
data-impl= | | detected from the file
ckpt-format= dist-ckpt-format= use-dist-ckpt auto-detect-ckpt-format | | there is one format, which loads on any layout
router-gating-in-fp32 | | the router computes in fp32
moe-permutation-async-comm | | all-to-alls are always asynchronous
mtp-mem-efficient-logits | | logits are computed in chunks
calculate-per-token-loss | | every loss is averaged over the global batch
log-timers-to-tensorboard log-memory-to-tensorboard log-world-size-to-tensorboard | | always written
log-learning-rate-to-tensorboard log-batch-size-to-tensorboard log-loss-scale-to-tensorboard | | always written
log-straggler | | --straggler-factor reports slow ranks
exit-signal-handler exit-signal-handler-for-training | | SIGTERM saves a checkpoint and stops the run
exit-signal-handler-for-dataloader | | SIGTERM saves a checkpoint and stops the run
exit-on-missing-checkpoint | | --load without a checkpoint is refused, unless --save is the same folder
check-for-spiky-loss check-for-large-grads | | reported by --spike-sigmas
attention-softmax-in-fp32 cross-entropy-fusion-impl= | | softmax and loss use at least fp32
ddp-param-name-patterns-for-fp32-local-accumulation= | | gradients are always accumulated in fp32
use-precision-aware-optimizer | | see --main-params-dtype, --exp-avg-dtype and similar arguments
no-use-tokenizer-model-from-checkpoint-args disable-use-tokenizer-model-from-checkpoint-args | | set by a flag
no-pad-vocab-size disable-pad-vocab-size | | --vocab-size is the number of rows
onnx-safe= | | no workaround is needed
moe-extended-tp | | mp ranks shard experts: --expert-mp-degree
rotary-interleaved | | the pairing only permutes the features of a head, which are initialized alike
"""

_UNNECESSARY = """
use-mcore-models use-legacy-models | | there is one model implementation
no-masked-softmax-fusion no-bias-dropout-fusion no-bias-swiglu-fusion | | there is nothing to switch off
no-async-tensor-model-parallel-allreduce | | there is nothing to switch off
disable-async-tensor-model-parallel-allreduce no-persist-layer-norm | | there is nothing to switch off
no-gradient-accumulation-fusion gradient-accumulation-fusion | | sharding keeps main gradients in fp32
gemm-gradient-accumulation-fusion | | sharding keeps main gradients in fp32
no-shared-storage | | a node whose cache folder is not shared makes its own cache of the data
no-barrier-with-level-1-timing timing-log-option= | | wait times are always measured per axis and collective
timing-log-level= | | wait times are always measured per axis and collective
reuse-fp32-param | | the bf16 copy is rounded from the master weight
num-workers= | | one thread prefetches batches
data-cache-path= | | the order of samples is computed by formula; nothing is cached
no-mmap-bin-files | | files are always memory-mapped
ddp-bucket-size= ddp-num-buckets= bucket-size-mb= | | bucket sizes are set by --segment-broadcast-MB
tensorboard-queue-size= tensorboard-log-interval= | | written at every --log-interval
no-create-attention-mask-in-dataloader create-attention-mask-in-dataloader | | attention masks are never materialized
manual-gc-eval no-manual-gc-eval disable-manual-gc-eval | | evaluations do not collect garbage
no-check-for-nan-in-loss-and-grad check-for-nan-in-loss-and-grad | | losses and norms are checked at every log interval
delay-grad-reduce no-delay-grad-reduce delay-param-gather align-grad-reduce | | reductions follow one planned order
align-param-gather | | reductions follow one planned order
use-ascend-coc coc-parallel-num= | | --tp-comm-overlap hides the same communication
max-padding-length= | | samples are packed
train-mode= dataset= finetune-hf-dataset | | pre-training reads --data-path
extra-vocab-size= | | --vocab-size counts all rows
moe-use-legacy-grouped-gemm | | experts always run as a grouped GEMM
moe-pad-expert-input-to-capacity | | only kept rows are sent, without padding
use-tp-pp-dp-mapping | | the order of ranks is --rank-order
empty-unused-memory-level= | | the allocator keeps its memory between steps
no-overlap-p2p-communication | | sends never block
profile-ranks= use-pytorch-profiler | | torch's profiler always traces rank 0
swap-optimizer-times= | | optimizer state moves with the step of each parameter group
use-cpu-initialization | | weights are initialized on the host, identically on every layout
no-initialization | | weights are initialized block by block, identically on every layout
no-query-key-layer-scaling apply-query-key-layer-scaling | | scales attention scores by the layer number and back
no-bias-gelu-fusion | | the exact GELU, as in megapar
data-parallel-random-init | | all replicas start from the same weights
no-scatter-gather-tensors-in-pipeline | | sends are sharded over mp ranks if sequences are
optimizer-offload-fraction= optimizer-offload-policy= | | --optimizer-offload offloads all of the state or none
train-sync-interval= | | the host runs at most one step ahead
te-rng-tracker lazy-mpu-init deprecated-use-mcore-models | | there is one implementation for all devices
num-dataset-builder-threads= per-dataset-sequences-path= | | the order of samples is computed by formula
mid-level-dataset-surplus= | | the order of samples is computed by formula
allow-ambiguous-pad-tokens | | samples are packed, without padding
no-clone-scatter-output-in-embedding disable-clone-scatter-output-in-embedding | | no view keeps the full tensor alive
enable-experimental test-mode | | megapar has no hidden features; megapar plan --trace runs on fake process groups
fake-process-group | | megapar has no hidden features; megapar plan --trace runs on fake process groups
tokenizer-hf-no-use-fast | | the fast tokenizer is used if there is one
log-params-norm log-num-zeros-in-grad log-validation-ppl-to-tensorboard | | losses and the gradient norm are logged
no-log-loss-scale-to-tensorboard disable-log-loss-scale-to-tensorboard | | logged if the loss is scaled
no-save-tokenizer-assets disable-save-tokenizer-assets | | --save-hf writes the tokenizer files
logging-level= | | there is one log level
warmup= | | Megatron-LM refuses it; use --lr-warmup-iters
"""

_ANOTHER = """
attention-sink-k= sliding-window= | | attention covers all earlier tokens
num-experts-per-layer= | | all layers have the same number of experts
"""

_UNSUPPORTED = """
swap-attention | | activations of single operators are not swapped; --recompute-offload offloads the inputs of units
moe-fb-overlap | | forward and backward of two micro-batches never overlap; --ampipe-degree hides all-to-alls
schedules-method= | | schedules are 1f1b, gpipe, interleaved and zero_bubble
coc-fused-kernel use-ascend-mc2 | | GEMMs and collectives are not fused into one kernel
tp-2d tp-x= tp-y= | | tensor parallelism is one-dimensional
"""

_LEFT = """
vocab-file= merge-file= | | --tokenizer-model is a folder with these files in Hugging Face's layout
adaptive-recompute-device-swap | | --adaptive-recompute-device-size is the memory that it may use
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
