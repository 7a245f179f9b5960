#!/usr/bin/env bash
# Measure on a GPU, on a machine without a network that has torch, triton, transformers, accelerate, peft, pandas, pyarrow,
# xxhash, pytest, pytest-xdist and hypothesis:
#
#     make wheels                  # before, on a machine with a network: what the other one lacks, in .whl/
#     benchmarks/gpu.sh head       # under 6 minutes: the head
#     benchmarks/gpu.sh training   # under 6 minutes: whole steps, packing, and the tests that need a GPU
#
# Results go to benchmarks/results/, and to the folder $OUT if that is set. PYTHON chooses the interpreter, WHEELS another
# folder than .whl/; DEVICE=cpu tries it all without a GPU, on tiny shapes, and writes to runs/bench/.
#
# Each program has a budget for what it measures, and a limit that includes its start; a call takes at most LIMIT seconds,
# 350 unless set. What a program does not reach, it or this script says.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
device=${DEVICE:-cuda}
most=${LIMIT:-350}
options=()
[ "$device" = cpu ] && options=(--results runs/bench) && tiny=--smoke
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
failed=0

# Nothing can be installed there: wheels that hold only Python work as they are unpacked
unpacked=$(mktemp -d)
trap 'rm -rf "$unpacked"' EXIT
for wheel in "${WHEELS:-.whl}"/*.whl; do
    name=$(basename "$wheel")
    "$python" -c "import importlib.metadata as m; m.version('${name%%-*}')" 2> /dev/null ||
        { [ -e "$wheel" ] && "$python" -m zipfile -e "$wheel" "$unpacked"; }
done
export PYTHONPATH=$PYTHONPATH:$unpacked

# run SECONDS WHAT COMMAND...: within these seconds, and within what is left of the call's
run() {
    local limit=$(($1 < most - SECONDS ? $1 : most - SECONDS)) what=$2 status
    shift 2
    if [ "$limit" -le 0 ]; then
        echo "left out: $what, past the $most s of a call"
        return
    fi
    timeout --kill-after=5 "$limit" "$@"
    status=$?
    if [ "$status" -eq 124 ] || [ "$status" -eq 137 ]; then
        echo "left out: the rest of $what, past its limit of $limit s"
    elif [ "$status" -ne 0 ]; then
        failed=1
    fi
}

case "${1:-}" in
head)
    run "$most" "the head" "$python" benchmarks/head.py --device "$device" --budget 280 "${options[@]}"
    ;;
training)
    run 190 "whole steps" "$python" benchmarks/training.py --budget 140 ${tiny:-} "${options[@]}"
    run 60 "what packing costs where it saves nothing" "$python" benchmarks/packing.py --budget 15 ${tiny:-} "${options[@]}"
    # Another torch than that of the tests may warn of more: nothing is an error here but a wrong result
    run "$most" "the tests" "$python" -m pytest -n 8 -v -W default -m 'not slow' \
        tests/reference/test_hosted_reference_gpu.py tests/packing/test_packing_gpu.py tests/heads/test_kernels.py \
        tests/host/test_offloading.py tests/trainers/test_drop_in.py
    ;;
*)
    echo "usage: benchmarks/gpu.sh head|training" >&2
    exit 2
    ;;
esac
exit $failed
