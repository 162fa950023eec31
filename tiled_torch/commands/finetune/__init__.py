"""`finetune`: the trainer, its processes and its checkpoints."""
