"""The process of the trial of NIXL: makes an agent as an engine does, ends it, and says what went wrong."""

from __future__ import annotations

import sys

from llm_datadist.memory.regions import RegionTable
from llm_datadist.paths.nixl_agent import NixlHost
from llm_datadist.paths.nixl_options import NixlOptions, NixlUnavailableError


def main() -> None:
    """Try it; one line on standard output if it fails."""
    table = RegionTable()
    host = NixlHost(NixlOptions(wanted=True), table)
    try:
        host.agent()
    except NixlUnavailableError as error:
        sys.stdout.write(" ".join(str(error).split()))
    finally:
        host.close()
        table.close()


if __name__ == "__main__":
    main()
