"""Train both models for 300 steps on the built-in text and compare their validation losses with the unigram entropy.

    .venv/bin/python scripts/prove_learning.py            # both, about 15 minutes on 2 cores
    .venv/bin/python scripts/prove_learning.py moe

Exit with status 1 if a model does not learn enough: 1.5 nats below the entropy for the decoder, 0.3 nats for ERNIE.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MARGIN_NATS = {"moe": 1.5, "ernie": 0.3}
CONFIG = {"moe": "configs/moe-10m.yaml", "ernie": "configs/ernie-quickstart.yaml"}


def unigram_nats(kind: str) -> float:
    """Return the cross-entropy of validation tokens under the frequencies of training tokens, nats per token."""
    from megapar.arguments import parse
    from megapar.training.building.corpus import make_corpus

    sys.path.insert(0, str(ROOT))
    from tests.support.unigram import unigram_entropy

    return unigram_entropy(make_corpus(parse(kind, ["--config", str(ROOT / CONFIG[kind])], {}))).heldout


def train(kind: str, metrics: Path) -> tuple[float, float]:
    """Train with two processes. Return the last validation loss per predicted token and the duration in seconds."""
    start = time.perf_counter()
    launcher = [sys.executable, "-m", "megapar.tools.main", "launch", "--nproc-per-node", "2"]
    flags = ["--config", CONFIG[kind], "--metrics-jsonl", str(metrics)]
    subprocess.run([*launcher, f"pretrain_{kind}.py", *flags], cwd=ROOT, check=True)
    last = json.loads(metrics.read_text().splitlines()[-1])
    return last["eval_lm_loss"], time.perf_counter() - start


def main(kinds: list[str]) -> int:
    """Print one line per model. Return 1 if a margin is missed."""
    missed = 0
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            loss, seconds = train(kind, Path(folder) / "metrics.jsonl")
        entropy = unigram_nats(kind)
        ok = entropy - loss >= MARGIN_NATS[kind]
        missed += not ok
        print(
            f"{kind}: held-out loss {loss:.3f}, unigram entropy {entropy:.3f} nats, {entropy - loss:.3f} below "
            f"(required {MARGIN_NATS[kind]}), {seconds:.0f} s: {'ok' if ok else 'MISSED'}"
        )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["moe", "ernie"]))
