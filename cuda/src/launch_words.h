// The attribute `launch` of a custom call: ten int64 words that say how its kernel is launched.
//
// Comes in: words from a compiled program, which may come from a file. Goes out: a Launch within the limits of every device that
// its architecture names, or std::invalid_argument. What depends on the device at hand is checked when the kernel is loaded.
//
// Words: version, sm, grid, block, cluster, shared bytes, cooperative, operands, results, zeroed bytes of the workspace.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace kitsune::cuda {

inline constexpr int64_t kLaunchVersion = 1;
inline constexpr size_t kLaunchWords = 10;
inline constexpr int64_t kSm90a = 900;     // exactly compute capability 9.0
inline constexpr int64_t kPortable = 800;  // 8.0 and later
inline constexpr int64_t kPortableCluster =
    8;  // larger clusters need the kernel's consent (CUDA C++ guide, "Thread Block Clusters")

struct Launch {
  int64_t sm, grid, block, cluster, shared_bytes;
  bool cooperative;
  int64_t operands, results;
  int64_t workspace_zero_bytes;  // of the last result, zeroed on the stream before the kernel starts
};

Launch parse_launch(const int64_t* words, size_t count);

// "grid 132, block 384, clusters of 2, 231424 bytes of shared memory, cooperative".
std::string geometry(const Launch& launch);

}  // namespace kitsune::cuda
