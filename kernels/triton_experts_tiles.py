"""Written by ``benchmarks/triton_experts_tiles.py``, which says how each was chosen.

(architecture, crowd, precision) → rows, columns, numbers in a step, warps, stages.
"""

TILES = {
    ("sm_80", "few", "half"): (16, 64, 128, 4, 3),
    ("sm_80", "few", "single"): (16, 32, 64, 4, 3),
    ("sm_80", "many", "half"): (128, 64, 64, 8, 4),
    ("sm_80", "many", "single"): (64, 32, 32, 8, 3),
    ("sm_89", "few", "half"): (16, 64, 64, 4, 3),
    ("sm_89", "few", "single"): (16, 32, 64, 4, 3),
    ("sm_89", "many", "half"): (128, 64, 64, 8, 4),
    ("sm_89", "many", "single"): (64, 32, 32, 8, 3),
    ("sm_90", "few", "half"): (16, 64, 128, 4, 4),
    ("sm_90", "few", "single"): (16, 32, 64, 4, 3),
    ("sm_90", "many", "half"): (128, 64, 64, 8, 4),
    ("sm_90", "many", "single"): (64, 32, 32, 8, 3),
    ("sm_100", "few", "half"): (16, 64, 128, 4, 4),
    ("sm_100", "few", "single"): (16, 32, 64, 4, 3),
    ("sm_100", "many", "half"): (128, 64, 64, 8, 4),
    ("sm_100", "many", "single"): (64, 32, 32, 8, 3),
    ("gfx942", "few", "half"): (16, 32, 64, 4, 3),
    ("gfx942", "few", "single"): (16, 32, 32, 4, 3),
    ("gfx942", "many", "half"): (128, 64, 64, 8, 3),
    ("gfx942", "many", "single"): (64, 32, 32, 8, 3),
}
