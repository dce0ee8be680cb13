"""The benchmarks behind tools/bench.py: each compares a store with the bare system calls, in one run."""
