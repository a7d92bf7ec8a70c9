"""``llm-datadist soak``: every operation over every path at once, while processes are killed, stopped and restarted."""
