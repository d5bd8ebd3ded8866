"""Arguments of the programs that start a script's ranks, and what becomes of each: rows as in ``megatron``.

Sources: torch.distributed.run and torch.distributed.launch, DeepSpeed's runner, Slurm's srun, Open MPI's mpirun,
paddle.distributed.launch.
"""

from __future__ import annotations

from collections.abc import Mapping

from megapar.tools.translation.verdict import IMPLIED, RENAMED, UNNECESSARY, UNSUPPORTED, Foreign, rows

_TORCHRUN = {
    **rows(
        """
nproc-per-node | @ranks_here | belongs to the launcher
nnodes | megapar launch --nnodes {value} | belongs to the launcher
node-rank | @node_rank |
master-addr master-port | @rendezvous | the launcher's rendezvous, address and port in one
rdzv-id rdzv-backend rdzv-endpoint rdzv-conf | megapar launch --{name} {value} | belongs to the launcher
max-restarts local-addr log-dir | megapar launch --{name} {value} | belongs to the launcher
""",
        RENAMED,
    ),
    **rows(
        """
standalone | | one node meets nobody
use-env | | ranks read the environment
""",
        IMPLIED,
    ),
    **rows(
        """
monitor-interval start-method role run-path module no-python | | there is one way to start ranks
local-ranks-filter numa-binding | | there is one way to start ranks
""",
        UNNECESSARY,
    ),
    **rows(
        """
redirects tee logs-specs | | --log-dir has every rank's output
""",
        UNSUPPORTED,
    ),
}
_DEEPSPEED = {
    **rows(
        """
num-gpus | @ranks_here | belongs to the launcher
num-nodes | megapar launch --nnodes {value} | belongs to the launcher
node-rank | @node_rank |
master-addr master-port | @rendezvous | the launcher's rendezvous, address and port in one
""",
        RENAMED,
    ),
    **rows(
        """
hostfile include exclude launcher launcher-args | | megapar launch is started on every node
no-ssh no-ssh-check ssh-port force-multi | | megapar launch is started on every node
""",
        UNNECESSARY,
    ),
    **rows(
        """
module no-python no-local-rank save-pid enable-each-rank-log bind-cores-to-rank | | there is one way to start ranks
autotuning elastic-training max-elastic-nodes min-elastic-nodes bind-core-list | | there is one way to start ranks
""",
        UNSUPPORTED,
    ),
}
_SRUN = {
    **rows(
        """
nodes | megapar launch --nnodes {value} | belongs to the launcher
ntasks-per-node gpus-per-node | @ranks_here | belongs to the launcher
""",
        RENAMED,
    ),
    **rows(
        """
ntasks gpus gres gpus-per-task cpus-per-task mem partition account qos time job-name | | Slurm's own; keep srun
container-image container-mounts container-workdir container-name export mpi | | Slurm's own; keep srun
label output error kill-on-bad-exit cpu-bind gpu-bind distribution nodelist | | Slurm's own; keep srun
exclusive exclude jobid overlap unbuffered wait chdir | | Slurm's own; keep srun
no-container-mount-home container-env threads-per-core ntasks-per-gpu het-group constraint | | Slurm's own; keep srun
""",
        UNNECESSARY,
    ),
}
_MPIRUN = {
    **rows(
        """
np n | @ranks_here | belongs to the launcher
""",
        RENAMED,
    ),
    **rows(
        """
allow-run-as-root bind-to map-by mca hostfile host x report-bindings tag-output oversubscribe prefix | | mpirun's own
""",
        UNNECESSARY,
    ),
}
_PADDLE = {
    **rows(
        """
nnodes | megapar launch --nnodes {value} | belongs to the launcher
rank | @node_rank |
master | megapar launch --rdzv-endpoint {value} | belongs to the launcher
nproc-per-node | @ranks_here | belongs to the launcher
gpus devices npus xpus selected-gpus | @listed | one rank for each device that is listed
log-dir | megapar launch --log-dir {value} | belongs to the launcher
max-restart | megapar launch --max-restarts {value} | belongs to the launcher
""",
        RENAMED,
    ),
    **rows(
        """
log-level log-overwrite | | every rank writes all it has
""",
        UNSUPPORTED,
    ),
    **rows(
        """
ips servers trainers run-mode job-id legacy sort-ip host | | megapar launch is started on every node
enable-gpu-log elastic-level elastic-timeout | | megapar launch is started on every node
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
