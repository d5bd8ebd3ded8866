"""The environment of the ranks: default variables by device and overlap, network interfaces, and cores."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from megapar.config.config import Config
from megapar.core.tensor_parallel.overlap_price import OFF
from megapar.health.stop.process import cores
from megapar.training.building.device_choices import kind_of_run, tensor_overlap

MOST_CONNECTIONS = "32"
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915
SLURM = (
    "Pass the cores of the node: sbatch --cpus-per-task N, and srun --cpus-per-task N or SRUN_CPUS_PER_TASK=N, because "
    "srun does not take the value from sbatch; with sbatch --exclusive, N may be all cores."
)
KUBERNETES = "Raise limits.cpu of the container."
OTHERWISE = "Give the job more cores: look at the scheduler's options, at taskset, and at the limits of the container."


def environment(
    ranks: int, config: Config | None, cuda: bool | None = None, npu: bool | None = None, rocm: bool | None = None
) -> dict[str, str]:
    """Return default variables for the ranks of this node. Variables that are set already take precedence.

    Args:
        config: Configuration of the run; None for scripts that are not megapar's.
        cuda, npu, rocm: This machine has NVIDIA, Ascend or AMD devices; None to detect them.
    """
    variables = {"OMP_NUM_THREADS": str(max(1, cores() // ranks))}
    if Path("/dev/nvidia0").exists() if cuda is None else cuda:
        # Expandable segments reduce fragmentation by activations of different sizes.
        if "PYTORCH_ALLOC_CONF" not in os.environ:  # torch reads the older name first
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
    if tensor_overlap(config, kind_of_run(config, "cuda", ""), dtype) == OFF:
        return MOST_CONNECTIONS
    overtakes = (
        config.grid.pp > 1
        or config.sharding.sharding_stage == 3
        or config.ampipe.ampipe_degree != 1
        or config.ampipe.use_pipe_experts
    )
    return MOST_CONNECTIONS if overtakes else "1"


def interfaces(address: str, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return environment variables for the ranks of this node, except those that are set already.

    A job on a loopback address uses only the loopback interface. Otherwise, gloo by default uses the address of the
    host name, which many machines resolve to a loopback address (Debian: 127.0.1.1). In that case gloo gets the
    interface of ``address``.

    Args:
        address: Address of this node for the other nodes.
        environ: Variables that are set already; None for this process's environment.
    """
    if sys.platform != "linux":
        return {}
    variables = {}
    if address.startswith("127.") or address in ("::1", "localhost"):
        variables = {GLOO: "lo", NCCL: "lo"}
    elif host_name_is_loopback() and (interface := interface_of(_numeric(address))):
        variables = {GLOO: interface}
    present = os.environ if environ is None else environ
    return {name: value for name, value in variables.items() if name not in present}


def _numeric(address: str) -> str:
    """Return the IPv4 address of a name; an address of IPv6 or an unknown name stays."""
    with suppress(OSError, UnicodeError):
        return socket.gethostbyname(address)
    return address


def host_name_is_loopback() -> bool:
    """Return True if this machine resolves its host name to a loopback address or cannot resolve it."""
    try:
        return socket.gethostbyname(socket.gethostname()).startswith("127.")
    except OSError:
        return True


def interface_of(address: str) -> str:
    """Return the network interface with this IPv4 address; "" if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has no IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""


def few_cores(
    ranks: int, usable: int | None = None, present: int | None = None, environ: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Yield one line if there are fewer usable cores than ranks although the machine has more.

    Each rank needs a core for itself: it launches kernels, and reads and tokenizes its data. A machine that has no more
    cores gives no reason to warn.
    """
    usable = cores() if usable is None else usable
    present = os.cpu_count() or 1 if present is None else present
    environ = os.environ if environ is None else environ
    if usable >= min(ranks, present):
        return
    scheduler = [("SLURM_JOB_ID", SLURM), ("KUBERNETES_SERVICE_HOST", KUBERNETES)]
    advice = next((text for name, text in scheduler if environ.get(name)), OTHERWISE)
    yield f"warning: {ranks} ranks share {usable} of this machine's {present} cores, which slows every rank. {advice}"
