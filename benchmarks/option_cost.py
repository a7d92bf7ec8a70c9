"""What an option costs: the same transfers with and without it, in turns.

Run it with a Python that has the project installed, and name the environment variable of the option, which is set to 1:
``python benchmarks/option_cost.py LLM_DATADIST_METRICS``. Takes a minute.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Final

from llm_datadist.cli.bench import driver, scales
from llm_datadist.cli.bench.cases import describe
from llm_datadist.cli.bench.driver import Plan, Program
from llm_datadist.cli.bench.results import Case, latency_ratio, ratio

_TOTAL: Final = 128 << 20
_BLOCK_BYTES: Final = 64 << 10
_PLAN: Final = Plan(rounds=9)
_CALLS: Final = 400


def main() -> int:
    """Measure, print a line for each kind of transfer; 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variable")
    plain = Program.ours()
    programs = [plain, dataclasses.replace(plain, environment={parser.parse_args().variable: "1"})]
    for path in ("process_vm", "tcp"):
        case = Case("pull_blocks", path, tensors=2, blocks=_TOTAL // 2 // _BLOCK_BYTES, block_bytes=_BLOCK_BYTES)
        without, with_it = driver.run([case], programs, _PLAN)
        seen = ratio(with_it, without)
        sys.stdout.write(f"{describe(case)}: {seen.median:.2f}x ({seen.low:.2f}..{seen.high:.2f}) the throughput\n")
        case = scales.small(path)
        without_few, with_few = driver.latency([case], programs, _PLAN, _CALLS)
        slower = latency_ratio(with_few, without_few, 0.5, _PLAN.rounds)
        times = [f"{found.quantile(0.5) * 1e6:.1f}" for found in (with_few, without_few)]
        sys.stdout.write(
            f"{describe(case)}: {slower.median:.2f}x ({slower.low:.2f}..{slower.high:.2f}) the p50 latency, "
            f"{' against '.join(times)} us\n"
        )
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
