"""Kernels: tensors in, tensors out. Knows nothing else of octavo."""
