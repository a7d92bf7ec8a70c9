"""``python -m llm_datadist.cli`` is the same as ``llm-datadist``."""

from __future__ import annotations

from llm_datadist.cli import main

if __name__ == "__main__":
    main()
