"""Layers split over ranks: linear, embedding, attention over a context, recomputation, random states, inference."""
