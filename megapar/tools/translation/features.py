"""Features of Megatron-LM that megapar does not have: a verdict and a reason for each, then its arguments.

``another model``: a part of the network is missing. ``other numbers``: the same network, trained differently.
``unsupported``: does not change any number. ``unnecessary``: an option of another argument or of a missing feature.
"""

from __future__ import annotations

from megapar.tools.translation.verdict import Foreign, table

ROWS: dict[str, Foreign] = table("""
[another model | the output projection of attention is a full matrix, not grouped or low-rank]
output-projection-groups= output-projection-lora-rank=
[another model | sparse attention with an indexer (DSA) is not supported]
experimental-attention-variant= dsa-indexer-n-heads= dsa-indexer-head-dim= dsa-indexer-topk= dsa-indexer-topk-freq=
dsa-indexer-skip-topk-offset= dsa-indexer-loss-coeff= dsa-indexer-use-sparse-loss dsa-indexer-rope-interleaved
dsa-indexer-k-norm-fp32 dsa-indexer-k-norm-epsilon= no-dsa-indexer-rotate-activation
disable-dsa-indexer-rotate-activation no-dsa-indexer-scoring-relu disable-dsa-indexer-scoring-relu
[another model | compressed sparse attention (DeepSeek-V4) is not supported]
csa-window-size= csa-compress-ratios= csa-compress-rotary-base= csa-dense-mode
[another model | linear attention (gated DeltaNet) is not supported]
linear-attention-type= linear-attention-freq= linear-conv-kernel-dim= linear-key-head-dim= linear-value-head-dim=
linear-num-key-heads= linear-num-value-heads= gdn-conv-pad-alignment=
[another model | state-space (Mamba) and hybrid models are not supported]
hybrid-layer-pattern= hybrid-override-pattern= hybrid-attention-pattern= mtp-hybrid-override-pattern= is-hybrid-model
mamba-state-dim= mamba-head-dim= mamba-num-groups= mamba-num-heads= mamba-training-ssm-states-dtype=
hybrid-attention-ratio= hybrid-mlp-ratio=
[another model | sliding-window attention is not supported]
window-size= window-attn-skip-freq=
[another model | output gates of attention heads are not supported]
attention-output-gate head-wise-attn-gate
[another model | --qk-norm is an RMSNorm with a weight; the L2 norm without a weight is not supported]
qk-l2-norm
[another model | RoPE has one base for all layers, and one position for all features]
rotary-base-per-layer= no-rope-freq= mrope-section= mrope-interleaved
[another model | --position-embedding-type yarn is not translated; --rope-scaling-type yarn has its formula]
yarn-original-max-position-embeddings= yarn-beta-fast= yarn-beta-slow= yarn-correction-range-round-to-int
no-yarn-correction-range-round-to-int
[another model | position embeddings are RoPE or learned, not relative biases]
relative-attention-num-buckets= relative-attention-max-distance=
[other numbers | the weights of queries and keys are not clipped]
qk-clip qk-clip-alpha= qk-clip-threshold=
[unnecessary | a kernel or cache of an attention variant that is not supported]
cache-mla-latents mla-down-proj-fusion dsa-kernel-backend= apply-dsa-kernel-fusion gdn-pre-gated-delta-rule-fusion
disable-mamba-mem-eff-path linear-cp-mode= cp-partition-mode=
[another model | activation functions are SwiGLU and GELU]
squared-relu quick-geglu glu-linear-offset= activation-func-clamp-value=
[other numbers | --activation gelu is exact (erf); this is the tanh approximation]
openai-gelu
[another model | the residual stream is not normalized: --norm-placement input or output]
apply-residual-connection-post-layernorm
[another model | hyper-connections (several residual streams) are not supported]
enable-hyper-connections num-residual-streams= mhc-sinkhorn-iterations= mhc-init-gating-factor=
[unnecessary | a kernel or memory option of hyper-connections, which are not supported]
use-fused-mhc mhc-recompute-layer-num=
[another model | experts process the hidden state, not a projection of it]
moe-latent-size= moe-use-norm-before-up-proj
[another model | router weights scale the outputs of experts, not their inputs]
moe-apply-probs-on-input
[another model | experts follow the attention of their layer, without a shortcut connection]
moe-shortcut-connection
[another model | a router selects the experts in every MoE layer, not a hash of the token]
moe-n-hash-layers= actual-vocab-size=
[another model | the multi-token prediction block is separate and trained with the model]
mtp-use-repeated-layer mtp-detach-heads
[another model | all layers are alike, except for leading dense layers (--first-k-dense)]
heterogeneous-layers-config-path= heterogeneous-layers-config-encoded-json=
[another model | BERT's objective; megapar's encoder is ERNIE (pretrain_ernie.py)]
bert-no-binary-head mask-prob= short-seq-prob=
[another model | encoder-decoder models (T5) are not supported]
decoder-seq-length= pipeline-model-parallel-split-rank= encoder-tensor-model-parallel-size=
encoder-pipeline-model-parallel-size=
[another model | vision models are not supported]
num-classes= img-h= img-w= num-channels= patch-dim= classes-fraction= data-per-class-fraction= no-data-sharding
head-lr-mult= vision-pretraining vision-pretraining-type= vision-backbone-type= swin-backbone-type= mask-type=
mask-factor= iter-per-epoch= dino-local-img-size= dino-local-crops-number= dino-head-hidden-size= dino-bottleneck-size=
dino-freeze-last-layer= dino-norm-last-layer dino-warmup-teacher-temp= dino-teacher-temp=
dino-warmup-teacher-temp-epochs=
[another model | retrievers (ICT, REALM) are not supported]
ict-head-size= biencoder-projection-dim= biencoder-shared-query-context-model ict-load= bert-load= titles-data-path=
query-in-block-prob= use-one-sent-docs evidence-data-path= retriever-report-topk-accuracies= retriever-score-scaling
retriever-seq-length= block-data-path= embedding-path= indexer-batch-size= indexer-log-interval=
[another model | retrieval inside the decoder (Retro) is not supported]
retro-workdir= retro-add-retriever retro-cyclic-train-iters= retro-encoder-layers= retro-encoder-hidden-dropout=
retro-encoder-attention-dropout= retro-num-neighbors= retro-num-retrieved-chunks= retro-return-doc-ids
retro-project-dir= retro-attention-gate= retro-verify-neighbor-count= retro-no-verify-neighbor-count
[other numbers | the router input has no noise]
moe-input-jitter-eps=
[other numbers | forced routing is not supported; measure with real routing]
moe-router-force-load-balancing moe-router-force-biased=
[other numbers | capacity is per expert, not per rank: --moe-capacity-factor]
moe-expert-rank-capacity-factor=
[other numbers | routing is limited by groups of experts: --moe-router-num-groups, --moe-router-group-topk]
moe-router-topk-limited-devices=
[other numbers | a dense checkpoint cannot be upcycled into experts]
moe-use-upcycling moe-upcycling-granularity=
[other numbers | learning rates, multipliers and initialization are not scaled by width (muP)]
use-mup mup-width-mult= mup-base-hidden-size= mup-embedding-mult= mup-output-mult= mup-base-head-dim=
mup-attn-scale-power=
[other numbers | all weights are initialized from a normal distribution with one --init-std]
embedding-init-method-std= init-method-xavier-uniform
[other numbers | embedding and output layer use --lr]
decoupled-lr= decoupled-min-lr=
[other numbers | norms and biases have no weight decay]
apply-wd-to-qk-layernorm no-weight-decay-cond-type=
[other numbers | all weights are trained]
freeze-all-layers
[other numbers | the residual stream uses the compute dtype]
fp32-residual-connection
[other numbers | logits have the compute dtype, and the loss is computed from them in fp32]
fp16-lm-cross-entropy output-logit-dtype=
[other numbers | bf16 GEMMs accumulate as the library does by default]
disable-bf16-reduced-precision-matmul
[other numbers | gradients are reduced and summed in --grad-reduce-dtype]
ddp-reduce-scatter-with-fp32-accumulation gtp-remat-reduce-scatter-with-fp32-accumulation
[other numbers | --fp8 (torchao, current scaling per tensor) computes differently from Transformer Engine]
fp8-format= fp8-e4m3 fp8-hybrid te-precision-config-file= kitchen-config-file= kitchen-recipe-number=
use-kitchen-attention
[other numbers | fp4 is not supported]
fp4-format=
[unnecessary | an option of --fp8-format or --fp4-format, which have their own verdicts]
fp8-recipe= fp8-quantizer-factory= fp8-margin= fp8-interval= fp8-amax-history-len= fp8-amax-compute-algo= no-fp8-wgrad
disable-fp8-wgrad fp8-output-proj first-last-layers-bf16 num-layers-at-start-in-bf16= num-layers-at-end-in-bf16=
fp4-recipe= fp4-quantizer-factory= fp4-param-gather fp8-param-gather reuse-grad-buf-for-mxfp8-param-ag
keep-fp8-transpose-cache kitchen-attention-backend=
[unnecessary | an option of another optimizer; megapar's are AdamW and SGD]
muon-momentum= muon-no-split-qkv muon-nesterov muon-scale-mode= muon-fp32-matmul-prec= muon-use-syrk
muon-coefficient-type= muon-num-ns-steps= muon-tp-mode= muon-extra-scale-factor= muon-scalar-optimizer= lion-beta1=
lion-beta2= sfplus-beta= sfplus-beta-max= sfplus-beta-anneal-steps= sfplus-r= sfplus-weight-lr-power= sfplus-c-warmup=
sfplus-polyak-beta= sfplus-muon-rms= sfplus-muon-weight-decay=
[other numbers | the batch size grows only with --rampup-batch-size]
step-batch-size-schedule= decrease-batch-size-if-needed phase-transition-iterations=
[other numbers | steps are not skipped; --skip-samples skips ranges of samples]
iterations-to-skip=
[other numbers | left to you: the run length is --train-iters; epochs do not end a run]
train-full-dataset
[other numbers | all samples are used]
sample-rate=
[other numbers | fill-in-the-middle samples are not supported]
fim-data fim-rate= fim-spm-rate= fim-split-sample= fim-fragment-rate= fim-no-prefix= fim-prefix-token=
fim-middle-token= fim-suffix-token= fim-pad-token= fim-eod-token=
[other numbers | left to you: write the weights and paths of that file as --data-path]
data-args-path= per-split-data-args-path=
[other numbers | fine-tuning on conversations is not supported, only pre-training]
sft sft-tokenizer-prompt-format= sft-loss-log-mode= sft-mock-dataset-config-json= sft-cross-document-attention
sft-pretrain-valid-data-path= sft-pretrain-valid-samples= use-varlen-dataset varlen-sbhd-validation
varlen-mock-dataset-config-json= chat-template=
[other numbers | distillation is not supported]
logits-save-top-k= logits-save-top-p= logits-save-top-p-min-k= logits-save-dir= logits-save-dtype= logits-load-dir=
logits-load-decode-threads= logits-load-prefetch-factor= logits-load-msc-prefetch-depth= logits-load-kd-loss-alpha=
logits-load-ignore-errors
[other numbers | reinforcement learning is not supported, only pre-training]
perform-rl-step rl-prompts-per-eval= grpo-prompts-per-step= grpo-group-size= rl-generation-lag=
rl-max-inflight-requests= rl-submission-granularity= rl-consumption-granularity= rl-durable-rollout-bank
rl-rollout-bank-dir= rl-rollout-bank-max-bytes= grpo-iterations= grpo-clamp-eps-lower= grpo-clamp-eps-upper=
grpo-kl-beta= grpo-entropy-term-weight= grpo-filter-groups-with-same-reward langrl-env-config= rl-default-temperature=
rl-default-top-p= rl-default-top-k= rl-offload-optimizer-during-inference rl-kv-cache-management-mode=
rl-persist-cuda-graphs rl-partial-rollouts rl-inference-logprobs-is-correction rl-importance-sampling-truncation-coef=
rl-use-sequence-packing rl-sequence-packing-max-sequences-per-bin= rl-sequence-packing-algo= rl-training-cuda-graphs
rl-inference-tensor-model-parallel-size= rl-inference-pipeline-model-parallel-size=
rl-inference-expert-model-parallel-size= rl-inference-expert-tensor-model-parallel-size=
rl-inference-model-unified-memory-level= rl-offload-inference-model-weights-when-idle refit-method=
refit-execution-batch-bytes= rl-verify-model-weights-swap rl-skip-bos-token rl-profile rl-profile-dir=
rl-inference-parsers=
[other numbers | left to you: write the contents of that file or checkpoint as flags]
yaml-cfg= use-checkpoint-args use-mp-args-from-checkpoint-args
[other numbers | the flags set the schedule; a checkpoint with a different schedule is refused]
use-checkpoint-opt-param-scheduler
[other numbers | a checkpoint resumes at its step; --finetune starts at step 0]
override-ckpt-iteration=
[other numbers | a training command trains; megapar evaluate prints the held-out loss of a checkpoint]
skip-train
[other numbers | every sample has --seq-length tokens; packs of different lengths are not balanced over ranks]
hybrid-context-parallel dynamic-context-parallel max-seqlen-per-dp-cp-rank= sequence-packing-scheduler=
thd-max-packed-sequences=
[unsupported | megapar has no inference engine: export with --save-hf and use one, or try megapar generate]
inference-batch-times-seqlen-threshold= max-tokens-to-oom= output-bert-embeddings bert-embedder-type=
use-legacy-static-engine inference-max-requests= inference-max-seq-length= inference-dynamic-batching
inference-dynamic-batching-buffer-size-gb= inference-dynamic-batching-paused-buffer-size-gb=
inference-dynamic-batching-mamba-memory-ratio= inference-dynamic-batching-block-size=
inference-dynamic-batching-max-requests= inference-dynamic-batching-max-tokens=
inference-dynamic-batching-num-cuda-graphs= inference-dynamic-batching-track-paused-request-events
inference-dynamic-batching-track-generated-token-events decode-only-cuda-graphs inference-cuda-graph-all-prefills
inference-cuda-graph-max-tokens= inference-dynamic-batching-unified-memory-level= enable-chunked-prefill
num-speculative-tokens= inference-dynamic-batching-prefix-caching no-inference-dynamic-batching-prefix-caching
inference-dynamic-batching-prefix-caching-eviction-policy=
inference-dynamic-batching-prefix-caching-coordinator-policy= inference-dynamic-batching-prefix-caching-routing-alpha=
inference-dynamic-batching-prefix-cache-ttl-seconds= inference-dynamic-batching-media-cache-coordinator-policy=
inference-dynamic-batching-media-cache-routing-weight= inference-dynamic-batching-vision-embedding-cache-max-bytes=
inference-dynamic-batching-allow-stale-multimodal-embeddings inference-dynamic-batching-prefix-caching-mamba-gb=
inference-dynamic-batching-cuda-graph-mixed-prefill-count= inference-dynamic-batching-cuda-graph-sizing-distribution=
inference-dynamic-batching-sampling-backend= use-same-sampling-seed-across-dp-ranks
inference-dynamic-batching-async-sched-mode= inference-dynamic-batching-logprobs-mode= inference-logging-step-interval=
inference-text-gen-server-logging inference-wandb-logging inference-coordinator-port=
mamba-inference-conv-states-dtype= mamba-inference-ssm-states-dtype= inference-use-synchronous-zmq-collectives
inference-disable-ep-consensus inference-shards= inference-rng-tracker inference-cuda-graph-scope= flash-decode
batch-invariant-mode symmetric-ar-type= nccl-all-reduce-for-prefill inference-fuse-tp-communication
inference-disable-triton-nvls-kernels inference-grouped-gemm-backend= inference-moe-disable-fused-quant-kernels
inference-moe-token-dispatcher-type= mlp-chunks-for-prefill= inference-max-batch-size=
moe-pad-experts-for-cuda-graph-inference
[unsupported | CUDA graphs are not supported; --compile fuses the operators between collectives]
cuda-graph-impl= cuda-graph-modules= cuda-graph-scope= cuda-graph-warmup-steps= enable-cuda-graph external-cuda-graph
cuda-graph-dynamic-microbatches optimizer-cuda-graph
[unsupported | an option of DeepEP, HybridEP or NCCL EP; --moe-dispatch node sends as few rows by torch's all-to-all]
moe-flex-dispatcher-num-sms= moe-deepep-num-sms= moe-hybridep-num-sms= moe-hybridep-num-blocks-permute=
moe-hybridep-num-blocks-unpermute= moe-hybridep-num-sms-preprocessing= moe-hybridep-pad-variable-tokens
moe-permute-fusion-into-hybridep moe-ncclep-static-shape moe-ncclep-use-symm-mem high-priority-a2a-comm-stream
[unsupported | one fused kernel for dispatch, experts and combine is not supported]
use-mok-megakernel mok-fwd-num-comm-sms= mok-bwd-num-comm-sms= mok-minibatch-size= mok-macrobatch-size=
mok-schedule-capacity-multiplier= mok-all-gather-top-experts-chunk-bytes= mok-source-mlp-glu-interleave-size=
no-mok-use-mxfp8-weights disable-mok-use-mxfp8-weights mok-scale-router-before-fc2
[unsupported | the forward of one micro-batch never overlaps the backward of another; --ampipe-degree hides all-to-alls]
overlap-moe-expert-parallel-comm ep-overlap-early-attn-memory-release
[unsupported | weight gradients are delayed only by the zero-bubble schedule: --pp-schedule zero_bubble]
delay-wgrad-compute overlap-dispatch-backward-with-experts-wgrad defer-embedding-wgrad-compute wgrad-deferral-limit=
[unsupported | fused kernels of Transformer Engine; the device's fused kernels are used if there are any]
use-transformer-engine-op-fuser fused-residual-rmsnorm use-fused-weighted-squared-relu use-te-activation-func
use-grouped-gemm-for-shared-expert dense-grouped-gemm use-grouped-gemm-for-dense-mlp moe-router-fusion
fallback-to-eager-attn
[unsupported | a weight layout for a kernel, or padding for quantized GEMMs]
moe-single-grouped-weight moe-single-grouped-bias moe-mlp-glu-interleave-size= moe-shared-expert-glu-interleave-size=
moe-router-padding-for-quantization moe-router-padding-for-fp8
[unsupported | inputs of single modules are not offloaded; --recompute-offload offloads those of recomputed units]
fine-grained-activation-offloading offload-modules= min-offloaded-tensor-size= delay-offload-until-cuda-graph
delta-offload-bytes-across-pp-ranks= activation-offload-fraction= fine-grained-offloading-max-inflight-offloads=
cpu-offloading-num-layers= cpu-offloading-retain-pinned-cpu-buffers
[unsupported | activations of experts are saved or recomputed with their layer, not paged]
moe-paged-stash moe-paged-stash-page-size= moe-paged-stash-buffer-size-factor-cuda=
moe-paged-stash-buffer-size-factor-cpu=
[unsupported | recompute covers layers, or with --recompute-granularity selective core attention and activations]
recompute-modules= moe-layer-recompute
[unsupported | the MLP processes the whole sequence of a micro-batch at once]
mlp-chunks-for-training=
[unsupported | weights are sharded over mp ranks (--mp-degree) and over data ranks (--sharding-stage 3)]
tensor-parallel-num-weight-shards= expert-tensor-parallel-num-weight-shards= gtp-remat-nccl-ub gtp-expert-remat-nccl-ub
[unsupported | the overlap of GEMMs and mp collectives has one switch: --tp-comm-overlap]
tp-comm-overlap-cfg= tp-comm-overlap-rs-dgrad tp-comm-bootstrap-backend= no-tp-comm-bulk-wgrad
disable-tp-comm-bulk-wgrad no-tp-comm-bulk-dgrad disable-tp-comm-bulk-dgrad no-tp-comm-overlap-ag
disable-tp-comm-overlap-ag no-tp-comm-overlap-rs disable-tp-comm-overlap-rs no-tp-comm-split-ag
disable-tp-comm-split-ag no-tp-comm-split-rs disable-tp-comm-split-rs tp-comm-bulk-wgrad tp-comm-bulk-dgrad
tp-comm-overlap-ag tp-comm-overlap-rs tp-comm-split-ag tp-comm-split-rs
[unsupported | torch creates one communicator per axis]
pipeline-model-parallel-comm-backend= use-ring-exchange-p2p nccl-communicator-config-path= use-sharp
sharp-enabled-group= high-priority-stream-groups= disable-gloo-process-groups create-all-gather-group use-nccl-ub
disable-symmetric-registration distributed-timeout-seconds-after-init=
[unsupported | hierarchical context parallelism is not supported: --context-parallel-algo selects one algorithm]
hierarchical-context-parallel-sizes=
[unsupported | the interleaved schedule runs groups of as many micro-batches as stages]
microbatch-group-size-per-virtual-pipeline-stage= overlap-p2p-communication-warmup-flush
[unsupported | the multi-token prediction block is on the last stage]
mtp-standalone
[unsupported | left to you: set --pp-seg-method to the first layer of every stage]
pipeline-model-parallel-layout=
[unsupported | buffers of Megatron-FSDP; buckets are set by --sharding-segment-strategy and --segment-broadcast-MB]
megatron-fsdp-version= fsdp-manual-registration fsdp-double-buffer suggested-communication-unit-size=
hfsdp-param-gather-overlap megatron-fsdp-enable-fine-grained-param-gather megatron-fsdp-max-pool-double-buffer
fsdp-db-use-persist-buf-on-alloc-fail torch-fsdp2-no-reshard-after-forward init-model-with-meta-device
[unsupported | sharding has one level: --sharding-degree ranks, replicated by --hybrid-dp]
outer-dp-sharding-strategy= expert-outer-dp-sharding-strategy= enable-full-sharding-in-hsdp
num-distributed-optimizer-instances= expert-data-parallel-sharding-strategy=
[unsupported | an option of gradient buckets, which megapar launches in one planned order]
ddp-pad-buckets-for-high-nccl-busbw ddp-average-in-collective no-gradient-reduce-div-fusion
overlap-param-gather-with-optimizer-step no-use-layer-wise-param-layout no-align-param-gather no-align-grad-reduce
disable-align-grad-reduce no-contiguous-buffers-in-local-ddp
[unsupported | --optimizer-offload keeps all optimizer state on the host, without further options]
use-torch-optimizer-for-cpu-offload overlap-cpu-optimizer-d2h-h2d no-pin-cpu-grads no-pin-cpu-params
[unsupported | no stage is reserved for the embedding]
standalone-embedding-stage
[unsupported | a failed rank ends the run; --load resumes it, also on fewer ranks (docs/reliability.md)]
inprocess-restart inprocess-max-iterations= inprocess-monitor-thread-interval= inprocess-monitor-process-interval=
inprocess-progress-watchdog-interval= inprocess-heartbeat-interval= inprocess-soft-timeout= inprocess-hard-timeout=
inprocess-heartbeat-timeout= inprocess-barrier-timeout= inprocess-completion-timeout= inprocess-last-call-wait=
inprocess-termination-grace-time= inprocess-granularity= inprocess-active-world-size= inprocess-empty-cuda-cache
enable-ft-package calc-ft-timeouts ft-num-warmup-iters= adlr-autoresume adlr-autoresume-interval=
[unsupported | hangs are reported by --step-timeout-seconds and megapar's flight recorder, not NCCL's]
flight-recorder-dump-path= flight-recorder-trace-buffer-size= no-flight-recorder-dump-on-timeout
disable-flight-recorder-dump-on-timeout flight-recorder-include-stack-trace no-flight-recorder-include-only-active
disable-flight-recorder-include-only-active no-flight-recorder-extra-dump-on-exec
disable-flight-recorder-extra-dump-on-exec
[unsupported | results are not recomputed; --replica-check-interval compares replicas]
rerun-mode= error-injection-rate= error-injection-type= result-rejected-tracker-filename=
[unsupported | --straggler-factor reports slow ranks; devices are not measured between steps]
gpu-sniff-test-interval= run-workload-inspector-server straggler-ctrlr-port= straggler-minmax-count=
disable-straggler-on-startup
[unsupported | only the tests inject faults]
fault-injector-ranks= fault-injector-num-ranks= fault-injector-fault-types= fault-injector-fault-probabilities=
fault-injector-fault-delay= fault-injector-delay-start-iteration= fault-injector-mtti-seconds=
fault-injector-offset-seconds= fault-injector-seed=
[unsupported | a service of NVIDIA that is not public]
no-one-logger one-logger-project= one-logger-run-name= one-logger-async app-tag-run-name= app-tag-run-version=
enable-one-logger one-logger-entity=
[unsupported | OpenTelemetry is not supported; every step is logged to --metrics-jsonl and TensorBoard]
otel-enabled otel-service-name= otel-span-groups=
[unsupported | logits, routing, tensors and energy of single steps are not logged]
moe-routing-trace-path= moe-routing-trace-max-training-iters= moe-routing-trace-capture-logits
moe-routing-trace-capture-hidden-states moe-routing-trace-dump-weights log-moe-overload-factor moe-per-layer-logging
log-max-attention-logit log-energy log-progress log-memory-interval= log-device-memory-used config-logger-dir=
save-params-interval= save-activations-interval= save-tokens-per-expert-interval= save-wgrads-interval=
save-dgrads-interval= dump-param-to-param-group-map= moe-enable-routing-replay
[unsupported | --profile writes a torch trace of rank 0, with shapes and without memory history]
pytorch-profiler-collect-shapes pytorch-profiler-collect-callstack pytorch-profiler-collect-chakra
record-memory-history memory-snapshot-path= record-shapes nvtx-ranges
[unsupported | torch caches compiled code (TORCHINDUCTOR_CACHE_DIR)]
persistent-cache-read-dir= persistent-cache-write-dir= persistent-cache-scopes=
persistent-cache-writeback-every-n-saves= persistent-cache-skip-validation disable-jit-fuser
[unsupported | files are read and written by path; mount object stores]
enable-msc disable-msc object-storage-cache-path= s3-cache-path=
[unsupported | checkpoints are sharded, written and verified in one way (docs/reliability.md)]
ckpt-fully-parallel-save no-ckpt-fully-parallel-save ckpt-fully-parallel-load ckpt-assume-constant-structure
ckpt-fully-parallel-load-exchange-algo= ckpt-fully-parallel-save-process-group= ckpt-fully-parallel-load-process-group=
ckpt-fully-parallel-save-replicate-local ckpt-fully-parallel-load-replicate-local ckpt-pg-tensors-cache-path=
no-ckpt-load-validate-sharding-integrity disable-ckpt-load-validate-sharding-integrity no-strict-fsdp-dtensor-load
disable-strict-fsdp-dtensor-load dist-ckpt-strictness= dist-ckpt-save-pre-mcore-014 dist-ckpt-optim-fully-reshardable
distrib-optim-fully-reshardable-mem-efficient dist-ckpt-workers= ckpt-drop-redundant-extra-state async-strategy=
use-persistent-ckpt-worker async-ckpt-cpu-priority= async-ckpt-io-priority= async-ckpt-use-cpu-shm
non-persistent-local-ckpt-algo= load-main-params-from-ckpt ckpt-convert-update-legacy-dist-opt-format no-save-optim
no-save-rng
[unsupported | Megatron-LM checkpoints are not supported; megapar convert reads and writes Hugging Face folders]
ckpt-convert-format= ckpt-convert-save= export-te-mcore-model
[unsupported | local checkpoints are in the memory of a node, with a copy on the next node: --local-checkpoint-interval]
non-persistent-ckpt-type= non-persistent-global-ckpt-dir= replication replication-jump= replication-factor=
[unsupported | --keep keeps the newest checkpoints, not one every N steps]
save-retain-interval=
[unsupported | one validation set, evaluated with --eval-iters training-size batches from the first interval on]
start-eval-at-iter= eval-global-batch-size= eval-micro-batch-size= full-validation multiple-validation-sets
validation-set-names=
[unsupported | .bin files contain tokens; text is tokenized as the files of the tokenizer specify]
tokenizer-metadata= tokenizer-special-tokens= tokenizer-sentencepiece-legacy
no-tokenizer-sentencepiece-ignore-extra-whitespaces disable-tokenizer-sentencepiece-ignore-extra-whitespaces
tokenizer-hf-no-include-special-tokens tiktoken-pattern= tiktoken-num-special-tokens= null-tokenizer-eod-id=
null-tokenizer-pad-id= tiktoken-special-tokens= legacy-tokenizer
[unsupported | remote code is never executed]
trust-remote-code
[unsupported | SIGTERM stops a run; files do not]
exit-signal=
[unsupported | one process loads the data, without custom loaders or index files of other runs]
dataloader-fast-cache-load dataloader-defer-npy-index-mmap
""")
