#!/usr/bin/env bash
# Builds the library and the examples, and runs C++ against Python over both kinds of path.
# Usage: run.sh [BUILD_FOLDER]   PYTHON: a python that has llm-datadist and pybind11
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
build=${1:-$(mktemp -d)}
cmake -S "$here/../../cpp" -B "$build" -DLLM_DATADIST_PYTHON="$(command -v "$python")" -DLLM_DATADIST_BUILD_EXAMPLES=ON >/dev/null
cmake --build "$build" --parallel >/dev/null
for path in process_vm tcp; do
    echo "path $path"
    LLM_DATADIST_PATHS=$path "$python" "$here/python_peer.py" decode "$build/examples/prefill_push"
    LLM_DATADIST_PATHS=$path "$python" "$here/python_peer.py" prefill "$build/examples/decode_pull"
done
