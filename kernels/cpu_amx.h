// Intel's AMX: whether this process may use tiles, and their shapes in this thread.
#pragma once

#if defined(__linux__) && defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define OCTAVO_AMX 1

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace octavo {

// Linux gives the memory for tiles only to a process that asks.
inline bool may_use_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  static const bool is_granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return is_granted;
}

// The rows and bytes a row of a thread's eight tiles, as the processor reads them.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int64_t num_rows, int64_t bytes) {
    rows[tile] = uint8_t(num_rows);
    row_bytes[tile] = uint16_t(bytes);
  }

  void load() const {
    asm volatile("" ::: "memory");  // the intrinsic does not say that it reads memory
    _tile_loadconfig(this);
  }
};

}  // namespace octavo

#endif
