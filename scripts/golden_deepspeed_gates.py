"""Write tests/moe/golden/deepspeed_gates.json: results of DeepSpeed's gates on small seeded inputs.

Run it in a separate environment, because DeepSpeed is not a dependency of megapar (the file was made with 0.19.8):

    pip install torch==2.13.0
    DS_ACCELERATOR=cpu DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed
    DS_ACCELERATOR=cpu python scripts/golden_deepspeed_gates.py

The file contains the logits, so that it does not depend on the random number generator.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.moe.sharded_moe import top1gating, top2gating, topkgating

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "moe" / "golden" / "deepspeed_gates.json"

# gate, drop policy (megapar's name), tokens, experts, k, capacity factor, minimum capacity
CASES = (
    ("top1", "token", 24, 4, 1, 1.0, 2),
    ("top1", "token", 40, 5, 1, 4.0, 4),
    ("top1", "token", 16, 8, 1, 0.5, 4),
    ("top2", "choice", 24, 4, 2, 1.0, 2),
    ("top2", "choice", 32, 8, 2, 0.6, 1),
    ("top2", "choice", 20, 8, 2, 1.0, 9),
    ("topk", "token", 24, 6, 3, 1.0, 2),
    ("topk", "token", 32, 8, 4, 0.5, 1),
    ("topk", "token", 16, 8, 6, 2.0, 4),
    ("topk", "probs", 24, 6, 3, 1.0, 2),
    ("topk", "probs", 32, 8, 4, 0.5, 1),
    ("topk", "probs", 16, 8, 6, 2.0, 4),
)


def gate(kind: str, policy: str, logits: torch.Tensor, k: int, factor: float, least: int) -> Any:
    """Return (l_aux, combine weights [T, E, C], dispatch mask [T, E, C], counts [E]) of a DeepSpeed gate."""
    if kind == "top1":
        return top1gating(logits, factor, least, use_rts=False)
    if kind == "top2":
        return top2gating(logits, factor, least, top2_2nd_expert_sampling=False)
    return topkgating(logits, k, factor, least, drop_policy="position" if policy == "token" else "probs")


def rounded(x: torch.Tensor, digits: int) -> list[list[float]]:
    """Return a matrix as rounded numbers for the file."""
    return [[round(value, digits) for value in row] for row in x.tolist()]


def answer(index: int, case: tuple[str, str, int, int, int, float, int]) -> dict[str, Any]:
    """Return one row of the golden file."""
    kind, policy, tokens, experts, k, factor, least = case
    drift = torch.linspace(0, 2, experts)  # some experts are more likely, so that tokens are dropped
    drawn = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(index)) + drift
    written = rounded(drawn, 3)
    logits = torch.tensor(written)
    aux, weights_TEC, mask_TEC, counts = gate(kind, policy, logits.clone(), k, factor, least)
    return {
        "gate": kind,
        "policy": policy,
        "topk": k,
        "capacity_factor": factor,
        "min_capacity": least,
        "logits": written,
        "capacity": weights_TEC.shape[2],
        "aux": float(aux),
        "counts": counts.tolist(),
        "kept": mask_TEC.any(2).int().tolist(),
        "weights": rounded(weights_TEC.sum(2), 8),
    }


def main() -> None:
    rows = [answer(index, case) for index, case in enumerate(CASES)]
    GOLDEN.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(row) for row in rows)
    GOLDEN.write_text(f'{{"deepspeed": "{deepspeed.__version__}", "rows": [\n{lines}\n]}}\n')
    print(f"wrote {len(rows)} rows to {GOLDEN}")


if __name__ == "__main__":
    main()
