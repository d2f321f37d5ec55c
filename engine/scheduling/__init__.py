"""Scheduling: requests, sequences, queues and the token-budget rule. No torch, no kernels."""
