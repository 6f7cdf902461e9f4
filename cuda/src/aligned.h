// Buffers that do not start where a kernel's vector loads and bulk copies may: each is replaced by an aligned copy for the launch.
//
// Comes in: the buffers of a call. Goes out: the buffers that the kernel gets, and copies on the stream, of operands before the
// launch and of results after it. Invariants: a call all of whose buffers are aligned costs one look at their addresses; nothing
// waits for the stream. XLA aligns what it allocates, but not every part of an array that it hands to a call instead of a copy
// (xla/backends/gpu/transforms/dynamic_slice_fusion_rewriter_v2.cc looks at the size of a slice, not at its first byte).
#pragma once

#include <map>
#include <mutex>
#include <tuple>
#include <vector>

#include "driver.h"

namespace kitsune::cuda {

inline constexpr uintptr_t kAlignment = 16;  // of vector loads and of bulk copies, PTX ISA, "cp.async.bulk"

struct Buffer {
  void* data;
  size_t bytes;
};

// An empty buffer has no element that could be read.
inline bool is_aligned(const Buffer& buffer) {
  return buffer.bytes == 0 || reinterpret_cast<uintptr_t>(buffer.data) % kAlignment == 0;
}

// The memory of copies in captured launches, which a graph may repeat for as long as the executable lives. A piece serves every
// launch of its kernel: these follow each other, because they write the same workspace.
class KeptMemory {
 public:
  ~KeptMemory();
  CUresult get(const Driver& driver, CUcontext context, size_t buffer, size_t bytes, CUdeviceptr* address);

 private:
  const Driver* driver_ = nullptr;
  std::mutex mutex_;
  std::map<std::tuple<CUcontext, size_t, size_t>, CUdeviceptr> pieces_;  // context, buffer, bytes
};

// The buffers of one launch. Memory comes from the driver in the order of the stream and goes back so; while the stream is being
// captured it is kept memory, because a graph with allocations cannot become a part of another (CUDA driver API,
// cuGraphAddChildGraphNode), as XLA's command buffers need. Every step returns the first error and the function that gave it.
class AlignedBuffers {
 public:
  AlignedBuffers(const Driver& driver, KeptMemory& kept, CUcontext context, CUstream stream)
      : driver_(driver), kept_(kept), context_(context), stream_(stream) {}
  ~AlignedBuffers();
  AlignedBuffers(const AlignedBuffers&) = delete;
  AlignedBuffers& operator=(const AlignedBuffers&) = delete;

  struct Status {
    CUresult error = CUDA_SUCCESS;
    const char* function = "";
  };
  // Replaces what is not aligned in `buffers`: `operands` operands, then results, of which the last is the workspace. A result that
  // lies in the memory of an operand shares the operand's copy.
  Status before(std::vector<Buffer>& buffers, size_t operands);
  // Once the kernel is launched: the results to where they belong.
  Status after();

 private:
  struct Copy {
    Buffer given;
    CUdeviceptr aligned;
    bool result, owned;
  };
  Status allocate(size_t buffer, size_t bytes, CUdeviceptr* address, bool* owned);

  const Driver& driver_;
  KeptMemory& kept_;
  CUcontext context_;
  CUstream stream_;
  std::vector<Copy> copies_;
};

}  // namespace kitsune::cuda
