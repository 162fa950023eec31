"""What `finetune` trains on: text and conversations, tokenized, as windows or packed rows."""
