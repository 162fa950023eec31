"""TiledLinear: checks, oracle, cases."""
