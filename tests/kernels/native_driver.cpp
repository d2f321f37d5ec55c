// Runs the native ops in a process of its own, for another processor or under a sanitizer: what to
// run comes on standard input, and what memory holds afterwards goes to standard output.
//
// All numbers are int64. A request is its kind, then:
//   kRun         threads; regions, and for each its address and size at the caller's; steps, and for
//                each its OpKind, the size of its Args, pointers in them, their offsets, the Args;
//                the regions' bytes                  → RunResult, the regions' bytes
//   kRowsSize    the arguments of octavo_packed_rows_size                  → the size
//   kWeightSize  the arguments of octavo_packed_size                       → the size
//   kPackWeight  kind, stride, out_features, in_features, threads, bytes of the source and of the
//                packed weight, the source                           → the packed weight

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "cpu_linear.h"
#include "cpu_program.h"
#include "cpu_threads.h"

namespace {

thread_local int own_rank = 0, own_size = 1;

int64_t read_number() {
  int64_t number;
  if (std::fread(&number, sizeof number, 1, stdin) != 1) std::exit(0);
  return number;
}

void read_bytes(void* to, size_t count) {
  if (std::fread(to, 1, count, stdin) != count) std::exit(2);
}

void write_bytes(const void* from, size_t count) {
  if (std::fwrite(from, 1, count, stdout) != count) std::exit(2);
}

void write_number(int64_t number) { write_bytes(&number, sizeof number); }

// A copy of memory of the caller's, aligned as that is, with nothing behind it.
class Region {
 public:
  Region(int64_t address, int64_t size) : address_(address), size_(size) {
    const size_t before = address % 64;
    if (posix_memalign(&memory_, 64, before + size) != 0) std::exit(2);
    bytes_ = static_cast<char*>(memory_) + before;
  }
  Region(Region&& other) noexcept { *this = std::move(other); }
  Region& operator=(Region&& other) noexcept {
    std::swap(memory_, other.memory_);
    std::swap(bytes_, other.bytes_);
    address_ = other.address_;
    size_ = other.size_;
    return *this;
  }
  ~Region() { std::free(memory_); }

  void read() { read_bytes(bytes_, size_); }
  void write() const { write_bytes(bytes_, size_); }
  char* here(int64_t address) const {
    return address >= address_ && address < address_ + size_ ? bytes_ + (address - address_) : nullptr;
  }

 private:
  void* memory_ = nullptr;
  char* bytes_ = nullptr;
  int64_t address_, size_;
};

int64_t translate(const std::vector<Region>& regions, int64_t address) {
  for (const Region& region : regions)
    if (char* here = region.here(address)) return reinterpret_cast<int64_t>(here);
  return 0;
}

void run() {
  const int64_t num_threads = read_number();
  std::vector<Region> regions;
  for (int64_t left = read_number(); left > 0; left--) {
    const int64_t address = read_number();
    regions.emplace_back(address, read_number());
  }
  std::vector<std::vector<int64_t>> all_args;
  std::vector<octavo::Instruction> program;
  for (int64_t left = read_number(); left > 0; left--) {
    const int64_t kind = read_number();
    std::vector<int64_t> args(read_number() / 8), offsets(read_number());
    for (int64_t& offset : offsets) offset = read_number();
    read_bytes(args.data(), args.size() * 8);
    for (int64_t offset : offsets) args[offset / 8] = translate(regions, args[offset / 8]);
    all_args.push_back(std::move(args));
    program.push_back({kind, all_args.back().data()});
  }
  for (Region& region : regions) region.read();
  write_number(octavo_run(program.data(), int64_t(program.size()), num_threads));
  for (const Region& region : regions) region.write();
}

void pack_weight() {
  const int64_t kind = read_number(), row_kind = read_number();
  const int64_t stride = read_number(), out_features = read_number();
  const int64_t in_features = read_number(), num_threads = read_number();
  const int64_t source_size = read_number(), packed_size = read_number();
  Region source(0, source_size), packed(0, packed_size);
  source.read();
  octavo_pack_weight(kind, row_kind, source.here(0), stride, out_features, in_features, packed.here(0),
                     num_threads);
  packed.write();
}

}  // namespace

// A team of plain threads instead of an OpenMP runtime, so that a sanitizer sees how they meet.
void GOMP_parallel(void (*function)(void*), void* data, unsigned num_threads, unsigned) {
  const auto part = [=](int rank) {
    own_rank = rank;
    own_size = int(num_threads);
    function(data);
    own_rank = 0;
    own_size = 1;
  };
  std::vector<std::thread> others;
  for (unsigned rank = 1; rank < num_threads; rank++) others.emplace_back(part, int(rank));
  part(0);
  for (std::thread& other : others) other.join();
}
int omp_get_thread_num() { return own_rank; }
int omp_get_num_threads() { return own_size; }

int main() {
  enum { kRun = 1, kRowsSize = 2, kWeightSize = 3, kPackWeight = 4, kRowKind = 5 };
  for (;;) {
    const int64_t request = read_number();
    if (request == kRun) {
      run();
    } else if (request == kPackWeight) {
      pack_weight();
    } else if (request == kRowKind) {
      write_number(octavo_row_kind(read_number()));
    } else {
      const int64_t a = read_number(), b = read_number(), c = read_number();
      write_number(request == kRowsSize ? octavo_packed_rows_size(a, b, c)
                                        : octavo_packed_size(a, b, c));
    }
    std::fflush(stdout);
  }
}
