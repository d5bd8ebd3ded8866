#!/usr/bin/env bash
# What a change should pass before it is pushed, in about eight minutes on two idle cores: style, types, layers, and the
# core of the suite: all of it but the command's tools, faults, the fuzzer, exports, and whole classes of transformers,
# which .ci/run and scripts/test.sh add. Arguments are passed to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/lint.sh
left_out=(tools faults fuzz benchmarks model/conformance checkpoints/export)
exec scripts/test.sh "${left_out[@]/#/--ignore=tests/}" "$@"
