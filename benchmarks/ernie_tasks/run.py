"""Proof that all five tasks of ERNIE 3.0 learn: each task's metric after 500 steps, relative to chance.

python -m benchmarks.ernie_tasks.run [--steps 500] [--folder runs/ernie_tasks]

An interrupted run continues from its last save. The documents are the paragraphs of the built-in text that are
sentences and fit into one sample: the paper's tasks permute and pair parts of paragraphs. Lexicons and triples are made
from that text too: phrases are its frequent pairs of words, entities its frequent dotted and capitalized names, triples
its sentences with a plain verb.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import numpy as np

from megapar.arguments import Config, parse
from megapar.data.sampling.samples import NO_LOSS, Samples
from megapar.data.text.builtin import documents
from megapar.model.ernie3.sizes import CLASSES, TASKS, accuracy_of
from megapar.trainer import train
from megapar.training.building.corpus import make_corpus

VERBS = ("returns", "raises", "contains", "means", "takes", "calls", "creates", "provides", "is", "are")
TRIPLE = re.compile(r"\b([A-Za-z_.]+) (" + "|".join(VERBS) + r") ((?:an? |the )?[A-Za-z_.]+)")
COUNTED = 4000  # samples of each side that the prior of the labels is counted over
PARAGRAPH = (60, 220)  # characters, so that nearly every one is one piece of at most 62 ids
MARGINS = {  # nats below the prior for words, points of accuracy above the most frequent class for classes
    "knowledge_mlm": 0.3,
    "document_lm": 0.8,
    "knowledge_text": 0.5,
    "sentence_reorder": 0.05,
    "sentence_distance": 0.05,
}
MODEL = (
    *("--ernie-model", "ernie3", "--num-layers", "3", "--hidden-size", "128", "--num-attention-heads", "4"),
    *("--task-num-layers", "1", "--task-hidden-size", "96", "--task-num-attention-heads", "4"),
    *("--task-type-vocab-size", "5", "--seq-length", "64", "--vocab-size", "2048", "--generation-segments", "2"),
    *("--memory-length", "16", "--attention-dropout", "0", "--hidden-dropout", "0"),
    *("--ernie-tasks", "knowledge_mlm:1,document_lm:1,sentence_reorder:2,sentence_distance:2,knowledge_text:1"),
    *(
        "--micro-batch-size",
        "96",
        "--global-batch-size",
        "96",
        "--lr",
        "2e-3",
        "--clip-grad",
        "1.0",
        "--split",
        "90,10",
    ),
    *("--lr-decay-style", "linear", "--adam-beta2", "0.98", "--progressive-iters", "50"),
    *("--progressive-length-multiple", "16", "--eval-iters", "60", "--eval-interval", "1000000", "--dtype", "fp32"),
)


def write_paragraphs(path: Path) -> None:
    """Write each paragraph of the built-in text that consists of sentences as a document, a long one as several."""
    found: dict[str, None] = {}
    for text in documents():
        for paragraph in re.split(r"\n\s*\n", text):
            plain = " ".join(paragraph.split())
            if plain[:1].isupper() and plain.endswith("."):
                found.update(dict.fromkeys(part for part in fitting(plain) if len(part) >= PARAGRAPH[0]))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in found), encoding="utf-8")


def fitting(paragraph: str) -> list[str]:
    """Split a paragraph into as few documents of whole sentences as fit, without sentences that are too long."""
    parts = [""]
    for sentence in re.split(r"(?<=\.) (?=[A-Z])", paragraph):
        longer = f"{parts[-1]} {sentence}".strip()
        if len(longer) <= PARAGRAPH[1]:
            parts[-1] = longer
        elif len(sentence) <= PARAGRAPH[1]:
            parts.append(sentence)
        else:
            parts.append("")
    return [part for part in parts if part]


def write_knowledge(folder: Path) -> dict[str, Path]:
    """Write lexicons and triples made from the built-in text."""
    words: Counter[tuple[str, str]] = Counter()
    names: Counter[str] = Counter()
    triples: dict[str, None] = {}
    for text in documents():
        for sentence in re.split(r"(?<=[.!?])\s+", text):
            plain = re.findall(r"[A-Za-z_]+", sentence)
            words.update((a.lower(), b.lower()) for a, b in pairwise(plain) if len(a) > 3 and len(b) > 3)
            names.update(re.findall(r"\b[A-Za-z_]+\.[A-Za-z_.]+[A-Za-z_]\b|\b[A-Z][a-z]+[A-Z]\w+", sentence))
            found = TRIPLE.search(sentence)
            if found and 20 < len(sentence) < 160:
                triples["\t".join((*found.groups(), " ".join(sentence.split())))] = None
    lists = {
        "phrase_file": [f"{a} {b}" for (a, b), n in words.most_common(400) if n > 3],
        "entity_file": [name for name, n in names.most_common(400) if n > 3],
        "triples_file": list(triples),
    }
    paths = {}
    for name, lines in lists.items():
        paths[name] = folder / f"{name}.txt"
        paths[name].write_text("\n".join(lines) + "\n", encoding="utf-8")
    return paths


def labels_of(samples: Samples, count: int) -> dict[str, list[int]]:
    """Return the labels of each task in the first samples."""
    found: dict[str, list[int]] = {task: [] for task in TASKS}
    for number in range(count):
        sample = samples[number]
        task = TASKS[int(sample["task"])]
        asked = [int(sample["label"])] if task in CLASSES else sample["labels"][sample["labels"] != NO_LOSS].tolist()
        found[task] += asked
    return found


def prior(train_labels: Iterable[int], heldout_labels: list[int], size: int) -> float:
    """Return the cross-entropy of held-out labels under the training labels' frequencies (counts plus one), in nats."""
    counts = np.bincount(list(train_labels), minlength=size) + 1.0
    return float(-np.log(counts / counts.sum())[heldout_labels].mean())


def chance(config: Config) -> dict[str, float]:
    """Return, for each task, the score of a model that knows the labels' frequencies and does not look at its input.

    For classes this is the largest share among the held-out labels themselves, which no such model can exceed.
    """
    corpus = make_corpus(config)
    count = min(COUNTED, len(corpus.heldout))
    seen, asked = labels_of(corpus.train, COUNTED), labels_of(corpus.heldout, count)
    found = {task: prior(seen[task], asked[task], config.model.vocab_size) for task in TASKS}
    for task in CLASSES:
        found[accuracy_of(task)] = Counter(asked[task]).most_common(1)[0][1] / len(asked[task])
    return found


def main() -> int:
    """Print one line per task. Returns 1 if a task misses its margin."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--folder", type=Path, default=Path("runs/ernie_tasks"))
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    knowledge = write_knowledge(asked.folder)
    write_paragraphs(asked.folder / "paragraphs.jsonl")
    flags = [
        *MODEL,
        *("--data-path", str(asked.folder / "paragraphs.jsonl")),
        *(token for name, path in knowledge.items() for token in ("--" + name.replace("_", "-"), str(path))),
    ]
    saved = ["--save", str(asked.folder / "checkpoints"), "--load", str(asked.folder / "checkpoints")]
    config = parse("ernie", [*flags, *saved, "--train-iters", str(asked.steps), "--save-interval", "50"], {})
    outcome = train(config)
    assert outcome.evaluation is not None
    levels, missed, rows = chance(config), 0, {}
    print("| task | metric | held out | knowing nothing | better by | margin |\n|---|---|--:|--:|--:|--:|")
    for task, margin in MARGINS.items():
        name = accuracy_of(task) if task in CLASSES else task
        got, level = outcome.evaluation[name], levels[name]
        better = got - level if task in CLASSES else level - got
        missed += better < margin
        metric = "accuracy" if task in CLASSES else "nats per token"
        print(f"| {task} | {metric} | {got:.3f} | {level:.3f} | {better:.3f} | {margin} |")
        rows[task] = {"got": got, "chance": level, "margin": margin, "loss": outcome.evaluation[task]}
    print(json.dumps({"steps": outcome.iteration, "tasks": rows, "missed": missed}))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
