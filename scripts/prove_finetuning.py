"""Fine-tune the quickstart's model on conversations made of the built-in documentation, and compare held-out losses.

    .venv/bin/python scripts/prove_finetuning.py         # of runs/quickstart/huggingface, by scripts/quickstart.sh
    .venv/bin/python scripts/prove_finetuning.py BASE    # of another folder of --save-hf; about two minutes on a core

Exit with status 1 unless the loss on held-out answers is 0.5 nats below the base model's.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path

from megapar.data.text.builtin import documents

ROOT = Path(__file__).resolve().parent.parent
MARGIN_NATS = 0.5
CONVERSATIONS = 1200
TEMPLATE = r"""
{%- for m in messages %}{{ m.role + ': ' + m.content + (eos_token if m.role == 'assistant' else '\n') }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}
"""
FLAGS = "--task sft --seq-length 256 --micro-batch-size 4 --global-batch-size 4 --lr 1e-3 --lr-decay-style cosine"


def conversations() -> Iterator[dict[str, object]]:
    """Yield a question about each documented function, with the first paragraph of its documentation as the answer."""
    for text in documents():
        for name, answer in pairwise(text.split("\n\n")):
            if re.fullmatch(r"[a-z]\w+\(\)", name) and 40 < len(answer) < 300:
                question = {"role": "user", "content": f"What does {name} do?"}
                yield {"messages": [question, {"role": "assistant", "content": answer}]}


def train(flags: list[str], loss: str) -> float:
    """Run the trainer; return the last value after ``loss`` in its log. Raises CalledProcessError if it fails."""
    command = [sys.executable, "pretrain_moe.py", *FLAGS.split(), *flags]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return float(re.findall(rf"{loss} ([\d.]+)", done.stdout)[-1])


def main(base: Path) -> int:
    """Print both losses. Return 1 if the margin is missed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = [json.dumps(record) + "\n" for record in islice(conversations(), CONVERSATIONS)]
        (folder / "chat.jsonl").write_text("".join(lines))
        (folder / "chat.jinja").write_text(TEMPLATE)
        data = ["--data-path", str(folder / "chat.jsonl"), "--chat-template", str(folder / "chat.jinja")]
        model = ["--load-hf", str(base.resolve()), "--tokenizer-model", str(base.resolve())]
        before = train([*data, *model, "--train-iters", "0", "--eval-interval", "1"], "held-out loss")
        after = train([*data, *model, "--train-epochs", "3", "--eval-interval", "20"], "eval loss")
    ok = before - after >= MARGIN_NATS
    print(
        f"held-out answers: loss {before:.3f} of the base model, {after:.3f} after fine-tuning, {before - after:.3f} "
        f"below (required {MARGIN_NATS}): {'ok' if ok else 'MISSED'}"
    )
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if sys.argv[1:] else ROOT / "runs/quickstart/huggingface")))
