"""Execution: step plans become tensors, logits become tokens. Knows no scheduler, no block pool."""
