"""Cost of reading: preparing against a plain tokenizer loop, the loader against training, opening 15 T tokens.

python -m benchmarks.data.run                       # all parts
python -m benchmarks.data.run --part memory         # prepare a 1 GB input and watch its memory
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.support.table import machine, print_json, print_table

ROOT = Path(__file__).parents[2]
KINDS = ("sentencepiece", "tokenizers")
PARTS = ("prepare", "loader", "open", "memory")
FILES, TOKENS_PER_FILE, DOCUMENTS_PER_FILE = 15, 10**12, 10**9


def write_jsonl(path: Path, megabytes: float) -> None:
    """Write the built-in documents in random order, repeatedly."""
    from megapar.data.text.source import all_documents, open_sources

    documents = [json.dumps({"text": text}) + "\n" for text in all_documents(open_sources(["builtin"]))]
    rng, written = random.Random(0), 0
    with open(path, "w", encoding="utf-8") as file:
        while written < megabytes * 1e6:
            written += file.write(rng.choice(documents))


def make_tokenizers(folder: Path) -> dict[str, str]:
    """Make a sentencepiece model of 8,192 ids, and a byte-level BPE of the package tokenizers."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    from megapar.data.text.source import all_documents, open_sources
    from megapar.data.tokenizers.sentencepiece_tokenizer import train

    texts = list(all_documents(open_sources(["builtin"])))
    (folder / "t.model").write_bytes(train(iter(texts), 8192))
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=8192, special_tokens=["<|endoftext|>"], show_progress=False)
    bpe.train_from_iterator(texts, trainer)
    (folder / "bpe").mkdir()
    bpe.save(str(folder / "bpe" / "tokenizer.json"))
    return {"sentencepiece": str(folder / "t.model"), "tokenizers": str(folder / "bpe" / "tokenizer.json")}


def plain_loop(kind: str, path: str, model: str) -> float:
    """Return the tokens per second of one core that only reads lines and calls the library."""
    if kind == "sentencepiece":
        import sentencepiece

        encode = sentencepiece.SentencePieceProcessor(model_file=model).encode
    else:
        from tokenizers import Tokenizer

        inner = Tokenizer.from_file(model)

        def encode(text: str) -> list[int]:
            return inner.encode(text, add_special_tokens=False).ids

    start, tokens = time.perf_counter(), 0
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            tokens += len(encode(json.loads(line)["text"])) + 1
    return tokens / (time.perf_counter() - start)


def plain_loops(kind: str, path: str, model: str, processes: int) -> float:
    """Return the tokens per second of several plain loops at once, which is what the cores can do together."""
    command = [sys.executable, "-m", "benchmarks.data.run", "--plain", kind, path, model]
    running = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(processes)]
    return sum(float(process.communicate()[0]) for process in running)


def ours(path: str, model: str, output: str, workers: int) -> float:
    """Return the tokens per second of ``prepare``, from its call to the finished files."""
    from megapar.data.tokens.prepare import prepare

    start = time.perf_counter()
    return prepare(output, [path], model, workers=workers, overwrite=True).tokens / (time.perf_counter() - start)


def part_prepare(folder: Path, rounds: int, megabytes: float, kinds: Sequence[str]) -> dict[str, object]:
    """Measure, in turns, a plain loop, prepare with one worker, plain loops on all cores, and prepare on all cores."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    path, cores = str(folder / "in.jsonl"), os.cpu_count() or 1
    write_jsonl(Path(path), megabytes)
    rows, result = [], {}
    models = make_tokenizers(folder)
    for kind in kinds:
        model = models[kind]
        rates: dict[str, list[float]] = {"plain": [], "one": [], "plain_all": [], "all": []}
        for _ in range(rounds):
            rates["plain"].append(plain_loop(kind, path, model))
            rates["one"].append(ours(path, model, str(folder / "out"), 1))
            rates["plain_all"].append(plain_loops(kind, path, model, cores))
            rates["all"].append(ours(path, model, str(folder / "out"), cores))
        medians = {name: statistics.median(found) for name, found in rates.items()}
        ratios = {
            name: statistics.median(a / b for a, b in zip(rates[name], rates[plain], strict=True))
            for name, plain in (("one", "plain"), ("all", "plain_all"))
        }
        columns = [f"{medians['plain']:,.0f}", f"{medians['one']:,.0f}", f"{ratios['one']:.2f}"]
        columns += [f"{medians['plain_all']:,.0f}", f"{medians['all']:,.0f}", f"{ratios['all']:.2f}"]
        rows.append([kind, *columns])
        result[kind] = {**medians, "ratio_one": ratios["one"], "ratio_all": ratios["all"]}
    heads = ("plain loop, tokens/s", "1 worker", "ratio", f"{cores} plain loops at once", f"{cores} workers", "ratio")
    print_table(["tokenizer", *heads], rows)
    return result


def part_loader(folder: Path, iterations: int = 8) -> dict[str, object]:
    """Compare the speed of the loader, which makes samples as a run does, with that of the quickstart's training."""
    from megapar.arguments import parse
    from megapar.data.batches import Loader
    from megapar.trainer import train
    from megapar.training.building.corpus import make_corpus

    flags = ["--config", str(ROOT / "configs" / "quickstart.yaml"), "--train-iters", str(iterations)]
    flags += ["--eval-interval", "0", "--log-interval", str(iterations), "--lr-warmup-iters", "0"]
    flags += ["--world-size", "1", "--ep-degree", "1"]
    config = parse("moe", flags, {})
    outcome = train(config, f"file://{folder / 'meet'}", keep_records=True)
    trained = statistics.median(record.tokens_per_second for record in outcome.records[2:])
    corpus = make_corpus(config)
    batch, length = config.training.global_batch_size, config.model.seq_length
    loader = Loader(corpus.train, corpus.collate, config.training.micro_batch_size, prefetch=False)
    steps, start = 20, time.perf_counter()
    for step in range(steps):
        loader.step(step * batch, batch // config.training.micro_batch_size)
    read = steps * batch * length / (time.perf_counter() - start)
    figures = [f"{trained:,.0f}", f"{read:,.0f}", f"{read / trained:.0f}"]
    print_table(["training, tokens/s", "loader, tokens/s", "ratio"], [figures])
    return {"trained": trained, "read": read, "ratio": read / trained}


def write_sparse(folder: Path) -> list[str]:
    """Write 15 files of 10^12 tokens (2 TB) and 10^9 sequences (20 GB of index) each, which take a few blocks of disk.

    All but the last 1,000 documents of a file are empty, because a hole in a file reads as zeros.
    """
    paths = []
    full = 1000
    for number in range(FILES):
        prefix = str(folder / f"corpus{number:02d}")
        lengths = [TOKENS_PER_FILE // full] * full
        first, count = DOCUMENTS_PER_FILE - full, DOCUMENTS_PER_FILE
        with open(prefix + ".idx", "wb") as file:
            file.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, count, count + 1))
            file.seek(34 + 4 * first)
            file.write(struct.pack(f"<{full}i", *lengths))
            file.seek(34 + 4 * count + 8 * first)
            file.write(struct.pack(f"<{full}q", *(2 * i * lengths[0] for i in range(full))))
            file.seek(34 + 12 * count + 8 * first)
            file.write(struct.pack(f"<{full + 1}q", *range(first, count + 1)))
        with open(prefix + ".bin", "wb") as file:
            file.truncate(2 * TOKENS_PER_FILE)
        paths += [str(1 + number % 3), prefix]
    return paths


# ru_maxrss of a new process begins at that of the one it was forked from; VmHWM is its own.
PEAK = """
def peak():
    return next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
"""
OPEN = (
    PEAK
    + """
import sys, time
import numpy
from megapar.data import build
before = peak()
start = time.perf_counter()
corpus = build("moe", data_path=sys.argv[1:], eval_data_path=sys.argv[2:3], vocab_size=50000, seq_length=4096, seed=1)
opened = time.perf_counter() - start
start = time.perf_counter()
for number in range(1000):
    corpus.train[number * 1000003]
read = (time.perf_counter() - start) / 1000
print(opened, read, peak(), peak() - before, len(corpus.train))
"""
)


def part_open(folder: Path) -> dict[str, object]:
    """Measure, in a separate process, the time from opening a mixture of 15 T tokens to its first sample."""
    paths = write_sparse(folder)
    command = [sys.executable, "-c", OPEN, *paths]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    opened, read, peak, added, samples = map(float, done.stdout.split())
    cells = [f"{FILES * TOKENS_PER_FILE:.3g}", f"{samples:.3g}", f"{opened:.3f} s", f"{read * 1e6:.0f} us"]
    heads = ("tokens", "samples", "opened", "a sample", "peak memory", "of it by opening and reading")
    print_table(heads, [[*cells, f"{peak:.0f} MB", f"{added:.0f} MB"]])
    return {"seconds": opened, "sample_seconds": read, "peak_mb": peak, "added_mb": added}


PREPARE = (
    PEAK
    + """
import resource, sys
from megapar.data.tokens.prepare import prepare
done = prepare(sys.argv[2], [sys.argv[1]], sys.argv[3], workers=int(sys.argv[4]), overwrite=True)
print(peak(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024, done.tokens)
"""
)


def part_memory(folder: Path, megabytes: float) -> dict[str, object]:
    """Measure the peak memory of the parent and of its largest worker, for a small input and for one of 1 GB."""
    model, cores = make_tokenizers(folder)["sentencepiece"], os.cpu_count() or 1
    rows, result = [], {}
    for size in (20, megabytes):
        write_jsonl(folder / "in.jsonl", size)
        start = time.perf_counter()
        command = [sys.executable, "-c", PREPARE, str(folder / "in.jsonl"), str(folder / "out"), model, str(cores)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        own, worker, tokens = map(float, done.stdout.split())
        seconds = time.perf_counter() - start
        rows.append([f"{size:.0f} MB", f"{tokens:,.0f}", f"{seconds:.0f} s", f"{own:.0f} MB", f"{worker:.0f} MB"])
        result[f"{size:.0f}"] = {"parent_mb": own, "worker_mb": worker, "tokens": tokens, "seconds": seconds}
    print_table(["input", "tokens", "time", "parent", "largest worker"], rows)
    return result


def main() -> None:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append")
    parser.add_argument("--tokenizer", choices=KINDS, action="append", help="of the prepare part; both by default")
    parser.add_argument("--plain", nargs=3, metavar=("KIND", "PATH", "MODEL"), help="one plain loop, and no more")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=float, default=1000, help="input of the memory part")
    parser.add_argument("--prepare-megabytes", type=float, default=40, help="input of the prepare part")
    args = parser.parse_args()
    if args.plain:
        print(plain_loop(*args.plain))
        return
    result: dict[str, object] = {"machine": machine("cpu")}
    for part in args.part or PARTS:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            run = {
                "prepare": lambda f: part_prepare(f, args.rounds, args.prepare_megabytes, args.tokenizer or KINDS),
                "loader": part_loader,
                "open": part_open,
                "memory": lambda f: part_memory(f, args.megabytes),
            }[part]
            result[part] = run(folder)
    print_json(result)


if __name__ == "__main__":
    main()
