"""How rows are proven whose failing example alone does not do it."""

from __future__ import annotations

from dataclasses import dataclass

_BOTH = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --ffn-hidden-size 32 --seq-length 16 --vocab-size 101 "
    "--micro-batch-size 2 --init-std 0.1"
)
_ERNIE = f"{_BOTH} --attention-dropout 0 --hidden-dropout 0"
SIZES = {
    "moe": f"{_BOTH} --num-experts 4",
    "ernie": _ERNIE,
    "ernie3": f"{_ERNIE} --task-num-layers 1 --task-hidden-size 16 --task-num-attention-heads 4 "
    "--task-ffn-hidden-size 32",
}


@dataclass(frozen=True)
class Proof:
    """line: flags in place of the row's failing example. ranks: processes, in place of its --world-size.

    idle: flags of it that must change nothing. same_as: flags of a run of which it is a second spelling.
    beside: other rows that are taken out with it, which refuse what it refuses as long as a feature is not there.
    argument: why no run is made.
    """

    line: str = ""
    ranks: int = 0
    idle: tuple[str, ...] = ()
    same_as: str = ""
    beside: tuple[str, ...] = ()
    argument: str = ""


_ON_ACCELERATORS = """
compile-device fp64-device fp8-device fp8-dtype not-built-fp8-fused-overlap
tp-comm-overlap-fused-device tp-comm-overlap-fused-dtype apex-moments
attention-backend-device attention-backend-dtype attention-backend-fused attention-backend-repeats
attention-backend-dropout attention-backend-form attention-backend-heads attention-backend-heads-ernie
"""

_FP8 = "--fp8 --device cpu --hidden-size 128 --ffn-hidden-size 256 --num-experts"
_LATER = ("not-built-recompute-in-advance", "not-built-recompute-in-bubble")

PROOFS: dict[str, Proof] = {
    **dict.fromkeys(
        _ON_ACCELERATORS.split(), Proof(argument="this device is not there, and a run would end when it is looked for")
    ),
    "fp8-widths": Proof(f"--mp-degree 2 --head-dim 64 --num-query-groups 2 {_FP8} 0 --ffn-hidden-size 384", 2),
    "fp8-heads": Proof(f"{_FP8} 0 --num-attention-heads 4 --head-dim 48"),
    "fp8-shared-experts": Proof(f"{_FP8} 4 --head-dim 64 --moe-shared-experts 1 --moe-ffn-hidden-size 192"),
    "fp8-ernie": Proof("--mp-degree 2 --fp8 --device cpu --hidden-size 384 --ffn-hidden-size 256", 2),
    "fp8-experts-unused": Proof(idle=("fp8_experts",)),
    "fp8-recipe-unused": Proof(idle=("fp8_recipe",)),
    "not-built-fp8-tensorwise": Proof(
        f"--mp-degree 2 --head-dim 64 --num-query-groups 2 {_FP8} 0 --fp8-recipe tensorwise", 2
    ),
    "fp8-expert-width": Proof(argument="on a GPU torch would refuse the product in the first step; a CPU takes it"),
    "not-built-fp8-experts": Proof(
        f"--mp-degree 2 --head-dim 64 --num-query-groups 2 {_FP8} 4 --moe-ffn-hidden-size 128 --fp8-experts", 2
    ),
    "not-built-stage-3-overlap-off": Proof(
        "--sharding-stage 3 --no-overlap-grad-reduce", 2, idle=("overlap_grad_reduce",)
    ),
    "remote-paths": Proof(argument="a run would write into a folder s3: of the working folder, and end with status 0"),
    "world-size-launched": Proof("--world-size 8", 1),
    "dp-degree-hybrid": Proof(argument="there would be replicas although --hybrid-dp is switched off"),
    "ep-room": Proof("--ep-degree 3 --num-experts 9", 4),
    "moe-dispatch-nodes": Proof("--ep-degree 4 --ranks-per-node 4 --moe-dispatch node", 4),
    "moe-dispatch-experts": Proof(
        "--ep-degree 2 --ranks-per-node 1 --moe-dispatch node --num-layers 1 --num-experts 32770", 2
    ),
    "moe-dispatch-unused": Proof(idle=("moe_dispatch",)),
    "moe-rebalance-experts": Proof(argument="there is one place for an expert, or ranks with one expert to exchange"),
    "not-built-stage-3-rebalance": Proof(
        argument="rows of the DTensors of FSDP2 would have to be moved, which is not built"
    ),
    "not-built-offload-rebalance": Proof(argument="the guard of offloaded state would take the moved rows for a fault"),
    "two-byte-dtype": Proof(argument="no gradient and no weight is bf16, so that nothing would have two bytes"),
    "main-grads-reduce": Proof(argument="messages would have fp32's bytes and bf16's precision"),
    "not-built-two-bytes-optimizer": Proof(argument="torch's kernel of SGD takes gradients of the masters' dtype"),
    "not-built-two-bytes-offload": Proof(argument="gradients of another dtype would be copied as the masters'"),
    "not-built-two-bytes-stage-3": Proof(argument="FSDP2's parameters and gradients would stay in fp32"),
    "not-built-remainders-qk-clip": Proof(argument="factors would be applied to remainders"),
    "not-built-remainders-rebalance": Proof(argument="an expert's remainders would move without its weights"),
    "not-built-bf16-moments-offload": Proof(argument="states of two dtypes would share memory of one"),
    "not-built-bf16-moments-rebalance": Proof(
        argument="an expert's moments would be rounded by the random numbers of the expert whose place it has"
    ),
    "ep-without-experts": Proof(idle=("ep_degree",)),
    "qkv-bias-unused": Proof(idle=("add_qkv_bias",)),
    "layer-freq": Proof(same_as="--num-layers 4 --moe-layer-freq [0,1]*2"),
    "layer-freq-lead": Proof(idle=("first_k_dense",)),
    "shared-width": Proof(idle=("moe_shared_experts",)),
    "pre-softmax": Proof(idle=("moe_router_pre_softmax",)),
    "qk-norm-scope-unused": Proof(idle=("qk_norm_scope",)),
    "window-layers": Proof(same_as="--num-layers 4 --window-size 4 --window-attn-skip-freq [1,0]*2"),
    "window-rope-unused": Proof(idle=("window_rope",)),
    "no-rope-layers": Proof(same_as="--num-layers 4 --no-rope-freq [0,1]*2"),
    "embedding-scale": Proof(idle=("embedding_multiplier",)),
    "window-layers-unused": Proof(idle=("window_attn_skip_freq",)),
    "qk-clip-unused": Proof(idle=("qk_clip_statistic",)),
    "qk-clip-norm": Proof(argument="the scores would stay as they are, because norms give queries their scale back"),
    "not-built-update-norms-offload": Proof(argument="on a CPU, host and device are the same memory"),
    "not-built-muon-offload": Proof(argument="on a CPU, host and device are the same memory"),
    "apex-device": Proof(argument="the kernels are not there, and a run would end when they are looked for"),
    "qk-clip-statistic": Proof(
        argument="the largest scores of a kernel that does not return them would be computed again"
    ),
    "not-built-qk-clip-offload": Proof(argument="on a CPU, host and device are the same memory"),
    "output-norm-ampipe": Proof("--norm-placement output --ep-degree 2 --ampipe-degree 2", 2, idle=("ampipe_degree",)),
    "mtp-block": Proof(argument="a block would be trained that no published model defines"),
    "tp-comm-overlap-unused": Proof(idle=("tp_comm_overlap",)),
    "tp-comm-overlap-fused": Proof(argument="all-reduces would stay as they are, one behind each product"),
    "mp-ffn": Proof("--mp-degree 2 --num-experts 0 --ffn-hidden-size 641", 2),
    "mp-shared-experts": Proof(
        "--mp-degree 2 --sequence-parallel --expert-mp-degree 1 --moe-shared-experts 1 --moe-ffn-hidden-size 255", 2
    ),
    "yarn-frequencies": Proof("--rope-scaling-type yarn --rope-theta 1"),
    "positions": Proof("--position-embedding-type learned --seq-length 32 --max-position-embeddings 16"),
    "first-k-dense": Proof(same_as="--num-layers 4 --num-experts 0"),
    "mtp-block-unused": Proof(idle=("mtp_block",)),
    "mtp-length": Proof(argument="a block would be trained on no token, and be saved"),
    "cp-ulysses-heads": Proof("--cp-degree 4 --context-parallel-algo ulysses_cp_algo --num-attention-heads 2", 4),
    "sequence-parallel-length": Proof("--mp-degree 2 --sequence-parallel --seq-length 15", 2),
    "cp-ring-length": Proof("--cp-degree 2 --seq-length 14", 2),
    "cp-gathered-length": Proof("--cp-degree 2 --context-parallel-algo allgather_cp_algo --seq-length 15", 2),
    "batch-divides": Proof("--micro-batch-size 2 --global-batch-size 18", 4),
    "stages-layers": Proof("--pp-degree 4 --num-layers 2 --gradient-merge-acc-step 4", 4),
    "schedule-without-chunks": Proof(
        "--pp-degree 2 --pp-schedule gpipe --vpp-degree 2 --num-layers 4 --gradient-merge-acc-step 4", 2
    ),
    "interleaved-chunks": Proof("--pp-degree 2 --pp-schedule interleaved --gradient-merge-acc-step 4", 2),
    "nanopipe-schedule": Proof(
        "--pp-degree 2 --use-nanopipe --pp-schedule gpipe --gradient-merge-acc-step 4", 2, idle=("pp_schedule",)
    ),
    "micro-batches-enough": Proof("--pp-degree 4 --num-layers 4 --gradient-merge-acc-step 3", 4),
    "micro-batches-stages": Proof(
        "--pp-degree 2 --pp-schedule interleaved --vpp-degree 2 --num-layers 4 --gradient-merge-acc-step 5", 2
    ),
    "pipeline-stage-3": Proof("--pp-degree 2 --sharding-stage 3 --gradient-merge-acc-step 2", 4),
    "zero-bubble-stage-2": Proof("--pp-degree 2 --use-nanopipe --sharding-stage 2 --gradient-merge-acc-step 2", 4),
    "zero-bubble-recompute": Proof(
        argument="what a unit computes again is kept until its weight-gradient step, for the memory that it was to save"
    ),
    "recompute-method-layers": Proof(argument="--recompute-method block alone does not say how many layers"),
    "recompute-contradiction": Proof(argument="one of the two would win in silence, and another memory be needed"),
    "recompute-granularity-pair": Proof(argument="one of the two would win in silence, and another memory be needed"),
    "recompute-keeps-parts": Proof(idle=("recompute_offload",)),
    "recompute-partition-sequence": Proof(idle=("recompute_partition",)),
    "recompute-advance-bubble": Proof(
        idle=("recompute_in_advance", "recompute_in_bubble"), beside=(*_LATER, "recompute-advance-chunks")
    ),
    "recompute-advance-chunks": Proof(idle=("recompute_in_bubble",), beside=_LATER),
    "recompute-adaptive-size": Proof(
        argument="every layer would be recomputed and the run end, or none be, whatever memory there is"
    ),
    "recompute-adaptive-pipeline": Proof(
        argument="the least memory of one micro-batch would be chosen, and a stage that keeps several exceed the bound"
    ),
    "ampipe-ep": Proof(idle=("ampipe_degree",)),
    "ampipe-short": Proof("--ampipe-degree 16 --seq-length 8 --ep-degree 2", 2),
    "ampipe-capacity-unused": Proof(
        "--ampipe-degree 2 --ep-degree 2 --ampipe-capacity slice --moe-model-type megatron_moe",
        2,
        idle=("ampipe_capacity",),
    ),
    "ampipe-drop-policy": Proof(
        "--ampipe-degree 2 --ep-degree 2 --moe-model-type deepspeed_moe --moe-drop-policy choice "
        "--moe-capacity-factor 0.5 --moe-min-capacity 1",
        2,
    ),
    "not-built-cp-pipe-experts": Proof(
        "--cp-degree 2 --use-pipe-experts --pipe-experts-multi-data 2 --moe-model-type deepspeed_moe --ep-degree 2 "
        "--moe-capacity-factor 0.5 --moe-min-capacity 1",
        2,
    ),
    "pipe-experts-alone": Proof("--use-pipe-experts --moe-model-type deepspeed_moe", 1, idle=("use_pipe_experts",)),
    "batch-agrees": Proof(idle=("gradient_merge_acc_step",)),
    "rampup-global": Proof(argument="first steps would have fewer micro-batches than --gradient-merge-acc-step"),
    "rampup-steps": Proof(argument="a batch of 9 would be trained on 8 samples and be counted as 9"),
    "warmup": Proof("--train-iters 10 --lr-warmup-iters 10 --lr-decay-style linear", idle=("lr_decay_style",)),
    "wsd-decay": Proof(argument="the decay would have begun before the first step, and --lr never be reached"),
    "wandb-unused": Proof(idle=("wandb_exp_name",)),
    "mlflow-unused": Proof(idle=("mlflow_run_name",)),
    "swanlab-unused": Proof(idle=("swanlab_exp_name",)),
    "profile-steps": Proof("--profile 3-5 --metrics-jsonl runs/a/metrics.jsonl"),
    "merge-mode-stage": Proof(
        "--sharding-stage 1 --gradient-merge-mode micro_batch --gradient-merge-acc-step 2",
        2,
        same_as="--sharding-stage 2 --gradient-merge-acc-step 2",
    ),
    "offload-stage": Proof("--optimizer-offload --sharding-stage 3", 2),
    "reduce-dtype-wide": Proof("--grad-reduce-dtype bf16 --dtype fp64", 2),
    "reduce-dtype-adds": Proof(argument="sums over micro-batches would lose what is below 2^-8 of them"),
    "mup-logits": Proof(argument="logits of a wider model would grow with its width, and --lr not suit it"),
    "mup-muon-heads": Proof(argument="updates of heads would grow with the width, and --lr not suit it"),
    "decoupled-min-lr": Proof(argument="the learning rate would grow while it is said to decay"),
    "decoupled-unused": Proof(idle=("decoupled_min_lr",)),
    "weight-decay-ends": Proof(idle=("weight_decay_incr_style", "end_weight_decay")),
    "weight-decay-ends-unused": Proof(idle=("end_weight_decay",)),
    "weight-decay-unused": Proof(idle=("weight_decay",)),
    "min-lr": Proof(argument="the learning rate would grow while it is said to decay"),
    "straggler-factor": Proof(argument="ranks as fast as the median one would be named as late"),
    "spike-skip-sigmas": Proof(idle=("spike_skip",)),
    "manual-gc-interval": Proof(idle=("manual_gc_interval",)),
    "load-twice": Proof(argument="one of the two sources of weights would win in silence"),
    "names-without-weights": Proof(argument="nothing would say what share of the samples each source has"),
    "eval-names-weights": Proof(argument="the weights would be ignored, and the loss be another than they say"),
    "eval-tasks-interval": Proof(argument="the tasks would never be scored, in silence"),
    "eval-tasks-names": Proof(argument="the scores of one task would replace those of the other"),
    "eval-tasks-tokenizer": Proof(argument="no text can be encoded, which would show after the ranks have started"),
    "phases-sources": Proof(argument="a source of a phase would have no path, or a source that is named no phase"),
    "phases-places": Proof(argument="a phase that is written would never be trained on, or the ramp would end in it"),
    "phases-lr": Proof(argument="one of the two decays at the end would win in silence"),
    "phases-warmup": Proof(
        argument="the warmup would be cut off in silence, and the rate jump at the end of the phase"
    ),
    "phases-decoupled-lr": Proof(
        argument="the rate of word embeddings would move to that of the phase, or stay, in silence"
    ),
    "phases-adaptive": Proof(argument="a longer phase would need more memory than the first steps showed"),
    "override-data": Proof(argument="a name that means nothing would lift no refusal"),
    "split-weights": Proof("--data-path a.jsonl --split 0,100"),
    "split-nothing-held-out": Proof("--data-path a.jsonl --split 100,0,0 --eval-interval 5"),
    "split-or-eval-data": Proof(argument="what is held out would come from one of the two, the other be ignored"),
    "sft-flags": Proof(idle=("sft_loss",)),
    "sft-tokenizer": Proof(
        argument="a tokenizer trained on the records has no chat template, and does not know tokens' characters"
    ),
    "sft-data": Proof(argument="text has no turns of an assistant"),
    "sft-packing": Proof(
        argument="two flags would say what shares a sample, and documents would end at tokens that mark no end"
    ),
    "sft-phases": Proof(argument="packs would be read by a plan of their sources' samples of text"),
    "train-epochs": Proof(argument="two flags would say how long the run is"),
    "split-mock": Proof(idle=("split",)),
    "text-field": Proof(idle=("text_field",)),
    "document-per": Proof(idle=("document_per",)),
    "packing-off": Proof(idle=("reset_attention_mask",)),
    "hf-source": Proof("--hf-dataset corpus", idle=("hf_dataset",)),
    "hf-source-alone": Proof(argument="files that are named would not be read"),
    "hf-source-packing": Proof(argument="samples would be packed although --no-packing is said"),
    "compile-deterministic": Proof(argument="a kernel that is chosen by measuring may be another one in the next run"),
    "compile-ernie3": Proof(argument="segments of another size each step are compiled anew each step"),
    "latent-head-dim": Proof(idle=("head_dim",)),
    "latent-rotary-percent": Proof(idle=("rotary_percent",)),
    "latent-sizes-unused": Proof(idle=("kv_lora_rank",)),
    "mla-cp-exchange-unused": Proof("--cp-degree 2 --mla-cp-exchange kv", 2, idle=("mla_cp_exchange",)),
    "triples": Proof(argument="the task would be trained on triples drawn at random"),
    "segment-size-unused": Proof(idle=("segment_broadcast_mb",)),
    "segments-unused": Proof(
        "--ernie-model ernie3 --task-type-vocab-size 5 --ernie-tasks knowledge_mlm:1.0 --generation-segments 2 "
        "--memory-length 4",
        idle=("generation_segments", "memory_length"),
    ),
    "segments": Proof(
        "--ernie-model ernie3 --task-type-vocab-size 5 --mp-degree 2 --sequence-parallel --generation-segments 3 "
        "--memory-length 4",
        2,
    ),
    "ernie3-length": Proof(argument="pieces of two ids would be cut in three, and parts be empty"),
    "memory": Proof(
        "--ernie-model ernie3 --task-type-vocab-size 5 --seq-length 16 --generation-segments 2 --memory-length 9",
        same_as="--ernie-model ernie3 --task-type-vocab-size 5 --seq-length 16 --generation-segments 2 "
        "--memory-length 8",
    ),
    "progressive-length": Proof(
        "--progressive-iters 3 --mp-degree 2 --sequence-parallel --seq-length 18 --progressive-length-multiple 9", 2
    ),
    "progressive-warmup": Proof(idle=("lr_warmup_iters",)),
    "progressive-rampup": Proof(idle=("rampup_batch_size",)),
    "not-built-recompute-in-advance": Proof(
        "--pp-degree 2 --vpp-degree 2 --pp-schedule interleaved --num-layers 4 --gradient-merge-acc-step 2 "
        "--recompute-interval 1 --recompute-in-advance",
        2,
        idle=("recompute_in_advance",),
    ),
    "not-built-recompute-in-bubble": Proof(
        "--pp-degree 2 --vpp-degree 2 --pp-schedule interleaved --num-layers 4 --gradient-merge-acc-step 2 "
        "--recompute-interval 1 --recompute-in-bubble",
        2,
        idle=("recompute_in_bubble",),
    ),
}
