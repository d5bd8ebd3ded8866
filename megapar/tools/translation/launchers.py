"""Translation tables for the words in front of a script (form: ``verdict.table``).

Sources: torch.distributed.run and torch.distributed.launch, DeepSpeed's runner, Slurm's srun, Open MPI's mpirun,
paddle.distributed.launch, MindSpore's msrun, accelerate launch, colossalai run, ft_launcher of
nvidia-resiliency-ext.
"""

from __future__ import annotations

from collections.abc import Mapping

from megapar.tools.translation.verdict import Foreign, table

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
[unnecessary]
monitor-interval= start-method= role= run-path module | | megapar launch starts ranks in one way only
no-python local-ranks-filter= numa-binding | | megapar launch starts ranks in one way only
[unsupported]
redirects= tee= logs-specs= | | --log-dir contains the output of every rank
""")
_DEEPSPEED = table("""
[renamed]
num-gpus= | @~ranks_here | handled by the launcher
num-nodes | megapar launch --nnodes {value} | handled by the launcher
node-rank= | @~node_rank |
master-addr= master-port= | @~rendezvous | the launcher takes address and port as one flag
[unnecessary]
hostfile= include= exclude= launcher= launcher-args= no-ssh | | start megapar launch on every node
no-ssh-check ssh-port= force-multi | | start megapar launch on every node
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
[unnecessary]
allow-run-as-root bind-to= map-by= mca= hostfile= host= x= report-bindings | | an option of mpirun
tag-output oversubscribe prefix= | | an option of mpirun
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
[unnecessary]
ips= servers= trainers= run-mode= job-id= legacy sort-ip host= | | start megapar launch on every node
enable-gpu-log elastic-level= elastic-timeout= | | start megapar launch on every node
""")
_MSRUN = table("""
[renamed]
worker-num= | @~worker_num | handled by the launcher
local-worker-num= | @~ranks_here | handled by the launcher
node-rank= | @~node_rank |
master-addr= master-port= | @~rendezvous | the launcher takes address and port as one flag
log-dir= | megapar launch --log-dir {value} | handled by the launcher
[unnecessary]
join= cluster-time-out= bind-core= sim-level= sim-rank-id= rank-table-file= | | an option of msrun
worker-log-name= tail-worker-log= | | an option of msrun
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
