"""Who calls the functions of layers: plain calls unless --compile is on and the compiler works."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch

from megapar.arguments import parse
from megapar.core.comm.axis import Axis
from megapar.core.device.base import Device
from megapar.core.device.compiled import Compiled, plain
from megapar.training.step import function_runner
from megapar.training.step.function_runner import make_runner, try_triton


def runner(line, trials=("",), rank=0, *, lacks="", monkeypatch):
    """Make the runner of a rank in a world whose ranks try their compilers with these results."""
    device = Device()
    monkeypatch.setattr(device, "compiler_lacks", lambda: lacks)
    monkeypatch.setattr(function_runner, "failed_trial", lambda device: trials[rank])
    others = [text for number, text in enumerate(trials) if number != rank]
    monkeypatch.setattr(
        function_runner, "texts_of_all", lambda text, axis, device: [*others[:rank], text, *others[rank:]]
    )
    world = SimpleNamespace(device=device, rank=rank, axis=Axis.single)
    return make_runner(parse("moe", line.split(), {}), world)


@pytest.mark.parametrize("line", ["", "--compile auto", "--no-compile"])
def test_functions_are_called_plainly_without_a_trial(line, monkeypatch):
    assert runner(line, (), monkeypatch=monkeypatch) is plain


def test_a_compiler_that_works_compiles(monkeypatch):
    assert isinstance(runner("--compile", ("", ""), monkeypatch=monkeypatch), Compiled)


def test_a_missing_compiler_is_one_warning_and_no_end(monkeypatch):
    with pytest.warns(
        RuntimeWarning, match="uncompiled, because on rank 0 no g\\+\\+; the numbers are the same"
    ) as found:
        assert runner("--compile", lacks="no g++", monkeypatch=monkeypatch) is plain
    assert len(found) == 1


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_all_ranks_follow_the_one_whose_compiler_fails(rank, monkeypatch):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert runner("--compile", ("", "ptxas ends", ""), rank, monkeypatch=monkeypatch) is plain
    assert [("on rank 1 ptxas ends" in str(warning.message)) for warning in found] == [True] * (rank == 0)


def test_the_trial_itself(monkeypatch):
    def fails(graph, inputs):
        raise RuntimeError("no ptxas")

    torch._dynamo.reset()
    assert function_runner.failed_trial(torch.device("cpu"), "eager") == ""
    torch._dynamo.reset()
    assert "the compiler fails on a trial kernel (BackendCompilerFailed" in function_runner.failed_trial(
        torch.device("cpu"), fails
    )


@pytest.mark.parametrize(
    ("device", "trials", "used"),
    [("cuda", ("", ""), True), ("cuda", ("", "no compiler"), False), ("cpu", ("no compiler", ""), False)],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_use_triton_or_none(device, trials, used, rank, monkeypatch):
    place, asked = torch.device(device, 0), []
    monkeypatch.setattr(function_runner, "triton_failure", lambda device: trials[rank])
    monkeypatch.setattr(function_runner, "texts_of_all", lambda text, axis, device: list(trials))
    monkeypatch.setattr(function_runner.triton_operators, "use", asked.append)
    world = SimpleNamespace(device=SimpleNamespace(torch_device=place), rank=rank, axis=Axis.single)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try_triton(world)
    assert asked == [place] * used
    warned = device == "cuda" and not used and rank == 0
    assert ["on rank 1 no compiler" in str(warning.message) for warning in found] == [True] * warned
