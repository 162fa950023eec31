"""`bench --device gpu` and `tune`: what touches the GPU runs in processes of its own."""
