"""Benchmarks: workloads, records, and the tables that the documents show of them."""
