"""Translation table for arguments of Megatron-DeepSpeed (form: ``verdict.table``)."""

from __future__ import annotations

from megapar.tools.translation.verdict import Foreign, defaults, table

ROWS: dict[str, Foreign] = table("""
[renamed]
num-experts= | @deepspeed_experts |
topk | --moe-router-topk {value} |
moe-expert-parallel-size | --ep-degree {value} |
enable-expert-tensor-parallelism | @~else: implied | mp ranks shard experts like other layers (--expert-mp-degree)
moe-train-capacity-factor | --moe-model-type deepspeed_moe --moe-capacity-factor {value} |
disable-moe-token-dropping | --moe-model-type megatron_moe | no tokens are dropped
expert-interval= |
    not experts: unnecessary | the model has no experts
    is 1: implied | all layers have experts
    else: another model | all layers have experts, every {value} layers in the script
mlp-type= |
    is standard: implied | experts replace the MLP
    else: another model | residual experts (in addition to a dense MLP) are not supported
disable-moe-top2-2nd-expert-sampling | @else: implied | the second expert has the second-highest score
ds-sequence-parallel-size= | ~ |
    is 1: unnecessary | a single rank has the whole sequence
    else: --cp-degree {value} --context-parallel-algo ulysses_cp_algo | all-to-all over attention heads
override-lr-scheduler | @~with load: --override-opt-param-scheduler else nothing is loaded |
rotary-position-embeddings-theta | --rope-theta {value} |
enable-zbh1-pipeline | --pp-schedule zero_bubble |
partition-activations distribute-checkpointed-activations | --recompute-partition | for recomputed units
deepspeed-activation-checkpointing | --recompute-interval 1 | every layer
cpu-optimizer | --optimizer-offload | optimizer state and master weights
checkpoint-in-cpu | --recompute-offload | for recomputed units
load-tag= | @~load_tag |
lr-warmup-tokens= | @warmup_tokens |
lr-decay-tokens= | @decay_tokens |
zero-stage= | ~ |
    is 0: --sharding-degree 1 --hybrid-dp | no sharding: every data rank is a replica
    else: --sharding-stage {value} | the ZeRO stage; the number of ranks is --sharding-degree
train-tokens= | @tokens | run lengths are given in steps
train-iters= | @iterations |
[implied]
create-moe-param-group | | the optimizer state of experts is sharded over the ranks that hold them
use-flash-attn-v1 use-flash-attn-v2 use-flash-attn-triton use-flash-attn-builder | | fused attention is the default
enable-zbh1-exact-semantics | | every schedule computes the numbers of a single process
overlap-p2p-communication | | sends never block
no-log-learnig-rate-to-tensorboard no-log-loss-scale-to-tensorboard | | always logged
torch-adam ds-fused-adam | | AdamW, fused if the device supports it
[unnecessary]
deepspeed-config= deepscale-config= | | its settings are flags: ZeRO stage, fp16 or bf16, batch sizes, offload
deepspeed deepscale deepspeed-mpi | | megapar has no separate engine
no-pipeline-parallel | | --pp-degree 1 is a single stage
force-ds-sequence-parallel | | set by --cp-degree
disable-mem-efficient-ln | | norms save only their input
lazy-mpu-init= | | there is one implementation for all devices
mmap-warmup | | files are memory-mapped and prefetched
ddp-impl= | | sharding reduces gradients
profile-steps= | | set by --profile
[other numbers]
embedding-weights-in-fp32 | | the embedding uses the compute dtype
use-tutel | | capacity is set with --moe-model-type deepspeed_moe, without Tutel's limits
[another model]
num-experts-switch= | | Switch Transformer layers are not supported; --num-experts with --moe-router-topk 1 is similar
[other numbers | distillation is not supported]
num-layers-teacher= num-experts-teacher= hidden-size-teacher= num-attention-heads-teacher= mos kd kd-alpha-ce=
kd-beta-ce= kd-temp= load-teacher=
[other numbers | curriculum learning by length and random layer token drop are not supported]
curriculum-learning-legacy curriculum-learning data-efficiency-curriculum-learning random-ltd
[other numbers | the run length is --train-iters; epochs do not end a run]
train-data-exact-num-epochs=
[other numbers | a checkpoint resumes at its step; --finetune starts at step 0]
reset-iteration no-load-lr-state
[unsupported | megapar has no inference engine: export with --save-hf and use one, or try megapar generate]
ds-inference inference
[unsupported | bucket sizes are set by --sharding-segment-strategy and --segment-broadcast-MB]
zero-reduce-scatter zero-contigious-gradients zero-reduce-bucket-size= zero-allgather-bucket-size=
[unsupported | no offload to NVMe or of parameters; --optimizer-offload keeps optimizer state on the host]
remote-device= use-pin-memory
[unsupported | linear layers are sharded over mp ranks or whole, never tiled]
memory-centric-tiled-linear tile-factor= split-transformers scattered-embeddings
[unsupported | long sequences are sharded over cp ranks, not streamed from the host]
ds-sequence-parallel-fpdt ds-sequence-parallel-fpdt-chunk-size= ds-sequence-parallel-fpdt-offloading
[unsupported | recomputed units save their inputs separately, and the host never waits for a layer]
contigious-checkpointing synchronize-each-layer profile-backward
[unsupported | a thread writes checkpoints during the following steps (docs/reliability.md)]
checkpoint-io-buffer-size= checkpoint-data-parallel= aio-intra-op-parallelism= checkpoint-writer-decoupled
[unsupported | DeepSpeed checkpoints cannot be read; megapar's load on any layout (megapar convert)]
universal-checkpoint
[unsupported | SIGTERM saves a checkpoint and stops the run; a file does not]
kill-switch-file=
[unsupported | the order of samples is a formula of the seed, without index files]
train-idx-path= train-desc-path= train-doc-idx-path= train-sample-idx-path= train-shuffle-idx-path= use-dataset-only=
return-data-index repeated-dataloader
[unsupported | files are read by path; mount object stores]
aml-data-download-path=
[unsupported | optimizer moments are not written to TensorBoard]
log-optimizer-states-to-tensorboard
[unsupported | evaluations use the capacity factor of the training]
moe-eval-capacity-factor=
""")
# Defaults that differ from Megatron-LM's. Source: megatron/arguments.py of deepspeedai/Megatron-DeepSpeed (207b2d5a).
DEFAULTS: dict[str, Foreign] = defaults("""
topk | @experts: --moe-router-topk 1 else the model has no experts |
expert-interval |
    not experts: unnecessary | the model has no experts
    else: another model | all layers have experts, every second layer by default in Megatron-DeepSpeed
moe-aux-loss-coeff moe-loss-coeff | @experts: --moe-aux-loss-coeff 0.1 else the model has no experts |
moe-train-capacity-factor disable-moe-token-dropping |
    not experts: unnecessary | the model has no experts
    else: --moe-model-type deepspeed_moe --moe-capacity-factor 1
disable-moe-top2-2nd-expert-sampling |
    experts and topk is 2: other numbers \
        | the second expert has the second-highest score; Megatron-DeepSpeed samples it with noise by default
    else: unnecessary | a single expert is never sampled
recompute-num-layers | @~with recompute-method: --recompute-num-layers 1 else nothing is recomputed |
""")
