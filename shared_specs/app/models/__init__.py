"""Model folders without a framework: configuration, weights, tokenizer."""
