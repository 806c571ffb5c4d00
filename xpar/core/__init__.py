"""What runs on tensors and process groups; nothing here imports diffusers."""
