TILES = {
    (arch, phase, precision, pad): (
        16 if phase == "decode" else 64,
        32 if precision == "single" else 64,
        4,
        2,
    )
    for arch in ("sm_80", "sm_89", "sm_90", "sm_100", "gfx942")
    for phase in ("prefill", "decode")
    for precision in ("half", "fp8", "single")
    for pad in (64, 128, 256)
}
