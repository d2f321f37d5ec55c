"""Decoders that transformers' own code computes, over octavo's paged keys and values."""
