"""Translation of arguments that depends on their value or on other arguments: rows ``@name`` of the tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from megapar.config.read import spellings
from megapar.tools.translation import megatron_values, open_values
from megapar.tools.translation.neutral import Function, collected
from megapar.tools.translation.number import NotANumberError, first, number, whole
from megapar.tools.translation.verdict import (
    ANOTHER,
    IMPLIED,
    LEFT,
    OTHER,
    RENAMED,
    SAME,
    UNNECESSARY,
    UNSUPPORTED,
    Decided,
)
from megapar.training.step.schedules import BatchSize


def _chunks(value: str, given: Mapping[str, str]) -> Decided:
    layers = first(given, "num-layers")
    stages = max(1, first(given, "pipeline-model-parallel-size", otherwise=first(given, "pp-degree", otherwise=1)))
    per_chunk = number(value)
    chunks = round(layers / stages / per_chunk) if per_chunk else 0
    if chunks < 1:
        return (
            LEFT,
            "",
            "chunks per stage = layers / stages / layers per chunk: --vpp-degree, --pp-schedule interleaved",
        )
    if chunks == 1:
        return UNNECESSARY, "", "one chunk per stage"
    return RENAMED, f"--vpp-degree {chunks} --pp-schedule interleaved", ""


def _ramp(given: Mapping[str, str]) -> BatchSize | None:
    """Return the global batch size as a function of consumed samples; None if the script does not set it."""
    final = int(first(given, "global-batch-size"))
    ramp = given.get("rampup-batch-size", "")
    if final < 1 or open_values.is_open(ramp):
        return None
    if not ramp:
        return BatchSize(final)
    if len(ramp.split()) != 3:
        raise NotANumberError(f"--rampup-batch-size has three numbers; {ramp} is not a number each")
    start, increment, samples = (int(number(word)) for word in ramp.split())
    return BatchSize(final, start, increment, samples) if increment and final > start else BatchSize(final)


def _steps(samples: float, given: Mapping[str, str], whole: Callable[[float], int] = round) -> int | None:
    """Return the number of optimizer steps for a number of samples; None if the global batch size is not set."""
    batch = _ramp(given)
    if batch is None:
        return None
    consumed = steps = 0
    while consumed < min(samples, batch.ramp_samples):
        consumed += batch.at(consumed)
        steps += 1
    return steps + max(0, whole((samples - consumed) / batch.final))


def _warmup(value: str, given: Mapping[str, str]) -> Decided:
    if megatron_values.warmed_otherwise("lr-warmup-fraction", value, given):
        return UNNECESSARY, "", megatron_values.SET_ELSEWHERE
    share = number(value)
    steps = first(given, "lr-decay-iters", otherwise=first(given, "train-iters"))
    samples = first(given, "lr-decay-samples", otherwise=first(given, "train-samples"))
    if samples and not steps:
        steps = _steps(samples, given) or 0
    if not steps:
        return OTHER, "", "left to you: --lr-warmup-iters is a fraction of --lr-decay-iters, which is not set"
    return RENAMED, f"--lr-warmup-iters {round(share * steps)}", ""


def _counted(ours: str, value: str, given: Mapping[str, str], whole: Callable[[float], int] = round) -> Decided:
    samples = number(value, -1)
    steps = _steps(samples, given, whole) if samples >= 0 else None
    if steps is None:
        return OTHER, "", f"left to you: {ours} = samples / --global-batch-size, which is not set"
    return RENAMED, f"{ours} {steps}", ""


def _samples(value: str, given: Mapping[str, str]) -> Decided:
    return _counted("--train-iters", value, given, math.floor)  # an incomplete last batch is not used


def _warmup_samples(value: str, given: Mapping[str, str]) -> Decided:
    if megatron_values.warmed_otherwise("lr-warmup-samples", value, given):
        return UNNECESSARY, "", megatron_values.SET_ELSEWHERE
    return _counted("--lr-warmup-iters", value, given)


def _decay_samples(value: str, given: Mapping[str, str]) -> Decided:
    return _counted("--lr-decay-iters", value, given, math.floor)  # as --train-samples, which it often equals


def _wsd_samples(value: str, given: Mapping[str, str]) -> Decided:
    return _counted("--lr-wsd-decay-iters", value, given)


def _ramped(value: str, given: Mapping[str, str]) -> Decided:
    _ramp(given)  # says what it cannot read
    warmed = any(name.startswith("lr-warmup-") for name in given)
    if not warmed and given.get("lr-decay-style") == "constant":
        return SAME, f"--rampup-batch-size {value}", ""
    reason = "the batch size grows equally, but the learning rate follows steps in megapar, samples in Megatron-LM"
    return OTHER, f"--rampup-batch-size {value}", reason


def _tokens(value: str, given: Mapping[str, str]) -> Decided:
    length = first(given, "seq-length")
    if not length:
        return OTHER, "", "left to you: --train-iters = tokens / (--global-batch-size x --seq-length)"
    verdict, ours, reason = _counted("--train-iters", str(number(value) / length), given)
    steps = int(first(given, "train-iters"))
    if ours and 0 < steps < int(ours.split()[1]):
        return verdict, f"--train-iters {steps}", "the earlier of both ends"
    return verdict, ours, reason


def _iterations(value: str, given: Mapping[str, str]) -> Decided:
    if not value:
        return LEFT, "", "it has no value"
    if first(given, "train-tokens") > 0 and _tokens(given["train-tokens"], given)[1]:
        return IMPLIED, "", "--train-tokens ends the run earlier"
    return SAME, f"--train-iters {value}", ""


def _zero(value: str, given: Mapping[str, str]) -> Decided:
    if value == "0":
        return RENAMED, "--sharding-degree 1 --hybrid-dp", "no sharding: every data rank is a replica"
    return RENAMED, f"--sharding-stage {value}", ""


def _attention(value: str, given: Mapping[str, str]) -> Decided:
    if value in ("unfused", "local"):
        return RENAMED, "--no-use-flash-attn", ""
    if value == "fused":
        return IMPLIED, "", "fused attention is the default; --attention-backend cudnn names cuDNN's kernel"
    return IMPLIED, "", "fused attention is the default"


def _implementation(value: str, given: Mapping[str, str]) -> Decided:
    return UNNECESSARY, "", "there is one implementation, which uses the fused kernels of the device"


def _balancing(value: str, given: Mapping[str, str]) -> Decided:
    if value == "aux_loss":
        return IMPLIED, "", "set by --moe-aux-loss-coeff"
    if value == "seq_aux_loss":
        return _sequence(value, given)
    if value == "noaux_tc" and "moe-router-bias-update-rate" in given:
        return IMPLIED, "", "set by --moe-router-bias-update-rate"
    if value == "noaux_tc":
        return RENAMED, "--moe-router-bias-update-rate 1e-3", "the expert bias is updated if its rate is not 0"
    if value == "none":
        return RENAMED, "--moe-aux-loss-coeff 0", ""
    return OTHER, "", "experts are balanced by auxiliary losses or by the expert bias"


def _per_sample(given: Mapping[str, str]) -> bool:
    return "seq-aux" in given or given.get("moe-router-load-balancing-type") == "seq_aux_loss"


def _sequence(value: str, given: Mapping[str, str]) -> Decided:
    if "moe-aux-loss-coeff" in given:
        return IMPLIED, "", "set by --moe-seq-aux-loss-coeff"
    return IMPLIED, "", "no load balancing loss without its coefficient"


def _coefficient(value: str, given: Mapping[str, str]) -> Decided:
    if given.get("moe-router-load-balancing-type") == "none":
        return UNNECESSARY, "", "the model has no load balancing loss"
    if _per_sample(given):
        return RENAMED, f"--moe-seq-aux-loss-coeff {value} --moe-aux-loss-coeff 0", "load balancing loss per sample"
    return SAME, f"--moe-aux-loss-coeff {value}", ""


def _capacity(value: str, given: Mapping[str, str]) -> Decided:
    if "moe-model-type" in given:  # MindSpeed's gates
        return SAME if value else LEFT, f"--moe-capacity-factor {value}", ""
    reason = "weights are normalized over the kept experts, over all selected ones in Megatron-LM"
    return OTHER, f"--moe-model-type deepspeed_moe --moe-capacity-factor {value} --moe-min-capacity 1", reason


def _drops(value: str, given: Mapping[str, str]) -> Decided:
    if not any(name.endswith("capacity-factor") for name in given):
        return UNNECESSARY, "", "no tokens are dropped without a capacity factor"
    ours = {"probs": "probs", "position": "token"}.get(value)
    if ours is None:
        return OTHER, "", "the drop policy keeps earlier tokens, earlier choices or higher probabilities"
    reason = "ranked by scores, by renormalized weights in Megatron-LM" if ours == "probs" else ""
    return OTHER if reason else RENAMED, f"--moe-drop-policy {ours}", reason


def _experts(value: str, given: Mapping[str, str]) -> Decided:
    counts = set(value.split())
    if len(counts) == 1:
        return SAME, f"--num-experts {counts.pop()}", ""
    return ANOTHER, "", "all layers have the same number of experts"


def _chooses(given: Mapping[str, str]) -> bool:
    """Return True if a token has several experts, whose weights are renormalized by default."""
    return first(given, "moe-router-topk", otherwise=2) >= 2


def _pre_softmax(value: str, given: Mapping[str, str]) -> Decided:
    if given.get("moe-router-score-function") == "sigmoid":
        return IMPLIED, "", "sigmoid scores are not normalized before the selection"
    if "norm-topk-prob" in given:
        return IMPLIED, "", "--norm-topk-prob divides them by their sum, which is the softmax after the selection"
    if not _chooses(given):
        return IMPLIED, "", "the weight of a single expert is its score"
    return SAME, "--moe-router-pre-softmax", ""


def _router_dtype(value: str, given: Mapping[str, str]) -> Decided:
    if value == "fp64":
        return OTHER, "", "the router computes in fp32"
    return IMPLIED, "", "the router computes in fp32"


def _optimizer(value: str, given: Mapping[str, str]) -> Decided:
    kind = value.lower()
    if kind in ("", "adam", "adamw", "fused-adam", "fused_adam", "torch-adamw"):
        if "no-decoupled-weight-decay" in given:
            return OTHER, "", "weight decay is always decoupled (AdamW)"
        return IMPLIED, "", "AdamW, fused if the device supports it"
    if kind == "sgd":
        return SAME, "--optimizer sgd", ""
    return OTHER, "", "the optimizer is AdamW or SGD"


def _adam(value: str, given: Mapping[str, str]) -> Decided:
    return _optimizer("adam", given)


def _decay_style(value: str, given: Mapping[str, str]) -> Decided:
    kind = value.lower()
    if kind in _choices("lr-decay-style"):
        return SAME if kind == value else RENAMED, f"--lr-decay-style {kind}", ""
    return OTHER, "", f"the learning rate decay is one of {', '.join(_choices('lr-decay-style'))}"


def _choices(name: str) -> tuple[str, ...]:
    """Return the choices of a megapar flag."""
    return tuple(str(choice) for choice in spellings()[name].flag.choices)


def _wsd_style(value: str, given: Mapping[str, str]) -> Decided:
    if given.get("lr-decay-style", "").lower() != "wsd":
        return UNNECESSARY, "", "no effect without --lr-decay-style WSD"
    if not value:
        return RENAMED, "--lr-wsd-decay-style exponential", ""
    if value in _choices("lr-wsd-decay-style"):
        return SAME, f"--lr-wsd-decay-style {value}", ""
    return OTHER, "", f"the WSD decay is one of {', '.join(_choices('lr-wsd-decay-style'))}"


def _decay_increments(value: str, given: Mapping[str, str]) -> Decided:
    start, end = given.get("start-weight-decay"), given.get("end-weight-decay")
    if given.get("weight-decay-incr-style", "constant") == "constant" or (start is not None and start == end):
        decay = start or given.get("weight-decay", "0.01")
        return RENAMED, f"--weight-decay {decay}", "constant"
    return OTHER, "", "the weight decay is constant"


def _scales(given: Mapping[str, str]) -> bool:
    return given.get("fp16", "false").lower() not in ("false", "0")


def _loss_scale(value: str, given: Mapping[str, str]) -> Decided:
    if not _scales(given):
        return UNNECESSARY, "", "the loss is scaled only with fp16"
    return SAME, f"--initial-loss-scale {value}", ""


def _fixed_scale(value: str, given: Mapping[str, str]) -> Decided:
    if not _scales(given):
        return UNNECESSARY, "", "the loss is scaled only with fp16"
    ours = f"--initial-loss-scale {value} --min-loss-scale {value}"
    return OTHER, ours, "the scale is dynamic, with this value as its minimum"


def _first_loss_scale(value: str, given: Mapping[str, str]) -> Decided:
    return _loss_scale("4294967296", given)


def _dense(given: Mapping[str, str]) -> bool:
    return not any(name in given for name in ("num-experts", "num-moe-experts"))


def _no_balance(value: str, given: Mapping[str, str]) -> Decided:
    if _dense(given):
        return UNNECESSARY, "", "the model has no experts"
    return RENAMED, "--moe-aux-loss-coeff 0", ""


def _per_layer(value: str, given: Mapping[str, str]) -> Decided:
    return IMPLIED, "", "aux_loss"


def _mtp_weight(value: str, given: Mapping[str, str]) -> Decided:
    if not first(given, "mtp-num-layers"):
        return UNNECESSARY, "", "multi-token prediction is off"
    return RENAMED, "--mtp-loss-weight 0.1", ""


def _per_token(value: str, given: Mapping[str, str]) -> Decided:
    if "eod-mask-loss" in given:
        return OTHER, "", "tokens have equal weight, micro-batches in Megatron-LM"
    return IMPLIED, "", "all micro-batches have the same number of tokens"


def _skipped(given: Mapping[str, str]) -> int:
    """Return the number of empty layers (no-ops) that a script counts as layers."""
    return len([layer for layer in given.get("noop-layers", "").split(",") if layer])


def _noop(value: str, given: Mapping[str, str]) -> Decided:
    return IMPLIED, "--pp-seg-method balanced", "--num-layers counts real layers, which are distributed over the stages"


def _layers(value: str, given: Mapping[str, str]) -> Decided:
    skipped, layers = _skipped(given), whole(value)
    if not skipped or layers is None:
        return SAME, f"--num-layers {value}", ""
    return RENAMED, f"--num-layers {layers - skipped}", f"without {skipped} empty layers"


def _cut(value: str, given: Mapping[str, str]) -> Decided:
    if megatron_values.mp_ranks(given) == 1:
        return UNNECESSARY, "", "a single mp rank has the whole sequence"
    return SAME, "--sequence-parallel", ""


def _algorithm(value: str, given: Mapping[str, str]) -> Decided:
    if first(given, "context-parallel-size", otherwise=first(given, "cp-degree", otherwise=1)) == 1:
        return UNNECESSARY, "", "a single cp rank has the whole sequence"
    return SAME, f"--context-parallel-algo {value}", ""


def _shares(value: str) -> list[float]:
    words = value.strip("'\"").split(",")
    return [number(word) for word in words]


def _holds_out(given: Mapping[str, str]) -> bool:
    """Return True if some data are held out for evaluation."""
    if "mock-data" in given or "split" not in given:
        return True
    return sum(_shares(given["split"])[1:2]) > 0


def _split(value: str, given: Mapping[str, str]) -> Decided:
    if "mock-data" in given:
        return UNNECESSARY, "", "mock data have a separate validation set"
    if "valid-data-path" in given or "eval-data-path" in given:
        return UNNECESSARY, "", "validation data have a separate path"
    return SAME, "--split " + value.strip("'\""), ""


def _usual_eval_iters(value: str, given: Mapping[str, str]) -> Decided:
    if not first(given, "eval-interval") or not _holds_out(given):
        return UNNECESSARY, "", "nothing is evaluated"
    return RENAMED, "--eval-iters 100", ""


def _usual_eval_interval(value: str, given: Mapping[str, str]) -> Decided:
    if "eval-iters" in given:
        return IMPLIED, "", "set with --eval-iters"
    return RENAMED, "--eval-interval 0", "no evaluation during training"


def _held_out_path(value: str, given: Mapping[str, str]) -> Decided:
    if not _evaluates(given):
        return UNNECESSARY, "", "nothing is evaluated"
    return RENAMED, f"--eval-data-path {value}", "validation data"


def _test_path(value: str, given: Mapping[str, str]) -> Decided:
    return UNSUPPORTED, "", "there is one validation set; evaluate another with a run that sets --eval-data-path"


def _evaluates(given: Mapping[str, str]) -> bool:
    return first(given, "eval-iters", otherwise=100) > 0 and "eval-interval" in given and _holds_out(given)


def _evaluations(value: str, given: Mapping[str, str]) -> Decided:
    if not _evaluates(given):
        return RENAMED, "--eval-interval 0", "no evaluation"
    return SAME, f"--eval-iters {value}", ""


def _evaluated(value: str, given: Mapping[str, str]) -> Decided:
    if not _evaluates(given):
        return RENAMED, "--eval-interval 0", "no evaluation"
    return SAME, f"--eval-interval {value}", ""


def _profile(value: str, given: Mapping[str, str]) -> Decided:
    if ":" in value:
        return SAME, f"--profile {value}", ""
    start, end = given.get("profile-step-start", "10"), given.get("profile-step-end", "12")
    return RENAMED, f"--profile {start}:{end}", ""


def _one_node(given: Mapping[str, str]) -> bool:
    if "worker-num" in given:
        return given["worker-num"] == given.get("local-worker-num", "8")
    names = ("nnodes", "num-nodes", "nodes", "num-machines")
    return all(given.get(name, "1") == "1" for name in names) and "," not in given.get("host", "")


def _rendezvous(value: str, given: Mapping[str, str]) -> Decided:
    address = given.get("master-addr", given.get("main-process-ip"))
    port = given.get("master-port", given.get("main-process-port"))
    if _one_node(given):
        return UNNECESSARY, "", "a single node needs no rendezvous"
    if not address or not port:
        missing = "--master_port" if address else "--master_addr"
        return LEFT, "", f"--rdzv-endpoint needs address and port, but {missing} is not set"
    return RENAMED, f"megapar launch --rdzv-endpoint {address}:{port}", ""


def _loading(value: str, given: Mapping[str, str]) -> Decided:
    if "load" not in given:
        return UNNECESSARY, "", "nothing is loaded"
    return SAME, f"--{{name}} {value}".strip(), ""


def _node_rank(value: str, given: Mapping[str, str]) -> Decided:
    if _one_node(given):
        return UNNECESSARY, "", "there is one node"
    return LEFT, "", "every node has another"


def _ranks_here(value: str, given: Mapping[str, str]) -> Decided:
    if (ranks := whole(value)) is None:
        return LEFT, "", "--nproc-per-node is a number of ranks"
    return RENAMED, f"megapar launch --nproc-per-node {ranks}", ""


def _worker_num(value: str, given: Mapping[str, str]) -> Decided:
    nodes, rest = divmod(number(value), max(1.0, first(given, "local-worker-num", otherwise=8)))
    if rest:
        return LEFT, "", "set --nnodes: the ranks of all nodes are not a multiple of those of this node"
    return RENAMED, f"megapar launch --nnodes {int(nodes)}", "the ranks of all nodes / those of this node"


def _num_processes(value: str, given: Mapping[str, str]) -> Decided:
    ranks, rest = divmod(number(value), max(1.0, first(given, "num-machines", otherwise=1)))
    if rest:
        return LEFT, "", "set --nproc-per-node: the ranks of all nodes are not a multiple of the nodes"
    return RENAMED, f"megapar launch --nproc-per-node {int(ranks)}", ""


def _hosts(value: str, given: Mapping[str, str]) -> Decided:
    return RENAMED, f"megapar launch --nnodes {len(value.split(','))}", ""


def _launch_file(value: str, given: Mapping[str, str]) -> Decided:
    return LEFT, "", "the file is not read: set its ranks and nodes, and --dtype and --sharding-stage if it sets them"


def _listed(value: str, given: Mapping[str, str]) -> Decided:
    devices = [word for word in value.strip("'\"").split(",") if word]
    return RENAMED, f"megapar launch --nproc-per-node {len(devices)}", ""


def _positions(value: str, given: Mapping[str, str]) -> Decided:
    if given.get("position-embedding-type") == "rope" or "use-rotary-position-embeddings" in given:
        return IMPLIED, "", "RoPE has no learned positions"
    return ANOTHER, "", "position embeddings are RoPE or learned"


DECIDED: Mapping[str, Function] = {
    **collected(globals()),
    **megatron_values.DECIDED,
}
# Functions whose argument affects the training. If the script leaves its value open, the training is undecided.
_HARMLESS = """
    loading rendezvous ranks_here worker_num num_processes hosts listed node_rank profile held_out_path test_path zero
    attention implementation chunks noop cut algorithm
"""
DECIDING = frozenset(DECIDED).difference(_HARMLESS.split(), megatron_values.HARMLESS)
