"""The process of the trial of NIXL: makes an agent as an engine does, ends it, and says what went wrong."""

from __future__ import annotations

import sys
from dataclasses import replace

from llm_datadist.engine.options import EngineOptions
from llm_datadist.memory.regions import RegionTable
from llm_datadist.paths.nixl_agent import NixlHost
from llm_datadist.paths.nixl_options import NixlOptions, NixlUnavailableError
from llm_datadist.status import LLMException


def main() -> None:
    """Try it; one line on standard output if it fails."""
    try:
        options = EngineOptions.parse({"llm.Role": "Mix"}).nixl
    except LLMException:  # which is told of by itself
        options = NixlOptions()
    table = RegionTable()
    host = NixlHost(replace(options, wanted=True), table)
    try:
        host.agent()
    except NixlUnavailableError as error:
        told = f"{error} [{error.hint}]" if error.hint else str(error)
        sys.stdout.write(" ".join(told.split()))
    finally:
        host.close()
        table.close()


if __name__ == "__main__":
    main()
