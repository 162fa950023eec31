"""The training loop that both halves' `finetune` runs, and everything it reads and writes."""
