"""Evaluation: perplexity, needles in long texts, memory and latency of a model with any cache, and plots of them."""
