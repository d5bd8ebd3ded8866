"""Runner of functions for traces that counts the kernels into which torch's compiler would fuse them.

AOTAutograd differentiates a function, and Inductor lowers, fuses and schedules both graphs for the GPU and writes their
Triton code, as under ``--compile on``. Only the last steps are left out, which need a driver: Triton does not translate
the code, and nothing is timed. No Triton is needed. Shapes are static here, where a run has dynamic numbers of rows.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch._dynamo.device_interface as device_interface
import torch._inductor.scheduler as scheduler
import torch.utils._triton as triton_of_torch
from functorch.compile import aot_function
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._inductor import compile_fx, ir
from torch._inductor import config as inductor
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from megapar.core.device.kinds import kind_of
from megapar.tools.tracing.fake import replaced
from scripts.tracing.gpu import FakeGpu
from scripts.tracing.kernels import kernels_of
from scripts.tracing.tally import PRODUCTS, MatrixProduct, Sums, Tally, product_of

T = TypeVar("T")

GENERATED = "triton"  # name of generated kernels in tallies
# Of one multiprocessor of compute capability 9.0 (CUDA C++ Programming Guide, table of technical specifications).
_REGISTERS, _THREADS, _THREADS_OF_BLOCK, _WARP, _SHARED_BYTES = 65_536, 2048, 1024, 32, 227 * 1024
_LAUNCH = re.compile(r"^\s+triton_\w+\.run\(", re.MULTILINE)


class Generated(NamedTuple):
    """Kernels that Inductor generates for a graph, and those of libraries that it calls.

    Attributes:
        kernels: Operator -> launches; ``GENERATED`` for kernels in Triton.
        bytes: Operator -> bytes read and written, except by products and attention.
        products: Matrix products -> calls.
    """

    kernels: Counter[str]
    bytes: Counter[str]
    products: Counter[MatrixProduct]


class LoweredFunctions:
    """Caller of functions that adds the kernels of their compiled form to a tally, under the function's name.

    Args:
        tally: Tally that counts.
        device: GPU for which Inductor generates code.
    """

    def __init__(self, tally: Tally, device: FakeGpu) -> None:
        self._tally, self._device = tally, device
        self._forms: dict[Hashable, Callable[..., Any]] = {}

    def __call__(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return results of the right shapes, and count the generated kernels; those of the backward when it runs."""
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        described = tuple(_described(x) if isinstance(x, Tensor) else x for x in arguments)
        key = (function, torch.is_grad_enabled(), described)
        if key not in self._forms:
            self._forms[key] = self._form(function, arguments)
        made = self._forms[key](*tensors)
        return cast(T, tuple(made) if isinstance(made, list) else made)  # AOTAutograd returns tuples as lists

    def _form(self, function: Callable[..., Any], arguments: Sequence[Any]) -> Callable[..., Any]:
        """Return the function with both graphs lowered: it is called once here, on other tensors."""
        places = [number for number, x in enumerate(arguments) if isinstance(x, Tensor)]

        def of_tensors(*tensors: Tensor) -> Any:
            given = dict(zip(places, tensors, strict=True))
            return function(*(given.get(number, x) for number, x in enumerate(arguments)))

        form = aot_function(
            of_tensors,
            fw_compiler=self._compiler(function.__name__),
            bw_compiler=self._compiler(f"{function.__name__} backward"),
            partition_fn=compile_fx.partition_fn,
            decompositions=select_decomp_table(),
        )
        sums, self._tally.sums = self._tally.sums, Sums()
        try:
            # Constants would be folded by running operators on the GPU; in kernels they cost nothing either way.
            folding = inductor.patch(joint_graph_constant_folding=False)
            # As dynamo traces a run: the table's forms then leave what a compiler fuses to it.
            compiling = replaced(torch.compiler, "is_compiling", lambda: True)
            with _disable_current_modes(), FakeTensorMode(), folding, compiling:
                made = tree_leaves(form(*(_like(arguments[place]) for place in places)))
                differentiable = [x for x in made if isinstance(x, Tensor) and x.requires_grad]
                if differentiable:
                    torch.autograd.backward(differentiable, [torch.ones_like(x) for x in differentiable])
        finally:
            self._tally.sums = sums
        return cast(Callable[..., Any], form)

    def _compiler(self, label: str) -> Callable[..., Any]:
        """Return a compiler of AOTAutograd whose code makes empty results and counts its kernels."""

        def compiler(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            results = [x.meta["val"] if isinstance(x, torch.fx.Node) else x for x in graph.graph.output_node().args[0]]
            generated = lowered(graph, inputs, self._device, backward=label.endswith("backward"))

            def code(*_: Any) -> list[Any]:
                sums = self._tally.sums
                sums.kernels.update({(name, label): count for name, count in generated.kernels.items()})
                sums.bytes.update({(name, label): count for name, count in generated.bytes.items()})
                sums.products.update({(product, label): count for product, count in generated.products.items()})
                return [_like(x, x.device) if isinstance(x, Tensor) else x for x in results]

            return code

        return compiler


def lowered(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], device: FakeGpu, *, backward: bool = False
) -> Generated:
    """Return the kernels that Inductor generates for a graph of ATen operators.

    Args:
        graph: Forward or backward graph from AOTAutograd; Inductor's passes change it.
        inputs: Its fake inputs.
        device: GPU of the inputs.
        backward: The graph is a backward.
    """
    with V.set_fake_mode(detect_fake_mode(inputs)), _compiling_for(device):
        view_to_reshape(graph)
        compile_fx._recursive_post_grad_passes(graph)
        lowering = GraphLowering(graph, example_inputs=inputs, is_backward=backward)
        with V.set_graph_handler(lowering), V.set_debug_handler(DebugContext()):
            lowering.run(*inputs)
            source = lowering.codegen()[0].value
            generated = Generated(Counter(), Counter(), Counter())
            generated.kernels[GENERATED] = len(_LAUNCH.findall(source))
            for node in lowering.scheduler.nodes:
                _count(generated, node)
    return generated


def _count(generated: Generated, node: Any) -> None:
    """Count the bytes of a scheduled node, and its kernels if a library has them."""
    size = node.get_read_write_buffers_sizes()
    if not node.is_extern():
        generated.bytes[GENERATED] += size
        return
    if isinstance(node.node, ir.MultiOutput):  # an element of the result of another node
        return
    overload = getattr(node.node, "op_overload", None)
    name = overload._schema.name if overload is not None else f"aten::{node.node.python_kernel_name.rpartition('.')[2]}"
    operator = name.rpartition("::")[2]
    generated.kernels[operator] += kernels_of(name)
    if operator in PRODUCTS:
        pair = node.node.inputs[-2:]
        left, right = (torch.empty_strided(x.get_size(), x.get_stride(), device="meta") for x in pair)
        generated.products[product_of(left, right)] += 1
    elif "attention" not in operator:
        generated.bytes[operator] += size


@contextmanager
def _compiling_for(device: FakeGpu) -> Iterator[None]:
    """Answer Inductor's questions about the GPU and Triton."""
    major, minor = device.capability
    properties = SimpleNamespace(
        name=device.name,
        major=major,
        minor=minor,
        multi_processor_count=kind_of("cuda", device.name).units,
        regs_per_multiprocessor=_REGISTERS,
        max_threads_per_multi_processor=_THREADS,
        max_threads_per_block=_THREADS_OF_BLOCK,
        warp_size=_WARP,
        shared_memory_per_block_optin=_SHARED_BYTES,
        gcnArchName="",  # of AMD only
    )
    answers: list[tuple[Any, str, Any]] = [
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "get_device_properties", lambda device=None: properties),
        (torch.cuda, "get_device_capability", lambda device=None: (major, minor)),
        (torch.cuda, "is_bf16_supported", lambda *_: True),
        (device_interface.CudaInterface, "get_device_properties", staticmethod(lambda device=None: properties)),
        (scheduler, "has_triton", lambda *_: True),
        (triton_of_torch, "triton_hash_with_backend", lambda *_: ""),  # a key of caches
    ]
    with ExitStack() as stack:
        for owner, name, value in answers:
            stack.enter_context(replaced(owner, name, value))
        yield


def _described(x: Tensor) -> Hashable:
    return tuple(x.shape), x.stride(), x.dtype, x.device, x.requires_grad


def _like(x: Tensor, device: torch.device | None = None) -> Tensor:
    """Return a new tensor of the same form."""
    made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device or x.device)
    return made.requires_grad_(x.requires_grad) if device is None else made
