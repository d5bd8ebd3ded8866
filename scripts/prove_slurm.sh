#!/usr/bin/env bash
# Run scripts/slurm.sbatch under a real Slurm: one machine, two tasks, stopped by SIGTERM, requeued and resumed. Needs
# root and Debian's slurm-wlm and munge. Starts its own controller with its own folders, and stops it.
set -euo pipefail
cd "$(dirname "$0")/.."
[ "$(id -u)" = 0 ] || { echo "prove_slurm.sh: needs root" >&2; exit 2; }
command -v slurmctld >/dev/null || { echo "prove_slurm.sh: install slurm-wlm" >&2; exit 2; }
work=$(mktemp -d)
host=$(hostname -s)
pids=()
finish() { for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done; }
trap finish EXIT

if ! munge -n >/dev/null 2>&1; then
    [ -f /etc/munge/munge.key ] || { dd if=/dev/urandom bs=1 count=1024 of=/etc/munge/munge.key status=none; }
    chown munge: /etc/munge/munge.key && chmod 400 /etc/munge/munge.key
    mkdir -p /run/munge && chown munge: /run/munge
    runuser -u munge -- munged --force
    pids+=("$(pgrep -nx munged)")
fi
export SLURM_CONF="$work/slurm.conf"
cat > "$SLURM_CONF" <<CONF
ClusterName=proof
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd.pid
SlurmctldPort=16817
SlurmdPort=16818
SlurmctldLogFile=$work/slurmctld.log
SlurmdLogFile=$work/slurmd.log
ReturnToService=2
KillWait=60
NodeName=$host NodeAddr=127.0.0.1 CPUs=2 Sockets=1 CoresPerSocket=2 ThreadsPerCore=1 RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes=$host Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE
CONF
mkdir -p "$work/state" "$work/spool"
slurmctld -D & pids+=($!)
slurmd -D -N "$host" & pids+=($!)
until sinfo -h -o %T 2>/dev/null | grep -q -E 'idle|mixed'; do sleep 1; done

run="$work/run"
job=$(RANKS=1 OMP_NUM_THREADS=1 LOG_DIR="$work/logs" sbatch --parsable --ntasks 2 --ntasks-per-node 2 --output "$work/job.log" scripts/slurm.sbatch \
    --config configs/quickstart.yaml --data-path mock --train-iters "${ITERS:-60}" --eval-interval 0 --log-interval 1 \
    --save "$run" --load "$run" --save-interval 10 --metrics-jsonl "$work/metrics.jsonl")
echo "job $job"
lines() { [ -f "$work/metrics.jsonl" ] && wc -l < "$work/metrics.jsonl" || echo 0; }
until [ "$(lines)" -ge 15 ]; do
    [ -n "$(squeue -h -j "$job" -o %T)" ] || { echo "the job ended before it was stopped" >&2; tail -20 "$work/job.log" >&2; exit 1; }
    sleep 1
done
scancel --batch --signal=TERM "$job"
echo "stopped after $(lines) iterations"
until squeue -h -j "$job" -o %T | grep -q PENDING; do
    [ -n "$(squeue -h -j "$job" -o %T)" ] || { echo "the job ended instead of being requeued" >&2; tail -20 "$work/job.log" >&2; exit 1; }
    sleep 1
done
echo "requeued; releasing"
scontrol update jobid="$job" StartTime=now >/dev/null
while [ -n "$(squeue -h -j "$job" -o %T 2>/dev/null)" ]; do sleep 1; done
grep -E "^job|asked to stop|resumed at" "$work/job.log"
python3 - "$work/metrics.jsonl" "${ITERS:-60}" <<'PY'
import json, sys
seen = [json.loads(line)["iteration"] for line in open(sys.argv[1])]
assert seen == list(range(1, int(sys.argv[2]) + 1)), seen
print(f"iterations 1 to {seen[-1]}, each once")
PY
grep -q "start 1" "$work/job.log"
# Each start has the logs of both ranks, by the job's name and the ranks' numbers in the job. Rank 1 has nothing to say.
for log in "megapar-$job-"{0,1}/attempt-0/rank-{0,1}.log; do
    [ -f "$work/logs/$log" ] || { echo "$log is missing" >&2; exit 1; }
done
grep -q iteration "$work/logs/megapar-$job-0/attempt-0/rank-0.log" && grep -q iteration "$work/logs/megapar-$job-1/attempt-0/rank-0.log"
resumed=$(sed -n 's/.*resumed at iteration \([0-9]*\).*/\1/p' "$work/job.log")
# Checkpoints are due every 10 iterations: one at or after the 15th was saved because the job was stopped.
[ "$resumed" -ge 15 ] || { echo "resumed at iteration $resumed: nothing was saved when the job was stopped" >&2; exit 1; }
echo "proved: stopped, requeued, resumed, finished"
