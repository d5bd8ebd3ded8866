"""Translation tables for the words in front of a script (form: ``verdict.table``), and what has to be computed.

Sources: torch.distributed.run and torch.distributed.launch, DeepSpeed's runner, Slurm's srun, Open MPI's mpirun,
paddle.distributed.launch, MindSpore's msrun, accelerate launch, colossalai run, ft_launcher of
nvidia-resiliency-ext.
"""

from __future__ import annotations

from collections.abc import Mapping

from megapar.tools.translation.cases import Function, collected, first, number, whole
from megapar.tools.translation.verdict import LEFT, RENAMED, UNNECESSARY, Decided, Foreign, Given, table

_TORCHRUN = table("""
[renamed]
nproc-per-node= | @~ranks_here | handled by the launcher
nnodes | megapar launch --nnodes {value} | handled by the launcher
node-rank= | @~node_rank |
master-addr= master-port= | @~rendezvous | the launcher takes address and port as one flag
rdzv-id rdzv-backend rdzv-endpoint rdzv-conf | megapar launch --{name} {value} | handled by the launcher
max-restarts local-addr log-dir | megapar launch --{name} {value} | handled by the launcher
[implied]
standalone | | a single node needs no rendezvous
use-env | | ranks always read the environment
[unnecessary | megapar launch starts ranks in one way only]
monitor-interval= start-method= role= run-path module no-python local-ranks-filter= numa-binding
[unsupported]
redirects= tee= logs-specs= | | --log-dir contains the output of every rank
""")
_DEEPSPEED = table("""
[renamed]
num-gpus= | @~ranks_here | handled by the launcher
num-nodes | megapar launch --nnodes {value} | handled by the launcher
node-rank= | @~node_rank |
master-addr= master-port= | @~rendezvous | the launcher takes address and port as one flag
[unnecessary | start megapar launch on every node]
hostfile= include= exclude= launcher= launcher-args= no-ssh no-ssh-check ssh-port= force-multi
[unsupported | megapar launch starts ranks in one way only]
module no-python no-local-rank save-pid= enable-each-rank-log bind-cores-to-rank autotuning= elastic-training
max-elastic-nodes= min-elastic-nodes= bind-core-list=
""")
_SRUN = table("""
[renamed]
nodes | megapar launch --nnodes {value} | handled by the launcher
ntasks-per-node= gpus-per-node= | @~ranks_here | handled by the launcher
[unnecessary | an option of Slurm: keep srun]
ntasks= gpus= gres= gpus-per-task= cpus-per-task= mem= partition= account= qos= time= job-name= container-image=
container-mounts= container-workdir= container-name= export= mpi= label output= error= kill-on-bad-exit= cpu-bind=
gpu-bind= distribution= nodelist= exclusive exclude= jobid= overlap unbuffered wait= chdir= constraint=
no-container-mount-home container-env= threads-per-core= ntasks-per-gpu= het-group=
""")
_MPIRUN = table("""
[renamed]
np= n= | @~ranks_here | handled by the launcher
[unnecessary | an option of mpirun]
allow-run-as-root bind-to= map-by= mca= hostfile= host= x= report-bindings tag-output oversubscribe prefix=
""")
_PADDLE = table("""
[renamed]
nnodes | megapar launch --nnodes {value} | handled by the launcher
rank= | @~node_rank |
master | megapar launch --rdzv-endpoint {value} | handled by the launcher
nproc-per-node= | @~ranks_here | handled by the launcher
gpus= devices= npus= xpus= selected-gpus= | @~listed | one rank per listed device
log-dir | megapar launch --log-dir {value} | handled by the launcher
max-restart | megapar launch --max-restarts {value} | handled by the launcher
[unsupported]
log-level= log-overwrite | | every rank logs everything
[unnecessary | start megapar launch on every node]
ips= servers= trainers= run-mode= job-id= legacy sort-ip host= enable-gpu-log elastic-level= elastic-timeout=
""")
_MSRUN = table("""
[renamed]
worker-num= | @~worker_num | handled by the launcher
local-worker-num= | @~ranks_here | handled by the launcher
node-rank= | @~node_rank |
master-addr= master-port= | @~rendezvous | the launcher takes address and port as one flag
log-dir= | megapar launch --log-dir {value} | handled by the launcher
[unnecessary | an option of msrun]
join= cluster-time-out= bind-core= sim-level= sim-rank-id= rank-table-file= worker-log-name= tail-worker-log=
""")
_ACCELERATE = table("""
[renamed]
num-processes= | @~num_processes | handled by the launcher
num-machines= | megapar launch --nnodes {value} | handled by the launcher
machine-rank= | @~node_rank |
main-process-ip= main-process-port= | @~rendezvous | the launcher takes address and port as one flag
rdzv-backend= rdzv-conf= max-restarts= | megapar launch --{name} {value} | handled by the launcher
[left to you]
config-file= |
    else: left to you | the file is not read: set its ranks and nodes, and --dtype and --sharding-stage if it sets them
[other numbers]
gradient-accumulation-steps= | | set --gradient-merge-acc-step
[other numbers | set --dtype, --sharding-stage]
mixed-precision= use-deepspeed use-fsdp use-megatron-lm deepspeed-config-file= zero-stage= zero3-init-flag=
gradient-clipping= offload-optimizer-device=
[unnecessary | an option of Accelerate]
multi-gpu cpu same-network num-cpu-threads-per-process= dynamo-backend= gpu-ids= monitor-interval= quiet q debug module
no-python main-training-function=
""")
_COLOSSALAI = table("""
[renamed]
nproc-per-node= | @~ranks_here | handled by the launcher
num-nodes= | megapar launch --nnodes {value} | handled by the launcher
host= | @~hosts | one node per listed host
master-addr= master-port= | @~rendezvous | the launcher takes address and port as one flag
[left to you]
hostfile= | | --nnodes is the number of its hosts
[unnecessary]
include= exclude= ssh-port= extra-launch-args= | | start megapar launch on every node
""")
_FAULT_TOLERANCE = table("""
[unsupported | docs/reliability.md has its timeouts]
ft-cfg-path= fault-tol-cfg-path= ft-rank-heartbeat-timeout= ft-initial-rank-heartbeat-timeout=
ft-param-rank-heartbeat-timeout= ft-param-initial-rank-heartbeat-timeout= ft-rank-section-timeouts=
ft-rank-out-of-section-timeout= ft-restart-policy= ft-log-level=
""")

LAUNCHERS: Mapping[str, Mapping[str, Foreign]] = {
    "torchrun": _TORCHRUN,
    "ft_launcher": {**_TORCHRUN, **_FAULT_TOLERANCE},
    "deepspeed": _DEEPSPEED,
    "srun": _SRUN,
    "mpirun": _MPIRUN,
    "paddle.distributed.launch": _PADDLE,
    "msrun": _MSRUN,
    "accelerate launch": _ACCELERATE,
    "colossalai run": _COLOSSALAI,
}


def _one_node(given: Given) -> bool:
    if "worker-num" in given:
        return given["worker-num"] == given.get("local-worker-num", "8")
    names = ("nnodes", "num-nodes", "nodes", "num-machines")
    return all(given.get(name, "1") == "1" for name in names) and "," not in given.get("host", "")


def _rendezvous(value: str, given: Given) -> Decided:
    address = given.get("master-addr", given.get("main-process-ip"))
    port = given.get("master-port", given.get("main-process-port"))
    if _one_node(given):
        return UNNECESSARY, "", "a single node needs no rendezvous"
    if not address or not port:
        missing = "--master_port" if address else "--master_addr"
        return LEFT, "", f"--rdzv-endpoint needs address and port, but {missing} is not set"
    return RENAMED, f"megapar launch --rdzv-endpoint {address}:{port}", ""


def _node_rank(value: str, given: Given) -> Decided:
    if _one_node(given):
        return UNNECESSARY, "", "there is one node"
    return LEFT, "", "every node has another"


def _ranks_here(value: str, given: Given) -> Decided:
    if (ranks := whole(value)) is None:
        return LEFT, "", "--nproc-per-node is a number of ranks"
    return RENAMED, f"megapar launch --nproc-per-node {ranks}", ""


def _divided(ours: str, by: str, usual: int, refused: str, reason: str = "") -> Function:
    """Return the function for the ranks of all nodes, divided by the argument ``by``."""

    def decide(value: str, given: Given) -> Decided:
        quotient, rest = divmod(number(value), max(1.0, first(given, by, otherwise=usual)))
        if rest:
            return LEFT, "", f"set {ours}: the ranks of all nodes are not a multiple of {refused}"
        return RENAMED, f"megapar launch {ours} {int(quotient)}", reason

    return decide


def _hosts(value: str, given: Given) -> Decided:
    return RENAMED, f"megapar launch --nnodes {len(value.split(','))}", ""


def _listed(value: str, given: Given) -> Decided:
    devices = [word for word in value.strip("'\"").split(",") if word]
    return RENAMED, f"megapar launch --nproc-per-node {len(devices)}", ""


_worker_num = _divided(
    "--nnodes", "local-worker-num", 8, "those of this node", "the ranks of all nodes / those of this node"
)
_num_processes = _divided("--nproc-per-node", "num-machines", 1, "the nodes")


FUNCTIONS: Mapping[str, Function] = collected(globals())
