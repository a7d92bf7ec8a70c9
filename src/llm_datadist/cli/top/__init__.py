"""The command ``llm-datadist top``: what running processes do, read from their Prometheus endpoints."""
