"""Registered memory and the system calls that move it."""
