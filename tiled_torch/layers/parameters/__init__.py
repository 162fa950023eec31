"""What ranks hold of parameters: what they save, and norms of gradients."""
