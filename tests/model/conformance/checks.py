"""The checks of the table: each one measures what stands in its column, against its bound."""

from __future__ import annotations

import contextlib
import io
import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapar.arguments import parse
from megapar.errors import ConfigError
from megapar.model.architectures import ARCHITECTURES
from tests.model.conformance import folders, theirs
from tests.model.conformance.answer import Answer, batches, norm
from tests.model.conformance.case import Case
from tests.model.conformance.ours import Ours
from tests.support.pace import slowness

OUTPUTS, GRADIENTS, TRAINED = 1e-10, 1e-9, 1e-9  # fp64 against fp64
RAW = 1e-5  # the class in fp32 against itself in fp64
ROUNDING = 1.2  # times the class's own error in bf16
SECONDS = 0.5  # of a processor that is not busy, until a folder is refused
STEPS, LR = 20, 1e-3


@dataclass(frozen=True)
class Figure:
    """A measured value.

    Attributes:
        value: The value; a list of differences counts its entries.
        bound: The most that it may be.
        what: Differences, for the message of a failure.
    """

    value: float
    bound: float
    what: Sequence[str] = ()

    @property
    def holds(self) -> bool:
        """Whether the value is within its bound; NaN is not."""
        return self.value <= self.bound


def _none(what: Sequence[str]) -> Figure:
    return Figure(len(what), 0, what)


def _furthest(mine: Tensor, wanted: Tensor) -> float:
    return float((mine.double() - wanted).abs().max() / wanted.abs().max())


def _gradient_error(mine: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """The largest difference of a gradient, by DESIGN 11: relative to its largest entry, or 1e-6 of the global norm."""
    assert mine.keys() == wanted.keys(), f"on one side only: {sorted(mine.keys() ^ wanted.keys())}"
    floor = 1e-6 * norm(dict(wanted))
    return max(float((mine[n] - b).abs().max()) / max(float(b.abs().max()), floor) for n, b in wanted.items())


def logits(case: Case) -> Figure:
    """Largest difference of logits where there is no padding from the exact ones, relative to the largest logit."""
    pairs = zip(case.our_answers, case.exact_answers, strict=True)
    return Figure(max(_furthest(a.logits, b.logits) for a, b in pairs), OUTPUTS)


def loss(case: Case) -> Figure:
    """Relative difference of the mean cross-entropy."""
    pairs = zip(case.our_answers, case.exact_answers, strict=True)
    return Figure(max(abs(a.loss - b.loss) / b.loss for a, b in pairs), OUTPUTS)


def gradients(case: Case) -> Figure:
    """Largest difference of a gradient, relative to its largest entry, or to a millionth of the global norm."""
    pairs = zip(case.our_answers, case.exact_answers, strict=True)
    return Figure(max(_gradient_error(a.gradients, b.gradients) for a, b in pairs), GRADIENTS)


def fp64_alone(case: Case) -> Figure:
    """Parameters, buffers and operators of either side with a tensor narrower than fp64."""
    assert case.our_answers
    assert case.exact_answers
    found = sorted(case.narrow.operators)
    for model in (case.ours.job.model, case.exact().model):
        tensors = (*model.named_parameters(), *model.named_buffers())
        found += [n for n, t in tensors if t.is_floating_point() and t.dtype != torch.float64]
    return _none(found)


def steps(case: Case) -> Figure:
    """Largest relative difference of losses and weights over steps of AdamW with the same groups, decayed or not."""
    ours, published = Ours(case.row, case.folder, "fp64"), case.exact()
    settings = ours.config.optimizer
    adamw = {"betas": (settings.adam_beta1, settings.adam_beta2), "eps": settings.adam_eps}
    published.optimize(ours.decays().__getitem__, LR, adamw, settings.weight_decay)
    errors = []
    for batch in batches(STEPS, case.model.config.vocab_size):
        wanted = published.step(batch)
        errors.append(abs(ours.step(batch, LR) - wanted) / wanted)
    trained = ours.weights()
    errors += [_furthest(trained[name], weight) for name, weight in published.weights().items()]
    return Figure(max(errors), TRAINED)


def balance(case: Case) -> Figure | None:
    """The load balancing loss and its gradients, layer by layer, where the class has one."""
    wanted = case.exact().balance(case.batches[0])
    if wanted is None or not case.ours.config.model.moe_layers:
        return None
    mine = case.ours.balance(0, case.batches[0])
    value = abs(mine[0] - wanted[0]) / wanted[0]
    return Figure(max(value, OUTPUTS / GRADIENTS * _gradient_error(mine[1], wanted[1])), OUTPUTS)


def raw(case: Case) -> Figure:
    """The untouched class in fp32 against the exact one, so that the mode of that hides nothing."""
    model, errors = theirs.untouched(case.row, case.folder, torch.float32), []
    for batch, exact in zip(case.batches, case.exact_answers, strict=True):
        mine = model.answer(batch)
        largest = max(float(gradient.abs().max()) for gradient in exact.gradients.values())
        errors += [_furthest(mine.logits, exact.logits), abs(mine.loss - exact.loss) / exact.loss]
        errors += [float((mine.gradients[n] - g).abs().max()) / largest for n, g in exact.gradients.items()]
    return Figure(max(errors), RAW)


def _rms(values: Sequence[float]) -> float:
    return float(torch.tensor(values, dtype=torch.float64).square().mean().sqrt())


def _bf16(case: Case) -> tuple[list[Answer], list[Answer]]:
    """The answers in bf16 of megapar, by the routes of its exact run, and of the untouched class."""
    mine = Ours(case.row, case.folder, "bf16", case.ours.routes_of(case.rounded_batches))
    published = theirs.untouched(case.row, case.folder, torch.bfloat16)
    ours = [mine.answer(number, batch) for number, batch in enumerate(case.rounded_batches)]
    return ours, [published.answer(batch) for batch in case.rounded_batches]


def _logit_error(answers: Sequence[Answer], exact: Sequence[Answer]) -> float:
    return _rms([float((a.logits - b.logits).norm() / b.logits.norm()) for a, b in zip(answers, exact, strict=True)])


def _gradient_error_in_all(answers: Sequence[Answer], exact: Sequence[Answer]) -> float:
    """Error of all gradients together, in which the large ones count."""
    errors = []
    for a, b in zip(answers, exact, strict=True):
        errors.append(norm({n: a.gradients[n] - g for n, g in b.gradients.items()}) / norm(b.gradients))
    return _rms(errors)


def _gradient_error_of_each(answers: Sequence[Answer], exact: Sequence[Answer]) -> float:
    """Error of each gradient relative to it, in which all that are more than noise count alike."""
    errors = []
    for a, b in zip(answers, exact, strict=True):
        floor = 1e-6 * norm(b.gradients)
        errors += [float((a.gradients[n] - g).norm() / g.norm()) for n, g in b.gradients.items() if g.norm() > floor]
    return _rms(errors)


def rounding(case: Case) -> dict[str, Figure]:
    """Rms error in bf16, with the routes of the exact run, relative to that of the untouched class with its own."""
    (ours, published), exact = _bf16(case), case.rounded_against
    found = {}
    for name, measures in (
        ("bf16 logits", (_logit_error,)),
        ("bf16 gradients", (_gradient_error_in_all, _gradient_error_of_each)),
    ):
        pairs = [(measure(ours, exact), measure(published, exact)) for measure in measures]
        what = [f"rms error {mine:.3g}, the class's own {allowed:.3g}" for mine, allowed in pairs]
        found[name] = Figure(max(mine / allowed for mine, allowed in pairs), ROUNDING, what)
    return found


def there_and_back(case: Case) -> Figure:
    """Names, shapes, dtypes, bits, keys of config.json that a folder loses on its way to a checkpoint and back."""
    found = []
    for source in (case.folder, case.half_folder):
        root = case.root / f"{source.name}-converted"
        root.mkdir()
        made = folders.there_and_back(source, root)
        found += folders.config_differences(source, made) + folders.tensor_differences(source, made)
        found += folders.unloaded(case.row.architecture, made)
    return _none(found)


def export(case: Case) -> Figure:
    """What a folder loses in a run that loads it, makes no step and exports it; likewise in fp32 and in bf16."""
    found = []
    for source in (case.folder, case.half_folder):
        root = case.root / f"{source.name}-exported"
        root.mkdir()
        with contextlib.redirect_stdout(io.StringIO()):
            made = folders.exported(case.row.kind, source, root, source.name)
        found += folders.config_differences(source, made) + folders.tensor_differences(source, made)
        trained = ARCHITECTURES[case.row.architecture].trained_as or case.row.architecture
        found += folders.unloaded(trained, made)
    return _none([one for one in found if not (case.row.initialized and one.startswith(case.row.initialized))])


def refusals(case: Case) -> Figure:
    """Seconds of a processor until a command refuses a folder with an unsupported setting, by the setting's name."""
    unnamed = []
    for settings in case.row.refused:
        folder, key = _with_settings(case, settings), next(iter(settings))
        try:
            parse(case.row.kind, ["--load-hf", str(folder), "--seq-length", "8"], {})
        except ConfigError as error:
            unnamed += [] if key in str(error) else [f"{key}: {error}"]
        else:
            unnamed.append(f"{settings} is not refused")
    if unnamed:
        return Figure(float("inf"), SECONDS, unnamed)
    command = [sys.executable, f"pretrain_{case.row.kind}.py", "--load-hf", str(folder), "--data-path", "mock"]
    seconds: list[float] = []
    while not seconds or (min(seconds) > SECONDS and len(seconds) < 3):  # on a busy machine these differ, too
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        done = subprocess.run([*command, "--seq-length", "8"], capture_output=True, text=True, timeout=60)
        seconds.append((resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before) / slowness())
        if done.returncode != 2 or key not in done.stderr:
            return Figure(float("inf"), SECONDS, [f"status {done.returncode}: {done.stderr[-500:]}"])
    return Figure(min(seconds), SECONDS)


def _with_settings(case: Case, settings: Mapping[str, Any]) -> Path:
    folder = case.root / "refused"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(case.folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **settings}))
    return folder


CHECKS: Mapping[str, Callable[[Case], Figure | dict[str, Figure] | None]] = {
    "logits": logits,
    "loss": loss,
    "gradients": gradients,
    "fp64 alone": fp64_alone,
    "20 steps": steps,
    "aux loss": balance,
    "class in fp32": raw,
    "bf16": rounding,
    "there and back": there_and_back,
    "export": export,
    "refusals": refusals,
}
