"""Translation table for arguments of MindSpeed and MindSpeed-LLM (form: ``verdict.table``)."""

from __future__ import annotations

from megapar.tools.translation.verdict import Foreign, table

ROWS: dict[str, Foreign] = table("""
[renamed]
adaptive-recompute-device-swap | ~ |
    adaptive-recompute-device-size above 0: implied | set by --adaptive-recompute-device-size
    else: left to you \
        | set --adaptive-recompute-device-size to the memory it may use, in MB; MindSpeed uses the whole device
adaptive-recompute-device-size= | ~ |
    above 0: same --adaptive-recompute-device-size {value}
    else: unnecessary | no memory is set for it
ampipe-degree= | ~ |
    at most 1: unnecessary | one slice
    else: same --ampipe-degree {value} \
        | MindSpeed parses it but does nothing since core_r0.12.1; megapar supports it, with the same numbers
ampipe-tp-sp-comm-overlap | ~ |
    ampipe-degree at most 1: unnecessary | no effect without --ampipe-degree
    else: same --ampipe-tp-sp-comm-overlap \
        | MindSpeed parses it but does nothing since core_r0.12.1; megapar supports it, with the same numbers
moe-model-type= |
    with moe-no-drop: --moe-model-type megatron_moe | no tokens are dropped
    else: same --moe-model-type {value}
moe-train-capacity-factor= |
    with moe-no-drop: unnecessary | no tokens are dropped (--moe-no-drop)
    not moe-model-type is deepspeed_moe: unnecessary | the capacity of deepspeed_moe, which is not selected
    else: --moe-capacity-factor {value} | a capacity factor of deepspeed_moe
moe-no-drop |
    with moe-model-type: implied | megatron_moe drops no tokens
    else: --moe-model-type megatron_moe | drops no tokens
shared-expert-gate | --moe-shared-expert-gate |
context-parallel-algo= | ~ |
    context-parallel-size cp-degree or 1 at most 1: unnecessary | a single cp rank has the whole sequence
    is megatron_cp_algo ulysses_cp_algo: same --context-parallel-algo {value}
    is kvallgather_cp_algo: --context-parallel-algo allgather_cp_algo
    else: --context-parallel-algo megatron_cp_algo | ring or Ulysses, not both: the numbers are the same
moe-router-load-balancing-type= |
    is softmax_topk and with norm-topk-prob: --moe-aux-loss-coeff 0 | no load balancing loss
    is softmax_topk: --moe-aux-loss-coeff 0 --no-norm-topk-prob \
        | no load balancing loss, and weights that keep their scores
    is group_limited_greedy pai_megatron_aux_loss sparsemixer_topk sinkhorn: other numbers \
        | the routing {value} is not supported
    is aux_loss: implied | set by --moe-aux-loss-coeff
    is seq_aux_loss and with moe-aux-loss-coeff: implied | set by --moe-seq-aux-loss-coeff
    is seq_aux_loss: implied | no load balancing loss without its coefficient
    is noaux_tc and with moe-router-bias-update-rate: implied | set by --moe-router-bias-update-rate
    is noaux_tc: --moe-router-bias-update-rate 1e-3 | the expert bias is updated if its rate is not 0
    is none: --moe-aux-loss-coeff 0
    else: other numbers | experts are balanced by auxiliary losses or by the expert bias
enable-expert-placement | ~ |
    expert-model-parallel-size or 1 at most 1: unnecessary | a single ep rank has all experts
    with expert-placement-freq: --moe-rebalance-interval {expert-placement-freq} \
        | moves experts by the load since the last move
    else: --moe-rebalance-interval 50 | moves experts by the load since the last move
expert-placement-freq= | ~ |
    with enable-expert-placement: implied | set by --moe-rebalance-interval
    else: unnecessary | no effect without --enable-expert-placement
add-dense-bias |
    without disable-bias-linear no-add-bias-linear: implied | --add-bias-linear adds them to all linear layers
    else: another model \
        | biases are in all linear layers, in those of queries, keys and values (--add-qkv-bias), or in none
optimizer-selection= | ~ |
    is fused_ema_adamw: unsupported | AdamW is the same; an exponential moving average of the weights is not kept
    else: implied | AdamW, fused if the device supports it
attention-mask-type= cp-attention-mask-type= | ~ |
    else: implied | attention is causal, within documents with --reset-attention-mask
pre-tockens= | @past |
num-layer-list= | @~layers_of_stages |
pipeline-num-transformer-layers= | @~layers_of_chunks |
npu-deterministic use-deter-comp | --deterministic |
padded-base-length= mla-mm-split mla-zero-memory mla-fa-divide-qk |
    not latent: unnecessary | no effect without --multi-latent-attention
    else: unnecessary | heads are padded where a kernel needs it, and keys and values are never kept
mla-up-proj-tp-overlap mla-swap-core-attn-out |
    not latent: unnecessary | no effect without --multi-latent-attention
    else: unsupported | the up projections do not overlap a collective
enable-zero3 layerzero | --sharding-stage 3 |
virtual-optimizer= | --optimizer-offload |
init-from-hf-path | --load-hf {value} |
expert-model-parallel-size= | @~expert_ranks |
scale-emb | --embedding-multiplier {value} |
output-multiplier-scale= | @output_multiplier |
scale-depth= | @depth |
dim-model-base= | @base_width |
rope-scaling-type= |
    is llama3 yarn: same --rope-scaling-type {value}
    else: another model | RoPE is scaled by linear, llama3 or yarn, not by {value}
rope-scaling-beta-fast= beta-fast= | @scaled by yarn: --beta-fast {value} else no effect without scaling by yarn |
rope-scaling-beta-slow= beta-slow= | @scaled by yarn: --beta-slow {value} else no effect without scaling by yarn |
low-freq-factor= | @scaled by llama3: --low-freq-factor {value} else no effect without scaling by llama3 |
high-freq-factor= | @scaled by llama3: --high-freq-factor {value} else no effect without scaling by llama3 |
[implied]
no-use-rts | | tokens are never selected at random, in MindSpeed with or without it
no-use-gmm-fp8 | | expert GEMMs never use fp8
input-layernorm-in-fp32 | | norms compute in fp32
loss-compute-mode= loss-chunk-size= output-layer-slice-num= | | logits are computed in chunks
use-fused-mlp use-fusion-attn-v2 use-triton-swiglu-limit | | fused kernels are used if the device has them
moe-hierarchical-alltoallv moe-zerc | | --moe-dispatch auto sends a token to each node once where that is faster
use-mc2 | | --tp-comm-overlap hides the same communication
[unnecessary]
longrope-freqs-type= long-factor= short-factor= long-mscale= short-mscale= | | an option of --rope-scaling-type longrope
skip-bias-add shape-order= megatron-cp-in-bnsd attention-mask-on-cpu | | memory layout of MindSpeed's tensors
use-multiparameter-pipeline-model-parallel variable-seq-lengths | | stages send one tensor of one shape
optimization-level= jit-compile | | kernels and schedules have separate flags
memory-fragmentation | | no defragmentation is needed: the allocator uses expandable segments
disable-gloo-group hccl-slice-size= | | every rank writes its part of a checkpoint, without gathering state
hccl-group-buffer= hccl-group-buffer-adaptive | | set by HCCL's environment variables
hccl-ep-group-buffer-adaptive-factor= hccl-op-mode= | | set by HCCL's environment variables
param-and-grad-buffer-pad= | | rows of buckets are aligned for the device
optimize-send-recv-comm optimize-vpp-send-recv-comm defer-p2p-send-wait | | sends never block
optimize-recomp-communication-level= | | a recomputed forward sends nothing unnecessary
optimize-recomp-communication-status= | | a recomputed forward sends nothing unnecessary
reset-bucket-group-order async-log-allreduce cache-get-batch-config | | buckets and logs never block
no-moe-npu-fast-ops te-gmm-mode= | | there is one implementation of permutation and grouped GEMM
moe-router-score-reuse moe-revert-type-after-topk | | scores are computed once, in fp32
tokenizer-not-use-fast enable-share-memory return-document-ids | | an option of MindSpeed's data loader
op-cal-tflops | | MFU is always logged
use-mp-args-from-checkpoint-args | | a checkpoint loads on any layout
input-jitter | | no effect without --moe-input-jitter-eps
additional-config= | | an option of models other than language models
kv-head-repeat-before-uly-alltoall | | key/value heads are repeated if there are more ranks than heads
handler-name= streaming hf-datasets-params= datasets= | | an option of preprocessing; files are read as they are
json-keys= split-sentences | | an option of preprocessing; files are read as they are
model-type-hf= load-dir= save-dir= mg-cache-dir= model-id= | | an option of checkpoint conversion: --load-hf, --save-hf
prompt-type= prompt-type-path= enable-thinking= | | an option of chat templates; pre-training reads plain text
md5-validate | | an option of chat templates; pre-training reads plain text
[unnecessary | an option of preprocessing]
keep-newlines interleave-probs= mix-strategy= dataset-dir= overwrite-cache max-samples= cache-dir= map-keys= pack
script-data-dir= append-eod pad-vocab-size-to= output-prefix= dataset-impl= workers= n-subs= merge-group-keys=
[unnecessary | an option of inference]
task= top-p= top-k= temperature= max-length= max-new-tokens= hf-chat-template add-eos-token= use-kv-cache
history-turns= num-gpus-for-train= num-gpus-for-infer= inference-tensor-model-parallel-size=
[unnecessary | an option of MindSpeed's evaluations]
task-data-path= evaluation-batch-size= greedy instruction-template= no-chat-template eval-language= max-eval-samples=
broadcast alternative-prompt origin-postprocess chain-of-thought
[unsupported]
adaptive-recompute-profiling-step= | | layers are chosen before the run from sizes, not from profiled steps
adaptive-memory-optimization smart-swap swap-delay= | | memory: --adaptive-recompute-device-size, --recompute-offload
swap-modules= swap-layer-input | | memory: --recompute-offload offloads the inputs of recomputed units
activation-offload | | memory: --recompute-offload offloads the inputs of recomputed units
compress-activation= compress-dense= compress-optimizer | | memory: nothing is compressed; --recompute-offload
recompute-norm recompute-norm-num-layers= recompute-mla-up-proj | | memory: norms are not recomputed separately
recompute-mtp-norm recompute-mtp-layer recompute-csa-attention mhc-recompute | | memory: --recompute-granularity
recompute-activation-function-num-layers= | | memory: --recompute-granularity selective applies to all layers
moe-adaptive-recompute-activation moe-adaptive-recompute-activation-scale= | | memory: layers are chosen once
moe-zero-memory= moe-zero-memory-num-layers= | | memory: a MoE layer is recomputed entirely or not at all
moe-unperm2-mem-optim moe-unperm2-mem-optim-swap | | memory: router weights are applied after the combine
use-nanopipe-swap | | memory: stored weight gradients stay on the device
swap-optimizer-sizes= | | memory: optimizer state moves with the step of each parameter group
auto-settings auto-settings-work-dir= auto-settings-ranks= auto-settings-log-level= | | megapar plan searches layouts
target-nnodes= auto-settings-type= prof-file= | | megapar plan searches layouts
moe-alltoall-overlap-comm moe-allgather-overlap-comm | | speed: --ampipe-degree 2 hides all-to-alls
moe-experts-pipeline-degree= | | speed: --use-pipe-experts overlaps experts with their all-to-alls
moe-fb-overlap | | speed: two micro-batches never overlap; --ampipe-degree 2 hides all-to-alls
schedules-method= | | speed: --pp-schedule is 1f1b, interleaved or zero_bubble
moe-bmm-mc2 moe-alltoall-mc2 use-ascend-mc2 coc-fused-kernel | | speed: GEMMs and messages are not fused
recompute-in-bubble recompute-in-advance | | memory: units are recomputed when their gradient arrives
swap-attention | | memory: --recompute-offload offloads the inputs of recomputed units, not of operators
moe-dynamic-padding | | speed: exactly the routed rows are sent
coc-mode= | | speed: --tp-comm-overlap splits GEMMs
balanced-moe-experts balanced-moe-hot-expert-num= trans-hot-expert-group-num= | | speed: experts are not copied
enable-fine-grained-expert-placement | | speed: --moe-rebalance-interval moves experts at fixed intervals
fine-grained-expert-placement-thre= | | speed: --moe-rebalance-interval moves experts at fixed intervals
print-expert-load | | logging: the load of a layer is not printed per expert
dualpipev-dw-detach chimera-decouple-bw virtual-data-parallel-size= | | speed: --pp-schedule zero_bubble
ulysses-degree-in-cp= cp-window-size= | | speed: ring or Ulysses, not both
adaptive-cp-without-coarse adaptive-cp-dynamic-attn-mask | | speed: an option of sparse masks
adaptive-cp-only-reschedule adaptive-cp-manually-set-mask-list | | speed: an option of sparse masks
context-parallel-kv-cache-policy= context-parallel-cache-interval= | | speed: keys and values go around the ring again
use-ulysses-allgather-kv | | speed: --context-parallel-algo allgather_cp_algo gathers keys and values
use-nd-matmul nd1-dim1-size= nd2-dim1-size= tp-2d tp-x= tp-y= | | layout: tensor parallelism is one-dimensional
enable-overlap-ag-with-matmul enable-overlap-matmul-with-rs | | layout: an option of two-dimensional tensor parallelism
enable-backward-overlap-ag-with-matmul | | layout: an option of two-dimensional tensor parallelism
unaligned-linear | | layout: heads and features are sharded evenly
layerwise-disaggregated-training | | layout: all stages have the same degrees
layerzero-config= fsdp2-config-str= | | layout: --sharding-degree, --segment-broadcast-MB
aiqos aiqos-mode= aiqos-schedule= aiqos-enable-roce | | speed: network priorities are not set
use-batch-invariant-ops use-flash-attn-npu-batch-invariant | | rounding: the device chooses kernels; see --deterministic
fp8-reuse-quantized-weight | | speed: weights are quantized at every use
te-comparison-with-cpu te-comparison-with-bf16 | | diagnosis: fp8 is not compared with other precisions
npu-datadump model-io-trace model-io-trace-config-path= | | diagnosis: tensors are not dumped
model-io-trace-output-path= | | diagnosis: tensors are not dumped
enable-high-availability | | faults: --local-checkpoint-dir keeps a copy on the next node
enable-optimizer-state-local-copy | | faults: --local-checkpoint-dir keeps a copy on the next node
enable-hbmfault-repair enable-worker-reboot | | faults: megapar launch --max-restarts restarts ranks
distributed-optimizer-no-replica enable-elastic-training | | faults: megapar launch --nnodes MIN:MAX
use-ema | | an exponential moving average of the weights is not kept
load-checkpoint-loosely | | --finetune selects what is re-initialized; the rest of a checkpoint must match
use-wandb | | logging: --wandb-project names the project; --tensorboard-dir, --metrics-jsonl
ai-framework= | | torch is the only framework
[unsupported | megapar plan distributes layers over stages]
automated-pipeline automated-pipeline-perf save-memory-ratio= recompute-module-list= recompute-type=
optimized-mbs-list= mbs-idx= pp-schedule-list= optimized-mbs-mode
[unsupported | diagnosis: --profile writes a torch trace]
profile-level= profile-with-cpu profile-with-stack profile-with-memory profile-record-shapes profile-save-path=
profile-export-type= profile-data-simplification
[left to you]
enable-hf2mg-convert | | initial weights: --load-hf is their folder
[other numbers unless]
noisy-gate-policy= | | | routers have no noise
moe-use-sinkhorn | | | experts are balanced by auxiliary losses or by the expert bias
fix-router | | | forced routing is not supported
moe-device-level-aux-loss-coeff= moe-comm-aux-loss-coeff= | 0 | | load balancing losses are per expert, not per device
ema-decay= | 0.9999 | use-ema | an exponential moving average of the weights is not kept
apply-wd-to-qk-layernorm | | | norms have no weight decay
quant-states= quant-grads o2-optimizer o2-gradient | | | optimizer moments and main gradients are fp32
qat-scheme= | | | GEMMs are not quantized
qat-scope= | all | qat-scheme fp8-format fp4-format | GEMMs are not quantized
hif8-input-margin= hif8-weight-margin= hif8-grad-margin= | | fp8-format | --fp8 uses current scaling per tensor
hif8-amax-collect-interval= hif8-scale-update-interval= | | fp8-format | --fp8 uses current scaling per tensor
hif8-amax-history-len= no-hif8-step-recovery | | fp8-format | --fp8 uses current scaling per tensor
no-shuffle | | | samples are always shuffled once per epoch
tokenizer-padding-side= | right | | samples are packed, without padding
tokenizer-kwargs= | | | the files of the tokenizer define it
is-instruction-dataset is-pairwise-dataset | | | megapar only pre-trains: no prompts, no pairs
stage= | | | megapar only pre-trains
full-shuffle-instruction-dataset neat-pack padded-samples | | is-instruction-dataset stage | megapar only pre-trains
no-cut-token cut-max-seqlen pad-to-multiple-of= | | is-instruction-dataset stage | an option of fine-tuning
dataset-additional-keys= | | is-instruction-dataset stage | an option of fine-tuning
lora-target-modules= qlora | | | all weights are trained; adapters are not supported
lora-load= lora-r= lora-alpha= lora-modules-to-save= | | lora-target-modules | adapters are not supported
lora-register-forward-hook= lora-fusion lora-ckpt-filter | | lora-target-modules | adapters are not supported
qlora-save-dequantize | | lora-target-modules | adapters are not supported
lu-lora-final-layer-index= | | | adapters are not supported
lu-lora-lr= lu-lora-lr-ratio= | | lu-lora-final-layer-index | adapters are not supported
dpo-beta= dpo-loss-type= ref-model= refer-model-iter= | | stage | preference training is not supported
dpo-label-smoothing= pref-ftx= | | stage | preference training is not supported
reward-tokens= reward-model= max-prompt-length= | | stage | reinforcement learning is not supported
num-samples-per-step= rollout-batch-size= cliprange-value= | | stage | reinforcement learning is not supported
critic-mini-batch-size= critic-update-epochs= ppo-mini-batch-size= | | stage | reinforcement learning is not supported
clip-ratio= entropy-coeff= ppo-epochs= shuffle-minibatch do-sample | | stage | reinforcement learning is not supported
missing-eos-penalty= n-samples-per-prompt= kl-coef= gamma= lam= | | stage | reinforcement learning is not supported
advantage-whiten= dataset-category= extract-content-for-reward= | | stage | reinforcement learning is not supported
[another model unless]
next-tockens= | 0 | | attention never covers later tokens
sparse-mode= | 2 | | masks are causal
expert-interval= | 1 | | all layers after --first-k-dense have experts
add-output-layer-bias | | | the output projection has no bias
dynamic-factor= | 1 | | RoPE is scaled by linear, llama3 or yarn, with one factor for all lengths
use-glm-rope | | | --rotary-percent rotates a part of each head, but GLM pairs other features
square-alibi-mask fill-neg-inf alibi-fusion-attn-type= | | | position embeddings are RoPE or learned
alibi-diagonal-opposite | | | position embeddings are RoPE or learned
use-dsa-absorb use-fused-lightning-indexer use-fused-sparse-flash-attention | | | attention is dense
use-fused-lightning-indexer-kl-loss enable-dsa-indexer use-indexer use-g2-attention | | | attention is dense
use-g2-indexer-loss use-triton-sfa o-groups= o-lora-rank= | | | attention is dense
index-n-heads= index-head-dim= index-topk= scale-fmt= | | enable-dsa-indexer use-indexer | attention is dense
indexer-loss-coeff= | | enable-dsa-indexer use-indexer | attention is dense
sliding-window= interleave-sliding-window= sliding-window-size= | | | attention covers all earlier tokens
g2-window-size= | | | attention covers all earlier tokens
use-naive-l2norm full-attention-interval= linear-key-head-dim= | | | all layers have full attention
linear-num-key-heads= linear-num-value-heads= linear-value-head-dim= mamba-d-ssm= | | | all layers have full attention
mamba-chunk-size= mamba-d-conv= mamba-expand= | | mamba-d-ssm | all layers have full attention
enable-mhc | | | there is one residual stream
use-triton-rmsnorm-without-weight use-triton-sinkhorn use-triton-mhc | | enable-mhc | there is one residual stream
hc-mult= hc-sinkhorn-iters= hc-eps= | | enable-mhc | there is one residual stream
swiglu-limit= | 0 | | SwiGLU is not clamped
shared-expert-gate-output-dimension= | 1 | shared-expert-gate | the gate of shared experts is one number of each token
cla-share-factor= | 1 | | every layer has separate keys and values
share-kvstates | | | every layer has separate keys and values
embed-layernorm input-embeds-norm | | | embeddings are not normalized
post-norm no-post-layer-norm | | | attention and MLP have one norm each: --norm-placement
add-rmsnorm-offset | | | norm weights have no offset
geglu gelu-tanh | | | activation functions are SwiGLU and GELU
output-logit-softcapping= | | | logits are not capped; attention scores are divided by sqrt(head size)
attn-logit-softcapping= | | | logits are not capped; attention scores are divided by sqrt(head size)
query-pre-attn-scalar= | | | logits are not capped; attention scores are divided by sqrt(head size)
fc-type= | | | MLPs are dense or consist of experts
mtp-after-norm | | | the multi-token prediction block reads its input before the final norm
dist-train | | | only text is supported
""")
