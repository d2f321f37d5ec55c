"""Models: one short file per family over shared layers, and the loaders of their weights."""
