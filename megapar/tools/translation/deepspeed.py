"""What becomes of arguments of Megatron-DeepSpeed that are no flags here: rows as in ``megatron`` and ``features``."""

from __future__ import annotations

from collections.abc import Mapping

from megapar.tools.translation.features import features
from megapar.tools.translation.verdict import ANOTHER, IMPLIED, OTHER, RENAMED, UNNECESSARY, Foreign, defaults, rows

_RENAMED = """
num-experts | @deepspeed_experts |
topk | --moe-router-topk {value} |
moe-expert-parallel-size | --ep-degree {value} |
enable-expert-tensor-parallelism | @experts_over_mp |
moe-train-capacity-factor | --moe-model-type deepspeed_moe --moe-capacity-factor {value} |
disable-moe-token-dropping | --moe-model-type megatron_moe | no token is dropped
expert-interval | @expert_interval |
mlp-type | @mlp_type |
disable-moe-top2-2nd-expert-sampling | @no_sampling |
ds-sequence-parallel-size | @heads_sent | heads travel by all-to-all
override-lr-scheduler | @overridden |
rotary-position-embeddings-theta | --rope-theta {value} |
enable-zbh1-pipeline | --pp-schedule zero_bubble |
partition-activations distribute-checkpointed-activations | --recompute-partition | for recomputed units
deepspeed-activation-checkpointing | --recompute-interval 1 | every layer
cpu-optimizer | --optimizer-offload | its state and masters
checkpoint-in-cpu | --recompute-offload | for recomputed units
load-tag | @load_tag |
lr-warmup-tokens | @warmup_tokens |
lr-decay-tokens | @decay_tokens |
zero-stage | @zero | the optimizer's stage is a flag, sharding ranks are --sharding-degree
train-tokens | @tokens | runs are counted in steps
train-iters | @iterations |
"""

_IMPLIED = """
create-moe-param-group | | experts' optimizer state is sharded over the ranks that hold them
use-flash-attn-v1 use-flash-attn-v2 use-flash-attn-triton use-flash-attn-builder | | fused attention is the default
enable-zbh1-exact-semantics | | every schedule has the numbers of one process
overlap-p2p-communication | | sends never block
no-log-learnig-rate-to-tensorboard no-log-loss-scale-to-tensorboard | | always written
torch-adam ds-fused-adam | | AdamW, fused where the device has it
"""

_UNNECESSARY = """
deepspeed-config deepscale-config | | what its file says are flags: ZeRO stage, fp16 or bf16, batch sizes, offload
deepspeed deepscale deepspeed-mpi | | there is no second engine
no-pipeline-parallel | | one stage where --pp-degree is 1
force-ds-sequence-parallel | | --cp-degree says it
disable-mem-efficient-ln | | norms keep their input only
mmap-warmup | | files are mapped and read ahead of the step
ddp-impl | | gradients are reduced by sharding
profile-steps | | --profile names them
"""

_OTHER = """
embedding-weights-in-fp32 | | the embedding has the compute dtype
use-tutel | | the capacity of experts is by --moe-model-type deepspeed_moe, without Tutel's limits
"""

_ANOTHER = """
num-experts-switch | | the Switch transformer's own layer is not built; --num-experts with --moe-router-topk 1 is near
"""

_FEATURES = """
other numbers | distillation is not built
    num-layers-teacher num-experts-teacher hidden-size-teacher num-attention-heads-teacher mos kd kd-alpha-ce
    kd-beta-ce kd-temp load-teacher
other numbers | curriculum learning by length and random layer token drop are not built
    curriculum-learning-legacy curriculum-learning data-efficiency-curriculum-learning random-ltd
other numbers | a run has --train-iters steps, and an epoch ends where it does
    train-data-exact-num-epochs
other numbers | a checkpoint goes on where it was saved; --finetune starts at step 0
    reset-iteration no-load-lr-state
unsupported | generation is not training: export with --save-hf and serve the folder with an inference engine
    ds-inference inference
unsupported | sizes of ZeRO's buckets; here segments: --sharding-segment-strategy, --segment-broadcast-MB
    zero-reduce-scatter zero-contigious-gradients zero-reduce-bucket-size zero-allgather-bucket-size
unsupported | nothing is kept on NVMe, and parameters not on the host; --optimizer-offload keeps optimizer state there
    remote-device use-pin-memory
unsupported | linear layers are whole on a rank or cut over mp ranks, never tiled
    memory-centric-tiled-linear tile-factor split-transformers scattered-embeddings
unsupported | attention over a very long sequence is cut over cp ranks, not streamed from the host
    ds-sequence-parallel-fpdt ds-sequence-parallel-fpdt-chunk-size ds-sequence-parallel-fpdt-offloading
unsupported | recomputed units keep their inputs each by itself, and the host never waits for a layer
    contigious-checkpointing synchronize-each-layer profile-backward
unsupported | a checkpoint's files are written by a thread under the steps that follow (docs/checkpoints.md)
    checkpoint-io-buffer-size checkpoint-data-parallel aio-intra-op-parallelism checkpoint-writer-decoupled
unsupported | DeepSpeed's checkpoints are not read; ours load on any layout, and there is megapar convert
    universal-checkpoint
unsupported | SIGTERM saves and stops a run; a file does not
    kill-switch-file
unsupported | samples are closed formulas of seed and number, without index files
    train-idx-path train-desc-path train-doc-idx-path train-sample-idx-path train-shuffle-idx-path use-dataset-only
    return-data-index repeated-dataloader
unsupported | files are read by their paths; object stores are mounted
    aml-data-download-path
unsupported | moments are not written to TensorBoard
    log-optimizer-states-to-tensorboard
unsupported | evaluations have the capacity of the training
    moe-eval-capacity-factor
"""

ROWS: dict[str, Foreign] = {
    **features(_FEATURES),
    **rows(_ANOTHER, ANOTHER),
    **rows(_OTHER, OTHER),
    **rows(_UNNECESSARY, UNNECESSARY),
    **rows(_IMPLIED, IMPLIED),
    **rows(_RENAMED, RENAMED),
}
# Where it differs from Megatron-LM. Source: megatron/arguments.py of deepspeedai/Megatron-DeepSpeed (207b2d5a).
DEFAULTS: Mapping[str, Foreign] = defaults("""
topk | @deepspeed_topk |
expert-interval | @usual_expert_interval |
moe-aux-loss-coeff moe-loss-coeff | @deepspeed_balance |
moe-train-capacity-factor disable-moe-token-dropping | @deepspeed_capacity |
disable-moe-top2-2nd-expert-sampling | @sampling |
recompute-num-layers | @one_layer |
""")
