// The memory that stamped kernels record to (cuda/include/kitsune/timeline.h), one buffer in each context, and what is in it.
//
// Comes in: the start and the end of a timeline, stamped kernels, and launches. Goes out: the records of all contexts. Invariants:
// while no timeline runs, stamped kernels record nothing; a buffer stays where it is until the process ends, because captured
// launches have its address; memory is allocated when a timeline starts, never in a launch on a device.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "driver.h"

namespace kitsune::cuda {

int64_t now_ns();  // of the host's steady clock, which the emulator's kernels have too

class Timelines {
 public:
  static constexpr int64_t kMostChunks = int64_t{1} << 17, kChunkBytes = 512, kHeadBytes = 4096;
  static constexpr int64_t kBytes = kHeadBytes + kMostChunks * kChunkBytes;
  static constexpr size_t kKernels = 1020;  // with numbers at a time

  // What kernels wrote in one context. `head`: words of a TimelineHead. `host_ns`: when all of it had been written, now_ns().
  struct Recorded {
    int device;  // -1: the emulator
    std::vector<uint32_t> head;
    std::string chunks;
    int64_t host_ns;
  };
  struct Recording {
    std::vector<Recorded> contexts;
    std::vector<std::string> names;  // of kernels, by number
    int64_t unstamped = 0;           // launches of other kernels
  };

  static Timelines& all();

  // Records to `chunks` chunks of each context from now on: of every device in use if `devices`, and of the emulator.
  void start(int64_t chunks, bool devices);
  Recording stop();

  // A number for a stamped kernel, and the end of its use; kKernels where there is none left.
  size_t add_kernel(const std::string& name);
  void remove_kernel(size_t number);

  // The buffer that a stamped kernel gets in this context, 0 for none. Other kernels are counted.
  CUdeviceptr buffer(const Driver& driver, CUcontext context);
  void count_unstamped();

 private:
  struct Buffer {
    const Driver* driver;
    int device;
    CUdeviceptr memory;
  };
  Buffer made(const Driver& driver, CUcontext context, int device);  // with the lock
  void set_head(const Buffer& buffer, uint32_t on) const;

  std::mutex mutex_;                     // never held while work is waited for: that may need the launch of another thread
  std::map<CUcontext, Buffer> buffers_;  // nullptr: the emulator's
  std::vector<std::string> names_;
  std::vector<bool> used_;
  std::atomic<bool> on_{false};
  std::atomic<int64_t> chunks_{0}, unstamped_{0};
};

}  // namespace kitsune::cuda
