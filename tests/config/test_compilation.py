"""What --compile means: its spellings, and what auto decides from the flags and the device."""

from __future__ import annotations

from pathlib import Path

import pytest

from megapar.arguments import parse
from megapar.config import compilation as module
from megapar.config.compilation import TRITON, compilation
from megapar.core.device.kinds import device_class


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("", "auto"),
        ("--compile", "on"),
        ("--compile true", "on"),
        ("--compile=True", "on"),
        ("--compile false", "off"),
        ("--no-compile", "off"),
        ("--compile off", "off"),
        ("--no-compile --compile auto", "auto"),
    ],
)
def test_a_switch_takes_the_words_of_a_boolean(line: str, value: str) -> None:
    assert parse("moe", line.split(), {}).training.compile == value


@pytest.mark.parametrize(("text", "value"), [("true", "on"), ("false", "off"), ("'on'", "on"), ("auto", "auto")])
def test_files_with_a_boolean_are_still_read(text: str, value: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"compile: {text}\n", encoding="utf-8")
    assert parse("moe", ["--config", str(tmp_path / "run.yaml")], {}).training.compile == value


@pytest.mark.parametrize(
    ("line", "device", "decided"),
    [
        ("--bf16", "cuda", "on (--compile auto: Triton compiles for this device)"),
        ("--bf16 --deterministic", "cuda", "off (--compile auto: --deterministic excludes kernels that are chosen by "),
        ("--dtype fp64", "cuda", "off (--compile auto: fp64 runs the reference forms)"),
        ("", "cpu", "off (--compile auto: only for devices that Triton compiles for)"),
        ("", "npu", "off (--compile auto: only for devices that Triton compiles for)"),
        ("--compile --dtype fp64", "cpu", "on (--compile)"),
        ("--no-compile", "cuda", "off (--compile)"),
    ],
)
def test_auto_decides_by_flags_and_device(line: str, device: str, decided: str, monkeypatch) -> None:
    monkeypatch.setattr(module, "AUTO_COMPILES", True)
    config = parse("moe", line.split(), {})
    assert str(compilation(config, device_class(device).compiler)).startswith(decided)


def test_sizes_of_ernie_3_are_not_compiled(monkeypatch) -> None:
    monkeypatch.setattr(module, "AUTO_COMPILES", True)
    assert not compilation(parse("ernie", ["--ernie-model", "ernie3", "--task-type-vocab-size", "5"], {}), TRITON).on
    assert compilation(parse("ernie", [], {}), TRITON).on


def test_auto_is_off_until_it_gains() -> None:
    found = compilation(parse("moe", ["--bf16"], {}), TRITON)
    assert str(found) == "off (--compile auto: steps on an H200 were no shorter)"
