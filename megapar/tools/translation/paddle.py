"""Translation table for arguments of Paddle Fleet, PaddleNLP, PaddleFormers and ERNIE 4.5; rows as in ``megatron``.

Keys of nested configurations are joined with dots. A row without a dot matches the last part of any key.
``_UNLESS_*`` are rows of ``neutral``: names, values without effect, arguments that they require, reason.
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
tensor-parallel-degree= tensor-model-parallel-size= mp-degree= | @~above 1: --mp-degree {value} else a single mp rank |
pipeline-parallel-degree= pipeline-model-parallel-size= pp-degree= | \
    @~above 1: --pp-degree {value} else a single stage |
virtual-pp-degree= virtual-pipeline-model-parallel-size= | @~above 1: --vpp-degree {value} --pp-schedule interleaved \
    else one chunk per stage |
expert-parallel-degree= expert-model-parallel-size= ep-degree= | @~above 1: --ep-degree {value} else a single ep rank |
expert-tensor-model-parallel-size= | @~above 1: --expert-mp-degree {value} else experts are not sharded |
context-parallel-degree= context-parallel-size= | @~above 1: --cp-degree {value} else \
    a single cp rank has the whole sequence |
sep-parallel-degree= sep-parallel-size= sep-degree= | \
    @~above 1: --cp-degree {value} --context-parallel-algo ulysses_cp_algo \
    else a single rank has the whole sequence |
data-parallel-degree= dp-degree= | @~above 1: --hybrid-dp \
    else the number of replicas follows from the number of ranks | \
    the number of replicas follows from the number of ranks
hybrid-dp | @~on: --hybrid-dp else no replicas |
sharding | @paddle_sharding |
sharding-parallel-degree= sharding-parallel-size= sharding-degree= sharding-group-size= | @paddle_sharding_degree |
segment-anchors= | @paddle_anchors |
sequence-parallel | @paddle_cut |
per-device-train-batch-size= micro-batch-size= | @above 0: --micro-batch-size {value} else set elsewhere |
gradient-accumulation-steps gradient-merge-configs.k-steps | --gradient-merge-acc-step {value} |
num-acc-steps n-microbatches | --gradient-merge-acc-step {value} |
global-batch-size= | @above 0: --global-batch-size {value} \
    else micro-batch size x accumulation steps x data ranks, the same default |
max-steps= | @paddle_steps |
num-train-epochs= | @paddle_epochs |
max-seq-length= max-seq-len= max-sequence-length= | @paddle_length |
base-seq-length= | @paddle_base_length |
learning-rate | --lr {value} |
min-lr= min-learning-rate= | @above 0: --min-lr {value} else the learning rate decays to 0 |
lr-scheduler= lr-scheduler-type= | @paddle_style |
decay-function= | @paddle_fall |
decay-steps | --lr-decay-iters {value} |
warmup-steps= | @paddle_warmup |
warmup-ratio= | @paddle_warmup_share |
adam-epsilon | --adam-eps {value} |
max-grad-norm | --clip-grad {value} |
bf16 | @on: --dtype bf16 else switched off |
fp16 amp use-pure-fp16 | @on: --dtype fp16 else switched off |
fp16-opt-level= | @paddle_level |
amp-master-grad | @paddle_master_gradients |
scale-loss= init-loss-scaling= | @paddle_loss_scale |
incr-every-n-steps | --loss-scale-window {value} |
decr-every-n-nan-or-inf | --hysteresis {value} |
incr-ratio | --loss-scale-factor {value} |
decr-ratio= | @paddle_shrink |
recompute use-recompute | @paddle_recomputed |
recompute-granularity= | @paddle_granularity |
enable-offload offload-recompute-inputs | --recompute-offload |
use-flash-attention use-flash-attn | @paddle_flash |
offload-optim optimize-offload tensorwise-offload-optimizer | --optimizer-offload |
deterministic-mode | --deterministic |
logging-steps | --log-interval {value} |
save-steps= | @~with output-dir: --save-interval {value} else nothing is saved without output_dir |
eval-steps= | @paddle_evaluated |
eval-iters= max-evaluate-steps= | @paddle_evaluations |
output-dir | --save {value} |
save-total-limit | --keep {value} |
save-strategy= evaluation-strategy= logging-strategy= | @paddle_rhythm |
use-async-save | --async-save |
input-dir= train-dataset-path= | @paddle_data |
eval-dataset-path= | @paddle_held_out |
tokenizer-name-or-path tokenizer-name | --tokenizer-model {value} |
model-name-or-path= model-type= | @paddle_model |
continue-training | @paddle_continued |
resume-from-checkpoint= | @paddle_resumed |
num-hidden-layers= | @paddle_layers |
remove-tail-layer | @paddle_tail |
intermediate-size | --ffn-hidden-size {value} |
rms-norm-eps | --layernorm-epsilon {value} |
initializer-range= | @paddle_std |
tie-word-embeddings | @paddle_tied |
use-rmsnorm | @paddle_norm |
hidden-act= | @paddle_activation |
use-bias | --add-bias-linear |
use-qk-norm | --qk-norm |
hidden-dropout-prob | --hidden-dropout {value} |
attention-probs-dropout-prob | --attention-dropout {value} |
moe-num-experts= n-routed-experts= num-experts= | @paddle_experts |
moe-k | --moe-router-topk {value} |
num-experts-per-tok= | @paddle_choices |
moe-intermediate-size= | @paddle_expert_width |
moe-num-shared-experts n-shared-experts | --moe-shared-experts {value} |
moe-layer-start-index= first-k-dense-replace= | @paddle_first_dense |
moe-capacity= | @paddle_capacity |
moe-aux-loss-lambda= | @paddle_aux_of_all_choices |
router-aux-loss-coef= | @paddle_aux |
moe-orthogonal-loss-lambda | --moe-orthogonal-loss-coeff {value} |
router-z-loss-coef | --moe-z-loss-coeff {value} |
moe-use-aux-free | @paddle_bias |
moe-use-aux-free-update-coef= moe-router-bias-update-rate= | @paddle_bias_rate |
moe-gate-lr-ratio= | @paddle_gate_rate |
moe-group= | @paddle_group |
moe-gate= | @paddle_gate |
moe-gate-act= scoring-func= | @paddle_score |
moe-norm-gate-logits norm-topk-prob= | @paddle_weights |
n-group= | @paddle_expert_groups |
topk-group= | @paddle_chosen_groups |
scaling-factor routed-scaling-factor | --moe-router-topk-scaling-factor {value} |
multi-token-pred-depth= num-nextn-predict-layers= mtp-num-layers= | @paddle_ahead |
multi-token-pred-lambda= mtp-loss-scaling-factor= | @paddle_ahead_weight |
optim= | @paddle_optimizer |
muon-exclude-patterns= muon-qkv-update-mode= muon-ffn-split muon-extra-scale-factor= | @paddle_muon | an option of Muon
muon-momentum= muon-version= muon-ns-steps= muon-ns-coeff-type= muon-ns-coeffs= | @paddle_muon | an option of Muon
normalize-logps label-smoothing= ignore-eos-token | @paddle_preferred | an option of preference training
ref-model-update-steps= reference-free loss-type= | @paddle_preferred | an option of preference training
pref-loss-ratio= sft-loss-ratio= beta= offset-alpha= simpo-gamma= | @paddle_preferred | an option of preference training
dpop-lambda= | @paddle_preferred | an option of preference training
report-to= | @paddle_logged |
sharding-parallel-config= | @paddle_sharding_words |
pipeline-parallel-config= | @paddle_pipeline_words |
tensor-parallel-config= | @paddle_tensor_words |
data-parallel-config= sequence-parallel-config= | @paddle_replica_words |
"""

_IMPLIED = """
do-train use-moe use-expert-parallel | | trainers always train; experts are --num-experts
use-intermediate-api from-scratch= | | weights are initialized randomly
use-ortho-loss-callback | | set by --moe-orthogonal-loss-coeff
use-fused-rms-norm use-fused-rope use-fused-linear use-fused-dropout-add | | fused kernels are used if available
use-fast-ln fuse-rms-norm fuse-ln fuse-swiglu fuse-linear fuse-rope | | fused kernels are used if available
apply-rope-fusion use-fast-layer-norm fuse-attn-ffn fuse-attention-qkv= | | fused kernels are used if available
fuse-attention-ffn= fuse-gate-detach-matmul fuse-softmax-mask use-mem-eff-attn | | fused kernels are used if available
use-flash-attn-with-mask use-sparse-flash-attn fa-version= | | fused kernels are used if available
use-fused-linear-cross-entropy use-fused-head-and-loss-fn use-fused-head-loss-fn | | logits are computed in chunks
loss-subbatch-seqlen= loss-subbatch-sequence-length= use-sparse-head-and-loss-fn | | logits are computed in chunks
moe-use-fusion-node moe-router-fusion moe-expert-fusion using-sonic-moe | | experts run as a grouped GEMM
use-unified-moe | | experts run as a grouped GEMM
moe-shared-expert-overlap | | shared experts overlap with the token dispatch
use-attn-mask-startend-row-indices attn-implementation= | | attention is causal, without a mask
gradient-merge fuse-grad-merge gradient-merge-configs.avg | | gradients accumulate over the tokens of all micro-batches
scale-strategy= scale-gradient use-dynamic-loss-scaling delay-scale-loss | | losses are averaged over the global batch
pp-delay-scale-loss enable-delay-scale-loss | | losses are averaged over the global batch
custom-white-list= custom-black-list= custom-black-varnames= | | norms, softmax and losses are computed in fp32
amp-custom-black-list= amp-custom-white-list= | | norms, softmax and losses are computed in fp32
use-fp16-guard use-optimizer-fp16 optimize-cast | | 16-bit copies are made once per step
unified-checkpoint unified-checkpoint-config= save-sharded-model | | one format, which loads on any layout
load-sharded-model save-checkpoint-format= load-checkpoint-format= | | one format, which loads on any layout
flex-ckpt-comm-method= save-rng-states | | one format, which loads on any layout
load-sharded-model-remap-parameter-name force-reshard-pp | | one format, for any layout
auto-parallel-resume-form-hybrid-parallel | | one format, for any layout
log-global-grad-norm | | the gradient norm is always logged
use-sp-callback sp-allreduce-avg-in-gradinent-scale | | gradients are summed over all axes
dp-allreduce-avg-in-gradinent-scale gradient-sync-after-accumulate | | gradients are summed over all axes, once per step
sync-param sync-grad sync-moment pp-sync-param tp-sync-param tp-sync-moment | | ranks always have the same values
pp-sync-moment | | ranks always have the same values
use-reduce-avg stage1-reduce-avg auto-parallel-sync-shared-params | | gradients are sums, once for shared weights
replace-with-parallel-cross-entropy replace-with-c-embedding tensor-parallel-output | | logits stay sharded over mp
moe-with-send-router-loss enable-mtp-magic-send | | losses are added where they are computed
use-calc-stream | | messages have separate streams
pipeline tensor-parallel tensor-parallel-configs.tensor-parallel-degree= | | set by the parallel degrees
distributed-dataloader split-inputs-sequence-dim pp-need-data | | every rank reads the data it needs
pp-need-data-degree= | | every rank reads the data it needs
packing | | pre-training samples are always full
use-global-causal-attn | | the default without --reset-attention-mask
"""

_UNNECESSARY = """
do-eval do-predict do-export prediction-loss-only | | set by --eval-interval
overwrite-output-dir disable-tqdm remove-unused-columns label-names= past-index= | | an option of Paddle's trainer
run-name= | | an option of Paddle's trainer
per-device-eval-batch-size= eval-accumulation-steps= | | evaluation uses global batches
device= no-cuda local-rank= mode= | | chosen by --device
log-on-each-node save-on-each-node logging-first-step | | one rank logs; every rank saves its part
load-best-model-at-end metric-for-best-model= greater-is-better= | | the result of a run is its last step
minimum-eval-times= | | the result of a run is its last step
ignore-save-lr-and-optim save-tokenizer save-last-step | | a checkpoint contains everything needed to resume
dataloader-num-workers= prefetch-factor= lazy-data-processing data-load-process-num= | | one thread prefetches
buffer-size= | | one thread prefetches
dataloader-shuffle dataloader-drop-last | | samples are shuffled once per epoch and packed
num-consecutive= shuffle-consecutive | | the order of samples depends on --seed, as in Paddle
global-shuffle-num-examples= | | the order of samples depends on --seed, as in Paddle
same-data= | | a resumed run continues with the next sample on any layout
data-impl= skip-warmup warmup-only-rank0 data-cache= share-folder | | files are memory-mapped; nothing is cached
packed-idx-cache-dir= | | files are memory-mapped; nothing is cached
seqlen max-position-embeddings= using-dynamic-sequence-length | | all samples have the same length
pad-token-id= bos-token-id= eos-token-id= ignored-index= | | the tokenizer defines these ids
use-cache architectures= torch-dtype= transformers-version= copy-custom-file-list= | | an option of Paddle's model files
download-hub= | | an option of Paddle's model files
tensor-parallel-rank= rope-reorder weight-share-add-bias | | memory layout of Paddle's tensors
recompute-use-reentrant | | recompute is never reentrant
skip-profile-timer enable-timer= timer enable-optimizer-timer skip-memory-metrics | | wait times are always measured
moe-logging using-precision-check enable-global-training-logs metrics-output-path= | | logged with --log-interval
count-trained-tokens global-logging-interval= | | logged with --log-interval
pre-alloc-memory= use-train-part-sharding= | | the allocator manages memory
gc-interval= | | --manual-gc synchronizes the ranks' collections
hybrid-parallel-topo-order= order= reorder-pipeline-priority | | numbers do not depend on --rank-order
sharding-parallel-mesh-dimension= sharding-comm-group-call-opt | | process groups are created in one order
nccl-comm-group-config= | | process groups are created in one order
nccl-comm-num= use-hierarchical-allreduce hierarchical-allreduce-inter-nranks= | | set by NCCL's environment variables
heter-ccl-mode | | set by NCCL's environment variables
fuse-all-reduce-ops fuse-grad-size-in-mb= fuse-grad-size-in-tflops= | | bucket sizes: --segment-broadcast-MB
fuse-grad-size-in-num= last-comm-group-size-mb= sync-nccl-allreduce | | bucket sizes: --segment-broadcast-MB
calc-comm-same-stream | | bucket sizes: --segment-broadcast-MB
pp-allreduce-in-optimize -dp-as-optimizer-sharding | | gradients are reduced once per step
cudnn-exhaustive-search conv-workspace-size-limit= | | the models have no convolutions
cudnn-batchnorm-spatial-persistent | | the models have no convolutions
sync-batch-norm without-graph-optimization find-unused-parameters | | megapar has no static program
enable-sequential-execution fuse-elewise-add-act-ops fuse-bn-act-ops | | megapar has no static program
fuse-relu-depthwise-conv fuse-broadcast-ops fuse-all-optimizer-ops enable-inplace | | megapar has no static program
enable-backward-optimizer-op-deps cache-runtime-context fuse-bn-add-act-ops | | megapar has no static program
enable-auto-fusion enable-addto fix-op-run-order allow-cuda-graph-capture | | megapar has no static program
reduce-strategy= num-threads= num-iteration-per-drop-scope= num-iteration-per-run= | | megapar has no static program
use-thread-barrier | | megapar has no static program
tensor-init-seed= | | set by --seed; weights are the same on every layout
max-merge-var-num= send-queue-size= independent-recv-thread | | megapar has no parameter servers
min-send-grad-num-before-recv= thread-pool-size= send-wait-times= | | megapar has no parameter servers
runtime-split-send-recv launch-barrier heter-worker-device-guard= use-ps-gpu= | | megapar has no parameter servers
a-sync-configs.k-steps= a-sync-configs.lr-decay-steps= a-sync | | megapar has no parameter servers
p2p-cache-shape checkpoint-shape= | | stages send one tensor of one shape
enable-auto-parallel to-static semi-auto auto auto-search enable-tuning | | megapar plan chooses layouts
model-with-dpo-criterion sharding-configs.stage= | | an option of automatic layouts
vocab-path= fine-tuning= dataset-type= train-dataset-type= eval-dataset-type= | | an option of fine-tuning
eval-dataset-prob= train-dataset-prob= random-shuffle num-samples-each-epoch= | | an option of fine-tuning
greedy-intokens template= template-backend= use-template encode-one-turn split-multi-turn | | an option of fine-tuning
eval-with-do-generation max-prompt-len= truncation-strategy= truncate-packing binpacking | | an option of fine-tuning
packing-interval= padding-free dataset-output-dir= make-offline-data | | an option of fine-tuning
new-special-tokens-path= custom-register-path= processor-use-fast= mix-strategy= | | an option of fine-tuning
max-estimate-samples= estimation-output-file= dataset-num-proc= dataset-batch-size= | | an option of fine-tuning
dataset-kwargs= dataset-text-field= num-of-gpus= autotuner-benchmark | | an option of fine-tuning
vision-config= ernie-model-config= compute-type= | | an option of Paddle's command line
moe-multimodal-dispatch-use-allgather= moe-dense-experts-token-type-id= | | an option of image models
balanced-image-preprocess factor= rope-3d freq-allocation= resampler-fuse-rms-norm | | an option of image models
use-recompute-resampler use-recompute-dnd | | an option of image models
moe-layer-feed-fake-token compression-ratio= moe-gate-detach= | | an option of older models
moe-deepep-num-sms= moe-ep-barrier moe-deep-gemm | | experts use torch's kernels
env.home= | | an option of Paddle's environment
bf16-full-eval fp16-full-eval | | evaluations use the precision of training
"""

_UNSUPPORTED = """
convert-from-hf save-to-hf load-from-hf save-hf-steps= save-hf-total-limit= | | files: --load-hf, --save-hf
save-hf-memory-growth-threshold= aoa-config= load-via-cpu | | files: --load-hf, --save-hf
resume-from-huggingface-ckpt= | | files: --load-hf
ordered-save-group-size= flash-device-save-steps= output-signal-dir= | | files: --async-save, --save, --tensorboard-dir
logging-dir= | | files: --async-save, --save, --tensorboard-dir
enable-zero-cost-checkpoint zcc-workers-num= | | files: --local-checkpoint-dir, --async-save
zcc-pipeline-hooks-capacity-usage= | | files: --local-checkpoint-dir, --async-save
save-sharding-stage1-model-include-freeze-params optim-shard-num= replicate-saved-into-local | | files: one format
pdc-download-ckpt pdc-download-timeout= skip-load-data-seq-cache= | | files: an option of a platform
wandb-api-key= wandb-http-proxy= | | logging: --wandb-project, with WANDB_API_KEY and HTTPS_PROXY in the environment
internal-medicine-monitors= internal-medicine-monitor-interval= | | logging: --metrics-jsonl
profile profile-step-start= profile-step-end= | | logging: --profile START:END
zcc-save-ema-coef= zcc-ema-interval= zcc-ema-loss-threshold= online-merge-ema | | no moving average of weights is kept
sharded-model-from-ema | | no moving average of weights is kept
recompute-method= recompute-num-layers= | | memory: use --recompute-granularity
recompute-modules= recompute-mtp-modules= recompute-mtp-granularity= | | memory: units are whole layers
recompute-mtp-method= use-recompute-attn use-recompute-lm-head use-recompute-loss-fn | | memory: units are whole layers
use-recompute-mtp use-recompute-moe refined-recompute= use-rms-qkv-recompute | | memory: units are whole layers
use-linear-residual-norm-recompute recompute-allgather checkpoints= | | memory: units are whole layers
selective-no-recompute-num= no-recompute-layers= pp-no-recompute-layer= | | memory: --recompute-interval
pp-recompute-interval= | | memory: --recompute-interval
decoderlayer-act-offload-settings= offload-pp-data-chunk-size= offload-queue | | memory: --recompute-offload
release-grads pp-release-grads sd-release-grads release-gradients | | memory: gradients are in buckets
free-grads-in-comm | | memory: gradients are in buckets
sharding-comm-buffer-size-mb= comm-buffer-size-mb= | | memory: --segment-broadcast-MB
sharding-offload-opt-buffersize-gb= | | memory: --segment-broadcast-MB
clear-every-step-cache use-mp-gathered-weight | | memory: nothing is cached between steps
offload-fp8-expert-master-weight | | memory: nothing is cached between steps
moe-subbatch-token-num-before-dispatch= | | memory: --use-pipe-experts splits rows
moe-subbatch-token-num-after-dispatch= | | memory: --use-pipe-experts splits rows
moe-dequant-input dequant-input recompute-fwd-gate-up | | memory: experts save their inputs
shared-expert offline-quant-expert-weight clear-origin-weight-when-offline-quant | | memory: an option of fp8 experts
stack-quant swiglu-probs-bwd split-group-gemm spaq transpose-split-quant | | speed: an option of fp8 experts
use-fp8-fuse-node fp8-wgrad | | speed: an option of fp8 experts
use-ep-comm-overlap use-async-a2a build-skip-comm-buffer | | speed: --ampipe-degree 2 hides all-to-alls
use-combine-before-a2a | | rounding: router weights are applied after the combine
moe-token-dispatcher-type= | | speed: all-to-alls; --moe-dispatch node sends as few rows as deepep does
use-tpsp-comm-overlap mp-async-allreduce tp-async-allreduce sp-async-reduce-scatter | | speed: --tp-comm-overlap
mp-skip-c-identity mp-fused-linear-param-grad-add enable-linear-fused-grad-add | | speed: gradients are in fp32 buckets
fuse-sequence-parallel-allreduce | | speed: gradients of norms are reduced with the others
dp-comm-overlap sharding-comm-overlap comm-overlap pp-sharding-comm-overlap overlap | | speed: --overlap-grad-reduce
sd-sharding-comm-overlap sd-shardingv1-comm-overlap | | speed: --overlap-grad-reduce
stage1-overlap stage2-overlap stage1-broadcast-overlap stage1-allgather-overlap | | speed: --overlap-param-gather
tensor-fusion stage1-tensor-fusion fuse-optimizer fuse-optimizer-states | | speed: buckets are always contiguous
split-param flatten-param-grads | | speed: buckets are always contiguous
overlap-p2p-comm use-batch-p2p-comm batch-p2p-comm non-batch-p2p-comm partial-send-recv | | speed: sends never block
send-recv-overlap variable-seq-lengths | | speed: sends never block
best-unbalanced-scheduler forward-backward-overlap-scheduler use-dualpipev split-backward | | speed: --pp-schedule
pipeline-schedule-mode= schedule-mode= | | speed: --pp-schedule is 1f1b, gpipe, interleaved or zero_bubble
pp-seg-method= | | layout: --pp-seg-method uniform, layer:REGEX, balanced or first layers
num-empty-layers-add-in-head= num-empty-layers-add-in-tail= insert-empty-layer= | | layout: --pp-seg-method balanced
cp-balance-mode= cp-comm-type= | | layout: --context-parallel-algo
split-norm-comm ddp-find-unused-parameters= elastic | | an option of Paddle's process groups
experimental-dataflow | | an option of Paddle's program
"""

_LEFT = """
skip-data-intervals= ignore-data-skip | | --skip-samples skips ranges of samples
"""

_UNLESS_OTHER = """
lr-end= power= num-cycles= | 1e-7 1 0.5 | | --lr-decay-style defines the curve
moe-dropout-prob= moe-all-to-all-dropout= | 0 | | experts and messages have no dropout
use-fp8-mlp | | | expert GEMMs use fp8 in Paddle, 16 bits in megapar
use-fp8 fp8= | | | --fp8 uses current scaling per tensor
fp8-configs= fp8-mem-configs= fp8-fused-ops-configs= | | use-fp8 use-fp8-mlp | experts never use fp8
use-quant-before-a2a | | use-fp8-mlp use-fp8 | rows are sent in 16 bits
global-aux-loss | | | experts are balanced over the micro-batch of all data ranks
aux-loss-type= | default switch_aux_loss aux_loss seq_aux_loss | | experts are balanced per micro-batch or per sample
moe-router-load-balancing-type= | default switch_aux_loss aux_loss seq_aux_loss | | auxiliary losses balance the experts
moe-expert-capacity-factor= | 0 | | only deepspeed_moe drops tokens in megapar
moe-token-drop-policy= | probs | moe-expert-capacity-factor | only deepspeed_moe drops tokens in megapar
moe-pad-expert-input-to-capacity | | moe-expert-capacity-factor | only deepspeed_moe drops tokens in megapar
moe-reverse-token-drop | | moe-capacity | only deepspeed_moe drops tokens in megapar
moe-router-force-load-balancing | | | forced routing is not supported
train-moe-only= train-mtp-only freeze-training freeze-config= | | | all weights are trained
mtp-distillation-loss | | | multi-token prediction learns from the data
use-lowprecision-moment ckpt-quant-stage= | o0 | | optimizer moments are fp32
hybrid-parallel-expert-grad-scale= | | | gradients are sums over all tokens
token-balance-loss token-balance-seqlen use-filtered-label-loss | | | all tokens have the same weight
ignore-load-lr-and-optim | | | --no-load-optim skips the optimizer state
neftune neftune-noise-alpha= | 5 | neftune | embeddings have no noise
lora rslora lora-plus-scale= rslora-plus | 1 | lora | all weights are trained; adapters are not supported
lora-rank= lora-path= lora-alpha= | | lora | all weights are trained; adapters are not supported
weight-quantize-algo= merge-with-qdq-base-model | | | weights are not quantized
stage= | pt | | megapar only pre-trains
localsgd adaptive-localsgd dgc lars lamb asp fp16-allreduce | | | every step is AdamW on the gradient of the whole batch
localsgd-configs.k-steps= localsgd-configs.begin-step= | | localsgd | all ranks step together
init-k-steps= adaptive-localsgd-configs.begin-step= | | adaptive-localsgd | all ranks step together
rampup-begin-step= rampup-step= sparsity= | | dgc | gradients are not compressed
lars-coeff= lars-weight-decay= lars-configs.epsilon= exclude-from-weight-decay= | | lars lamb | the optimizer is AdamW
lamb-weight-decay= | | lamb | the optimizer is AdamW
mtp-attention-flexible | | | the multi-token prediction block has the same attention as the layers
dataset= | | | data are read from files: --data-path
init-method= output-layer-init-method= embedding-init-method= | | | weights are normally distributed: --init-std
embedding-init-method-std= | 0.02 | | all weights are initialized with --init-std
high-precision-rope fp32-residual-connection | | | rotary angles and residuals use --dtype
adam-d2sum | | | the optimizer is AdamW
"""

_UNLESS_ANOTHER = """
dsa-indexer-loss-coeff= | 0.01 | | attention is dense
moe-layer-interval= | 1 | | all layers after --first-k-dense have experts
moe-layer-end-index= | -1 | | all layers after --first-k-dense have experts
moe-group-experts moe-num-dense-experts= moe-use-hard-gate moe-gate-scale | | | a layer has one router for all experts
expert-mlp-use-bias= | | | all linear layers have biases, or none
multi-latent-attention | | | multi-latent attention is not supported
no-rope-freq | | | RoPE is applied in every layer
position-embedding-type= | rope | | position embeddings are RoPE or learned
gated-linear-unit | true | | the alternative is --activation gelu
normalization= | rmsnorm layernorm | | norms are RMSNorm or LayerNorm
softmax-type= | vanilla | | attention uses a plain softmax
moe-group-orthogonal-loss | true | | the orthogonal loss covers all rows of a router together
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

# Defaults of Paddle that differ from megapar's.
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
max-steps num-train-epochs | | the run length is not set: --train-iters
max-seq-length max-seq-len max-sequence-length | | the sample length is not set: --seq-length
input-dir train-dataset-path | | no data are set: --data-path
split | @with input-dir: --split 949,50,1 else no data are set |
eval-steps evaluation-strategy | @paddle_usual_evaluated |
save-steps save-strategy | @~with output-dir: --save-interval 500 else nothing is saved without output_dir |
logging-steps logging-strategy | --log-interval 500 |
moe-num-experts n-routed-experts num-experts | @paddle_usual_experts |
moe-aux-loss-lambda router-aux-loss-coef | @paddle_usual_aux |
rms-norm-eps | @paddle_usual_eps |
initializer-range | @paddle_usual_std |
tie-word-embeddings | @paddle_usual_tie |
""")


# Parts of the names of models for which megapar has no trainer.
_OTHERS = ("bert", "t5", "bart", "-vl", "vit", "mamba", "rwkv", "chatglm")


def trainer_kind(given: Mapping[str, str]) -> str:
    """Return the kind of trainer for a script with these arguments, "moe" or "ernie"; "" if there is none."""
    plain = {name.rpartition(".")[2]: value for name, value in given.items()}
    if any(name in plain for name in ("moe-num-experts", "moe-group", "moe-k", "use-moe")):
        return "moe"
    name = " ".join(plain.get(key, "") for key in ("model-type", "model-name-or-path", "architecture")).lower()
    if "ernie" in name:
        return "moe" if any(mark in name for mark in ("4.5", "4_5", "4p5", "45")) else "ernie"
    return "" if any(mark in name for mark in _OTHERS) else "moe"
