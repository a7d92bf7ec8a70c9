"""The ways in which bytes move between two processes."""
