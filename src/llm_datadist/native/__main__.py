"""``python -m llm_datadist.native``: see ``build``."""

from __future__ import annotations

import sys

from llm_datadist.native.build import main

if __name__ == "__main__":
    sys.exit(main())
