"""What the processes run on: DDP, FSDP2, DeepSpeed, tensor parallel; who holds which part of what."""
