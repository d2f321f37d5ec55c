"""The parts of ``compare.py``: peers, model forms, engines, figures, rows and the table."""
