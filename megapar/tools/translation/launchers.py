"""Translation tables for the arguments of launchers, with rows as in ``megatron``.

Sources: torch.distributed.run and torch.distributed.launch, DeepSpeed's runner, Slurm's srun, Open MPI's mpirun,
paddle.distributed.launch. Tested in ``tests/tools/test_translate.py``.
"""

from __future__ import annotations

from collections.abc import Mapping

from megapar.tools.translation.verdict import IMPLIED, RENAMED, UNNECESSARY, UNSUPPORTED, Foreign, rows

_TORCHRUN = {
    **rows(
        """
nproc-per-node= | @ranks_here | handled by the launcher
nnodes | megapar launch --nnodes {value} | handled by the launcher
node-rank= | @node_rank |
master-addr= master-port= | @rendezvous | the launcher takes address and port as one flag
rdzv-id rdzv-backend rdzv-endpoint rdzv-conf | megapar launch --{name} {value} | handled by the launcher
max-restarts local-addr log-dir | megapar launch --{name} {value} | handled by the launcher
""",
        RENAMED,
    ),
    **rows(
        """
standalone | | a single node needs no rendezvous
use-env | | ranks always read the environment
""",
        IMPLIED,
    ),
    **rows(
        """
monitor-interval= start-method= role= run-path module no-python | | megapar launch starts ranks in one way only
local-ranks-filter= numa-binding | | megapar launch starts ranks in one way only
""",
        UNNECESSARY,
    ),
    **rows(
        """
redirects= tee= logs-specs= | | --log-dir contains the output of every rank
""",
        UNSUPPORTED,
    ),
}
_DEEPSPEED = {
    **rows(
        """
num-gpus= | @ranks_here | handled by the launcher
num-nodes | megapar launch --nnodes {value} | handled by the launcher
node-rank= | @node_rank |
master-addr= master-port= | @rendezvous | the launcher takes address and port as one flag
""",
        RENAMED,
    ),
    **rows(
        """
hostfile= include= exclude= launcher= launcher-args= | | start megapar launch on every node
no-ssh no-ssh-check ssh-port= force-multi | | start megapar launch on every node
""",
        UNNECESSARY,
    ),
    **rows(
        """
module no-python no-local-rank save-pid= enable-each-rank-log | | megapar launch starts ranks in one way only
bind-cores-to-rank | | megapar launch starts ranks in one way only
autotuning= elastic-training max-elastic-nodes= min-elastic-nodes= | | megapar launch starts ranks in one way only
bind-core-list= | | megapar launch starts ranks in one way only
""",
        UNSUPPORTED,
    ),
}
_SRUN = {
    **rows(
        """
nodes | megapar launch --nnodes {value} | handled by the launcher
ntasks-per-node= gpus-per-node= | @ranks_here | handled by the launcher
""",
        RENAMED,
    ),
    **rows(
        """
ntasks= gpus= gres= gpus-per-task= cpus-per-task= mem= partition= account= qos= time= | | an option of Slurm: keep srun
job-name= container-image= container-mounts= container-workdir= container-name= | | an option of Slurm: keep srun
export= mpi= label output= error= kill-on-bad-exit= cpu-bind= gpu-bind= distribution= | | an option of Slurm: keep srun
nodelist= exclusive exclude= jobid= overlap unbuffered wait= chdir= constraint= | | an option of Slurm: keep srun
no-container-mount-home container-env= threads-per-core= ntasks-per-gpu= het-group= | | an option of Slurm: keep srun
""",
        UNNECESSARY,
    ),
}
_MPIRUN = {
    **rows(
        """
np= n= | @ranks_here | handled by the launcher
""",
        RENAMED,
    ),
    **rows(
        """
allow-run-as-root bind-to= map-by= mca= hostfile= host= x= report-bindings tag-output | | an option of mpirun
oversubscribe prefix= | | an option of mpirun
""",
        UNNECESSARY,
    ),
}
_PADDLE = {
    **rows(
        """
nnodes | megapar launch --nnodes {value} | handled by the launcher
rank= | @node_rank |
master | megapar launch --rdzv-endpoint {value} | handled by the launcher
nproc-per-node= | @ranks_here | handled by the launcher
gpus= devices= npus= xpus= selected-gpus= | @listed | one rank per listed device
log-dir | megapar launch --log-dir {value} | handled by the launcher
max-restart | megapar launch --max-restarts {value} | handled by the launcher
""",
        RENAMED,
    ),
    **rows(
        """
log-level= log-overwrite | | every rank logs everything
""",
        UNSUPPORTED,
    ),
    **rows(
        """
ips= servers= trainers= run-mode= job-id= legacy sort-ip host= | | start megapar launch on every node
enable-gpu-log elastic-level= elastic-timeout= | | start megapar launch on every node
""",
        UNNECESSARY,
    ),
}

LAUNCHERS: Mapping[str, Mapping[str, Foreign]] = {
    "torchrun": _TORCHRUN,
    "deepspeed": _DEEPSPEED,
    "srun": _SRUN,
    "mpirun": _MPIRUN,
    "paddle.distributed.launch": _PADDLE,
    "python": {},
}
