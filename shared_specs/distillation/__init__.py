"""Distillation of one language-model head by another: objective, checks, oracle, costs."""
