"""The parts of ``memory_paper.py``: request lengths, contiguous reservations, replay through the real scheduler."""
