"""Commands that answer before torch is imported: a second of every refusal and of every plan would go there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROBE = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__") if sys.argv[0].endswith(".py") else \
        runpy.run_module(sys.argv[0], run_name="__main__")
except SystemExit as end:
    print("status", end.code or 0)
print("heavy", sorted({"torch", "transformers"} & set(sys.modules)))
"""
MAIN = "megapar.tools.main"
LARGE = ("--config", "configs/gpt-117m.yaml")


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (("pretrain_moe.py", "--num-layers", "0", "--num-attention-heads", "7"), 2),
        (("pretrain_moe.py", "--validate-only", "--data-path", "mock"), 0),
        (("pretrain_ernie.py", "--validate-only", "--data-path", "mock", "--ernie-model", "ernie3"), 2),
        (("pretrain_ernie.py", "--help"), 0),
        ((MAIN, "pretrain", "moe", "--help", "optimizer"), 0),
        ((MAIN, "--help"), 0),
        ((MAIN, "configs"), 0),
        ((MAIN, "pretrain", "moe", "--config", "tiny", "--validate-only"), 0),
        ((MAIN, "evaluate", "docs"), 2),
        ((MAIN, "plan", *LARGE), 0),
        ((MAIN, "plan", *LARGE, "--search"), 0),
        ((MAIN, "rules"), 0),
        (("scripts/generated_pages.py", "--check"), 0),
        ((MAIN, "translate", "--", "--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4"), None),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, tuple) else "",
)
def test_no_torch(command: tuple[str, ...], status: int | None) -> None:
    env = {"PATH": "", "PYTHONPATH": str(ROOT)}
    probe = [sys.executable, "-c", PROBE, *command]
    done = subprocess.run(probe, capture_output=True, text=True, cwd=ROOT, env=env, timeout=120)
    *_, ended, heavy = done.stdout.splitlines()
    assert heavy == "heavy []", done.stderr
    assert status is None or ended == f"status {status}", done.stdout + done.stderr
