"""What becomes of arguments of MindSpeed and MindSpeed-LLM that are no flags here: rows as in ``megatron``.

``_UNLESS_*`` are rows of ``neutral``: names, values that change nothing, what they mean nothing without, reason.
"""

from __future__ import annotations

from megapar.tools.translation.neutral import Function, unless
from megapar.tools.translation.verdict import (
    ANOTHER,
    IMPLIED,
    LEFT,
    OTHER,
    RENAMED,
    UNNECESSARY,
    UNSUPPORTED,
    Foreign,
    rows,
)

_RENAMED = """
adaptive-recompute-device-swap | @adaptive |
adaptive-recompute-device-size | @adaptive_size |
ampipe-degree | @ampipe |
ampipe-tp-sp-comm-overlap | @ampipe_overlap |
moe-model-type | @mindspeed_kind |
moe-train-capacity-factor | @mindspeed_capacity | a capacity of deepspeed_moe
moe-no-drop | @mindspeed_undropped |
context-parallel-algo | @mindspeed_algorithm |
moe-router-load-balancing-type | @mindspeed_balancing |
add-qkv-bias add-dense-bias | @mindspeed_biases |
optimizer-selection | @mindspeed_optimizer |
attention-mask-type cp-attention-mask-type | @mindspeed_mask |
pre-tockens | @mindspeed_past |
num-layer-list | @layers_of_stages |
pipeline-num-transformer-layers | @layers_of_chunks |
npu-deterministic use-deter-comp | --deterministic |
enable-zero3 layerzero | --sharding-stage 3 |
virtual-optimizer | --optimizer-offload |
init-from-hf-path | --load-hf {value} |
expert-model-parallel-size | @mindspeed_expert_ranks |
"""

_IMPLIED = """
no-use-rts | | no token is chosen at random; there neither, with or without it
no-use-gmm-fp8 | | products of experts are never in fp8
input-layernorm-in-fp32 | | norms compute in fp32
loss-compute-mode loss-chunk-size output-layer-slice-num | | logits are made in chunks
use-fused-mlp use-fusion-attn-v2 use-triton-swiglu-limit | | the device's fused kernels are taken where they are
use-mc2 | | --tp-comm-overlap hides the same
"""

_UNNECESSARY = """
skip-bias-add shape-order megatron-cp-in-bnsd attention-mask-on-cpu | | how tensors lie there
use-multiparameter-pipeline-model-parallel variable-seq-lengths | | stages send one tensor, of one shape
optimization-level jit-compile | | kernels and schedules are flags of their own
memory-fragmentation | | memory is not pieced together: the allocator's segments grow
disable-gloo-group hccl-slice-size | | checkpoints are written by every rank, without gathering state
hccl-group-buffer hccl-group-buffer-adaptive hccl-ep-group-buffer-adaptive-factor hccl-op-mode | | HCCL's environment
param-and-grad-buffer-pad | | rows of segments are aligned for the device
optimize-send-recv-comm optimize-vpp-send-recv-comm defer-p2p-send-wait | | sends never block here
optimize-recomp-communication-level optimize-recomp-communication-status | | a repeated forward sends nothing needless
reset-bucket-group-order async-log-allreduce cache-get-batch-config | | segments and logs wait for nothing here
no-moe-npu-fast-ops te-gmm-mode | | there is one way to sort tokens and multiply
moe-router-score-reuse moe-revert-type-after-topk | | scores are made once, in fp32
tokenizer-not-use-fast enable-share-memory return-document-ids | | how the loader works there
op-cal-tflops | | MFU is always logged
use-mp-args-from-checkpoint-args | | a checkpoint loads on any layout
input-jitter | | means something with --moe-input-jitter-eps only
additional-config | | of other models than language models
kv-head-repeat-before-uly-alltoall | | key/value heads are repeated where ranks outnumber them
handler-name streaming hf-datasets-params | | of preprocessing; files are read as they are
datasets json-keys split-sentences | | of preprocessing; files are read as they are
keep-newlines interleave-probs mix-strategy dataset-dir overwrite-cache max-samples | | of preprocessing
cache-dir map-keys pack script-data-dir append-eod pad-vocab-size-to output-prefix | | of preprocessing
dataset-impl workers n-subs merge-group-keys | | of preprocessing
model-type-hf load-dir save-dir mg-cache-dir model-id | | of converting checkpoints: --load-hf, --save-hf
task top-p top-k temperature max-length max-new-tokens hf-chat-template | | of inference
add-eos-token use-kv-cache history-turns | | of inference
num-gpus-for-train num-gpus-for-infer inference-tensor-model-parallel-size | | of inference
task-data-path evaluation-batch-size greedy instruction-template no-chat-template eval-language | | of its evaluations
max-eval-samples broadcast alternative-prompt origin-postprocess chain-of-thought | | of its evaluations
prompt-type prompt-type-path enable-thinking md5-validate | | of chat templates; pre-training reads plain text
"""

_UNSUPPORTED = """
adaptive-recompute-profiling-step | | layers are chosen before the start from sizes, not from profiled steps
adaptive-memory-optimization smart-swap swap-delay | | memory: --adaptive-recompute-device-size, --recompute-offload
swap-modules swap-layer-input | | memory: --recompute-offload keeps the inputs of recomputed units away
activation-offload | | memory: --recompute-offload keeps the inputs of recomputed units away
compress-activation compress-dense compress-optimizer | | memory: nothing is compressed; --recompute-offload
recompute-norm recompute-norm-num-layers recompute-mla-up-proj | | memory: norms by themselves are not recomputed
recompute-mtp-norm recompute-mtp-layer recompute-csa-attention mhc-recompute | | memory: --recompute-granularity
recompute-activation-function-num-layers | | memory: --recompute-granularity selective is for all layers
moe-adaptive-recompute-activation moe-adaptive-recompute-activation-scale | | memory: layers are chosen once
moe-zero-memory moe-zero-memory-num-layers | | memory: of a MoE layer all is recomputed or nothing
moe-unperm2-mem-optim moe-unperm2-mem-optim-swap | | memory: rows are weighted when they are back
use-nanopipe-swap | | memory: stored weight gradients stay on the device
swap-optimizer-sizes | | memory: state comes and goes with each parameter group's step
automated-pipeline automated-pipeline-perf save-memory-ratio recompute-module-list | | megapar plan shares out layers
recompute-type optimized-mbs-list mbs-idx pp-schedule-list optimized-mbs-mode | | megapar plan shares out layers
auto-settings auto-settings-work-dir auto-settings-ranks auto-settings-log-level | | megapar plan searches layouts
target-nnodes auto-settings-type prof-file | | megapar plan searches layouts
moe-alltoall-overlap-comm moe-allgather-overlap-comm | | speed: --ampipe-degree 2 hides all-to-alls
moe-experts-pipeline-degree | | speed: --use-pipe-experts runs experts one after the other under their messages
moe-hierarchical-alltoallv moe-zerc | | speed: each token travels once for each expert
moe-fb-overlap | | speed: no forward under another micro-batch's backward; --ampipe-degree 2 hides all-to-alls
schedules-method | | speed: --pp-schedule is 1f1b, interleaved or zero_bubble
moe-bmm-mc2 moe-alltoall-mc2 use-ascend-mc2 coc-fused-kernel | | speed: products and messages are not one kernel
recompute-in-bubble recompute-in-advance | | memory: units are recomputed when their gradient arrives
swap-attention | | memory: --recompute-offload keeps the inputs of recomputed units away, not those of operators
moe-dynamic-padding | | speed: rows travel as many as there are
coc-mode | | speed: --tp-comm-overlap cuts products into pieces
balanced-moe-experts balanced-moe-hot-expert-num trans-hot-expert-group-num | | speed: experts are not copied
enable-expert-placement expert-placement-freq | | speed: experts stay where they are
enable-fine-grained-expert-placement | | speed: experts stay where they are
fine-grained-expert-placement-thre | | speed: experts stay where they are
print-expert-load | | logging: the largest and smallest load of a layer are not printed by expert
dualpipev-dw-detach chimera-decouple-bw virtual-data-parallel-size | | speed: --pp-schedule zero_bubble
ulysses-degree-in-cp cp-window-size | | speed: rings only or heads only
adaptive-cp-without-coarse adaptive-cp-dynamic-attn-mask adaptive-cp-only-reschedule | | speed: of sparse masks
adaptive-cp-manually-set-mask-list | | speed: of sparse masks
context-parallel-kv-cache-policy context-parallel-cache-interval | | speed: keys and values turn round again
use-ulysses-allgather-kv | | speed: --context-parallel-algo allgather_cp_algo gathers keys and values
use-nd-matmul nd1-dim1-size nd2-dim1-size tp-2d tp-x tp-y | | layout: tensor parallelism is along one axis
enable-overlap-ag-with-matmul enable-overlap-matmul-with-rs | | layout: of two-dimensional tensor parallelism
enable-backward-overlap-ag-with-matmul | | layout: of two-dimensional tensor parallelism
unaligned-linear | | layout: heads and features are shared out evenly
layerwise-disaggregated-training | | layout: every stage has the same degrees
layerzero-config fsdp2-config-str | | layout: --sharding-degree, --segment-broadcast-MB
aiqos aiqos-mode aiqos-schedule aiqos-enable-roce | | speed: the network's priorities are not set
use-batch-invariant-ops use-flash-attn-npu-batch-invariant | | rounding: kernels are the device's; --deterministic
fp8-reuse-quantized-weight | | speed: weights are scaled at every use
te-comparison-with-cpu te-comparison-with-bf16 | | diagnosis: fp8 is not compared with anything
npu-datadump model-io-trace | | diagnosis: tensors are not written out
model-io-trace-config-path model-io-trace-output-path | | diagnosis: tensors are not written out
profile-level profile-with-cpu profile-with-stack profile-with-memory | | diagnosis: --profile writes torch's trace
profile-record-shapes profile-save-path profile-export-type | | diagnosis: --profile writes torch's trace
profile-data-simplification | | diagnosis: --profile writes torch's trace
enable-high-availability | | faults: --local-checkpoint-dir keeps a copy on the next node
enable-optimizer-state-local-copy | | faults: --local-checkpoint-dir keeps a copy on the next node
enable-hbmfault-repair enable-worker-reboot | | faults: megapar launch --max-restarts starts ranks again
distributed-optimizer-no-replica enable-elastic-training | | faults: megapar launch --nnodes MIN:MAX
use-ema | | a mean of the weights over time is not kept beside them
load-checkpoint-loosely | | --finetune says what starts anew, and a checkpoint's other parts must fit
use-wandb | | logging: --tensorboard-dir, --metrics-jsonl
ai-framework | | torch only
"""

_LEFT = """
enable-hf2mg-convert | | weights to start from: --load-hf is their folder
"""

_UNLESS_OTHER = """
noisy-gate-policy | | | routing has no noise
moe-use-sinkhorn | | | balance is by auxiliary losses or by the correction bias
fix-router | | | routing is never forced
moe-device-level-aux-loss-coeff moe-comm-aux-loss-coeff | 0 | | balance is by expert, not by device
ema-decay | 0.9999 | use-ema | a mean of the weights over time is not kept
apply-wd-to-qk-layernorm | | | norms have no weight decay
quant-states quant-grads o2-optimizer o2-gradient | | | moments and master gradients are fp32
qat-scheme | | | products are not quantised
qat-scope | all | qat-scheme fp8-format fp4-format | products are not quantised
hif8-input-margin hif8-weight-margin hif8-grad-margin | | fp8-format | --fp8 scales each tensor as it is
hif8-amax-collect-interval hif8-scale-update-interval | | fp8-format | --fp8 scales each tensor as it is
hif8-amax-history-len no-hif8-step-recovery | | fp8-format | --fp8 scales each tensor as it is
no-shuffle | | | samples are shuffled once per epoch
tokenizer-padding-side | right | | samples are packed, without padding
tokenizer-kwargs | | | a tokenizer is as its files say
is-instruction-dataset is-pairwise-dataset | | | trainers here pre-train: no prompts, no pairs
stage | | | trainers here pre-train
full-shuffle-instruction-dataset neat-pack padded-samples | | is-instruction-dataset stage | trainers here pre-train
no-cut-token cut-max-seqlen pad-to-multiple-of dataset-additional-keys | | is-instruction-dataset stage | of fine-tuning
lora-target-modules qlora | | | all weights are trained, no adapters
lora-load lora-r lora-alpha lora-modules-to-save lora-register-forward-hook | | lora-target-modules | no adapters
lora-fusion lora-ckpt-filter qlora-save-dequantize | | lora-target-modules | no adapters
lu-lora-final-layer-index | | | no adapters
lu-lora-lr lu-lora-lr-ratio | | lu-lora-final-layer-index | no adapters
dpo-beta dpo-loss-type ref-model refer-model-iter dpo-label-smoothing pref-ftx | | stage | no preference training
reward-tokens reward-model max-prompt-length | | stage | no reinforcement learning
num-samples-per-step rollout-batch-size | | stage | no reinforcement learning
cliprange-value critic-mini-batch-size critic-update-epochs ppo-mini-batch-size | | stage | no reinforcement learning
clip-ratio entropy-coeff ppo-epochs | | stage | no reinforcement learning
shuffle-minibatch do-sample missing-eos-penalty | | stage | no reinforcement learning
n-samples-per-prompt kl-coef gamma lam advantage-whiten dataset-category | | stage | no reinforcement learning
extract-content-for-reward | | stage | no reinforcement learning
"""

_UNLESS_ANOTHER = """
next-tockens | 0 | | attention sees nothing behind it
sparse-mode | 2 | | masks are causal
expert-interval | 1 | | experts are in all layers behind --first-k-dense
add-output-layer-bias | | | the output projection has no bias
rope-scaling-type | | | only plain rope
rope-scaling-factor yarn-scaling-factor | 1 | rope-scaling-type | only plain rope
rope-scaling-beta-fast beta-fast rope-scaling-beta-slow beta-slow | | rope-scaling-type | only plain rope
rope-scaling-mscale rope-scaling-mscale-all-dim | | rope-scaling-type | only plain rope
rope-scaling-original-max-position-embeddings | | rope-scaling-type | only plain rope
original-max-position-embeddings longrope-freqs-type | | rope-scaling-type | only plain rope
low-freq-factor high-freq-factor long-factor short-factor | | rope-scaling-type | only plain rope
long-mscale short-mscale | | rope-scaling-type | only plain rope
dynamic-factor | 1 | | only plain rope
use-glm-rope partial-rotary-factor | | | all features of a head are turned
square-alibi-mask fill-neg-inf alibi-fusion-attn-type alibi-diagonal-opposite | | | positions are rope or learned
multi-head-latent-attention | | | latent attention is not built
q-lora-rank kv-lora-rank | | multi-latent-attention multi-head-latent-attention | latent attention is not built
v-head-dim | | multi-latent-attention multi-head-latent-attention | latent attention is not built
qk-rope-head-dim qk-nope-head-dim | | multi-latent-attention multi-head-latent-attention | latent attention is not built
mla-fa-without-pad padded-base-length | | multi-latent-attention multi-head-latent-attention | of latent attention
mla-mm-split | | multi-latent-attention multi-head-latent-attention | of latent attention
mla-zero-memory mla-up-proj-tp-overlap | | multi-latent-attention multi-head-latent-attention | of latent attention
mla-swap-core-attn-out mla-fa-divide-qk | | multi-latent-attention multi-head-latent-attention | of latent attention
use-dsa-absorb use-fused-lightning-indexer use-fused-sparse-flash-attention | | | attention is dense
use-fused-lightning-indexer-kl-loss enable-dsa-indexer use-indexer | | | attention is dense
index-n-heads index-head-dim index-topk | | enable-dsa-indexer use-indexer | attention is dense
scale-fmt indexer-loss-coeff | | enable-dsa-indexer use-indexer | attention is dense
sliding-window interleave-sliding-window sliding-window-size g2-window-size | | | attention sees everything before it
use-g2-attention use-g2-indexer-loss use-triton-sfa o-groups o-lora-rank | | | attention is dense
use-naive-l2norm | | | every layer attends
full-attention-interval linear-key-head-dim linear-num-key-heads | | | every layer attends
linear-num-value-heads linear-value-head-dim | | | every layer attends
mamba-d-ssm | | | every layer attends
mamba-chunk-size mamba-d-conv mamba-expand | | mamba-d-ssm | every layer attends
enable-mhc | | | one residual stream
use-triton-rmsnorm-without-weight use-triton-sinkhorn use-triton-mhc | | enable-mhc | one residual stream
hc-mult hc-sinkhorn-iters hc-eps | | enable-mhc | one residual stream
swiglu-limit | 0 | | gates are not clamped
shared-expert-gate | | | shared experts have no gate
shared-expert-gate-output-dimension | | shared-expert-gate | shared experts have no gate
cla-share-factor | 1 | | every layer has keys and values of its own
share-kvstates | | | every layer has keys and values of its own
embedding-multiplier-scale output-multiplier-scale scale-emb | 1 | | embeddings and logits are not scaled
dim-model-base scale-depth | | | embeddings, layers and logits are not scaled
embed-layernorm input-embeds-norm | | | embeddings are not normalised
post-norm no-post-layer-norm | | | norms stand in front of attention and MLP, and at the end
add-rmsnorm-offset | | | the weight of a norm is its own
geglu gelu-tanh | | | activations are swiglu and gelu
output-logit-softcapping attn-logit-softcapping | | | logits are not capped, scores are over sqrt(head)
query-pre-attn-scalar | | | logits are not capped, scores are over sqrt(head)
fc-type | | | MLPs are dense or of experts
mtp-after-norm | | | the block for the token after the next reads in front of the final norm
dist-train | | | text only
"""

_OTHER, _OTHER_FUNCTIONS = unless(_UNLESS_OTHER, OTHER)
_ANOTHER, _ANOTHER_FUNCTIONS = unless(_UNLESS_ANOTHER, ANOTHER)

ROWS: dict[str, Foreign] = {
    **rows(_RENAMED, RENAMED),
    **rows(_IMPLIED, IMPLIED),
    **rows(_UNNECESSARY, UNNECESSARY),
    **rows(_UNSUPPORTED, UNSUPPORTED),
    **rows(_LEFT, LEFT),
    **_OTHER,
    **_ANOTHER,
}
FUNCTIONS: dict[str, Function] = {**_OTHER_FUNCTIONS, **_ANOTHER_FUNCTIONS}

# What differs from Megatron-LM's where a script says nothing: `defaults`, with the same keys.
DEFAULTS: dict[str, Foreign] = {}
