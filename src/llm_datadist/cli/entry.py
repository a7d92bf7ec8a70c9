"""Entry point of the command ``llm-datadist``."""

from __future__ import annotations

import sys

_EXTRAS = {"typer": "cli", "rich": "cli", "prometheus_client": "cli,metrics", "aiohttp": "route"}
"""By package that is missing."""


def main() -> None:
    """Run the command line.

    Raises:
        SystemExit: always, with the exit code: 0 success, 1 failure, 2 wrong usage or an extra is not
            installed, 130 interrupted.
    """
    try:
        from llm_datadist.cli.app import app  # noqa: PLC0415 - the library works without the packages this needs

        app()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get(error.name or "")
        if extra is None:
            raise
        sys.stderr.write(f"llm-datadist needs the package {error.name}: run pip install 'llm-datadist[{extra}]'\n")
        raise SystemExit(2) from None
