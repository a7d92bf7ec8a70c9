"""Sockets, the background thread and worker threads."""
