"""Choices that a run makes by a clock, by memory or by its device, forced: each legal outcome is a case of its own.

    config = parse(kind, flags, environ)
    outcomes(config)                          # {"degree": (1, 2, 4), "hiding": ("off", "on", "pieces"), ..}
    trace(.., parts=forced_parts(degree=2))       # what is not named is chosen as in any run

Left alone, for lack of a second outcome on a CPU: kernels of attention and the trial of Triton's kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from megapar.arguments import Config
from megapar.core.comm.world import World
from megapar.core.device.compiled import FunctionRunner
from megapar.core.recompute.adaptive import Adaptive, Chosen
from megapar.core.tensor_parallel.overlapped_linear import Overlap
from megapar.moe.layer import MoeParts
from megapar.training.building.ampipe_degree import AUTO, legal_degrees
from megapar.training.building.device_choices import NODE, PLAIN
from megapar.training.building.parts import Parts, make_model, make_overlap, make_tried_runner
from megapar.training.step.job import Model

PIECES = "pieces"


def forced_parts(
    degree: int | None = None,
    dispatch: str | None = None,
    hiding: str | None = None,
    compiled: str | None = None,
    layers: tuple[int, ...] | None = None,
) -> Parts:
    """Parts of a trainer with these outcomes; None leaves a choice to the run.

    degree: of ``--ampipe-degree auto``. dispatch: ``plain`` or ``node``, of ``--moe-dispatch auto``. hiding: ``off``,
    ``on`` or ``pieces`` (on, in as many as a device may cut), of ``--tp-comm-overlap auto``. compiled: ``off`` or
    ``on``, of ``--compile auto``. layers: those of a rank that adaptive recompute goes on recomputing.
    """
    chosen: dict[str, Any] = {"model": partial(_model, dispatch, layers)}
    if degree is not None:
        chosen["ampipe_degree"] = partial(_degree, degree)
    if hiding is not None:
        chosen["overlap"] = partial(_overlap, hiding)
    if compiled is not None:
        chosen["runner"] = partial(_runner, compiled)
    return Parts(**chosen)


def _degree(degree: int, seconds: Mapping[int, float]) -> tuple[int, str]:
    """The degree, one of those that were measured."""
    assert degree in seconds
    return degree, "forced"


def _model(
    dispatch: str | None, layers: tuple[int, ...] | None, moe: MoeParts, config: Config, *rest: Any, **options: Any
) -> Model:
    """The model with its dispatch and the layers that it recomputes."""
    if dispatch is not None:
        config = replace(config, moe=replace(config.moe, moe_dispatch=dispatch))
    model = make_model(moe, config, *rest, **options)
    if layers is not None and model.recompute is not None:
        assert isinstance(model.recompute.choice, Adaptive)
        _go_on(model.recompute.choice, layers)
    return model


def _overlap(hiding: str, config: Config, world: World) -> Overlap:
    """The overlap of linear layers' collectives."""
    form = "on" if hiding == PIECES else hiding
    made = make_overlap(replace(config, parallel=replace(config.parallel, tp_comm_overlap=form)), world)
    return replace(made, pieces=3, piece_bytes=1, least_rows=1) if hiding == PIECES else made


def _runner(compiled: str, config: Config, world: World) -> FunctionRunner:
    """The caller of layers' functions."""
    return make_tried_runner(replace(config, training=replace(config.training, compile=compiled)), world)


def _go_on(adaptive: Adaptive, layers: tuple[int, ...]) -> None:
    """Let it measure, and then recompute these layers, whatever memory was measured."""
    measured = adaptive.end_step

    def end_step(peak_bytes: int, *rest: Any) -> Chosen | None:
        chosen = measured(0, *rest)
        if chosen is not None:
            chosen = adaptive.chosen = chosen._replace(layers=tuple(n for n in layers if n < chosen.num_layers))
        return chosen

    adaptive.end_step = end_step  # type: ignore[method-assign]


def outcomes(config: Config) -> dict[str, tuple[Any, ...]]:
    """Legal outcomes of each choice that the configuration leaves to the run, by the argument of ``forced_parts``."""
    found: dict[str, tuple[Any, ...]] = {}
    grid, parallel, training = config.grid, config.parallel, config.training
    if config.kind == "moe" and config.ampipe.ampipe_degree == AUTO:
        found["degree"] = legal_degrees(config)[0]
    if config.kind == "moe" and config.moe.moe_dispatch == "auto" and parallel.ranks_per_node and grid.ep > 1:
        local = grid.ep_node_ranks(parallel.ranks_per_node)
        found["dispatch"] = (PLAIN, NODE) if local not in (None, grid.ep) else (PLAIN,)
    if grid.mp > 1 and parallel.tp_comm_overlap == "auto":
        found["hiding"] = ("off", "on", PIECES)
    if training.compile == "auto" and not training.deterministic and not config.model.mixes_tasks:
        found["compiled"] = ("off", "on")
    if config.recompute.adaptive_recompute_device_size:
        layers = range(config.model.num_layers)
        found["layers"] = ((), tuple(layers[::2]), tuple(layers))
    return {name: values for name, values in found.items() if len(values) > 1}
