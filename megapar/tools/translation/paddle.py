"""What becomes of arguments of Paddle Fleet, PaddleNLP, PaddleFormers and ERNIE 4.5: rows as in ``megatron``.

Keys of nested configurations are joined by dots; where a row has no dot, it stands for the last part of any of them.
``_UNLESS_*`` are rows of ``neutral``: names, values that change nothing, what they mean nothing without, reason.
"""

from __future__ import annotations

from collections.abc import Mapping

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
    defaults,
    rows,
)

_RENAMED = """
tensor-parallel-degree tensor-model-parallel-size mp-degree | @paddle_mp |
pipeline-parallel-degree pipeline-model-parallel-size pp-degree | @paddle_pp |
virtual-pp-degree virtual-pipeline-model-parallel-size | @paddle_virtual |
expert-parallel-degree expert-model-parallel-size ep-degree | @paddle_ep |
expert-tensor-model-parallel-size | @paddle_expert_mp |
context-parallel-degree context-parallel-size | @paddle_cp |
sep-parallel-degree sep-parallel-size sep-degree | @paddle_sep |
data-parallel-degree dp-degree | @paddle_dp |
hybrid-dp | @paddle_hybrid_dp |
sharding | @paddle_sharding |
sharding-parallel-degree sharding-parallel-size sharding-degree sharding-group-size | @paddle_sharding_degree |
segment-anchors | @paddle_anchors |
sequence-parallel | @paddle_cut |
per-device-train-batch-size micro-batch-size | @paddle_micro |
gradient-accumulation-steps accumulate-steps | --gradient-merge-acc-step {value} |
gradient-merge-configs.k-steps num-acc-steps n-microbatches | --gradient-merge-acc-step {value} |
global-batch-size | @paddle_batch |
max-steps | @paddle_steps |
num-train-epochs | @paddle_epochs |
max-seq-length max-seq-len max-sequence-length | @paddle_length |
base-seq-length | @paddle_base_length |
learning-rate | --lr {value} |
min-lr min-learning-rate | @paddle_floor |
lr-scheduler lr-scheduler-type | @paddle_style |
decay-function | @paddle_fall |
decay-steps | --lr-decay-iters {value} |
warmup-steps | @paddle_warmup |
warmup-ratio | @paddle_warmup_share |
adam-epsilon | --adam-eps {value} |
max-grad-norm | --clip-grad {value} |
bf16 | @paddle_bf16 |
fp16 amp use-pure-fp16 | @paddle_fp16 |
fp16-opt-level | @paddle_level |
amp-master-grad | @paddle_master_gradients |
scale-loss init-loss-scaling | @paddle_loss_scale |
incr-every-n-steps | --loss-scale-window {value} |
decr-every-n-nan-or-inf | --hysteresis {value} |
incr-ratio | --loss-scale-factor {value} |
decr-ratio | @paddle_shrink |
recompute use-recompute | @paddle_recomputed |
recompute-granularity | @paddle_granularity |
enable-offload offload-recompute-inputs | --recompute-offload |
use-flash-attention use-flash-attn | @paddle_flash |
offload-optim optimize-offload tensorwise-offload-optimizer | --optimizer-offload |
deterministic-mode | --deterministic |
logging-steps | --log-interval {value} |
save-steps | @paddle_saved |
eval-steps | @paddle_evaluated |
eval-iters max-evaluate-steps | @paddle_evaluations |
output-dir | --save {value} |
save-total-limit | --keep {value} |
save-strategy evaluation-strategy logging-strategy | @paddle_rhythm |
use-async-save | --async-save |
input-dir train-dataset-path | @paddle_data |
eval-dataset-path | @paddle_held_out |
tokenizer-name-or-path tokenizer-name | --tokenizer-model {value} |
model-name-or-path model-type | @paddle_model |
continue-training | @paddle_continued |
resume-from-checkpoint | @paddle_resumed |
num-hidden-layers | @paddle_layers |
remove-tail-layer | @paddle_tail |
intermediate-size | --ffn-hidden-size {value} |
num-key-value-heads | --num-query-groups {value} |
rms-norm-eps | --layernorm-epsilon {value} |
initializer-range | @paddle_std |
tie-word-embeddings | @paddle_tied |
use-rmsnorm | @paddle_norm |
hidden-act | @paddle_activation |
use-bias | --add-bias-linear |
use-qk-norm | --qk-norm |
hidden-dropout-prob | --hidden-dropout {value} |
attention-probs-dropout-prob | --attention-dropout {value} |
moe-num-experts n-routed-experts num-experts | @paddle_experts |
moe-k | --moe-router-topk {value} |
num-experts-per-tok | @paddle_choices |
moe-intermediate-size | @paddle_expert_width |
moe-num-shared-experts n-shared-experts | --moe-shared-experts {value} |
moe-layer-start-index first-k-dense-replace | @paddle_first_dense |
moe-capacity | @paddle_capacity |
moe-aux-loss-lambda | @paddle_aux_of_all_choices |
router-aux-loss-coef | @paddle_aux |
moe-orthogonal-loss-lambda | --moe-orthogonal-loss-coeff {value} |
router-z-loss-coef | --moe-z-loss-coeff {value} |
moe-use-aux-free | @paddle_bias |
moe-use-aux-free-update-coef moe-router-bias-update-rate | @paddle_bias_rate |
moe-gate-lr-ratio | @paddle_gate_rate |
moe-group | @paddle_group |
moe-gate | @paddle_gate |
moe-gate-act scoring-func | @paddle_score |
moe-norm-gate-logits norm-topk-prob | @paddle_weights |
n-group | @paddle_expert_groups |
topk-group | @paddle_chosen_groups |
scaling-factor routed-scaling-factor | --moe-router-topk-scaling-factor {value} |
multi-token-pred-depth num-nextn-predict-layers mtp-num-layers | @paddle_ahead |
multi-token-pred-lambda mtp-loss-scaling-factor | @paddle_ahead_weight |
optim | @paddle_optimizer |
muon-exclude-patterns muon-qkv-update-mode muon-ffn-split muon-extra-scale-factor | @paddle_muon | belongs to Muon
muon-momentum muon-version muon-ns-steps muon-ns-coeff-type muon-ns-coeffs | @paddle_muon | belongs to Muon
normalize-logps label-smoothing ignore-eos-token | @paddle_preferred | of preferences
ref-model-update-steps reference-free | @paddle_preferred | of preferences
loss-type pref-loss-ratio sft-loss-ratio beta offset-alpha simpo-gamma dpop-lambda | @paddle_preferred | of preferences
report-to | @paddle_logged |
sharding-parallel-config | @paddle_sharding_words |
pipeline-parallel-config | @paddle_pipeline_words |
tensor-parallel-config | @paddle_tensor_words |
data-parallel-config sequence-parallel-config | @paddle_replica_words |
"""

_IMPLIED = """
do-train use-moe use-expert-parallel | | trainers train; experts are --num-experts
use-intermediate-api from-scratch | | weights are drawn
use-ortho-loss-callback | | --moe-orthogonal-loss-coeff says it
use-fused-rms-norm use-fused-rope use-fused-linear use-fused-dropout-add use-fast-ln | | the device's fused kernels
fuse-rms-norm fuse-ln fuse-swiglu fuse-linear | | the device's fused kernels
fuse-rope apply-rope-fusion use-fast-layer-norm | | the device's fused kernels
fuse-attn-ffn fuse-attention-qkv fuse-attention-ffn | | the device's fused kernels
fuse-gate-detach-matmul fuse-softmax-mask | | the device's fused kernels
use-fused-linear-cross-entropy use-fused-head-and-loss-fn use-fused-head-loss-fn | | logits are made in chunks
loss-subbatch-seqlen loss-subbatch-sequence-length use-sparse-head-and-loss-fn | | logits are made in chunks
moe-use-fusion-node moe-router-fusion moe-expert-fusion using-sonic-moe use-unified-moe | | experts are grouped products
moe-shared-expert-overlap | | shared experts run while tokens travel
use-mem-eff-attn use-flash-attn-with-mask use-sparse-flash-attn fa-version | | the device's fused kernels
use-attn-mask-startend-row-indices attn-implementation | | masks are causal, and never built
gradient-merge fuse-grad-merge gradient-merge-configs.avg | | micro-batches are summed, over all their tokens
scale-strategy scale-gradient use-dynamic-loss-scaling | | losses have their denominator over the global batch
custom-white-list custom-black-list custom-black-varnames | | norms, softmax and losses compute in fp32
amp-custom-black-list amp-custom-white-list | | norms, softmax and losses compute in fp32
use-fp16-guard use-optimizer-fp16 optimize-cast | | 16-bit copies are made once a step
unified-checkpoint unified-checkpoint-config | | one format, which loads on any layout
save-sharded-model load-sharded-model | | one format, which loads on any layout
save-checkpoint-format load-checkpoint-format | | one format, which loads on any layout
flex-ckpt-comm-method save-rng-states | | one format, which loads on any layout
load-sharded-model-remap-parameter-name force-reshard-pp | | one format, for any layout
auto-parallel-resume-form-hybrid-parallel | | one format, for any layout
log-global-grad-norm | | the norm is always logged
use-sp-callback sp-allreduce-avg-in-gradinent-scale | | gradients are sums over all axes
dp-allreduce-avg-in-gradinent-scale | | gradients are sums over all axes, reduced once a step
gradient-sync-after-accumulate | | gradients are sums over all axes, reduced once a step
sync-param sync-grad sync-moment pp-sync-param | | ranks have the same values
tp-sync-param tp-sync-moment pp-sync-moment | | ranks have the same values
use-reduce-avg stage1-reduce-avg auto-parallel-sync-shared-params | | gradients are sums; shared weights are summed once
delay-scale-loss pp-delay-scale-loss enable-delay-scale-loss | | losses have their denominator over the global batch
replace-with-parallel-cross-entropy replace-with-c-embedding tensor-parallel-output | | logits stay cut over mp
moe-with-send-router-loss enable-mtp-magic-send | | losses count where they arise
use-calc-stream | | messages have streams of their own
pipeline tensor-parallel tensor-parallel-configs.tensor-parallel-degree | | said by the degrees
distributed-dataloader split-inputs-sequence-dim pp-need-data pp-need-data-degree | | every rank reads what it needs
packing | | samples of pre-training are full
use-global-causal-attn | | attention goes over documents without --reset-attention-mask
"""

_UNNECESSARY = """
do-eval do-predict do-export prediction-loss-only | | --eval-interval says when
overwrite-output-dir disable-tqdm remove-unused-columns label-names past-index run-name | | of its trainer
per-device-eval-batch-size eval-accumulation-steps | | evaluation is by global batches
device no-cuda local-rank mode | | follows the machine: --device
log-on-each-node save-on-each-node logging-first-step | | one rank logs, every rank saves its part
load-best-model-at-end metric-for-best-model greater-is-better minimum-eval-times | | the last step is what is trained
ignore-save-lr-and-optim save-tokenizer save-last-step | | a checkpoint holds all that a resumed run needs
dataloader-num-workers prefetch-factor lazy-data-processing data-load-process-num buffer-size | | one thread reads ahead
dataloader-shuffle dataloader-drop-last | | samples are shuffled once per epoch, and packed
num-consecutive shuffle-consecutive | | the order of samples is one of --seed, as it is of Paddle's
global-shuffle-num-examples | | the order of samples is one of --seed, as it is of Paddle's
same-data | | a resumed run goes on with the next sample, whatever its layout
data-impl skip-warmup warmup-only-rank0 | | files are mapped, nothing is cached
data-cache share-folder packed-idx-cache-dir | | files are mapped, nothing is cached
seqlen max-position-embeddings using-dynamic-sequence-length | | samples have one length
pad-token-id bos-token-id eos-token-id ignored-index | | ids are the tokenizer's
use-cache architectures torch-dtype transformers-version copy-custom-file-list download-hub | | of its model files
tensor-parallel-rank rope-reorder weight-share-add-bias | | how tensors lie there
recompute-use-reentrant | | recompute is without reentrance
skip-profile-timer enable-timer timer enable-optimizer-timer skip-memory-metrics | | waits are always metered
moe-logging using-precision-check enable-global-training-logs metrics-output-path | | logged with --log-interval
count-trained-tokens global-logging-interval | | logged with --log-interval
pre-alloc-memory use-train-part-sharding | | memory is the allocator's
gc-interval | | --manual-gc keeps ranks together
hybrid-parallel-topo-order order reorder-pipeline-priority | | numbers do not depend on it: --rank-order
sharding-parallel-mesh-dimension sharding-comm-group-call-opt nccl-comm-group-config | | groups are made in one order
nccl-comm-num use-hierarchical-allreduce hierarchical-allreduce-inter-nranks heter-ccl-mode | | NCCL's environment
fuse-all-reduce-ops fuse-grad-size-in-mb | | segments: --segment-broadcast-MB
fuse-grad-size-in-tflops fuse-grad-size-in-num | | segments: --segment-broadcast-MB
last-comm-group-size-mb sync-nccl-allreduce calc-comm-same-stream | | segments: --segment-broadcast-MB
pp-allreduce-in-optimize -dp-as-optimizer-sharding | | gradients are reduced once a step
cudnn-exhaustive-search conv-workspace-size-limit cudnn-batchnorm-spatial-persistent | | no convolutions
sync-batch-norm without-graph-optimization find-unused-parameters | | no static program
tensor-init-seed | | --seed: the same weights on every layout
enable-sequential-execution fuse-elewise-add-act-ops fuse-bn-act-ops fuse-relu-depthwise-conv | | no static program
fuse-broadcast-ops fuse-all-optimizer-ops enable-inplace enable-backward-optimizer-op-deps | | no static program
cache-runtime-context fuse-bn-add-act-ops enable-auto-fusion enable-addto fix-op-run-order | | no static program
allow-cuda-graph-capture reduce-strategy | | no static program
num-threads num-iteration-per-drop-scope num-iteration-per-run use-thread-barrier | | no static program
max-merge-var-num send-queue-size independent-recv-thread min-send-grad-num-before-recv | | no parameter servers
thread-pool-size send-wait-times runtime-split-send-recv launch-barrier | | no parameter servers
heter-worker-device-guard use-ps-gpu a-sync-configs.k-steps a-sync-configs.lr-decay-steps | | no parameter servers
a-sync | | there are no parameter servers
p2p-cache-shape checkpoint-shape | | stages send one tensor, of one shape
enable-auto-parallel to-static semi-auto auto auto-search enable-tuning | | megapar plan chooses layouts
model-with-dpo-criterion sharding-configs.stage | | of its automatic layouts
vocab-path fine-tuning dataset-type train-dataset-type eval-dataset-type | | of fine-tuning
eval-dataset-prob train-dataset-prob random-shuffle num-samples-each-epoch greedy-intokens | | of fine-tuning
template template-backend use-template encode-one-turn split-multi-turn eval-with-do-generation | | of fine-tuning
max-prompt-len truncation-strategy truncate-packing binpacking packing-interval padding-free | | of fine-tuning
dataset-output-dir make-offline-data new-special-tokens-path custom-register-path | | of fine-tuning
processor-use-fast mix-strategy max-estimate-samples estimation-output-file dataset-num-proc | | of fine-tuning
dataset-batch-size dataset-kwargs dataset-text-field num-of-gpus autotuner-benchmark | | of fine-tuning
vision-config ernie-model-config compute-type | | of its command line
moe-multimodal-dispatch-use-allgather moe-dense-experts-token-type-id | | of pictures
balanced-image-preprocess factor rope-3d freq-allocation | | of pictures
resampler-fuse-rms-norm use-recompute-resampler use-recompute-dnd | | of pictures
moe-layer-feed-fake-token compression-ratio moe-gate-detach | | of its model's past
moe-deepep-num-sms moe-ep-barrier moe-deep-gemm | | kernels of experts are torch's
env.home | | of its environment
bf16-full-eval fp16-full-eval | | evaluations compute as training does
"""

_UNSUPPORTED = """
convert-from-hf save-to-hf load-from-hf save-hf-steps save-hf-total-limit | | files: --load-hf, --save-hf
save-hf-memory-growth-threshold aoa-config load-via-cpu | | files: --load-hf, --save-hf
resume-from-huggingface-ckpt | | files: --load-hf
ordered-save-group-size flash-device-save-steps | | files: --async-save, --save, --tensorboard-dir
output-signal-dir logging-dir | | files: --async-save, --save, --tensorboard-dir
enable-zero-cost-checkpoint zcc-workers-num | | files: --local-checkpoint-dir, --async-save
zcc-pipeline-hooks-capacity-usage | | files: --local-checkpoint-dir, --async-save
save-sharding-stage1-model-include-freeze-params optim-shard-num replicate-saved-into-local | | files: one format
pdc-download-ckpt pdc-download-timeout skip-load-data-seq-cache | | files: of a platform
wandb-api-key wandb-http-proxy | | logging: --metrics-jsonl
internal-medicine-monitors internal-medicine-monitor-interval | | logging: --metrics-jsonl
profile profile-step-start profile-step-end | | logging: --profile START:END, both in one
zcc-save-ema-coef zcc-ema-interval zcc-ema-loss-threshold | | no mean of weights is kept
online-merge-ema sharded-model-from-ema | | no mean of weights is kept
recompute-method recompute-num-layers | | memory: with --recompute-granularity, in the same words
recompute-modules recompute-mtp-modules | | memory: units are whole layers
recompute-mtp-granularity recompute-mtp-method | | memory: units are whole layers
use-recompute-attn use-recompute-lm-head use-recompute-loss-fn | | memory: units are whole layers
use-recompute-mtp use-recompute-moe | | memory: units are whole layers
selective-no-recompute-num no-recompute-layers | | memory: --recompute-interval
pp-no-recompute-layer pp-recompute-interval | | memory: --recompute-interval
refined-recompute use-rms-qkv-recompute | | memory: units are whole layers
use-linear-residual-norm-recompute recompute-allgather | | memory: units are whole layers
checkpoints | | memory: units are whole layers
decoderlayer-act-offload-settings offload-pp-data-chunk-size offload-queue | | memory: --recompute-offload
release-grads pp-release-grads sd-release-grads | | memory: gradients lie in segments
release-gradients free-grads-in-comm | | memory: gradients lie in segments
sharding-comm-buffer-size-mb comm-buffer-size-mb sharding-offload-opt-buffersize-gb | | memory: --segment-broadcast-MB
clear-every-step-cache use-mp-gathered-weight | | memory: nothing is cached between steps
offload-fp8-expert-master-weight | | memory: nothing is cached between steps
moe-subbatch-token-num-before-dispatch moe-subbatch-token-num-after-dispatch | | memory: --use-pipe-experts cuts rows
moe-dequant-input dequant-input recompute-fwd-gate-up | | memory: experts keep what they read
shared-expert offline-quant-expert-weight clear-origin-weight-when-offline-quant | | memory: of experts in fp8
stack-quant swiglu-probs-bwd split-group-gemm spaq transpose-split-quant | | speed: of experts in fp8
use-fp8-fuse-node fp8-wgrad | | speed: of experts in fp8
use-ep-comm-overlap use-async-a2a build-skip-comm-buffer | | speed: --ampipe-degree 2 hides all-to-alls
use-combine-before-a2a | | rounding: rows are weighted when they are back
moe-token-dispatcher-type | | speed: tokens travel by all-to-all
use-tpsp-comm-overlap mp-async-allreduce tp-async-allreduce sp-async-reduce-scatter | | speed: --tp-comm-overlap
mp-skip-c-identity mp-fused-linear-param-grad-add enable-linear-fused-grad-add | | speed: gradients lie in fp32 segments
fuse-sequence-parallel-allreduce | | speed: gradients of norms are reduced with all others
dp-comm-overlap sharding-comm-overlap comm-overlap pp-sharding-comm-overlap overlap | | speed: --overlap-grad-reduce
stage1-overlap stage2-overlap stage1-broadcast-overlap stage1-allgather-overlap | | speed: --overlap-param-gather
sd-sharding-comm-overlap sd-shardingv1-comm-overlap | | speed: --overlap-grad-reduce
tensor-fusion stage1-tensor-fusion fuse-optimizer | | speed: segments
fuse-optimizer-states split-param flatten-param-grads | | speed: segments
overlap-p2p-comm use-batch-p2p-comm batch-p2p-comm | | speed: sends never block here
non-batch-p2p-comm partial-send-recv | | speed: sends never block here
send-recv-overlap variable-seq-lengths | | speed: sends never block here
best-unbalanced-scheduler forward-backward-overlap-scheduler use-dualpipev split-backward | | speed: --pp-schedule
pipeline-schedule-mode schedule-mode | | speed: --pp-schedule is 1f1b, gpipe, interleaved or zero_bubble
pp-seg-method | | layout: --pp-seg-method uniform, layer:REGEX, balanced or starts
num-empty-layers-add-in-head num-empty-layers-add-in-tail insert-empty-layer | | layout: --pp-seg-method balanced
cp-balance-mode cp-comm-type | | layout: --context-parallel-algo
split-norm-comm ddp-find-unused-parameters elastic | | of its process groups
experimental-dataflow | | of its program
"""

_LEFT = """
skip-data-intervals ignore-data-skip | | --skip-samples are the samples to leave out
"""

_UNLESS_OTHER = """
lr-end power num-cycles | 1e-7 1 0.5 | | curves are as --lr-decay-style says
moe-dropout-prob moe-all-to-all-dropout | 0 | | experts and messages have no dropout
use-fp8-mlp | | | experts' products are in fp8 there, in 16 bits here
use-fp8 fp8 | | | --fp8 scales each tensor as it is
fp8-configs fp8-mem-configs fp8-fused-ops-configs | | use-fp8 use-fp8-mlp | experts are never in fp8
use-quant-before-a2a | | use-fp8-mlp use-fp8 | rows travel in 16 bits
global-aux-loss | | | balance is over the micro-batch of all data ranks
aux-loss-type | default switch_aux_loss aux_loss seq_aux_loss | | balance is per micro-batch or per sample
moe-router-load-balancing-type | default switch_aux_loss aux_loss seq_aux_loss | | balance is by auxiliary losses
moe-expert-capacity-factor | 0 | | only deepspeed_moe drops tokens here
moe-token-drop-policy | probs | moe-expert-capacity-factor | only deepspeed_moe drops tokens here
moe-pad-expert-input-to-capacity | | moe-expert-capacity-factor | only deepspeed_moe drops tokens here
moe-reverse-token-drop | | moe-capacity | only deepspeed_moe drops tokens here
moe-router-force-load-balancing | | | routing is never forced
train-moe-only train-mtp-only freeze-training freeze-config | | | all weights are trained
mtp-distillation-loss | | | the token after the next is learnt from the data
use-lowprecision-moment ckpt-quant-stage | o0 | | moments are fp32
hybrid-parallel-expert-grad-scale | | | gradients are sums over all tokens
token-balance-loss token-balance-seqlen use-filtered-label-loss | | | every token counts the same
ignore-load-lr-and-optim | | | --no-load-optim leaves the optimizer's state out
neftune neftune-noise-alpha | 5 | neftune | embeddings get no noise
lora rslora lora-plus-scale rslora-plus | 1 | lora | all weights are trained, no adapters
lora-rank lora-path lora-alpha | | lora | all weights are trained, no adapters
weight-quantize-algo merge-with-qdq-base-model | | | weights are not quantised
stage | pt | | trainers here pre-train
localsgd adaptive-localsgd dgc lars lamb asp fp16-allreduce | | | every step is AdamW on the whole batch's gradient
localsgd-configs.k-steps localsgd-configs.begin-step | | localsgd | ranks step together
init-k-steps adaptive-localsgd-configs.begin-step | | adaptive-localsgd | ranks step together
rampup-begin-step rampup-step sparsity | | dgc | gradients are whole
lars-coeff lars-weight-decay lars-configs.epsilon exclude-from-weight-decay | | lars lamb | the optimizer here is AdamW
lamb-weight-decay | | lamb | the optimizer here is AdamW
mtp-attention-flexible | | | the block for the token after the next attends as the others
dataset | | | data are files: --data-path
init-method output-layer-init-method embedding-init-method | | | weights are drawn normal: --init-std
embedding-init-method-std | 0.02 | | all weights are drawn with --init-std
high-precision-rope fp32-residual-connection | | | angles and residuals are as --dtype
adam-d2sum | | | the optimizer here is AdamW
"""

_UNLESS_ANOTHER = """
dsa-indexer-loss-coeff | 0.01 | | attention is dense
moe-layer-interval | 1 | | experts are in all layers behind --first-k-dense
moe-layer-end-index | -1 | | experts are in all layers behind --first-k-dense
moe-group-experts moe-num-dense-experts moe-use-hard-gate moe-gate-scale | | | one router for all experts of a layer
expert-mlp-use-bias | | | biases are in all linear layers or in none
multi-latent-attention | | | latent attention is not built
no-rope-freq | | | every layer turns its keys
position-embedding-type | rope | | positions are rope or learned
gated-linear-unit | true | | --activation gelu is the other one
normalization | rmsnorm layernorm | | norms are RMSNorm or LayerNorm
softmax-scale | | | scores are over sqrt(head)
softmax-type | vanilla | | attention's softmax is the plain one
moe-group-orthogonal-loss | true | | routers' rows are orthogonal all together
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

# Where a script says nothing and Paddle means something else than trainers here: `defaults`.
DEFAULTS: dict[str, Foreign] = defaults("""
adam-beta2 | --adam-beta2 0.999 |
weight-decay | --weight-decay 0.0 |
learning-rate | --lr 5e-05 |
lr-scheduler lr-scheduler-type | @paddle_usual_style |
decay-function | @paddle_usual_fall |
min-lr min-learning-rate | @paddle_usual_floor |
bf16 fp16 amp | @paddle_usual_precision |
fp16-opt-level use-pure-fp16 | @paddle_usual_level |
scale-loss init-loss-scaling | @paddle_usual_loss_scale |
incr-every-n-steps decr-every-n-nan-or-inf | @paddle_usual_window |
per-device-train-batch-size micro-batch-size global-batch-size | --micro-batch-size 8 |
sharding | @paddle_unsharded |
sharding-degree sharding-group-size sharding-parallel-degree sharding-parallel-size | @paddle_usual_degree |
seed | --seed 42 |
max-steps num-train-epochs | | the run's length is not said: --train-iters
max-seq-length max-seq-len max-sequence-length | | the length of a sample is not said: --seq-length
input-dir train-dataset-path | | data are not named: --data-path
split | @paddle_usual_split |
eval-steps evaluation-strategy | @paddle_usual_evaluated |
save-steps save-strategy | @paddle_usual_saved |
logging-steps logging-strategy | --log-interval 500 |
moe-num-experts n-routed-experts num-experts | @paddle_usual_experts |
moe-aux-loss-lambda router-aux-loss-coef | @paddle_usual_aux |
rms-norm-eps | @paddle_usual_eps |
initializer-range | @paddle_usual_std |
tie-word-embeddings | @paddle_usual_tie |
""")


# Parts of names of models that no trainer here is for.
_OTHERS = ("bert", "t5", "bart", "-vl", "vit", "mamba", "rwkv", "chatglm")


def model_of(given: Mapping[str, str]) -> str:
    """Which of our trainers is for a script with these arguments, moe or ernie; empty where none is."""
    plain = {name.rpartition(".")[2]: value for name, value in given.items()}
    if any(name in plain for name in ("moe-num-experts", "moe-group", "moe-k", "use-moe")):
        return "moe"
    name = " ".join(plain.get(key, "") for key in ("model-type", "model-name-or-path", "architecture")).lower()
    if "ernie" in name:
        return "moe" if any(mark in name for mark in ("4.5", "4_5", "4p5", "45")) else "ernie"
    return "" if any(mark in name for mark in _OTHERS) else "moe"
