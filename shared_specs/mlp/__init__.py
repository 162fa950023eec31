"""The MLP: checks, costs, oracle, cases."""
