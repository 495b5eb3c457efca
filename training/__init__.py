"""Training: losses, optimisers, curricula, collators and distillation, on transformers' Trainer and Accelerate."""
