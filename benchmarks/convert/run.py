"""Peak memory of ``megapar convert`` both ways, on a random Mixtral model of 1.1 GB that this script writes.

python -m benchmarks.convert.run                                # 1.1 GB: 5 GB of disk for the three folders
python -m benchmarks.convert.run --inner 1024 --hidden 512      # a few MB, to see it work
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.support.table import machine, print_json, print_table
from megapar.checkpoints.format.shards import CODES, ShardFile, TensorPlan, file_order, write_shards

ROOT = Path(__file__).parents[2]
HEADS, GROUPS, HEAD_DIM, VOCAB = 32, 8, 128, 256
SHARD_BYTES = 600 << 20


def write_config(folder: Path, hidden: int, inner: int, layers: int, experts: int) -> None:
    """Write the config.json of a Mixtral model."""
    import transformers

    config = transformers.MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=HEAD_DIM,
        num_local_experts=experts,
        max_position_embeddings=256,
        sliding_window=None,
        architectures=["MixtralForCausalLM"],
    )
    config.save_pretrained(folder)


def plans_of(hidden: int, inner: int, layers: int, experts: int) -> list[TensorPlan]:
    """Return the tensors that a Mixtral folder contains: bf16, with routers in fp32."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (VOCAB, hidden),
    }
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.{norm}.weight": (hidden,) for norm in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{at}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, hidden)}
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (GROUPS * HEAD_DIM, hidden) for name in "kv"}
        shapes |= {f"{at}.self_attn.o_proj.weight": (hidden, HEADS * HEAD_DIM)}
        shapes |= {f"{at}.block_sparse_moe.gate.weight": (experts, hidden)}
        for expert in range(experts):
            moe = f"{at}.block_sparse_moe.experts.{expert}"
            shapes |= {f"{moe}.{w}.weight": (inner, hidden) for w in ("w1", "w3")}
            shapes |= {f"{moe}.w2.weight": (hidden, inner)}
    gates = ".gate.weight"
    return [
        TensorPlan(name, torch.float32 if name.endswith(gates) else torch.bfloat16, shape)
        for name, shape in shapes.items()
    ]


def write_model(folder: Path, plans: list[TensorPlan]) -> None:
    """Write random tensors in files of about 600 MB, with their index."""
    generator = torch.Generator().manual_seed(0)
    by_name = {plan.name: plan for plan in plans}

    def fetch(name: str) -> Iterator[Tensor]:
        plan = by_name[name]
        left = plan.num_bytes // plan.dtype.itemsize
        while left:
            count = min(left, 1 << 22)
            yield torch.randn(count, generator=generator).to(plan.dtype)
            left -= count

    groups: list[list[TensorPlan]] = [[]]
    for plan in plans:
        if groups[-1] and sum(one.num_bytes for one in groups[-1]) + plan.num_bytes > SHARD_BYTES:
            groups.append([])
        groups[-1].append(plan)
    places = {}
    for number, group in enumerate(groups, start=1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        write_shards(folder / name, file_order(group), fetch, metadata={"format": "pt"})
        places |= {plan.name: name for plan in group}
    index = {"metadata": {"total_size": sum(plan.num_bytes for plan in plans)}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def hashes(folder: Path) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """Return dtype, shape and SHA-256 of every tensor of a folder, which is read in blocks."""
    dtypes = {code: dtype for dtype, code in CODES.items()}
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with ShardFile(path) as shards, open(path, "rb") as raw:
            for name in shards.names():
                code, shape = shards.describe(name)
                raw.seek(shards.check(name, dtypes[code], shape))
                left, digest = TensorPlan(name, dtypes[code], shape).num_bytes, hashlib.sha256()
                while left:
                    block = raw.read(min(left, 1 << 20))
                    digest.update(block)
                    left -= len(block)
                found[name] = (code, shape, digest.hexdigest())
    return found


# A separate process for each direction. What it has loaded before it reads a model's first byte does not count.
CONVERT = """
import sys, time
import torch
from benchmarks.support.memory import PeakMemory
from megapar.checkpoints.export.from_hf import hf_to_megapar
from megapar.checkpoints.export.to_hf import megapar_to_hf
memory = PeakMemory("cpu")
before, start = memory.read(), time.perf_counter()
{"in": hf_to_megapar, "out": megapar_to_hf}[sys.argv[1]](sys.argv[2], sys.argv[3])
print(memory.read() - before, memory.read(), time.perf_counter() - start)
"""


def convert(way: str, source: Path, out: Path) -> dict[str, float]:
    """Return the bytes that one direction added to the peak of its process, that peak, and the seconds."""
    command = [sys.executable, "-c", CONVERT, way, str(source), str(out)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    added, peak, seconds = map(float, done.stdout.split())
    return {"added_bytes": added, "peak_bytes": peak, "seconds": seconds}


def main() -> None:
    """Write the model, convert it both ways, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--inner", type=int, default=14336)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--experts", type=int, default=3)
    args = parser.parse_args()
    sizes = (args.hidden, args.inner, args.layers, args.experts)
    with tempfile.TemporaryDirectory() as name:
        source, made, back = (Path(name) / kind for kind in ("model", "made", "back"))
        source.mkdir()
        plans = plans_of(*sizes)
        write_config(source, *sizes)
        write_model(source, plans)
        ways = {"hf-to-megapar": convert("in", source, made), "megapar-to-hf": convert("out", made, back)}
        same = hashes(source) == hashes(back)
        same = same and (source / "config.json").read_bytes() == (back / "config.json").read_bytes()
    total, largest = sum(plan.num_bytes for plan in plans), max(plan.num_bytes for plan in plans)
    rows = []
    for way, of in ways.items():
        sizes_told = [f"{n / 1e6:,.0f} MB" for n in (total, largest, of["added_bytes"], of["peak_bytes"])]
        rows.append([way, *sizes_told, f"{of['added_bytes'] / largest:.2f}", f"{of['seconds']:.0f} s"])
    heads = ["way", "model", "largest tensor", "added to the peak", "whole peak", "added / largest", "time"]
    print_table(heads, rows)
    print(f"dtype, shape and SHA-256 of {len(plans)} tensors, and config.json: {'equal' if same else 'DIFFERENT'}\n")
    print_json({"machine": machine("cpu"), "bytes": total, "largest_bytes": largest, "same": same, **ways})
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
