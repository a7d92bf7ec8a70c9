#!/usr/bin/env bash
# Everything that must hold for the C++ API. Needs cmake, g++, GoogleTest, and a Python that has llm-datadist and
# pybind11; clang++ and pkg-config are used if they are there.
# Usage: run_tests.sh [BUILD_FOLDER]
#   PYTHON=...     that Python (python3)
#   SANITIZE=1     also with AddressSanitizer and UndefinedBehaviorSanitizer
#   VALGRIND=1     also one pass under valgrind (slow)
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python=$(command -v "${PYTHON:-python3}")
work=${1:-}
if [ -z "$work" ]; then
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
fi
warnings=(-Wall -Wextra -Werror -I "$here/include" -fsyntax-only)
set -x

cmake -S "$here" -B "$work/build" -DLLM_DATADIST_PYTHON="$python" -DLLM_DATADIST_BUILD_TESTS=ON \
    -DLLM_DATADIST_BUILD_EXAMPLES=ON -DCMAKE_INSTALL_PREFIX="$work/prefix"
cmake --build "$work/build" --parallel "$(nproc)"
ctest --test-dir "$work/build" --output-on-failure

# The headers, as programs compile them.
for compiler in g++ clang++; do
    if command -v "$compiler" >/dev/null; then
        for standard in c++14 c++17 c++20; do
            "$compiler" "-std=$standard" "${warnings[@]}" "$here/tests/brace_test.cc"
        done
    fi
done

# Installed: a CMake package, and pkg-config. The library itself knows nothing of Python.
cmake --install "$work/build" >/dev/null
cmake -S "$here/../examples/cpp" -B "$work/examples" -DCMAKE_PREFIX_PATH="$work/prefix" >/dev/null
cmake --build "$work/examples"
library=$(find "$work/prefix" -name libllm_datadist.so)
! nm -D --undefined-only "$library" | grep -q ' _\?Py'
# With the compiler options of the original's samples, the older ABI of the standard library among them.
g++ -O2 -ftrapv -fno-common -Wall -Wextra -Werror -Wfloat-equal -D_GLIBCXX_USE_CXX11_ABI=0 -I "$work/prefix/include" \
    -I "$here/acl" "$here/../examples/cpp/prefill_push.cc" -o "$work/older_abi" \
    -L "${library%/*}" -Wl,-rpath,"${library%/*}" -lllm_datadist -lpthread -lrt
"$python" "$here/../examples/cpp/python_peer.py" decode "$work/older_abi"
if command -v pkg-config >/dev/null; then
    export PKG_CONFIG_PATH=${library%/*}/pkgconfig
    # shellcheck disable=SC2046
    g++ -std=c++17 $(pkg-config --cflags llm_datadist) -I "$here/acl" "$here/../examples/cpp/decode_pull.cc" \
        -o "$work/by_pkg_config" $(pkg-config --libs llm_datadist)
    LD_LIBRARY_PATH=${library%/*} "$python" "$here/../examples/cpp/python_peer.py" prefill "$work/by_pkg_config"
fi

# C++ and Python, both ways, over both kinds of path.
for path in process_vm tcp; do
    LLM_DATADIST_PATHS=$path "$python" "$here/../examples/cpp/python_peer.py" decode "$work/examples/prefill_push"
    LLM_DATADIST_PATHS=$path "$python" "$here/../examples/cpp/python_peer.py" prefill "$work/examples/decode_pull"
done

if [ "${SANITIZE:-0}" = 1 ]; then
    cmake -S "$here" -B "$work/sanitized" -DLLM_DATADIST_PYTHON="$python" -DLLM_DATADIST_BUILD_TESTS=ON \
        -DLLM_DATADIST_SANITIZE=address,undefined
    cmake --build "$work/sanitized" --parallel "$(nproc)" --target llm_datadist_tests llm_datadist_python
    ASAN_OPTIONS=detect_leaks=1:fast_unwind_on_malloc=0 LSAN_OPTIONS=suppressions=$here/tests/lsan.supp \
        UBSAN_OPTIONS=print_stacktrace=1 "$work/sanitized/tests/llm_datadist_tests" \
        --gtest_filter='-Lives.AThousandDoNotGrow'
fi
if [ "${VALGRIND:-0}" = 1 ]; then
    PYTHONMALLOC=malloc valgrind --error-exitcode=9 --leak-check=no --suppressions="$here/tests/valgrind.supp" \
        "$work/build/tests/llm_datadist_tests" --gtest_filter='Push.*:Pull.*:Pool.*:AscendStrings.*'
fi
