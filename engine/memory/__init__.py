"""Memory: block pool, block tables, their invariants. No torch, no kernels."""
