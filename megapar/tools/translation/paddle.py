"""Translation table for arguments of Paddle Fleet, PaddleNLP, PaddleFormers and ERNIE 4.5 (form: ``verdict.table``).

Keys of nested configurations are joined with dots. A row without a dot matches the last part of any key.
"""

from __future__ import annotations

from megapar.tools.translation.verdict import Foreign, defaults, table

ROWS: dict[str, Foreign] = table("""
[renamed]
tensor-parallel-degree= tensor-model-parallel-size= mp-degree= | @~above 1: --mp-degree {value} else a single mp rank |
pipeline-parallel-degree= pipeline-model-parallel-size= pp-degree= | ~ |
    above 1: --pp-degree {value}
    else: unnecessary | a single stage
virtual-pp-degree= virtual-pipeline-model-parallel-size= | ~ |
    above 1: --vpp-degree {value} --pp-schedule interleaved
    else: unnecessary | one chunk per stage
expert-parallel-degree= expert-model-parallel-size= ep-degree= | @~above 1: --ep-degree {value} else a single ep rank |
expert-tensor-model-parallel-size= | @~above 1: --expert-mp-degree {value} else experts are not sharded |
context-parallel-degree= context-parallel-size= | ~ |
    above 1: --cp-degree {value}
    else: unnecessary | a single cp rank has the whole sequence
sep-parallel-degree= sep-parallel-size= sep-degree= | ~ |
    above 1: --cp-degree {value} --context-parallel-algo ulysses_cp_algo
    else: unnecessary | a single rank has the whole sequence
data-parallel-degree= dp-degree= | ~ |
    above 1: --hybrid-dp | the number of replicas follows from the number of ranks
    else: unnecessary | the number of replicas follows from the number of ranks
hybrid-dp | @~on: --hybrid-dp else no replicas |
sharding | @~paddle_sharding |
sharding-parallel-degree= sharding-parallel-size= sharding-degree= sharding-group-size= | ~ |
    below 0: unnecessary | all data ranks, the same default
    at most 1: unnecessary | a single rank shards nothing
    else: --sharding-degree {value} | with more ranks, also set --hybrid-dp
segment-anchors= | ~ |
    is '' []: unnecessary | no anchors
    else: left to you | anchors are names of modules, of program variables in Paddle: --segment-anchors
sequence-parallel | ~ |
    off: unnecessary | switched off
    tensor-parallel-degree tensor-model-parallel-size mp-degree or 1 at most 1: unnecessary \
        | a single mp rank has the whole sequence
    else: --sequence-parallel
per-device-train-batch-size= micro-batch-size= | @above 0: --micro-batch-size {value} else set elsewhere |
gradient-accumulation-steps gradient-merge-configs.k-steps | --gradient-merge-acc-step {value} |
num-acc-steps n-microbatches | --gradient-merge-acc-step {value} |
global-batch-size= |
    above 0: --global-batch-size {value}
    else: unnecessary | micro-batch size x accumulation steps x data ranks, the same default
max-steps= | @above 0: --train-iters {value} else left to you: run lengths are given in steps: --train-iters |
num-train-epochs= |
    max-steps above 0: unnecessary | --max_steps takes precedence
    else: left to you | run lengths are given in steps: --train-iters
max-seq-length= max-seq-len= max-sequence-length= | @else: --seq-length {value} |
base-seq-length= | @paddle_base_length |
learning-rate | --lr {value} |
min-lr= min-learning-rate= | @above 0: --min-lr {value} else the learning rate decays to 0 |
lr-scheduler= lr-scheduler-type= | @paddle_style |
decay-function= | @paddle_fall |
decay-steps | --lr-decay-iters {value} |
warmup-steps= |
    above 0: --lr-warmup-iters {value} \
        | the warmup is one step ahead: its first step has a part of the rate, 0 in Paddle
    else: unnecessary | warmup is off
warmup-ratio= | @paddle_warmup_share |
adam-epsilon | --adam-eps {value} |
max-grad-norm | --clip-grad {value} |
bf16 | @on: --dtype bf16 else switched off |
fp16 amp use-pure-fp16 | @on: --dtype fp16 else switched off |
fp16-opt-level= |
    not bf16 fp16 on: unnecessary | fp32 throughout
    is O2: implied | 16-bit weights with fp32 master weights
    else: other numbers | {value} keeps weights and norms in fp32; megapar keeps only master weights in fp32 (O2)
amp-master-grad |
    off and bf16 fp16 on: other numbers | gradients are accumulated in fp32, in 16 bits in Paddle
    else: implied | gradients are accumulated in fp32
scale-loss= init-loss-scaling= |
    not fp16 amp use-pure-fp16 on: unnecessary | the loss is scaled only with fp16
    else: --initial-loss-scale {value}
incr-every-n-steps | --loss-scale-window {value} |
decr-every-n-nan-or-inf | --hysteresis {value} |
incr-ratio | --loss-scale-factor {value} |
decr-ratio= | @paddle_shrink |
recompute use-recompute | ~ |
    off: unnecessary | switched off
    recompute-granularity is core_attn: \
        --recompute-granularity selective --recompute-method uniform --recompute-num-layers 1
    recompute-granularity or full is full: --recompute-interval 1
    else: --recompute-interval 1 | whole layers instead of {recompute-granularity}: recomputes more
recompute-granularity= | ~ |
    is selective: --recompute-granularity {value}
    with recompute-method: --recompute-granularity {value}
    recompute use-recompute on: implied | set with recompute
    else: unnecessary | nothing is recomputed
enable-offload offload-recompute-inputs | --recompute-offload |
use-flash-attention use-flash-attn | @~off: --no-use-flash-attn else implied: fused attention is the default |
offload-optim optimize-offload tensorwise-offload-optimizer | --optimizer-offload |
deterministic-mode | --deterministic |
logging-steps | --log-interval {value} |
save-steps= | @~with output-dir: --save-interval {value} else nothing is saved without output_dir |
eval-steps= | ~ |
    evaluated in paddle: --eval-interval {value}
    else: --eval-interval 0 | evaluation is off without do_eval
eval-iters= max-evaluate-steps= | ~ |
    evaluated in paddle: --eval-iters 10 | Paddle's trainers override it with 10
    else: unnecessary | evaluation is off without do_eval
output-dir | --save {value} |
save-total-limit | --keep {value} |
save-strategy= evaluation-strategy= logging-strategy= | ~ |
    is epoch: left to you | intervals are given in steps, not epochs
    is no: unnecessary | switched off
    else: implied | in steps
use-async-save | --async-save |
input-dir= train-dataset-path= | @~paddle_data |
eval-dataset-path= | @~evaluated in paddle: --eval-data-path {value} else evaluation is off without do_eval |
tokenizer-name-or-path tokenizer-name | --tokenizer-model {value} |
model-name-or-path= model-type= |
    with hidden-size: implied | the sizes are given
    has gpt: left to you | its configuration contains the sizes: also translate that file, or set --load-hf to its \
        folder; for GPT, also --hidden-dropout 0.1 --attention-dropout 0.1
    else: left to you | its configuration contains the sizes: also translate that file, or set --load-hf to its folder
continue-training |
    off: unnecessary | weights are initialized randomly
    else: left to you | initial weights: set --load-hf to their folder in Hugging Face format
resume-from-checkpoint= |
    is '' true false 0: unnecessary | set --load to the folder of checkpoints to resume from
    else: left to you | Paddle checkpoints are not supported: export to Hugging Face format for --load-hf
num-hidden-layers= | @paddle_layers |
remove-tail-layer | @else: implied | --num-layers counts the remaining layers
intermediate-size | --ffn-hidden-size {value} |
rms-norm-eps | --layernorm-epsilon {value} |
initializer-range= | @paddle_std |
tie-word-embeddings |
    off: --untie-embeddings-and-output-weights
    else: implied | the output projection and the embedding are tied
use-rmsnorm | @off: --normalization layernorm else implied: RMSNorm is the default |
hidden-act= |
    is silu swish: implied | SwiGLU is the default
    is gelu: --activation gelu
    else: another model | activation functions are SwiGLU and GELU
use-bias | --add-bias-linear |
use-qk-norm | --qk-norm |
hidden-dropout-prob | --hidden-dropout {value} |
attention-probs-dropout-prob | --attention-dropout {value} |
moe-num-experts= n-routed-experts= num-experts= |
    alike: --num-experts {word}
    else: another model | all layers have the same experts, for one type of token
moe-k | --moe-router-topk {value} |
num-experts-per-tok= | @without moe-k: --moe-router-topk {value} else set by moe_k |
moe-intermediate-size= |
    not alike and not is '': another model | all layers have the same experts, for one type of token
    at most 0: unnecessary | experts are as wide as the dense layers
    else: --moe-ffn-hidden-size {value}
moe-num-shared-experts n-shared-experts | --moe-shared-experts {value} |
moe-layer-start-index= first-k-dense-replace= | @paddle_first_dense |
moe-capacity= | @paddle_capacity |
moe-aux-loss-lambda= | @paddle_aux_of_all_choices |
router-aux-loss-coef= |
    moe-router-load-balancing-type aux-loss-type is seq_aux_loss: \
        --moe-seq-aux-loss-coeff {value} --moe-aux-loss-coeff 0 | load balancing loss per sample
    else: --moe-aux-loss-coeff {value}
moe-orthogonal-loss-lambda | --moe-orthogonal-loss-coeff {value} |
router-z-loss-coef | --moe-z-loss-coeff {value} |
moe-use-aux-free |
    off: unnecessary | the model has no expert bias
    with moe-use-aux-free-update-coef moe-router-bias-update-rate: implied | set with its rate
    else: --moe-router-bias-update-rate 0.001
moe-use-aux-free-update-coef= moe-router-bias-update-rate= |
    with moe-use-aux-free and not moe-use-aux-free on: unnecessary | the model has no expert bias
    at most 0: unnecessary | the expert bias is constant
    with moe-use-aux-free: --moe-router-bias-update-rate {value}
    else: --moe-router-bias-update-rate {value} | applies if moe_use_aux_free of the model is on
moe-gate-lr-ratio= |
    moe-layer-start-index above 0: unnecessary | no effect: ERNIE's trainer applies it to layer 0 only, which is dense
    else: other numbers --moe-router-lr-ratio {value} \
        | applies to all routers; ERNIE's trainer applies it to layer 0 only
moe-group= | ~ |
    is ep expert: implied | expert ranks are --ep-degree
    else: unsupported | layout: experts are distributed over expert ranks, --ep-degree
moe-gate= |
    has top2: implied | top-k of --moe-router-topk; the weights of the selected experts sum to one
    else: other numbers | the router is a softmax or sigmoid with top-k
moe-gate-act= scoring-func= |
    is softmax sigmoid: --moe-router-score-function {value}
    else: other numbers | router scores are softmax or sigmoid
moe-norm-gate-logits norm-topk-prob= |
    off: other numbers | the weights of the selected experts sum to one; in the script they keep their scores
    else: implied | the weights of the selected experts sum to one
n-group= | @above 1: --moe-router-num-groups {value} else experts have no groups |
topk-group= | @n-group moe-router-num-groups above 1: --moe-router-group-topk {value} else experts have no groups |
scaling-factor routed-scaling-factor | --moe-router-topk-scaling-factor {value} |
multi-token-pred-depth= num-nextn-predict-layers= mtp-num-layers= |
    at most 0: unnecessary | multi-token prediction is off
    above 1: another model | multi-token prediction has a single block
    else: --mtp-depth {value}
multi-token-pred-lambda= mtp-loss-scaling-factor= |
    multi-token-pred-depth num-nextn-predict-layers mtp-num-layers at most 0: unnecessary \
        | multi-token prediction is off
    else: --mtp-loss-weight {value}
optim= |
    is adamw_mini: other numbers | AdamW with full moments
    is adamw adamw_apex adamw_custom: implied | AdamW
    else: other numbers | the optimizer is AdamW
muon-exclude-patterns= muon-qkv-update-mode= muon-ffn-split muon-extra-scale-factor= muon-momentum= muon-version= \
    muon-ns-steps= muon-ns-coeff-type= muon-ns-coeffs= |
    optim has muon: other numbers | the optimizer is AdamW
    else: unnecessary | an option of Muon, which is not selected
normalize-logps label-smoothing= ignore-eos-token ref-model-update-steps= reference-free loss-type= pref-loss-ratio= \
    sft-loss-ratio= beta= offset-alpha= simpo-gamma= dpop-lambda= |
    stage is DPO KTO VL-DPO: other numbers | megapar only pre-trains, without preference pairs
    else: unnecessary | an option of preference training, which is not selected
report-to= | ~ |
    is '' []: unnecessary | switched off
    off: unnecessary | switched off
    else: unsupported | --tensorboard-dir, --wandb-project or --swanlab-project log the numbers
sharding-parallel-config= | @~paddle_sharding_words |
pipeline-parallel-config= | @~paddle_pipeline_words |
tensor-parallel-config= | @~paddle_tensor_words |
data-parallel-config= sequence-parallel-config= | @~paddle_replica_words |
[implied]
do-train use-moe use-expert-parallel | | trainers always train; experts are --num-experts
use-intermediate-api from-scratch= | | weights are initialized randomly
use-ortho-loss-callback | | set by --moe-orthogonal-loss-coeff
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
[implied | fused kernels are used if available]
use-fused-rms-norm use-fused-rope use-fused-linear use-fused-dropout-add use-fast-ln fuse-rms-norm fuse-ln fuse-swiglu
fuse-linear fuse-rope apply-rope-fusion use-fast-layer-norm fuse-attn-ffn fuse-attention-qkv= fuse-attention-ffn=
fuse-gate-detach-matmul fuse-softmax-mask use-mem-eff-attn use-flash-attn-with-mask use-sparse-flash-attn fa-version=
[implied | one format, which loads on any layout]
unified-checkpoint unified-checkpoint-config= save-sharded-model load-sharded-model save-checkpoint-format=
load-checkpoint-format= flex-ckpt-comm-method= save-rng-states
[unnecessary]
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
pp-allreduce-in-optimize -dp-as-optimizer-sharding | | gradients are reduced once per step
cudnn-exhaustive-search conv-workspace-size-limit= | | the models have no convolutions
cudnn-batchnorm-spatial-persistent | | the models have no convolutions
tensor-init-seed= | | set by --seed; weights are the same on every layout
p2p-cache-shape checkpoint-shape= | | stages send one tensor of one shape
enable-auto-parallel to-static semi-auto auto auto-search enable-tuning | | megapar plan chooses layouts
model-with-dpo-criterion sharding-configs.stage= | | an option of automatic layouts
vision-config= ernie-model-config= compute-type= | | an option of Paddle's command line
moe-layer-feed-fake-token compression-ratio= moe-gate-detach= | | an option of older models
moe-deepep-num-sms= moe-ep-barrier moe-deep-gemm | | experts use torch's kernels
env.home= | | an option of Paddle's environment
bf16-full-eval fp16-full-eval | | evaluations use the precision of training
[unnecessary | bucket sizes: --segment-broadcast-MB]
fuse-all-reduce-ops fuse-grad-size-in-mb= fuse-grad-size-in-tflops= fuse-grad-size-in-num= last-comm-group-size-mb=
sync-nccl-allreduce calc-comm-same-stream
[unnecessary | megapar has no static program]
sync-batch-norm without-graph-optimization find-unused-parameters enable-sequential-execution fuse-elewise-add-act-ops
fuse-bn-act-ops fuse-relu-depthwise-conv fuse-broadcast-ops fuse-all-optimizer-ops enable-inplace
enable-backward-optimizer-op-deps cache-runtime-context fuse-bn-add-act-ops enable-auto-fusion enable-addto
fix-op-run-order allow-cuda-graph-capture reduce-strategy= num-threads= num-iteration-per-drop-scope=
num-iteration-per-run= use-thread-barrier
[unnecessary | megapar has no parameter servers]
max-merge-var-num= send-queue-size= independent-recv-thread min-send-grad-num-before-recv= thread-pool-size=
send-wait-times= runtime-split-send-recv launch-barrier heter-worker-device-guard= use-ps-gpu= a-sync-configs.k-steps=
a-sync-configs.lr-decay-steps= a-sync
[unnecessary | an option of fine-tuning]
vocab-path= fine-tuning= dataset-type= train-dataset-type= eval-dataset-type= eval-dataset-prob= train-dataset-prob=
random-shuffle num-samples-each-epoch= greedy-intokens template= template-backend= use-template encode-one-turn
split-multi-turn eval-with-do-generation max-prompt-len= truncation-strategy= truncate-packing binpacking
packing-interval= padding-free dataset-output-dir= make-offline-data new-special-tokens-path= custom-register-path=
processor-use-fast= mix-strategy= max-estimate-samples= estimation-output-file= dataset-num-proc= dataset-batch-size=
dataset-kwargs= dataset-text-field= num-of-gpus= autotuner-benchmark
[unnecessary | an option of image models]
moe-multimodal-dispatch-use-allgather= moe-dense-experts-token-type-id= balanced-image-preprocess factor= rope-3d
freq-allocation= resampler-fuse-rms-norm use-recompute-resampler use-recompute-dnd
[unsupported]
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
[unsupported | memory: units are whole layers]
recompute-modules= recompute-mtp-modules= recompute-mtp-granularity= recompute-mtp-method= use-recompute-attn
use-recompute-lm-head use-recompute-loss-fn use-recompute-mtp use-recompute-moe refined-recompute=
use-rms-qkv-recompute use-linear-residual-norm-recompute recompute-allgather checkpoints=
[left to you]
skip-data-intervals= ignore-data-skip | | --skip-samples skips ranges of samples
[other numbers unless]
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
[another model unless]
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
""")

# Defaults of Paddle that differ from megapar's.
DEFAULTS: dict[str, Foreign] = defaults("""
adam-beta2 | --adam-beta2 0.999 |
weight-decay | --weight-decay 0.0 |
learning-rate | --lr 5e-05 |
lr-scheduler lr-scheduler-type |
    ernie 4.5: --lr-decay-style cosine
    else: --lr-decay-style linear
decay-function | = half_life |
min-lr min-learning-rate |
    ernie 4.5: unnecessary | the learning rate decays to 0
    lr-scheduler-type has constant: unnecessary | the learning rate decays to 0
    else: --min-lr 1e-05 | the minimum in PaddleNLP's run_pretrain.py
bf16 fp16 amp | --dtype fp32 | neither bf16 nor fp16
fp16-opt-level use-pure-fp16 | = O1 |
scale-loss init-loss-scaling | = 32768 |
incr-every-n-steps decr-every-n-nan-or-inf |
    not fp16 on: unnecessary | the loss is scaled only with fp16
    else: --loss-scale-window 2000 --hysteresis 1 | the defaults of paddle.amp.GradScaler
per-device-train-batch-size micro-batch-size global-batch-size | --micro-batch-size 8 |
sharding | @paddle_unsharded |
sharding-degree sharding-group-size sharding-parallel-degree sharding-parallel-size |
    sharding is true 1: --sharding-degree 8 | Fleet's sharding optimizer
    else: unnecessary | all data ranks, the same default
seed | --seed 42 |
max-steps num-train-epochs | | the run length is not set: --train-iters
max-seq-length max-seq-len max-sequence-length | | the sample length is not set: --seq-length
input-dir train-dataset-path | | no data are set: --data-path
split | @with input-dir: --split 949,50,1 else no data are set |
eval-steps evaluation-strategy |
    evaluated in paddle: left to you | the interval is not set: --eval-interval
    else: --eval-interval 0 | evaluation is off without do_eval
save-steps save-strategy | @~with output-dir: --save-interval 500 else nothing is saved without output_dir |
logging-steps logging-strategy | --log-interval 500 |
moe-num-experts n-routed-experts num-experts |
    without hidden-size: unnecessary | no model sizes are given
    else: --num-experts 0 | a dense model
moe-aux-loss-lambda router-aux-loss-coef | @paddle_usual_aux |
rms-norm-eps | @with hidden-size: --layernorm-epsilon 1e-06 else no model sizes are given |
initializer-range | @paddle_usual_std |
tie-word-embeddings | @with hidden-size: --untie-embeddings-and-output-weights else no model sizes are given |
""")
