"""The limit: every kernel that a step's mathematics asks for, by itself, at its shape; a turn sums their best times.

A product counts three times: forward, and both gradients. Copies, sorts and other additions of a framework are not
included. The masked-word head runs only for masked words, as megapar's does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from math import prod

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from benchmarks.support.contest import Figures, serve
from benchmarks.support.synchronize import synchronize
from benchmarks.throughput.prepare import MASKED
from benchmarks.throughput.shape import Shape, contestant_parser, find

TRIES = 3
Kernel = tuple[str, int, Callable[[], object]]  # (group, times per step, what to time)


class Kernels:
    """Kernels of one model at its shapes, in one process."""

    def __init__(self, shape: Shape, parameters: int, device: str, dtype: torch.dtype) -> None:
        self._shape, self._config, self._parameters = shape, shape.config, parameters
        self._device, self._dtype = device, dtype
        self._rows = shape.micro_batch * shape.seq_length

    def __iter__(self) -> Iterator[Kernel]:
        yield from self._attention()
        yield from self._ernie() if self._shape.kind == "ernie" else self._decoder()
        yield from self._optimizer()

    def _new(self, *sizes: int, grad: bool = False) -> Tensor:
        return torch.randn(*sizes, device=self._device, dtype=self._dtype, requires_grad=grad)

    def _product(self, times: int, rows: int, inner: int, out: int, group: str = "products") -> Iterator[Kernel]:
        x, w, y = self._new(rows, inner), self._new(out, inner), self._new(rows, out)
        yield group, times, lambda: F.linear(x, w)
        yield group, times, lambda: y @ w
        yield group, times, lambda: y.t() @ x

    def _both(self, group: str, times: int, forward: Callable[..., Tensor], *inputs: Tensor) -> Iterator[Kernel]:
        """Yield the kernel that runs forward and backward together."""
        grad = torch.randn_like(forward(*inputs))

        def run() -> None:
            torch.autograd.grad(forward(*inputs), inputs, grad)

        yield group, times, run

    def _attention(self) -> Iterator[Kernel]:
        config, B, S = self._config, self._shape.micro_batch, self._shape.seq_length
        layers, heads, H = (config[name] for name in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
        groups, D = config.get("num_key_value_heads", heads), H // heads
        causal = self._shape.kind == "moe"
        q, k, v = (self._new(B, S, n, D).transpose(1, 2).requires_grad_() for n in (heads, groups, groups))

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=groups != heads)

        yield from self._both("attention", layers, attend, q, k, v)
        yield from self._product(layers, self._rows, H, (heads + 2 * groups) * D)
        yield from self._product(layers, self._rows, heads * D, H)

    def _ernie(self) -> Iterator[Kernel]:
        config, rows = self._config, self._rows
        layers, H, width = (config[name] for name in ("num_hidden_layers", "hidden_size", "intermediate_size"))
        masked = self._shape.micro_batch * round(self._shape.seq_length * MASKED)
        yield from self._product(layers, rows, H, width)
        yield from self._product(layers, rows, width, H)
        yield from self._product(1, masked, H, H)
        yield from self._product(1, masked, H, config["vocab_size"], "head")
        yield from self._loss(masked)
        yield from self._both("activation", layers, F.gelu, self._new(rows, width, grad=True))
        norm = self._new(H, grad=True), self._new(H, grad=True)
        normed = (self._new(rows, H, grad=True), *norm)
        yield from self._both("norms", 2 * layers + 1, lambda x, w, b: F.layer_norm(x, (H,), w, b), *normed)
        x, y = self._new(rows, H), self._new(rows, H)
        yield "sums", 4 * layers, lambda: x + y

    def _decoder(self) -> Iterator[Kernel]:
        config, rows = self._config, self._rows
        layers, H, width = (config[name] for name in ("num_hidden_layers", "hidden_size", "intermediate_size"))
        yield from self._product(1, rows, H, config["vocab_size"], "head")
        yield from self._loss(rows)
        norm = self._new(rows, H, grad=True), self._new(H, grad=True)
        yield from self._both("norms", 2 * layers + 1, lambda x, w: F.rms_norm(x, (H,), w), *norm)
        x, y = self._new(rows, H), self._new(rows, H)
        yield "sums", 4 * layers, lambda: x + y
        if "moe_k" not in config:
            yield from self._product(layers, rows, H, 2 * width)
            yield from self._product(layers, rows, width, H)
        else:
            experts, width, rows = config["moe_num_experts"], config["moe_intermediate_size"], rows * config["moe_k"]
            yield from self._product(layers * experts, rows // experts, H, 2 * width)
            yield from self._product(layers * experts, rows // experts, width, H)
            yield from self._product(layers, self._rows, H, experts, "router")
        gate, up = self._new(rows, width, grad=True), self._new(rows, width, grad=True)
        yield from self._both("activation", layers, lambda g, u: F.silu(g) * u, gate, up)

    def _loss(self, rows: int) -> Iterator[Kernel]:
        vocabulary = self._config["vocab_size"]
        part = min(rows, 512)
        logits = torch.randn(part, vocabulary, device=self._device, requires_grad=True)
        labels = torch.zeros(part, dtype=torch.int64, device=logits.device)
        for kernel in self._both("loss", 1, lambda x: F.cross_entropy(x, labels), logits):
            yield kernel[0], max(1, rows // part), kernel[2]

    def _optimizer(self) -> Iterator[Kernel]:
        flat = torch.zeros(self._parameters, device=self._device)
        flat.grad = torch.ones_like(flat)
        adamw = torch.optim.AdamW([flat], lr=1e-4, fused=True)
        yield "optimizer", 1, adamw.step


def main() -> None:
    """Serve turns."""
    options = contestant_parser().parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype]
    parameters = 0
    for path in options.folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            parameters += sum(prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    kernels = Kernels(find(options.device, options.model), parameters, options.device, dtype)

    def turn(request: str) -> Figures:
        seconds: Figures = {}
        for group, times, run in kernels:
            times *= 1 if group == "optimizer" else options.micro_batches
            seconds[group] = seconds.get(group, 0.0) + times * _best(run, options.device)
        return {"seconds": sum(seconds.values()), "gemm_flops": _gemm_flops(options.device, dtype), **seconds}

    serve(turn)


def _gemm_flops(device: str, dtype: torch.dtype) -> float:
    """Return the FLOP/s of a large square product."""
    size = 8192 if device == "cuda" else 2048
    a = torch.randn(size, size, device=device).to(dtype)
    return float(2 * size**3 / _best(lambda: a @ a, device))


def _best(run: Callable[[], object], device: str) -> float:
    best = float("inf")
    for _ in range(TRIES + 1):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best


if __name__ == "__main__":
    main()
