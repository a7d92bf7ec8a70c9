"""Measure transfers beside what the machine can do at the very moment."""
