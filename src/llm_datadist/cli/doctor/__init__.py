"""The command ``llm-datadist doctor``: what of this machine helps or hinders transfers."""
