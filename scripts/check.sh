#!/usr/bin/env bash
# What a change should pass before it is pushed, in about eight minutes on two idle cores: style, types, layers, and the
# core of the suite: layouts in fp64, and the tests of each module that a step runs. What scripts/test.sh and .ci/run add:
# bf16 and streams, whole trainings, exports, classes of transformers, the command's tools, faults and the fuzzer. Arguments
# are passed to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/lint.sh
left_out=(tools faults fuzz benchmarks training model/conformance checkpoints/export)
exec scripts/test.sh "${left_out[@]/#/--ignore=tests/}" -k "not test_bf16 and not test_on_streams" "$@"
