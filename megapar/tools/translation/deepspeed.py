"""Translation table for arguments of Megatron-DeepSpeed, with rows as in ``megatron`` and ``features``."""

from __future__ import annotations

from collections.abc import Mapping

from megapar.tools.translation.features import features
from megapar.tools.translation.verdict import ANOTHER, IMPLIED, OTHER, RENAMED, UNNECESSARY, Foreign, defaults, rows

_RENAMED = """
num-experts= | @deepspeed_experts |
topk | --moe-router-topk {value} |
moe-expert-parallel-size | --ep-degree {value} |
enable-expert-tensor-parallelism | @experts_over_mp |
moe-train-capacity-factor | --moe-model-type deepspeed_moe --moe-capacity-factor {value} |
disable-moe-token-dropping | --moe-model-type megatron_moe | no tokens are dropped
expert-interval= | @expert_interval |
mlp-type= | @mlp_type |
disable-moe-top2-2nd-expert-sampling | @no_sampling |
ds-sequence-parallel-size= | @heads_sent | all-to-all over attention heads
override-lr-scheduler | @~with load: --override-opt-param-scheduler else nothing is loaded |
rotary-position-embeddings-theta | --rope-theta {value} |
enable-zbh1-pipeline | --pp-schedule zero_bubble |
partition-activations distribute-checkpointed-activations | --recompute-partition | for recomputed units
deepspeed-activation-checkpointing | --recompute-interval 1 | every layer
cpu-optimizer | --optimizer-offload | optimizer state and master weights
checkpoint-in-cpu | --recompute-offload | for recomputed units
load-tag= | @load_tag |
lr-warmup-tokens= | @warmup_tokens |
lr-decay-tokens= | @decay_tokens |
zero-stage= | @zero | the ZeRO stage; the number of ranks is --sharding-degree
train-tokens= | @tokens | run lengths are given in steps
train-iters= | @iterations |
"""

_IMPLIED = """
create-moe-param-group | | the optimizer state of experts is sharded over the ranks that hold them
use-flash-attn-v1 use-flash-attn-v2 use-flash-attn-triton use-flash-attn-builder | | fused attention is the default
enable-zbh1-exact-semantics | | every schedule computes the numbers of a single process
overlap-p2p-communication | | sends never block
no-log-learnig-rate-to-tensorboard no-log-loss-scale-to-tensorboard | | always logged
torch-adam ds-fused-adam | | AdamW, fused if the device supports it
"""

_UNNECESSARY = """
deepspeed-config= deepscale-config= | | its settings are flags: ZeRO stage, fp16 or bf16, batch sizes, offload
deepspeed deepscale deepspeed-mpi | | megapar has no separate engine
no-pipeline-parallel | | --pp-degree 1 is a single stage
force-ds-sequence-parallel | | set by --cp-degree
disable-mem-efficient-ln | | norms save only their input
lazy-mpu-init= | | there is one implementation for all devices
mmap-warmup | | files are memory-mapped and prefetched
ddp-impl= | | sharding reduces gradients
profile-steps= | | set by --profile
"""

_OTHER = """
embedding-weights-in-fp32 | | the embedding uses the compute dtype
use-tutel | | capacity is set with --moe-model-type deepspeed_moe, without Tutel's limits
"""

_ANOTHER = """
num-experts-switch= | | Switch Transformer layers are not supported; --num-experts with --moe-router-topk 1 is similar
"""

_FEATURES = """
other numbers | distillation is not supported
    num-layers-teacher= num-experts-teacher= hidden-size-teacher= num-attention-heads-teacher= mos kd kd-alpha-ce=
    kd-beta-ce= kd-temp= load-teacher=
other numbers | curriculum learning by length and random layer token drop are not supported
    curriculum-learning-legacy curriculum-learning data-efficiency-curriculum-learning random-ltd
other numbers | the run length is --train-iters; epochs do not end a run
    train-data-exact-num-epochs=
other numbers | a checkpoint resumes at its step; --finetune starts at step 0
    reset-iteration no-load-lr-state
unsupported | megapar has no inference engine: export with --save-hf and use one, or try megapar generate
    ds-inference inference
unsupported | bucket sizes are set by --sharding-segment-strategy and --segment-broadcast-MB
    zero-reduce-scatter zero-contigious-gradients zero-reduce-bucket-size= zero-allgather-bucket-size=
unsupported | no offload to NVMe or of parameters; --optimizer-offload keeps optimizer state on the host
    remote-device= use-pin-memory
unsupported | linear layers are sharded over mp ranks or whole, never tiled
    memory-centric-tiled-linear tile-factor= split-transformers scattered-embeddings
unsupported | long sequences are sharded over cp ranks, not streamed from the host
    ds-sequence-parallel-fpdt ds-sequence-parallel-fpdt-chunk-size= ds-sequence-parallel-fpdt-offloading
unsupported | recomputed units save their inputs separately, and the host never waits for a layer
    contigious-checkpointing synchronize-each-layer profile-backward
unsupported | a thread writes checkpoints during the following steps (docs/reliability.md)
    checkpoint-io-buffer-size= checkpoint-data-parallel= aio-intra-op-parallelism= checkpoint-writer-decoupled
unsupported | DeepSpeed checkpoints cannot be read; megapar's load on any layout (megapar convert)
    universal-checkpoint
unsupported | SIGTERM saves a checkpoint and stops the run; a file does not
    kill-switch-file=
unsupported | the order of samples is a formula of the seed, without index files
    train-idx-path= train-desc-path= train-doc-idx-path= train-sample-idx-path= train-shuffle-idx-path=
    use-dataset-only= return-data-index repeated-dataloader
unsupported | files are read by path; mount object stores
    aml-data-download-path=
unsupported | optimizer moments are not written to TensorBoard
    log-optimizer-states-to-tensorboard
unsupported | evaluations use the capacity factor of the training
    moe-eval-capacity-factor=
"""

ROWS: dict[str, Foreign] = {
    **features(_FEATURES),
    **rows(_ANOTHER, ANOTHER),
    **rows(_OTHER, OTHER),
    **rows(_UNNECESSARY, UNNECESSARY),
    **rows(_IMPLIED, IMPLIED),
    **rows(_RENAMED, RENAMED),
}
# Defaults that differ from Megatron-LM's. Source: megatron/arguments.py of deepspeedai/Megatron-DeepSpeed (207b2d5a).
DEFAULTS: Mapping[str, Foreign] = defaults("""
topk | @deepspeed_topk |
expert-interval | @usual_expert_interval |
moe-aux-loss-coeff moe-loss-coeff | @deepspeed_balance |
moe-train-capacity-factor disable-moe-token-dropping | @deepspeed_capacity |
disable-moe-top2-2nd-expert-sampling | @sampling |
recompute-num-layers | @one_layer |
""")
