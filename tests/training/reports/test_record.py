"""Every figure of a step's record by its formula, from what heads and routers got, and from masters and gradients."""

from __future__ import annotations

import dataclasses
import math
import resource
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megapar.core.comm.accounts import Waits
from megapar.core.optimizer.loss_scale import LossScale
from megapar.model.decoder.model import LmHead
from megapar.model.ernie.model import MaskedLmHead, SentenceOrderHead
from megapar.model.ernie3.model import ClassHead
from megapar.moe.router import Router
from megapar.trainer import Trainer
from megapar.training.loop import stepper
from megapar.training.reports.logger import Logger
from megapar.training.reports.record import Record
from tests.support.training import COMMON, SMALL, last_wins, make_trainer
from tests.training.step.test_qk_clip import largest, masters, recorded

ROOT = Path(__file__).parents[3]
STEPS, SAMPLES, LENGTH, VOCABULARY, H, TOPK, EXPERTS = 4, 8, 16, 101, 32, 2, 4
SECONDS, THRESHOLD, TFLOPS = 0.25, 2.5, 0.5
WEIGHTS = {"mtp": 0.3, "aux": 0.01, "z": 0.001, "sequence": 0.05, "orthogonal": 0.1}
FLAGS = (
    *("--dtype", "fp64", "--untie-embeddings-and-output-weights", "--no-packing", "--micro-batch-size", "2"),
    *("--moe-model-type", "deepspeed_moe", "--moe-capacity-factor", "0.75", "--moe-min-capacity", "1"),
    *(
        "--first-k-dense",
        "0",
        "--moe-drop-policy",
        "token",
        "--mtp-depth",
        "1",
        "--mtp-loss-weight",
        "0.3",
        "--moe-aux-loss-coeff",
        "0.01",
    ),
    *("--moe-z-loss-coeff", "0.001", "--moe-seq-aux-loss-coeff", "0.05", "--moe-orthogonal-loss-coeff", "0.1"),
    *("--decoupled-lr", "2e-2", "--decoupled-min-lr", "2e-3", "--min-lr", "1e-3", "--lr-warmup-iters", "1"),
    *("--lr-decay-style", "cosine", "--weight-decay-incr-style", "linear", "--start-weight-decay", "0.1"),
    *("--end-weight-decay", "0.5", "--clip-grad", "0.1", "--qk-clip-threshold", str(THRESHOLD)),
    *("--log-update-norms", "--log-interval", "1", "--device-tflops", str(TFLOPS), "--train-iters", str(STEPS)),
    *("--eval-interval", str(STEPS), "--eval-iters", "1"),
)
WAITS = {"mp/all_reduce": 0.03, "data/counts": 0.02}


class Clock:
    """Steps of 0.25 s, of which the n-th ends n hours after 1970 began."""

    def __init__(self) -> None:
        self.seconds, self.hours = 0.0, 0

    def perf_counter(self) -> float:
        self.seconds += SECONDS
        return self.seconds

    def time(self) -> float:
        self.hours += 1
        return 3600.0 * self.hours


class Failing(Logger):
    """A logger that fails for each record."""

    def log(self, record: Record) -> None:
        """Fail."""
        raise OSError("full")


@dataclasses.dataclass
class Seen:
    """What a step of the model got, and did.

    Attributes:
        heads: Of each call of a head, sum of losses, predictions and right ones of each input.
        routers: Of each call of a router, its weight, correction bias, input, valid tokens and samples.
    """

    batches: list[Any]
    heads: list[list[tuple[float, int, int]]] = dataclasses.field(default_factory=list)
    routers: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)
    grads: list[Tensor] = dataclasses.field(default_factory=list)
    before: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    after: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    first_scores: int = 0


class Run:
    """Four steps, of which the second overflows, and an evaluation after the last."""

    def __init__(self, kind: str, flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps, self.evaluated = list[Seen](), Seen([])
        self.scores = recorded(monkeypatch)
        monkeypatch.setattr("megapar.trainer.make_loss_scale", lambda *_: LossScale(1024.0, 1.0, 2.0, 1, 1))
        monkeypatch.setattr(stepper, "time", Clock())
        trainer = make_trainer(kind, last_wins((*SMALL[kind], *COMMON), flags), loggers=[Failing()], keep_records=True)
        self.memory = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]
        self._watch(trainer)
        self.records = list(trainer.train().records)
        self.memory += [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]

    def _watch(self, trainer: Trainer) -> None:
        model, monitor, optimizer = trainer.job.model, trainer.monitor, trainer.job.optimizer
        following, before_update, add, update = (
            trainer.stepper.feed.next, trainer.stepper.before_update, monitor.add, optimizer.step
        )  # fmt: skip
        trainer.checkpoints.failures.in_a_row = 2
        monitor._device.memory_pressure = lambda: SimpleNamespace(held_bytes=11, retries=3)

        def begin(*arguments: Any) -> Any:
            work = following(*arguments)
            self.steps.append(Seen(list(work.batches), first_scores=len(self.scores)))
            return work

        def keep_gradients() -> None:
            before_update()
            shards = trainer.job.sharding.master_shards
            self.steps[-1].grads = [s.grad.clone() for s in shards if s.grad is not None]

        def keep_masters(*arguments: Any) -> None:
            self.steps[-1].before = masters(trainer)
            update(*arguments)
            self.steps[-1].after = masters(trainer)

        def timed(step: Any) -> None:
            waits = {"exposed": Waits(WAITS), "waited": Waits({"last": 0.04}), "sent_bytes": {"mp/all_reduce": 7}}
            add(dataclasses.replace(step, **waits))

        trainer.stepper.feed.next, trainer.stepper.before_update = begin, keep_gradients
        monitor.add, optimizer.step = timed, keep_masters
        next(model.parameters()).register_hook(lambda grad: grad * (math.inf if len(self.steps) == 2 else 1))
        for module in model.modules():
            if isinstance(module, (LmHead, MaskedLmHead, SentenceOrderHead, ClassHead)):
                module.register_forward_pre_hook(self._head)
            if isinstance(module, Router):
                module.register_forward_pre_hook(self._router)

    def _now(self, module: Any) -> Seen:
        return self.steps[-1] if module.training else self.evaluated

    def _head(self, module: Any, arguments: Any) -> None:
        """Keep the loss of each of the head's inputs, by a plain softmax in fp64."""
        self._now(module).heads.append(list(losses_of(module, arguments)))

    def _router(self, module: Router, arguments: tuple[Any, ...]) -> None:
        kept = (module.weight.detach().clone(), module.correction_bias.clone(), *arguments)
        self._now(module).routers.append(kept)


def losses_of(module: Any, arguments: Any) -> Iterator[tuple[float, int, int]]:
    """Yield (sum of cross-entropies, their number, correct predictions) of each input of a head."""
    with torch.no_grad():
        if isinstance(module, LmHead):
            pairs = [(x @ module.weight.T, labels) for x, labels, _ in arguments]
        elif isinstance(module, MaskedLmHead):
            rows, labels, word = arguments
            pairs = [(module.norm(F.gelu(module.transform(rows))) @ word.T + module.bias, labels)]
        else:
            pairs = [(arguments[0] @ module.weight.T + module.bias, arguments[1])]
        for logits, labels in pairs:
            counted = labels != -100
            logits, labels = logits[counted], labels[counted]
            shares = (logits - logits.amax(-1, keepdim=True)).exp()
            chosen = shares.gather(1, labels[:, None])[:, 0] / shares.sum(1)
            yield float(-chosen.log().sum()), len(labels), int((logits.argmax(1) == labels).sum())


def routed(seen: Seen) -> list[dict[str, Any]]:
    """The losses and loads of each call of a router; none of padding."""
    found = []
    for weight, bias, x, valid, samples in seen.routers:
        kept = torch.ones(len(x), dtype=torch.bool) if valid is None else valid
        logits = x.detach() @ weight.T
        shares = logits.softmax(1)

        def balance(rows: Tensor, shares: Tensor = shares) -> Tensor:
            """E / k times the sum of mean shares and mean choices of the best by score."""
            best = torch.bincount(shares[rows].topk(TOPK).indices.flatten(), minlength=EXPERTS)
            return EXPERTS / TOPK * (shares[rows].mean(0) * best / rows.sum()).sum()

        load = torch.bincount((shares + bias)[kept].topk(TOPK).indices.flatten(), minlength=EXPERTS)
        room = max(1, math.ceil(0.75 * TOPK * int(kept.sum()) / EXPERTS))
        rows = F.normalize(weight, dim=1)
        found.append(
            {
                "load": load,
                "dropped": int((load - room).clamp(min=0).sum()),
                "aux": balance(kept),
                "z": logits[kept].logsumexp(1).square().mean(),
                "sequence": sum(
                    balance(kept & (torch.arange(len(x)) // (len(x) // samples) == sample)) for sample in range(samples)
                ),
                "orthogonal": (rows @ rows.T - torch.eye(EXPERTS)).square().mean(),
            }
        )
    return found


def routing(name: str) -> Callable[[Run, int], float]:
    """The sum over layers, and the mean over micro-batches, or over samples of a loss per sample."""
    divisor = SAMPLES if name == "sequence" else SAMPLES // 2
    return lambda run, step: float(sum(call[name] for call in routed(run.steps[step]))) / divisor


def mean(seen: Seen, number: int, *, column: int = 0) -> float:
    """A loss per prediction, or a share of right ones, of all calls of heads: their input ``number``."""
    inputs = [losses[number] for losses in seen.heads]
    return sum(one[column] for one in inputs) / sum(one[1] for one in inputs)


def loads(run: Run, step: int) -> list[list[float]]:
    """By layer, the load of each expert relative to an even one."""
    calls, layers = [call["load"] for call in routed(run.steps[step])], 2
    return [(load / load.double().mean()).tolist() for load in (sum(calls[n::layers]) for n in range(layers))]


def percentiles(run: Run, step: int) -> list[dict[str, float]]:
    return [dict(zip(("min", "p50", "p90", "max"), (s[0], s[1], s[3], s[3]), strict=True))
            for s in map(sorted, loads(run, step))]  # fmt: skip


def valid_tokens(seen: Seen) -> int:
    """Tokens that are not padding."""
    return sum(
        int(b.tensors["valid"].sum()) if "valid" in b.tensors else b.tensors["tokens"].numel() for b in seen.batches
    )


def updates(step: int) -> int:
    """Updates before a step: the second overflows."""
    return (0, 1, 1, 2)[step]


def cosine(peak: float, floor: float) -> Callable[[Run, int], float]:
    """One step of warmup, and three of a half cosine."""
    shares = [0.5 * (1 + math.cos(math.pi * max(0, n - 1) / 3)) for n in range(3)]
    return lambda run, step: floor + (peak - floor) * shares[updates(step)]


def class_of(name: str) -> str:
    """The class of a parameter, by its name."""
    words = {"norm": "vectors", "bias": "vectors", "router": "routers", "experts": "experts", "attention": "attention"}
    words |= {"embedding": "embeddings", "lm_head": "head"}
    return next((kind for word, kind in words.items() if word in name.replace("attention_norm", "norm")), "mlps")


def norms(values: Callable[[Seen, str], Tensor]) -> Callable[[Run, int], dict[str, float]]:
    def by_class(run: Run, step: int) -> dict[str, float]:
        squares: dict[str, float] = {}
        for name in run.steps[step].after:
            kind = class_of(name)
            squares[kind] = squares.get(kind, 0.0) + float(values(run.steps[step], name).square().sum())
        return {kind: math.sqrt(total) for kind, total in squares.items()}

    return by_class


def flops(run: Run, step: int) -> float:
    """Of a second: 6 for each weight and token, and for each feature of a query and half of the keys."""
    attention, dense, experts = H * (4 + 2 * 2) * 8 + H * H, 3 * H * 48, TOPK * 3 * H * 24 + H * EXPERTS
    weights = 3 * attention + dense + 2 * experts + 2 * H * H + 2 * H * VOCABULARY
    return valid_tokens(run.steps[step]) / SECONDS * 6 * (weights + 3 * H * LENGTH)


def statistics(run: Run, step: int) -> list[float]:
    """The largest log-sum-exp of each head of each layer in a step."""
    first = [seen.first_scores for seen in run.steps]
    found = largest(run.scores[first[step] : [*first[1:], None][step]], by_maximum=False)
    return [statistic for heads in found.values() for statistic in heads]


def total(means: Mapping[str, float]) -> float:
    """The weighted sum of losses."""
    return sum(WEIGHTS.get(name, 1.0) * value for name, value in means.items())


def loss(run: Run, step: int) -> float:
    means = {"lm": mean(run.steps[step], 0), "mtp": mean(run.steps[step], 1)}
    return total(means | {name: routing(name)(run, step) for name in ("aux", "z", "sequence", "orthogonal")})


def once(step: int) -> bool:
    """The step updates the model."""
    return step != 1


FORMULAS: Mapping[str, Callable[[Run, int], Any]] = MappingProxyType(
    {
        "iteration": lambda run, step: step + 1,
        "time": lambda run, step: f"1970-01-01T0{step + 1}:00:00.000+00:00",
        "consumed_samples": lambda run, step: SAMPLES * (step + 1),
        "consumed_tokens": lambda run, step: sum(map(valid_tokens, run.steps[: step + 1])),
        "predicted_tokens": lambda run, step: sum(
            int((b.tensors["labels"] >= 0).sum()) for b in run.steps[step].batches
        ),
        "lm_loss": lambda run, step: mean(run.steps[step], 0),
        "perplexity": lambda run, step: math.exp(mean(run.steps[step], 0)),
        "sop_loss": lambda run, step: None,
        "mtp_loss": lambda run, step: mean(run.steps[step], 1),
        "aux_loss": routing("aux"),
        "z_loss": routing("z"),
        "sequence_loss": routing("sequence"),
        "orthogonal_loss": routing("orthogonal"),
        "loss": loss,
        "grad_norm": lambda run, step: math.sqrt(sum(float(g.square().sum()) for g in run.steps[step].grads)),
        "lr": cosine(1e-2, 1e-3),
        "decoupled_lr": cosine(2e-2, 2e-3),
        "weight_decay": lambda run, step: 0.1 + 0.4 * updates(step) / STEPS,
        "loss_scale": lambda run, step: (1024.0, 2048.0, 1024.0, 2048.0)[step],
        "skipped": lambda run, step: not once(step),
        "qk_clip_largest": lambda run, step: max(statistics(run, step)) if once(step) else None,
        "qk_clipped_heads": lambda run, step: sum(s > THRESHOLD for s in statistics(run, step)) if once(step) else None,
        "update_norms": norms(lambda seen, name: seen.after[name] - seen.before[name]),
        "weight_norms": norms(lambda seen, name: seen.after[name]),
        "dropped_tokens": lambda run, step: sum(call["dropped"] for call in routed(run.steps[step])),
        "iteration_seconds": lambda run, step: SECONDS,
        "tokens_per_second": lambda run, step: valid_tokens(run.steps[step]) / SECONDS,
        "model_tflops_per_device": lambda run, step: flops(run, step) / 1e12,
        "mfu": lambda run, step: flops(run, step) / (TFLOPS * 1e12),
        "mfu_peak": lambda run, step: "flag",
        "exposed_communication_seconds": lambda run, step: 0.05,
        "exposed_seconds": lambda run, step: WAITS,
        "sent_bytes": lambda run, step: {"mp/all_reduce": 7},
        "reserved_unused_bytes": lambda run, step: 11,
        "allocation_retries": lambda run, step: 3,
        "logging_errors": lambda run, step: step,
        "failed_saves": lambda run, step: 2,
        "rank_seconds": lambda run, step: {"p50": 0.16, "p90": 0.16, "max": 0.16, "slowest_rank": 0},
        "expert_load": percentiles,
        "loads_by_layer": lambda run, step: [[round(load, 2) for load in layer] for layer in loads(run, step)],
    }
)
EVALUATED: Mapping[str, Callable[[Seen], Any]] = MappingProxyType(
    {
        "eval_loss": lambda seen: total({"lm": mean(seen, 0), "mtp": mean(seen, 1)}),
        "eval_lm_loss": lambda seen: mean(seen, 0),
        "eval_perplexity": lambda seen: math.exp(mean(seen, 0)),
        "eval_mtp_loss": lambda seen: mean(seen, 1),
    }
)
ELSEWHERE = MappingProxyType(
    {
        "pace": "tests/training/test_pace.py",
        "peak_memory_bytes tasks eval_tasks eval_sop_loss": "tests/training/reports/test_record.py",
        "eval_sets": "tests/training/test_phases.py",
        "eval_bits_per_byte eval_sets_bits_per_byte eval_scores": "tests/equivalence/test_eval_tasks.py",
    }
)
CURVES = {
    **{"loss/total": "loss", "loss/lm": "lm_loss", "loss/perplexity": "perplexity", "loss/mtp": "mtp_loss"},
    **{"loss/aux": "aux_loss", "loss/z": "z_loss", "loss/sequence": "sequence_loss"},
    **{"loss/orthogonal": "orthogonal_loss", "loss/evaluation": "eval_loss", "loss/evaluation_lm": "eval_lm_loss"},
    **{"loss/evaluation_perplexity": "eval_perplexity", "loss/evaluation_mtp": "eval_mtp_loss"},
    **{"optimizer/lr": "lr", "optimizer/decoupled_lr": "decoupled_lr", "optimizer/weight_decay": "weight_decay"},
    **{"optimizer/qk_clip_largest": "qk_clip_largest", "optimizer/qk_clipped_heads": "qk_clipped_heads"},
    **{"optimizer/grad_norm": "grad_norm", "precision/loss_scale": "loss_scale", "precision/skipped": "skipped"},
    **{"run/consumed_tokens": "consumed_tokens", "run/consumed_samples": "consumed_samples"},
    **{"run/logging_errors": "logging_errors", "run/failed_saves": "failed_saves"},
    **{"speed/step_seconds": "iteration_seconds", "speed/tokens_per_second": "tokens_per_second"},
    **{"speed/model_tflops_per_device": "model_tflops_per_device", "speed/mfu": "mfu"},
    **{"speed/exposed_seconds": "exposed_communication_seconds", "moe/dropped_tokens": "dropped_tokens"},
    **{"memory/reserved_unused_bytes": "reserved_unused_bytes", "memory/allocation_retries": "allocation_retries"},
    "memory/peak_bytes": "peak_memory_bytes",
}
"""Name of a tracker's curve -> the figure that it shows."""


@pytest.fixture(scope="module")
def decoder() -> Iterator[Run]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield Run("moe", FLAGS, monkeypatch)


def compare(got: Any, want: Any) -> None:
    """Numbers within rounding of fp64; a norm that is not finite is none."""
    if isinstance(want, Mapping):
        assert got.keys() == want.keys()
        for key, value in want.items():
            compare(got[key], value)
    elif isinstance(want, list):
        for one, other in zip(got, want, strict=True):
            compare(one, other)
    elif isinstance(want, float) and isinstance(got, float):
        assert got == pytest.approx(want, rel=1e-7 if got == pytest.approx(0.16, rel=1e-6) else 1e-11)
    else:
        assert got == want


def value_of(record: Record, key: str) -> Any:
    return record.to_dict()["rank_seconds"] if key == "rank_seconds" else getattr(record, key)


@pytest.mark.parametrize("key", FORMULAS)
def test_a_figure_is_its_formula(key: str, decoder: Run) -> None:
    for step, record in enumerate(decoder.records):
        if not once(step) and key in ("grad_norm", "update_norms", "weight_norms"):
            assert not math.isfinite(record.grad_norm) if key == "grad_norm" else value_of(record, key) == {}
            continue
        compare(value_of(record, key), FORMULAS[key](decoder, step))


@pytest.mark.parametrize("key", EVALUATED)
def test_a_figure_of_an_evaluation_is_its_formula(key: str, decoder: Run) -> None:
    assert [value_of(record, key) for record in decoder.records[:-1]] == [None] * (STEPS - 1)
    compare(value_of(decoder.records[-1], key), EVALUATED[key](decoder.evaluated))


def test_every_figure_has_a_formula(decoder: Run) -> None:
    elsewhere = {key: file for keys, file in ELSEWHERE.items() for key in keys.split()}
    fields = {field.name for field in dataclasses.fields(Record)}
    assert fields | decoder.records[-1].to_dict().keys() == {*FORMULAS, *EVALUATED, *elsewhere}
    assert [key for key, file in elsewhere.items() if f".{key}" not in (ROOT / file).read_text()] == []


def test_a_curve_shows_its_figure(decoder: Run) -> None:
    record = decoder.records[-1]
    want = {name: float(value_of(record, key)) for name, key in CURVES.items()}
    layers = percentiles(decoder, STEPS - 1)
    want |= {f"moe/load_{name}": sum(layer[name] for layer in layers) / 2 for name in ("p50", "p90")}
    want |= {f"moe/load_{name}": over(layer[name] for layer in layers) for name, over in (("min", min), ("max", max))}
    want |= {f"updates/{name}": value for name, value in record.update_norms.items()}
    want |= {f"weights/{name}": value for name, value in record.weight_norms.items()}
    want |= {f"waits/{name}": value for name, value in WAITS.items()} | {"sent_bytes/mp/all_reduce": 7.0}
    compare(record.scalars(), want)


def test_the_peak_of_memory_is_that_of_the_process(decoder: Run) -> None:
    peaks = [record.peak_memory_bytes for record in decoder.records]
    assert decoder.memory == sorted(decoder.memory)
    assert decoder.memory[0] <= peaks[0] <= peaks[-1] <= decoder.memory[1]


TASKS = {"knowledge_mlm": 1.0, "document_lm": 1.0, "sentence_reorder": 0.5, "sentence_distance": 0.5}
ERNIE3 = (
    *("--ernie-model", "ernie3", "--task-num-layers", "1", "--task-hidden-size", "32"),
    *("--task-num-attention-heads", "4", "--task-type-vocab-size", "5", "--seq-length", "64"),
)


@pytest.mark.parametrize(("more", "weights"), [((), {"lm": 1.0, "sop": 1.0}), (ERNIE3, TASKS)], ids=["ernie", "ernie3"])
def test_tasks_have_their_losses_and_accuracies(
    more: tuple[str, ...], weights: Mapping[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In training and held out: record.tasks, record.eval_tasks, record.eval_sop_loss."""
    run = Run(
        "ernie", (*FLAGS[:2], "--micro-batch-size", "2", *FLAGS[FLAGS.index("--train-iters") :], *more), monkeypatch
    )
    for seen, record, before in ((run.steps[2], run.records[2], ""), (run.evaluated, run.records[-1], "eval_")):
        calls = [losses[0] for losses in seen.heads]
        sums = {name: [sum(column) for column in zip(*calls[number :: len(weights)], strict=True)]
                for number, name in enumerate(weights)}  # fmt: skip
        means = {name: loss / count for name, (loss, count, _) in sums.items()}
        compare(getattr(record, f"{before}loss"), sum(weights[name] * mean for name, mean in means.items()))
        compare(getattr(record, f"{before}sop_loss"), means.get("sop"))
        words = [sums[name] for name in sums if name != "sop" and "sentence" not in name]
        lm = sum(one[0] for one in words) / sum(one[1] for one in words)
        compare(getattr(record, f"{before}lm_loss"), None if more and before else lm)  # ERNIE 3.0 has it in training
        right = {f"{name}_accuracy": n / count for name, (_, count, n) in sums.items() if "sentence" in name}
        compare(getattr(record, f"{before}tasks"), means | right if more else {})
