"""The command ``llm-datadist ping``: whether, how and how fast a running peer is reached from here."""
