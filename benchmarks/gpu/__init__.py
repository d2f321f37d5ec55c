"""The sections of ``gpu_check.py``, a file each."""
