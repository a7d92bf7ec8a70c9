"""Deterministic simulation of whole clusters: see docs/testing.md."""
