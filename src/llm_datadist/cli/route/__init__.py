"""The command ``llm-datadist route``: vLLM's API in front of engines that prefill and engines that decode."""
