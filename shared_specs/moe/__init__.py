"""A mixture of experts: checks, costs, oracle, cases."""
