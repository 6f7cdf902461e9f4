#include "launch_words.h"

#include <limits>
#include <stdexcept>

namespace kitsune::cuda {
namespace {

constexpr int64_t kMaxGrid = std::numeric_limits<int32_t>::max();  // x dimension, CUDA C++ guide, "Technical Specifications"
constexpr int64_t kWarp = 32;
constexpr int64_t kMaxBlock = 1024;
constexpr int64_t kMaxCluster = 16;              // non-portable size on Hopper (Hopper tuning guide, "Thread Block Clusters")
constexpr int64_t kMaxSharedBytes = 227 * 1024;  // compute capability 9.0, the most of any
constexpr int64_t kMaxParameters = 4096 / 8;     // pointers in the 4 KB of parameters that every driver of CUDA 12 takes

int64_t checked(const char* what, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high)
    throw std::invalid_argument("launch words: " + std::string(what) + " is " + std::to_string(value) + ", not between " +
                                std::to_string(low) + " and " + std::to_string(high));
  return value;
}

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument("launch words: " + std::string(what));
}

}  // namespace

Launch parse_launch(const int64_t* words, size_t count) {
  if (count != kLaunchWords)
    throw std::invalid_argument("launch words: there are " + std::to_string(count) + ", not " + std::to_string(kLaunchWords));
  if (words[0] != kLaunchVersion)
    throw std::invalid_argument("launch words: version " + std::to_string(words[0]) + ", but this extension reads version " +
                                std::to_string(kLaunchVersion) + ": the program was made by another version of kitsune_jax");
  require(words[1] == kSm90a || words[1] == kPortable, "the architecture is neither 900 nor 800");
  Launch launch{};
  launch.sm = words[1];
  launch.grid = checked("the grid", words[2], 1, kMaxGrid);
  launch.block = checked("the block", words[3], kWarp, kMaxBlock);
  launch.cluster = checked("the cluster", words[4], 1, kMaxCluster);
  launch.shared_bytes = checked("the shared memory", words[5], 0, kMaxSharedBytes);
  launch.cooperative = checked("cooperative", words[6], 0, 1) != 0;
  launch.operands = checked("the number of operands", words[7], 0, kMaxParameters);
  launch.results = checked("the number of results", words[8], 1, kMaxParameters);
  launch.workspace_zero_bytes = checked("the zeroed part of the workspace", words[9], 0, std::numeric_limits<int64_t>::max());
  require(launch.block % kWarp == 0, "the block is not a multiple of a warp");
  require(launch.grid % launch.cluster == 0, "the grid is not a multiple of the cluster");
  require(launch.sm == kSm90a || launch.cluster == 1, "clusters need architecture 900");
  require(launch.operands + launch.results <= kMaxParameters, "more operands and results than a kernel has parameters");
  return launch;
}

std::string geometry(const Launch& launch) {
  std::string text = "grid " + std::to_string(launch.grid) + ", block " + std::to_string(launch.block);
  if (launch.cluster > 1) text += ", clusters of " + std::to_string(launch.cluster);
  text += ", " + std::to_string(launch.shared_bytes) + " bytes of shared memory";
  return launch.cooperative ? text + ", cooperative" : text;
}

}  // namespace kitsune::cuda
