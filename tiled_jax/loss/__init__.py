"""The loss of a language-model head without its logits."""
