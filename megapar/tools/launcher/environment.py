"""What ranks should find in their environment, by the devices of this machine and by what the run hides under what."""

from __future__ import annotations

from pathlib import Path

from megapar.config.config import Config
from megapar.core.device.kinds import kind_of
from megapar.core.health.process import cores
from megapar.core.tensor_parallel.overlap_price import OFF
from megapar.training.building.tensor_overlap import hiding

MOST_CONNECTIONS = "32"


def environment(ranks: int, config: Config | None, cuda: bool | None = None, npu: bool | None = None) -> dict[str, str]:
    """Names and values for ``ranks`` ranks of this node; what is set already wins over them.

    config: of the run; None where another script speaks for itself. cuda, npu: whether this machine has such devices;
    None: look.
    """
    found = {"OMP_NUM_THREADS": str(max(1, cores() // ranks))}
    if Path("/dev/nvidia0").exists() if cuda is None else cuda:
        # Segments that grow leave fewer holes between activations of unlike sizes.
        found["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        found["CUDA_DEVICE_MAX_CONNECTIONS"] = _connections(config)
        if config is not None and config.grid.world_size > 1:
            # A collective under a product gets its few blocks before those of the product that is waiting.
            found["TORCH_NCCL_HIGH_PRIORITY"] = "1"
    if Path("/dev/davinci0").exists() if npu is None else npu:
        found |= {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True", "TASK_QUEUE_ENABLE": "1"}
        found |= {"HCCL_CONNECT_TIMEOUT": "1200"}
    return found


def _connections(config: Config | None) -> str:
    """Hardware queues between host and device.

    With one, kernels of all streams start in the order of the program: a collective of the mp axis before the product
    that is to hide it. With more, what does not wait overtakes: gathered parameters, experts' rows and messages between
    stages, which have streams of their own, would stand behind products otherwise, and products behind the receipt of
    a message that has not been sent. As many as there can be then: streams beyond their number share one, and a run
    has about a dozen.
    """
    if config is None or config.parallel.mp_degree == 1:
        return MOST_CONNECTIONS
    dtype = "bf16" if config.training.dtype == "auto" else config.training.dtype
    if hiding(config, kind_of("cuda", ""), dtype) == OFF:
        return MOST_CONNECTIONS
    overtakes = (
        config.grid.pp > 1
        or config.sharding.sharding_stage == 3
        or config.ampipe.ampipe_degree != 1
        or config.ampipe.use_pipe_experts
    )
    return MOST_CONNECTIONS if overtakes else "1"
