"""Default environment variables of the ranks, chosen by device type and by the overlap of the run's streams."""

from __future__ import annotations

from pathlib import Path

from megapar.config.config import Config
from megapar.core.tensor_parallel.overlap_price import OFF
from megapar.health.stop.process import cores
from megapar.training.building.device_figures import kind_of_run
from megapar.training.building.tensor_overlap import hiding

MOST_CONNECTIONS = "32"


def environment(
    ranks: int,
    config: Config | None,
    cuda: bool | None = None,
    npu: bool | None = None,
    rocm: bool | None = None,
) -> dict[str, str]:
    """Return default variables for the ranks of this node. Variables that are set already take precedence.

    Args:
        ranks: Ranks of this node.
        config: Configuration of the run; None for scripts that are not megapar's.
        cuda: This machine has NVIDIA devices; None to detect them.
        npu: This machine has Ascend devices; None to detect them.
        rocm: This machine has AMD's devices; None to detect them.
    """
    variables = {"OMP_NUM_THREADS": str(max(1, cores() // ranks))}
    if Path("/dev/nvidia0").exists() if cuda is None else cuda:
        # Expandable segments reduce fragmentation by activations of different sizes.
        variables["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = _connections(config)
        variables |= _priority(config)
    elif Path("/dev/kfd").exists() if rocm is None else rocm:
        # No expandable segments: with them a copy to the device hung in torch's issue 192259.
        variables |= _priority(config)
    if Path("/dev/davinci0").exists() if npu is None else npu:
        variables |= {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True", "TASK_QUEUE_ENABLE": "1"}
        variables |= {"HCCL_CONNECT_TIMEOUT": "1200"}
    return variables


def _priority(config: Config | None) -> dict[str, str]:
    """Let the few blocks of a collective start before the waiting blocks of the matrix product that it overlaps."""
    several = config is not None and config.grid.world_size > 1
    return {"TORCH_NCCL_HIGH_PRIORITY": "1"} if several else {}


def _connections(config: Config | None) -> str:
    """Return CUDA_DEVICE_MAX_CONNECTIONS, the number of hardware queues between host and device.

    With 1, the kernels of all streams start in program order, so that a collective of the mp axis starts before the
    matrix product that hides it. With more, kernels that are ready overtake waiting ones. Parameter gathers, expert
    rows and messages between stages run on separate streams and need this: in program order they would wait for matrix
    products, and matrix products would wait for messages that have not been sent. The maximum is used then, because
    streams share a queue if there are more streams than queues, and a run has about a dozen streams.
    """
    if config is None or config.parallel.mp_degree == 1:
        return MOST_CONNECTIONS
    dtype = "bf16" if config.training.dtype == "auto" else config.training.dtype
    if hiding(config, kind_of_run(config, "cuda", ""), dtype) == OFF:
        return MOST_CONNECTIONS
    overtakes = (
        config.grid.pp > 1
        or config.sharding.sharding_stage == 3
        or config.ampipe.ampipe_degree != 1
        or config.ampipe.use_pipe_experts
    )
    return MOST_CONNECTIONS if overtakes else "1"
