"""The loss of any language model: its own forward, with a head whose logits are made only where somebody reads them."""
