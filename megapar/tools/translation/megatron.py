"""Translation table for arguments of Megatron-LM and MindSpeed that are not flags of megapar (form: ``verdict.table``).

Flags and aliases of the trainers need no row, unless the name has a different meaning in Megatron-LM. Unsupported
features are in ``features``.
"""

from __future__ import annotations

from megapar.tools.translation import features
from megapar.tools.translation.verdict import Foreign, defaults, table

ROWS: dict[str, Foreign] = {
    **features.ROWS,
    **table("""
[renamed]
nproc-per-node | megapar launch --nproc-per-node {value} | handled by the launcher
nnodes | megapar launch --nnodes {value} | handled by the launcher
node-rank= | @~node_rank |
no-load-optim no-load-rng finetune ckpt-step= override-opt-param-scheduler | ~ |
    without load: unnecessary | nothing is loaded
    else: same --{name} {value}
master-addr= master-port= | @~rendezvous | the launcher takes address and port as one flag
rdzv-id rdzv-backend rdzv-endpoint rdzv-conf | megapar launch --{name} {value} | handled by the launcher
encoder-num-layers decoder-num-layers | --num-layers {value} |
encoder-seq-length | --seq-length {value} |
batch-size | --micro-batch-size {value} | old name of this argument
model-parallel-size | --mp-degree {value} | old name of this argument
decoder-first-pipeline-num-layers= decoder-last-pipeline-num-layers= | @~stages |
account-for-embedding-in-pipeline-split | --pp-seg-method balanced | layers are balanced by their cost
account-for-loss-in-pipeline-split | --pp-seg-method balanced | layers are balanced by their cost
num-query-groups= |
    with group-query-attention: same --num-query-groups {value}
    else: unnecessary | no effect in Megatron-LM without --group-query-attention
group-query-attention |
    with num-query-groups: implied | set by --num-query-groups
    else: --num-query-groups 1 | one group by default
vocab-size= | @vocabulary |
make-vocab-size-divisible-by= | ~ |
    with vocab-size padded-vocab-size: implied | --vocab-size counts the padded rows
    else: left to you | set --vocab-size to the tokenizer's size, padded to a multiple of this x mp ranks
padded-vocab-size | --vocab-size {value} | rows of the embedding, including padding
position-embedding-type= |
    is learned_absolute: --position-embedding-type learned
    is learned rope: same --position-embedding-type {value}
    else: another model | position embeddings are RoPE or learned
rope-type= |
    is rope: implied | RoPE is scaled by other arguments only
    not latent: unnecessary | no effect in Megatron-LM without --multi-latent-attention
    scaled by yarn: implied | set by --rotary-scaling-factor
    else: unnecessary | without --rotary-scaling-factor YaRN's factor is one
rotary-percent= partial-rotary-factor= |
    or 1 equals 0 1: unnecessary | RoPE rotates all features of a head
    latent: another model | in multi-latent attention all features of --qk-pos-emb-head-dim are rotated
    else: same --rotary-percent {value}
use-rope-scaling | @not latent: --rope-scaling-type llama3 else no effect in Megatron-LM with --multi-latent-attention |
rope-scaling-factor= yarn-scaling-factor= |
    not scaled: unnecessary | no effect without RoPE scaling
    latent and without rope-scaling-type: unnecessary | no effect without RoPE scaling
    else: same --rope-scaling-factor {value}
rotary-scaling-factor= |
    scaled by yarn and without rope-scaling-type: --rope-scaling-type yarn --rope-scaling-factor {value}
    or 1 equals 1: unnecessary | the factor is one
    else: unnecessary | no effect without YaRN in multi-latent attention
rotary-seq-len-interpolation-factor= |
    or 1 equals 0 1: unnecessary | the factor is one
    not scaled by linear: another model | RoPE is scaled by one formula: linear, llama3 or yarn
    else: --rope-scaling-type linear --rope-scaling-factor {value}
original-max-position-embeddings= rope-scaling-original-max-position-embeddings= |
    not scaled: unnecessary | no effect without scaling by YaRN
    with use-rope-scaling: unnecessary | no effect without scaling by YaRN
    else: same --original-max-position-embeddings {value}
mscale= rope-scaling-mscale= | @rope_mscale |
mscale-all-dim= rope-scaling-mscale-all-dim= |
    not scaled by yarn: unnecessary | no effect without scaling by yarn
    equals 0: unnecessary | off
    with mscale rope-scaling-mscale: same --mscale-all-dim {value}
    else: --mscale 1.0 --mscale-all-dim {value} | --mscale is 1 by default
no-position-embedding |
    position-embedding-type is rope: implied | RoPE has no learned positions
    with use-rotary-position-embeddings: implied | RoPE has no learned positions
    else: another model | position embeddings are RoPE or learned
softmax-type= |
    is vanilla: implied | a softmax without a sink
    else: another model | attention sinks (off-by-one, learnable) are not supported
qk-layernorm |
    latent: implied | the latents of multi-latent attention are normalized
    normalization is rmsnorm: --qk-norm | means --qk-norm
    else: another model | --qk-norm is an RMSNorm, a LayerNorm in Megatron-LM with this --normalization
kv-channels= | @not latent: --head-dim {value} else heads of multi-latent attention have sizes of their own |
multi-head-latent-attention | --multi-latent-attention |
q-lora-rank= kv-lora-rank= qk-head-dim= qk-pos-emb-head-dim= v-head-dim= attention-latent-norm-epsilon= |
    not latent: unnecessary | no effect without --multi-latent-attention
    else: same --{name} {value}
qk-nope-head-dim= | @latent: --qk-head-dim {value} else no effect without --multi-latent-attention |
qk-rope-head-dim= | @latent: --qk-pos-emb-head-dim {value} else no effect without --multi-latent-attention |
fused-padded-mla-attention mla-fa-without-pad |
    not latent: unnecessary | no effect without --multi-latent-attention
    else: unnecessary | heads are padded where a kernel needs it, and keys and values are never kept
add-qkv-bias |
    without disable-bias-linear no-add-bias-linear: implied | all linear layers have biases
    else: same --add-qkv-bias
apply-layernorm-1p |
    else: unnecessary | norm weights are 1 + w instead of w: the same steps, because norms have no weight decay
spec= |
    is local: implied | there is one implementation
    else: another model | flags define the layers; a layer specification in code is not read
mtp-num-layers= |
    below 1: unnecessary | multi-token prediction is off
    above 1: another model | multi-token prediction has a single block
    else: --mtp-depth 1 --mtp-block layer | the block is like the last layer, with a separate norm
moe-router-enable-expert-bias |
    with moe-router-bias-update-rate: implied | set by --moe-router-bias-update-rate
    else: --moe-router-bias-update-rate 1e-3 | the default rate
moe-router-bias-update-rate= |
    without moe-router-enable-expert-bias and not moe-router-load-balancing-type is noaux_tc: unnecessary \
        | no effect in Megatron-LM without --moe-router-enable-expert-bias
    else: same --moe-router-bias-update-rate {value}
moe-router-num-groups= | @router_groups |
moe-router-group-topk= |
    moe-router-num-groups or 2 at most 1: unnecessary | a single group is not a limit
    else: same --moe-router-group-topk {value}
moe-router-score-function= |
    is softmax sigmoid: same --moe-router-score-function {value}
    else: another model | router scores are softmax or sigmoid
moe-shared-expert-intermediate-size= | @shared_width |
moe-layer-freq= | @layers_with_experts |
moe-router-load-balancing-type= |
    is '' aux_loss: implied | set by --moe-aux-loss-coeff
    is seq_aux_loss: implied | set by --moe-seq-aux-loss-coeff
    is none: --moe-aux-loss-coeff 0
    is noaux_tc and with moe-router-bias-update-rate: implied | set by --moe-router-bias-update-rate
    is noaux_tc: --moe-router-bias-update-rate 1e-3 | the expert bias is updated if its rate is not 0
    else: other numbers | experts are balanced by a loss per micro-batch or per sample, or by the expert bias
use-torch-fsdp2 | --sharding-stage 3 |
use-megatron-fsdp use-custom-fsdp | ~ |
    with data-parallel-sharding-strategy: implied | --data-parallel-sharding-strategy sets the stage
    else: --sharding-stage 3
data-parallel-sharding-strategy= | ~ |
    without use-megatron-fsdp use-custom-fsdp: unnecessary | no effect in Megatron-LM without --use-megatron-fsdp
    is no_shard optim: --sharding-stage 1
    is optim_grads: --sharding-stage 2
    is optim_grads_params: --sharding-stage 3
    else: unsupported | sharding stages are 1, 2 and 3
cp-comm-type= | ~ |
    context-parallel-size or 1 equals 1: unnecessary | a single cp rank has the whole sequence
    is p2p: --context-parallel-algo megatron_cp_algo
    is a2a: --context-parallel-algo ulysses_cp_algo
    is allgather all_gather: --context-parallel-algo allgather_cp_algo
    else: unsupported \
        | one algorithm for all layers: ring (p2p), Ulysses (a2a) or all-gather of keys and values (allgather)
lr-warmup-iters= | @warmup_steps |
lr-warmup-samples= | @warmup_samples | run lengths are given in steps
lr-warmup-init= | @equals 0: unnecessary else other numbers: warmup always starts at 0 | warmup starts at 0
main-grads-dtype= main-params-dtype= exp-avg-dtype= exp-avg-sq-dtype= megatron-fsdp-main-params-dtype= \
    megatron-fsdp-main-grads-dtype= megatron-fsdp-grad-comm-dtype= |
    is fp32: implied | master weights, gradients and moments are fp32
    is auto and without bf16: implied | master weights, gradients and moments are fp32
    else: other numbers | master weights, gradients and moments are always fp32
dataloader-type= |
    is external: other numbers | data are only read from --data-path
    else: implied | samples are shuffled once per epoch, identically on every layout
dataloader-inter-document-masking |
    with reset-attention-mask: implied | set by --reset-attention-mask
    else: --reset-attention-mask | attention does not cross documents
vocab-extra-ids= |
    equals 0: unnecessary | no extra ids
    else: other numbers | extra ids are not supported: add them to the tokenizer
load | --load {value} | a folder of megapar checkpoints; Megatron-LM's are not supported
pretrained-checkpoint | --load {value} --finetune | a folder of megapar checkpoints; Megatron-LM's are not supported
persistent-save-interval | --save-interval {value} |
non-persistent-save-interval | --local-checkpoint-interval {value} | in node memory, with a copy on the next node
non-persistent-local-ckpt-dir | --local-checkpoint-dir {value} |
check-weight-hash-across-dp-replicas-interval | --replica-check-interval {value} |
distribute-saved-activations | --recompute-partition | for recomputed units
verify-integrity | --checkpoint-verify full |
num-layers-per-virtual-pipeline-stage= | @~chunks | counts chunks per stage, not layers per chunk
num-virtual-stages-per-pipeline-rank | --vpp-degree {value} --pp-schedule interleaved |
lr-warmup-fraction= | @warmup_fraction | warmup is given in steps
train-samples= | @samples | run lengths are given in steps
lr-decay-samples= | @decay_samples | run lengths are given in steps
lr-wsd-decay-samples= | @wsd_samples | run lengths are given in steps
rampup-batch-size= | @ramped |
recompute-activation-function | --recompute-granularity selective | includes activation functions and core attention
attention-backend= | ~ |
    is unfused local: --no-use-flash-attn
    is fused: implied | fused attention is the default; --attention-backend cudnn names cuDNN's kernel
    else: implied | fused attention is the default
transformer-impl= | @~else: unnecessary | there is one implementation, which uses the fused kernels of the device
moe-train-capacity-factor= moe-expert-capacity-factor= |
    with moe-model-type and is '': left to you --moe-capacity-factor
    with moe-model-type: same --moe-capacity-factor {value}
    else: other numbers --moe-model-type deepspeed_moe --moe-capacity-factor {value} --moe-min-capacity 1 \
        | weights are normalized over the kept experts, over all selected ones in Megatron-LM
num-shared-experts n-shared-experts | --moe-shared-experts {value} |
moe-intermediate-size | --moe-ffn-hidden-size {value} |
first-k-dense-replace= | @above 0: --first-k-dense {value} else all layers have experts |
num-experts= num-moe-experts= |
    alike: same --num-experts {word}
    else: another model | all layers have the same number of experts
n-group | --moe-router-num-groups {value} |
topk-group | --moe-router-group-topk {value} |
routed-scaling-factor | --moe-router-topk-scaling-factor {value} |
moe-token-drop-policy= |
    not limited: unnecessary | no tokens are dropped without a capacity factor
    is probs: other numbers --moe-drop-policy probs | ranked by scores, by renormalized weights in Megatron-LM
    is position: --moe-drop-policy token
    else: other numbers | the drop policy keeps earlier tokens, earlier choices or higher probabilities
moe-aux-loss-coeff= moe-loss-coeff= |
    moe-router-load-balancing-type is none: unnecessary | the model has no load balancing loss
    balanced per sample: --moe-seq-aux-loss-coeff {value} --moe-aux-loss-coeff 0 | load balancing loss per sample
    else: same --moe-aux-loss-coeff {value}
seq-aux |
    with moe-aux-loss-coeff: implied | set by --moe-seq-aux-loss-coeff
    else: implied | no load balancing loss without its coefficient
moe-tp-extend-ep | --expert-mp-degree 1 | mp ranks hold whole experts
noop-layers= | ~ |
    else: implied --pp-seg-method balanced | --num-layers counts real layers, which are distributed over the stages
num-layers= | @layers |
tokenizer-name-or-path | --tokenizer-model {value} |
exit-duration-in-mins | --exit-duration-minutes {value} |
grad-reduce-in-bf16 | --grad-reduce-dtype bf16 |
swap-optimizer optimizer-cpu-offload offload-optimizer | --optimizer-offload |
sequence-parallel | ~ |
    tensor-model-parallel-size model-parallel-size mp-degree or 1 equals 1: unnecessary \
        | a single mp rank has the whole sequence
    else: same --sequence-parallel
context-parallel-algo= | ~ |
    context-parallel-size cp-degree or 1 equals 1: unnecessary | a single cp rank has the whole sequence
    else: same --context-parallel-algo {value}
split= |
    with mock-data: unnecessary | mock data have a separate validation set
    with valid-data-path eval-data-path: unnecessary | validation data have a separate path
    else: same --split {value}
eval-iters= |
    evaluated: same --eval-iters {value}
    else: --eval-interval 0 | no evaluation
eval-interval= |
    evaluated: same --eval-interval {value}
    else: --eval-interval 0 | no evaluation
save-interval= | @~with save: same --save-interval {value} else nothing is saved without --save |
valid-data-path= | @~evaluated: --eval-data-path {value} else nothing is evaluated | validation data
test-data-path= | ~ |
    else: unsupported | there is one validation set; evaluate another with a run that sets --eval-data-path
optimizer= |
    is sgd: same --optimizer sgd
    not is '' adam adamw fused-adam fused_adam torch-adamw: other numbers | the optimizer is AdamW or SGD
    with no-decoupled-weight-decay: other numbers | weight decay is always decoupled (AdamW)
    else: implied | AdamW, fused if the device supports it
adam-beta1= adam-beta2= adam-eps= | @not optimizer is sgd: same --{name} {value} else no effect with --optimizer sgd |
sgd-momentum= | @optimizer is sgd: same --sgd-momentum {value} else no effect without --optimizer sgd |
moe-router-dtype= | @is fp64: other numbers else implied: the router computes in fp32 | the router computes in fp32
moe-router-pre-softmax |
    moe-router-score-function is sigmoid: implied | sigmoid scores are not normalized before the selection
    with norm-topk-prob: implied | --norm-topk-prob divides them by their sum, which is the softmax after the selection
    moe-router-topk or 2 below 2: implied | the weight of a single expert is its score
    else: same --moe-router-pre-softmax
lr-decay-style= | @decay_style |
lr-wsd-decay-style= | @wsd_style |
weight-decay-incr-style= start-weight-decay= end-weight-decay= | @decay_increments |
initial-loss-scale= | @loss scaled: same --initial-loss-scale {value} else the loss is scaled only with fp16 |
loss-scale= |
    not loss scaled: unnecessary | the loss is scaled only with fp16
    else: other numbers --initial-loss-scale {value} --min-loss-scale {value} \
        | the scale is dynamic, with this value as its minimum
accumulate-allreduce-grads-in-fp32 | --grad-reduce-dtype fp32 | the default
profile profile-step-start= profile-step-end= | @~profile | start and end are one flag
checkpoint-activations | --recompute-interval 1 |
checkpoint-num-layers | --recompute-interval {value} |
recompute-method-uniform | --recompute-method uniform |
[implied]
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
[unnecessary]
use-mcore-models use-legacy-models | | there is one model implementation
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
[unnecessary | there is nothing to switch off]
no-masked-softmax-fusion no-bias-dropout-fusion no-bias-swiglu-fusion no-async-tensor-model-parallel-allreduce
disable-async-tensor-model-parallel-allreduce no-persist-layer-norm
[another model]
attention-sink-k= sliding-window= | | attention covers all earlier tokens
num-experts-per-layer= | | all layers have the same number of experts
[unsupported]
swap-attention | | activations of single operators are not swapped; --recompute-offload offloads the inputs of units
moe-fb-overlap | | forward and backward of two micro-batches never overlap; --ampipe-degree hides all-to-alls
schedules-method= | | schedules are 1f1b, gpipe, interleaved and zero_bubble
coc-fused-kernel use-ascend-mc2 | | GEMMs and collectives are not fused into one kernel
tp-2d tp-x= tp-y= | | tensor parallelism is one-dimensional
[left to you]
vocab-file= merge-file= | | --tokenizer-model is a folder with these files in Hugging Face's layout
adaptive-recompute-device-swap | | --adaptive-recompute-device-size is the memory that it may use
"""),
}
# Defaults that differ from megapar's. Source: arguments.py and config/training_config.py of megatron/training, and
# optimizer_config.py of megatron/core/optimizer, NVIDIA/Megatron-LM, 2026.
DEFAULTS: dict[str, Foreign] = defaults("""
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
moe-router-load-balancing-type | @else: implied | aux_loss
mtp-loss-scaling-factor | @not mtp-num-layers equals 0: --mtp-loss-weight 0.1 else multi-token prediction is off |
calculate-per-token-loss |
    with eod-mask-loss: other numbers | tokens have equal weight, micro-batches in Megatron-LM
    else: implied | all micro-batches have the same number of tokens
optimizer | = adam |
adam-beta2 | @not optimizer is sgd: --adam-beta2 0.999 else no effect with --optimizer sgd |
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
