"""Arguments of Megatron-LM, MindSpeed and Megatron-DeepSpeed scripts that are no flags here, and what becomes of each.

A row: names, what to write here, reason; rows are grouped by verdict. What to write is a text with ``{value}``, or
``@`` and a function of ``translate`` where other arguments matter. Flags and aliases of the trainers need no row.
"""

from __future__ import annotations

from megapar.tools.translation.verdict import IMPLIED, LEFT, RENAMED, UNNECESSARY, UNSUPPORTED, Foreign, rows

_RENAMED = """
nproc-per-node | megapar launch --nproc-per-node {value} | belongs to the launcher
nnodes | megapar launch --nnodes {value} | belongs to the launcher
node-rank | @node_rank |
no-load-optim no-load-rng finetune ckpt-step override-opt-param-scheduler | @loading |
master-addr master-port | @rendezvous | the launcher's rendezvous, address and port in one
rdzv-id rdzv-backend rdzv-endpoint rdzv-conf | megapar launch --{name} {value} | belongs to the launcher
encoder-num-layers decoder-num-layers | --num-layers {value} |
num-layers-per-virtual-pipeline-stage | @chunks | chunks per stage are counted, not layers per chunk
num-virtual-stages-per-pipeline-rank | --vpp-degree {value} --pp-schedule interleaved |
lr-warmup-fraction | @warmup | warm-up is given in steps
train-samples | @samples | runs are counted in steps
lr-warmup-samples | @warmup_samples | runs are counted in steps
lr-decay-samples | @decay_samples | runs are counted in steps
lr-wsd-decay-samples | @wsd_samples | runs are counted in steps
rampup-batch-size | @ramped |
train-tokens | @tokens | runs are counted in steps
num-key-value-heads | --num-query-groups {value} |
zero-stage | @zero | the optimizer's stage is a flag, sharding ranks are --sharding-degree
recompute-activation-function | --recompute-granularity selective | activation functions and attention's core together
attention-backend | @attention |
transformer-impl | @implementation |
moe-train-capacity-factor moe-expert-capacity-factor | @capacity |
moe-router-enable-expert-bias | --moe-router-bias-update-rate 1e-3 | the correction bias moves where its rate is not 0
moe-shared-expert-intermediate-size | @shared | shared experts are counted in widths of one expert
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
rotary-percent | @rotated |
sequence-parallel | @cut |
context-parallel-algo | @algorithm |
split | @split |
eval-iters | @evaluations |
eval-interval | @evaluated |
save-interval | @saved |
moe-layer-freq | @frequency | leading layers may be dense: --first-k-dense
moe-router-load-balancing-type | @balancing |
moe-input-jitter-eps | | noise on the router is not built
use-torch-fsdp2 use-custom-fsdp use-megatron-fsdp | --sharding-stage 3 |
data-parallel-sharding-strategy | @strategy |
use-rotary-position-embeddings | --position-embedding-type rope |
no-position-embedding | @positions |
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
padded-vocab-size | --vocab-size {value} | padding to the ranks is for compute only
init-method-xavier-uniform | | weights are drawn normal: --init-std
accumulate-allreduce-grads-in-fp32 | --grad-reduce-dtype fp32 | the default
profile profile-step-start profile-step-end | @profile | both ends in one flag
optimizer-cpu-offload offload-optimizer optimizer-offload-policy optimizer-offload-fraction | --optimizer-offload |
cpu-optimizer | --optimizer-offload |
deepspeed-activation-checkpointing checkpoint-activations | --recompute-interval 1 |
checkpoint-num-layers | --recompute-interval {value} |
recompute-method-uniform | --recompute-method uniform |
"""

_IMPLIED = """
group-query-attention | | --num-query-groups says it
moe-grouped-gemm use-fused-moe-token-permute-and-unpermute moe-permute-fusion | | experts always run as grouped products
moe-token-dispatcher-type | | tokens always travel by all-to-all
moe-shared-expert-overlap | | shared experts run while tokens travel
enable-shared-expert | | --moe-shared-experts says it
enable-token-rearrange-opt | | tokens are always sorted, never multiplied by masks
use-fused-rotary-pos-emb use-fused-swiglu use-fused-rmsnorm | | the device's fused kernels are taken where they are
use-fused-ring-attention-update use-cp-send-recv-overlap | | ring attention always overlaps
apply-rope-fusion | | the device's fused kernels are taken where they are
bias-swiglu-fusion bias-gelu-fusion masked-softmax-fusion cross-entropy-loss-fusion | | fused where the device has it
enable-recompute-layers-per-pp-rank | | --recompute-method block counts layers of a stage
log-throughput | | always logged
distributed-backend | | follows the device
local-rank | | set by the launcher
tokenizer-type | | found from --tokenizer-model
data-impl | | found from the file
dataloader-type | | samples are shuffled once per epoch, the same on every layout
attention-softmax-in-fp32 | | always
no-rope-fusion | | the device's fused kernels are taken where they are
tp-comm-overlap-ag tp-comm-overlap-rs | | part of --tp-comm-overlap
ckpt-format dist-ckpt-format use-dist-ckpt auto-detect-ckpt-format | | one format, which loads on any layout
log-timers-to-tensorboard log-batch-size-to-tensorboard log-validation-ppl-to-tensorboard | | always written
log-memory-to-tensorboard log-world-size-to-tensorboard log-learning-rate-to-tensorboard | | always written
norm-topk-prob | | the weights of the chosen experts always sum to one
router-gating-in-fp32 | | the router computes in fp32
moe-permutation-async-comm | | all-to-alls are launched and waited for apart
mtp-mem-efficient-logits | | logits are made in chunks
log-loss-scale-to-tensorboard log-num-zeros-in-grad log-params-norm | | norms and scales are always written
calculate-per-token-loss | | every loss has its denominator over the global batch
"""

_UNNECESSARY = """
use-mcore-models use-legacy-models | | there is one model
no-masked-softmax-fusion no-bias-gelu-fusion no-bias-dropout-fusion no-bias-swiglu-fusion | | nothing to switch off
no-gradient-accumulation-fusion gradient-accumulation-fusion | | main gradients are kept in fp32 by sharding
no-async-tensor-model-parallel-allreduce no-persist-layer-norm | | nothing to switch off
no-query-key-layer-scaling | | never scaled
no-barrier-with-level-1-timing timing-log-option timing-log-level | | waits are always metered by axis and collective
reuse-fp32-param | | the bf16 copy is a rounding of the master
num-workers | | one thread reads ahead of the step
data-cache-path | | indexes are closed formulas, nothing is cached
no-mmap-bin-files | | files are mapped
ddp-bucket-size ddp-num-buckets bucket-size-mb | | segments: --segment-broadcast-MB
deepspeed deepspeed-config deepspeed_config deepspeed_mpi | | what its file says are flags here
no-pipeline-parallel | | --pp-degree 1
tensorboard-queue-size tensorboard-log-interval | | written every --log-interval
no-create-attention-mask-in-dataloader create-attention-mask-in-dataloader | | masks are never built
manual-gc-eval | | evaluations do not collect
no-check-for-nan-in-loss-and-grad check-for-nan-in-loss-and-grad | | losses and norms are checked at every log interval
delay-grad-reduce delay-param-gather align-grad-reduce align-param-gather | | reductions follow one planned order
use-ascend-coc coc-parallel-num | | --tp-comm-overlap hides the same
max-padding-length | | samples are packed
train-mode dataset | | pre-training on --data-path
extra-vocab-size | | --vocab-size counts all rows
moe-use-legacy-grouped-gemm moe-use-upcycling | | experts always run as grouped products
moe-pad-expert-input-to-capacity | | kept rows travel, not padding
use-tp-pp-dp-mapping | | --rank-order
empty-unused-memory-level | | the allocator's memory is not given back between steps
finetune-hf-dataset | | pre-training on --data-path
exit-signal-handler | | SIGTERM always saves and stops
make-vocab-size-divisible-by | | padding to the ranks is for compute only
no-overlap-p2p-communication | | sends never block here
profile-ranks use-pytorch-profiler | | rank 0 is traced, by torch's profiler
gemm-gradient-accumulation-fusion no-shared-storage | | main gradients are kept in fp32 by sharding
swap-optimizer-times | | state comes and goes with each parameter group's step
spec | | flags say what a layer is made of
use-cpu-initialization | | weights are drawn on the host, the same on every layout
no-initialization | | weights are drawn block by block, whatever the layout
"""

_UNSUPPORTED = """
swap-attention | | swapping single operators to the host is not built; --recompute-offload keeps units' inputs there
q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim | | latent attention is not built
multi-head-latent-attention qk-rope-head-dim qk-nope-head-dim mla-fa-without-pad | | latent attention is not built
rope-scaling-beta-fast rope-scaling-beta-slow rope-scaling-mscale rope-scaling-mscale-all-dim | | only plain rope
rope-scaling-original-max-position-embeddings | | only plain rope
moe-fb-overlap | | one micro-batch's forward never runs under another's backward; --ampipe-degree hides all-to-alls
schedules-method | | schedules are 1f1b, gpipe, interleaved and zero_bubble
decoupled-lr decoupled-min-lr | | embedding and head learn at --lr
tiktoken-pattern | | tokenizers are sentencepiece models or Hugging Face folders
coc-fused-kernel | | fused kernels of products and collectives
attention-sink-k window-size sliding-window | | attention sees everything before it
fused-padded-mla-attention | | latent attention is not built
rotary-scaling-factor rope-scaling-type use-rope-scaling rope-scaling-factor mscale mscale-all-dim | | only plain rope
apply-query-key-layer-scaling | | changes the numbers of fp16 runs only
apply-layernorm-1p | | the weight of a norm is its own
fp8-format fp8-amax-compute-algo fp8-amax-history-len fp8-recipe fp8-param-gather | | --fp8 scales each tensor as it is
no-save-optim no-save-rng | | a checkpoint holds everything that a resumed run needs
num-experts-per-layer mlp-type topk expert-interval create-moe-param-group | | experts are the same in all layers
wandb-project wandb-exp-name wandb-save-dir wandb-entity | | --metrics-jsonl and --tensorboard-dir have the same numbers
use-tutel inference disable-moe-token-dropping | | pre-training with experts' own products and capacity here
moe-router-force-load-balancing | | routing is never forced; measure with real routing
use-ascend-mc2 | | fused kernels of products and collectives
tp-2d tp-x tp-y | | tensor parallelism is along one axis
curriculum-learning-legacy curriculum-learning random-ltd data-efficiency-curriculum-learning | | not built
load-teacher kd | | distillation is not built
hybrid-attention-pattern hybrid-override-pattern | | every layer attends
"""

_LEFT = """
vocab-file merge-file | | --tokenizer-model is a folder with these files, as Hugging Face lays them out
adaptive-recompute-device-swap | | --adaptive-recompute-device-size is the memory it may use
"""

ROWS: dict[str, Foreign] = {
    **rows(_RENAMED, RENAMED),
    **rows(_LEFT, LEFT),
    **rows(_IMPLIED, IMPLIED),
    **rows(_UNNECESSARY, UNNECESSARY),
    **rows(_UNSUPPORTED, UNSUPPORTED),
}
