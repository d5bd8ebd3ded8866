"""Translation tables for the words in front of a script: verdict, then rows as in ``megatron``.

Sources: torch.distributed.run and torch.distributed.launch, DeepSpeed's runner, Slurm's srun, Open MPI's mpirun,
paddle.distributed.launch, MindSpore's msrun, accelerate launch, colossalai run, ft_launcher of
nvidia-resiliency-ext.
"""

from __future__ import annotations

from collections.abc import Mapping

from megapar.tools.translation.verdict import Foreign, rows


def _table(text: str) -> Mapping[str, Foreign]:
    found: dict[str, Foreign] = {}
    for line in text.strip().splitlines():
        verdict, _, row = line.partition(" | ")
        found |= rows(row, verdict)
    return found


_TORCHRUN = _table("""
renamed | nproc-per-node= | @ranks_here | handled by the launcher
renamed | nnodes | megapar launch --nnodes {value} | handled by the launcher
renamed | node-rank= | @node_rank |
renamed | master-addr= master-port= | @rendezvous | the launcher takes address and port as one flag
renamed | rdzv-id rdzv-backend rdzv-endpoint rdzv-conf | megapar launch --{name} {value} | handled by the launcher
renamed | max-restarts local-addr log-dir | megapar launch --{name} {value} | handled by the launcher
implied | standalone | | a single node needs no rendezvous
implied | use-env | | ranks always read the environment
unnecessary | monitor-interval= start-method= role= run-path module | | megapar launch starts ranks in one way only
unnecessary | no-python local-ranks-filter= numa-binding | | megapar launch starts ranks in one way only
unsupported | redirects= tee= logs-specs= | | --log-dir contains the output of every rank
""")
_DEEPSPEED = _table("""
renamed | num-gpus= | @ranks_here | handled by the launcher
renamed | num-nodes | megapar launch --nnodes {value} | handled by the launcher
renamed | node-rank= | @node_rank |
renamed | master-addr= master-port= | @rendezvous | the launcher takes address and port as one flag
unnecessary | hostfile= include= exclude= launcher= launcher-args= no-ssh | | start megapar launch on every node
unnecessary | no-ssh-check ssh-port= force-multi | | start megapar launch on every node
unsupported | module no-python no-local-rank save-pid= | | megapar launch starts ranks in one way only
unsupported | enable-each-rank-log bind-cores-to-rank autotuning= | | megapar launch starts ranks in one way only
unsupported | elastic-training max-elastic-nodes= min-elastic-nodes= | | megapar launch starts ranks in one way only
unsupported | bind-core-list= | | megapar launch starts ranks in one way only
""")
_SRUN = _table("""
renamed | nodes | megapar launch --nnodes {value} | handled by the launcher
renamed | ntasks-per-node= gpus-per-node= | @ranks_here | handled by the launcher
unnecessary | ntasks= gpus= gres= gpus-per-task= cpus-per-task= mem= partition= | | an option of Slurm: keep srun
unnecessary | account= qos= time= job-name= container-image= container-mounts= | | an option of Slurm: keep srun
unnecessary | container-workdir= container-name= export= mpi= label output= error= | | an option of Slurm: keep srun
unnecessary | kill-on-bad-exit= cpu-bind= gpu-bind= distribution= nodelist= exclusive | | an option of Slurm: keep srun
unnecessary | exclude= jobid= overlap unbuffered wait= chdir= constraint= | | an option of Slurm: keep srun
unnecessary | no-container-mount-home container-env= threads-per-core= ntasks-per-gpu= | | an option of Slurm: keep srun
unnecessary | het-group= | | an option of Slurm: keep srun
""")
_MPIRUN = _table("""
renamed | np= n= | @ranks_here | handled by the launcher
unnecessary | allow-run-as-root bind-to= map-by= mca= hostfile= host= x= report-bindings | | an option of mpirun
unnecessary | tag-output oversubscribe prefix= | | an option of mpirun
""")
_PADDLE = _table("""
renamed | nnodes | megapar launch --nnodes {value} | handled by the launcher
renamed | rank= | @node_rank |
renamed | master | megapar launch --rdzv-endpoint {value} | handled by the launcher
renamed | nproc-per-node= | @ranks_here | handled by the launcher
renamed | gpus= devices= npus= xpus= selected-gpus= | @listed | one rank per listed device
renamed | log-dir | megapar launch --log-dir {value} | handled by the launcher
renamed | max-restart | megapar launch --max-restarts {value} | handled by the launcher
unsupported | log-level= log-overwrite | | every rank logs everything
unnecessary | ips= servers= trainers= run-mode= job-id= legacy sort-ip host= | | start megapar launch on every node
unnecessary | enable-gpu-log elastic-level= elastic-timeout= | | start megapar launch on every node
""")
_MSRUN = _table("""
renamed | worker-num= | @worker_num | handled by the launcher
renamed | local-worker-num= | @ranks_here | handled by the launcher
renamed | node-rank= | @node_rank |
renamed | master-addr= master-port= | @rendezvous | the launcher takes address and port as one flag
renamed | log-dir= | megapar launch --log-dir {value} | handled by the launcher
unnecessary | join= cluster-time-out= bind-core= sim-level= sim-rank-id= rank-table-file= | | an option of msrun
unnecessary | worker-log-name= tail-worker-log= | | an option of msrun
""")
_ACCELERATE = _table("""
renamed | num-processes= | @num_processes | handled by the launcher
renamed | num-machines= | megapar launch --nnodes {value} | handled by the launcher
renamed | machine-rank= | @node_rank |
renamed | main-process-ip= main-process-port= | @rendezvous | the launcher takes address and port as one flag
renamed | rdzv-backend= rdzv-conf= max-restarts= | megapar launch --{name} {value} | handled by the launcher
left to you | config-file= | @launch_file |
other numbers | mixed-precision= use-deepspeed use-fsdp use-megatron-lm | | set --dtype, --sharding-stage
other numbers | deepspeed-config-file= zero-stage= zero3-init-flag= gradient-clipping= | | set --dtype, --sharding-stage
other numbers | offload-optimizer-device= | | set --dtype, --sharding-stage
other numbers | gradient-accumulation-steps= | | set --gradient-merge-acc-step
unnecessary | multi-gpu cpu same-network num-cpu-threads-per-process= dynamo-backend= | | an option of Accelerate
unnecessary | gpu-ids= monitor-interval= quiet q debug module no-python | | an option of Accelerate
unnecessary | main-training-function= | | an option of Accelerate
""")
_COLOSSALAI = _table("""
renamed | nproc-per-node= | @ranks_here | handled by the launcher
renamed | num-nodes= | megapar launch --nnodes {value} | handled by the launcher
renamed | host= | @hosts | one node per listed host
renamed | master-addr= master-port= | @rendezvous | the launcher takes address and port as one flag
left to you | hostfile= | | --nnodes is the number of its hosts
unnecessary | include= exclude= ssh-port= extra-launch-args= | | start megapar launch on every node
""")
_FAULT_TOLERANCE = _table("""
unsupported | ft-cfg-path= fault-tol-cfg-path= ft-rank-heartbeat-timeout= | | docs/reliability.md has its timeouts
unsupported | ft-initial-rank-heartbeat-timeout= | | docs/reliability.md has its timeouts
unsupported | ft-param-rank-heartbeat-timeout= | | docs/reliability.md has its timeouts
unsupported | ft-param-initial-rank-heartbeat-timeout= | | docs/reliability.md has its timeouts
unsupported | ft-rank-section-timeouts= ft-rank-out-of-section-timeout= | | docs/reliability.md has its timeouts
unsupported | ft-restart-policy= ft-log-level= | | docs/reliability.md has its timeouts
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
