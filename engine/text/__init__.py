"""Text: tokenizers, chat templates, incremental detokenisation, stop strings. No blocks, no tensors."""
