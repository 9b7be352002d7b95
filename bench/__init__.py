"""Benchmarks: `bench/run.py` prints them all; each module measures one thing."""
