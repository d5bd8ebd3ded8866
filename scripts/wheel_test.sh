#!/usr/bin/env bash
# Build the wheel, install it alone into a new environment, and use every command of it in an empty folder.
#
#   scripts/wheel_test.sh
#
# The environment sees the libraries of .venv by a .pth file, so nothing is downloaded but what resolves the extras. .venv's
# own megapar is not seen: it is an editable installation, whose .pth file is not read again.
set -euo pipefail
cd "$(dirname "$0")/.."
python="$PWD/.venv/bin/python"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset PYTHONPATH
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" XDG_CACHE_HOME="$work/cache" HF_HUB_OFFLINE=1

mkdir "$work/source" "$work/empty"
cp -a pyproject.toml README.md LICENSE megapar configs "$work/source/"  # setuptools writes into its source
"$python" -m pip wheel --quiet --disable-pip-version-check --no-index --no-deps --no-build-isolation \
    --wheel-dir "$work" "$work/source"
rm -rf "$work/source"
"$python" -m venv --without-pip "$work/venv"
"$python" -m pip --python "$work/venv/bin/python" install --quiet --disable-pip-version-check --no-index --no-deps \
    "$work"/megapar-*.whl
"$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
    > "$("$work/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/libraries.pth"
PATH="$work/venv/bin:$PATH"
cd "$work/empty"

refused() { if "$@" > "$work/output" 2>&1; then cat "$work/output"; echo "wheel: accepted: $*"; exit 1; fi; }
step() { echo "wheel: ${*%%$'\n'*}"; "$@" > "$work/output" 2>&1 || { cat "$work/output"; echo "wheel: failed: $*"; exit 1; }; }
says() { grep -q -- "$1" "$work/output" || { cat "$work/output"; echo "wheel: nothing says: $1"; exit 1; }; }

# s3fs, gcsfs and datasets pin fsspec, each to other dates. Meanwhile, an index is asked for versions that agree.
beside() {
    local wanted
    mapfile -t wanted < <(python -c "
import sys
from importlib.metadata import requires
for name, _, marker in (text.partition(';') for text in requires('megapar')):
    if name.startswith('datasets') or marker.strip() == f'extra == \"{sys.argv[1]}\"':
        print(name)" "$1")
    [ "${#wanted[@]}" = 2 ] || { echo "wheel: the requirements of [$1] are ${wanted[*]}"; return 1; }
    "$python" -m pip install --dry-run --ignore-installed --only-binary :all: --no-input --disable-pip-version-check \
        "${wanted[@]}"
}
beside s3 > "$work/s3" 2>&1 & s3=$!
beside gcs > "$work/gcs" 2>&1 & gcs=$!

step python -c "
import megapar, sys
assert megapar.__file__.startswith(sys.prefix), megapar.__file__"
step megapar --help
says 'pretrain '
step megapar configs
says '^mixtral-8x7b '
step megapar plan --config mixtral-8x7b
says 'MFU'
step megapar pretrain ernie --config sharding-32 --validate-only --data-path mock
says 'sharding 32'
store=(pretrain moe --config tiny --data-path mock --validate-only --save)
refused megapar "${store[@]}" gs://bucket/run  # .venv has the extra s3, and not gcs
says 'pip install "megapar\[gcs\]"'
refused megapar pretrain moe --config tiny --data-path mock --validate-only --wandb-project name
says 'pip install "megapar\[wandb\]"'
step megapar pretrain moe --help optimizer
says '^  --lr FLOAT'
step python -c "
from importlib.metadata import metadata
assert {'ernie3', 'wandb', 'mlflow', 'swanlab', 'logging'} <= {*metadata('megapar').get_all('Provides-Extra')}"
step python -c "
import sys
from megapar.arguments import parse
parse('moe', '--config tiny --data-path mock --validate-only --save s3://bucket/run'.split(), {})
assert not {'fsspec', 's3fs'} & set(sys.modules), 'a form is checked without them'"
step python -c "
import json
words = 'a rank holds a part of every layer and sends the rest of its rows to the others in turn'.split()
with open('my.jsonl', 'w') as file:
    for line in range(100):
        text = ' '.join(words[(7 * line + at * (1 + line % 5)) % len(words)] for at in range(60))
        file.write(json.dumps({'text': text}) + '\n')"
data=(--data-path my.jsonl --split 90,10)
step megapar pretrain moe --config tiny "${data[@]}" --vocab-size 256 --save runs/one --train-iters 2
says 'iteration 2/2'
step python -m megapar launch --nproc-per-node 2 pretrain moe --config tiny "${data[@]}" --vocab-size 256 \
    --sharding-degree 2 --sharding-stage 3 --load runs/one --save runs/two --train-iters 4 \
    --override-opt-param-scheduler
says 'iteration 4/4'
step megapar convert megapar-to-hf runs/two released
step megapar evaluate runs/one --data-path my.jsonl
says '^perplexity '
step megapar evaluate runs/two --data-path my.jsonl
grep '^loss ' "$work/output" > one_rank
step megapar launch --nproc-per-node 2 evaluate runs/two --data-path my.jsonl
grep '^loss ' "$work/output" > two_ranks
step python -c "
one, two = (float(open(name).read().split()[1]) for name in ('one_rank', 'two_ranks'))
assert abs(one - two) < 1e-5, (one, two)"
step megapar generate runs/two --prompt 'a rank holds' --max-new-tokens 8 --hf-cache cache
says '^a rank holds'
step test "$(ls -A)" = "$(printf '%s\n' cache my.jsonl one_rank released runs two_ranks)"
wait "$s3" || { cat "$work/s3"; echo "wheel: megapar[s3] cannot be installed"; exit 1; }
wait "$gcs" || { cat "$work/gcs"; echo "wheel: megapar[gcs] cannot be installed"; exit 1; }
echo "wheel: $(grep -ho 'fsspec-[0-9.]*[0-9]' "$work/s3" "$work/gcs" | sort -u | tr '\n' ' ')with the extras s3 and gcs"
echo "wheel: $(du -h "$work"/megapar-*.whl | cut -f1), every command runs from it"
