"""The losses: checks, costs, oracle, cases."""
