"""Checkpoints on disk: model configuration and file formats, read without torch."""
