"""The command line: local runs, plans, sizing, and a first prompt."""
