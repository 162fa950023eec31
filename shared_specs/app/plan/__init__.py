"""How long a context fits: bytes and time of a training step from formulas, without a framework, and what to set for it."""
