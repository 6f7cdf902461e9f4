// The attribute `launch` of a custom call: int64 words that say how its kernel is launched, and on how many bytes.
//
// Comes in: words from a compiled program, which may come from a file. Goes out: a Launch within the limits of every device that
// its architecture names, or std::invalid_argument. What depends on the device at hand is checked when the kernel is loaded.
//
// Words: version, sm, grid, block, cluster, shared bytes, flags (1: cooperative, 2: stamped, 4 for each tensor map), blocks of an
// instance, operands, results, zeroed bytes of the workspace; then the bytes of each operand and of each result, which a custom
// call must name and a kernel outside of XLA may leave out. Where a packing kernel writes parts of the workspace first
// (cuda/include/kitsune/pack.h): its blocks, the operand that holds its table, and (buffer, first byte, bytes) of each pointer of
// the kernel. Else these are the buffers. Last (pointer, columns, rows) of each tensor map.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace kitsune::cuda {

inline constexpr int64_t kLaunchVersion = 6;
inline constexpr size_t kLaunchWords = 11;
inline constexpr int64_t kMapBytes = 128;  // of a tensor map
inline constexpr int64_t kSm90a = 900;     // exactly compute capability 9.0
inline constexpr int64_t kPortable = 800;  // 8.0 and later
inline constexpr int64_t kPortableCluster =
    8;  // larger clusters need the kernel's consent (CUDA C++ guide, "Thread Block Clusters")

// Bytes of a buffer that the kernel has a pointer to.
struct Part {
  int64_t buffer, first, bytes;
};

// A tensor map that the kernel gets in front of its pointers: of `rows` rows of `columns` 16-bit elements without gaps, which begin
// at pointer `pointer`, in boxes of 64 by 64 with the 128-byte swizzle (cuda/include/kitsune/stage/rows.h).
struct Map {
  int64_t pointer, columns, rows;
};

struct Launch {
  int64_t sm, grid, block, cluster, shared_bytes;
  bool cooperative;
  bool stamped;      // the kernel takes the buffer of a timeline and its own number behind the pointers to its buffers
  int64_t instance;  // a grid of fewer blocks, a multiple of this, does the same work; 0: the grid is as it is
  int64_t operands, results;
  int64_t workspace_zero_bytes;  // of the last result, zeroed on the stream before the kernel starts
  std::vector<int64_t> bytes;    // of operands, then of results; empty where they are not said
  int64_t pack_blocks;           // of the packing kernel; 0: there is none
  int64_t table;                 // the operand that holds its table
  std::vector<Part> pointers;    // of the kernel; empty: to every buffer
  std::vector<Map> maps;
};

// Well-formed UTF-8, as names in messages must be.
bool is_utf8(const std::string& text);

// What an image is refused for before a driver, which is not told its size, reads it; "" if nothing. An ELF image must hold all
// that its header and its tables name; any other must be text (PTX), whose end the driver finds.
std::string check_image(const std::string& image, bool emulated);

Launch parse_launch(const int64_t* words, size_t count);

// "grid 132, block 384, clusters of 2, 231424 bytes of shared memory, cooperative".
std::string geometry(const Launch& launch);

}  // namespace kitsune::cuda
