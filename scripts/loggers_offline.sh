#!/usr/bin/env bash
# Install the experiment trackers into an environment of their own, train a small model with each of them offline, and
# read back what they have written (docs/logging.md). Needs the network for the installation only.
#
#   scripts/loggers_offline.sh             in a temporary folder, which is removed
#   scripts/loggers_offline.sh FOLDER      in this folder, which is kept; an environment in it is used again
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh dev
if [ $# -gt 0 ]; then
    mkdir -p "$1"
    folder=$(cd "$1" && pwd)
else
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
fi
python=$folder/environment/bin/python
if [ ! -f "$folder/environment/ready" ]; then
    .venv/bin/python -m venv "$folder/environment"
    "$python" -m pip install --quiet --disable-pip-version-check wandb mlflow swanlab
    # After the installation, so that pip installs every package that the trackers need.
    site='import sysconfig; print(sysconfig.get_path("purelib"))'
    .venv/bin/python -c "$site" > "$("$python" -c "$site")/megapar.pth"
    touch "$folder/environment/ready"
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PYTHONPATH=$PWD
rm -rf "$folder/runs"
runs=$folder/runs
mkdir -p "$runs"

train() { "$python" pretrain_moe.py --config configs/tiny.yaml --metrics-jsonl "$runs/metrics.jsonl" "$@" | tee "$runs/log"; }
fail() { echo "loggers_offline: $*" >&2; exit 1; }
sound() { if grep -q WARNING "$runs/log"; then fail "$1 warned, see above"; fi; }
# Both services write a line of text per entry, between bytes of their own.
holds() {
    for word in loss/total loss/perplexity run/consumed_tokens speed/step_seconds moe/load_max hidden_size; do
        grep -rqaF "$word" "$2" || fail "$1 has not written $word"
    done
    echo "$1: $(du -sk "$2" | cut -f1) KiB in $2"
}

WANDB_MODE=offline train --wandb-project offline --wandb-exp-name first --wandb-save-dir "$runs/wandb"
sound "Weights & Biases"
holds "Weights & Biases" "$runs/wandb"

SWANLAB_MODE=offline train --swanlab-project offline --swanlab-exp-name first --swanlab-save-dir "$runs/swanlog"
sound SwanLab
holds SwanLab "$runs/swanlog"

uri=sqlite:///$runs/mlflow.db
train --mlflow-experiment offline --mlflow-run-name first --mlflow-tracking-uri "$uri"
sound MLflow
"$python" - "$uri" "$runs/metrics.jsonl" <<'PY'
import json
import sys
from pathlib import Path

from mlflow import MlflowClient

client = MlflowClient(tracking_uri=sys.argv[1])
experiment = client.get_experiment_by_name("offline")
(run,) = client.search_runs([experiment.experiment_id])
assert run.info.status == "FINISHED", run.info.status
assert run.data.params["hidden_size"] == "64"
lines = [json.loads(line) for line in Path(sys.argv[2]).read_text().splitlines()]
for curve, name in (("loss/total", "loss"), ("loss/perplexity", "perplexity"), ("speed/step_seconds", "iteration_seconds")):
    history = sorted(client.get_metric_history(run.info.run_id, curve), key=lambda metric: metric.step)
    assert [metric.step for metric in history] == [line["iteration"] for line in lines], curve
    assert [metric.value for metric in history] == [line[name] for line in lines], curve
print(f"MLflow: {len(run.data.metrics)} metrics of {len(lines)} steps, equal to the metrics file")
PY
echo "loggers_offline: all three trackers have written their runs"
