"""Gradients in bf16, and master weights as remainders: one process's bits on other layouts, from any checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megapar.core.device.remainders import split_master
from tests.support.training import COMMON, SMALL, last_wins, make_trainer, run

# A step sums two gradients, on one rank or two; a norm would be summed in another order.
LINE = ("--dtype", "bf16", "--global-batch-size", "2", "--clip-grad", "0", "--lr-decay-iters", "6")
SUMMED = 1e-7  # relative: losses that are logged are summed in fp32 on a rank, and in fp64 over ranks
KINDS = {"moe": (), "ernie": ("--attention-dropout", "0", "--hidden-dropout", "0")}
GRADIENTS, REMAINDERS = ("--main-grads-dtype", "bf16"), ("--store-param-remainders",)
MOMENTS = ("--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16")
ALL = (*GRADIENTS, *REMAINDERS, *MOMENTS)
MUON = ("--optimizer", "muon", "--muon-extra-scale-factor", "0.2")
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one": (1, ()),
    "stage 1": (2, ()),
    "stage 2": (2, ("--sharding-stage", "2")),
    "mp": (2, ("--mp-degree", "2", "--sequence-parallel")),
    "ep": (2, ("--ep-degree", "2")),
    "pp": (2, ("--pp-degree", "2")),
    "hybrid dp": (4, ("--sharding-degree", "2", "--hybrid-dp", "--global-batch-size", "4")),
}


def losses(layout: str, kind: str, *flags: str) -> list[float]:
    ranks, more = LAYOUTS[layout]
    line = last_wins(LINE, (*KINDS[kind], *more, *flags))
    return [record.loss for record in run(ranks, kind, *line).records]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flags", [GRADIENTS, REMAINDERS, ALL])
def test_ranks_have_the_bits_of_one_process(kind: str, flags: tuple[str, ...]) -> None:
    straight = losses("one", kind, *flags)
    wide = losses("one", kind)
    assert straight == pytest.approx(wide, rel=2e-2)
    assert straight[0] == wide[0]
    assert flags == REMAINDERS or straight[1:] != wide[1:]
    # Messages have the gradients of a router in bf16, too, which one rank does not send.
    error = 1e-3 if kind == "moe" and GRADIENTS[0] in flags else SUMMED
    for layout in ("stage 1", "stage 2"):
        assert losses(layout, kind, *flags) == pytest.approx(straight, rel=error)


@pytest.mark.parametrize("flags", [GRADIENTS, REMAINDERS, ALL])
def test_matrices_move_alike_on_other_ranks_and_as_with_wide_state(flags: tuple[str, ...]) -> None:
    straight, wide = losses("one", "ernie", *MUON, *flags), losses("one", "ernie", *MUON)
    assert straight == pytest.approx(wide, rel=1e-2)
    assert straight[1:] != wide[1:]
    for layout in ("stage 1", "stage 2"):
        assert losses(layout, "ernie", *MUON, *flags) == pytest.approx(straight, rel=1e-4)


@pytest.mark.parametrize(("layout", "kind"), [("mp", "ernie"), ("ep", "moe"), ("pp", "ernie"), ("hybrid dp", "ernie")])
def test_split_masters_are_updated_as_whole_ones(layout: str, kind: str) -> None:
    """But for a weight at a tie, now and then, which may change a token's experts."""
    assert losses(layout, kind, *MOMENTS, *REMAINDERS) == pytest.approx(losses(layout, kind, *MOMENTS), rel=1e-3)


@pytest.mark.parametrize(
    ("there", "here", "flags"),
    [("one", "stage 2", ALL), ("stage 2", "stage 1", ALL), ("stage 1", "one", ALL), ("stage 2", "one", (*ALL, *MUON))],
)
def test_a_run_goes_on_with_the_bits_of_its_masters(
    there: str, here: str, flags: tuple[str, ...], tmp_path: Path
) -> None:
    straight = losses("one", "ernie", *flags)
    losses(there, "ernie", *flags, "--train-iters", "3", "--save", str(tmp_path))
    files = [load_file(path) for path in sorted((tmp_path / "iter_0000003").glob("shard-*.safetensors"))]
    dtypes = {tensor.dtype for file in files for name, tensor in file.items() if name.startswith("model/")}
    assert dtypes == {torch.float32}
    again = losses(here, "ernie", *flags, "--load", str(tmp_path))
    assert again == pytest.approx(straight[3:], rel=1e-4 if MUON[0] in flags else SUMMED)


@pytest.mark.parametrize(("there", "here"), [(REMAINDERS, ()), ((), REMAINDERS)])
def test_masters_become_whole_or_split_when_a_run_goes_on(
    there: tuple[str, ...], here: tuple[str, ...], tmp_path: Path
) -> None:
    straight = losses("one", "ernie", *there)
    losses("one", "ernie", *there, "--train-iters", "3", "--save", str(tmp_path))
    assert losses("stage 1", "ernie", *here, "--load", str(tmp_path)) == pytest.approx(straight[3:], rel=1e-3)


def test_parameters_are_their_masters_rounded_and_the_sums_of_gradients_have_two_bytes() -> None:
    trainer = make_trainer("moe", last_wins((*SMALL["moe"], *COMMON), (*LINE, *GRADIENTS, *REMAINDERS)))
    for _ in range(2):
        trainer.step()
    job = trainer.job
    job.sharding.wait()
    parameters, shards = dict(job.model.named_parameters()), job.sharding.master_shards
    views = list(job.sharding.views([shard.values for shard in shards]))
    for view in views:
        parameter = parameters[view.spec.name]
        if parameter.dtype == torch.bfloat16:
            assert torch.equal(parameter, split_master(view.tensor.contiguous())[0])
    kinds = {(shard.master.dtype, shard.grad.dtype) for shard in shards if shard.grad is not None}
    assert kinds == {(torch.int16, torch.bfloat16), (torch.float32, torch.float32)}  # routers compute in fp32
    assert len(views) == len(parameters)
