"""Benchmarks: workloads, records, and the tables that the README makes of them."""
