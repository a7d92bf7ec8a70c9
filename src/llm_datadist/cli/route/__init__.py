"""The command ``llm-datadist route``: both legs of each request at once, for layer-wise push between vLLM engines."""
