// A compiled kernel: how it is loaded into a context and launched on a stream, on a device or in the emulator.
//
// Comes in: an image (a cubin; for the emulator the bytes of a shared library), that of the packing kernel, launch words and
// buffers. Goes out: a launch on the stream, of the packing kernel in front of it where the launch words say so (the stream orders
// the two), or an exception whose message names the region. Invariants: making a Kernel calls no driver; `launch` does not load,
// and allocates only for buffers that are not aligned (aligned.h), so a stream that is being captured may be given; a kernel whose
// blocks wait for each other starts with all of them resident, or not at all. A grid that was planned for a larger device shrinks
// to what the one at hand holds, where the kernel allows it (launch_words.h).
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "aligned.h"
#include "driver.h"
#include "launch_words.h"

namespace kitsune::cuda {

struct LaunchError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Library;

class Kernel {
 public:
  // `name` is the region's name and source line, for messages. Emulated kernels have no contexts; nullptr stands for the only one.
  Kernel(std::string image, std::string packer, const Launch& launch, std::string name, bool emulated);
  ~Kernel();
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;

  // Loads the kernel into a context, once, and checks that the device can run it: into the context of `stream`; or into the calling
  // thread's context, false if there is none.
  void load(CUstream stream);
  bool load_current();

  // Operands, then results, the last of which is the workspace. Throws std::invalid_argument for buffers that do not fit the launch
  // words.
  void launch(CUstream stream, std::vector<Buffer> buffers);

  const Launch& config() const { return launch_; }

 private:
  const Driver& driver() const;
  CUcontext context_of(const Driver& driver, CUstream stream) const;
  struct Loaded {
    CUcontext context;
    CUfunction function;
    CUfunction packer;  // null where nothing is packed
    int64_t grid;       // what of the grid fits the device
  };
  const Loaded* find(CUcontext context) const;
  void load_into(const Driver& driver, CUcontext context);
  CUfunction load_packer(const Driver& driver);
  // Tensor map `number` of an array at `address`, encoded once.
  CUtensorMap tensor_map(const Driver& driver, size_t number, void* address);
  // The kernel's parameter: its tensor maps, then its pointers. Empty if it has no maps: the pointers are the parameter.
  std::vector<CUtensorMap> with_maps(const Driver& driver, const std::vector<void*>& pointers);
  void pack(const Driver& driver, const Loaded& loaded, const std::vector<Buffer>& buffers, CUstream stream) const;
  void check_device(const Driver& driver) const;
  int64_t resident_blocks(const Driver& driver, CUfunction function) const;
  int64_t fitted_grid(const Driver& driver, CUfunction function) const;
  void check_buffers(const std::vector<Buffer>& buffers) const;
  void check(const Driver& driver, CUresult error, const char* what) const;
  [[noreturn]] void fail(const std::string& what) const;

  const std::string image_, packer_;
  const Launch launch_;
  const std::string name_;
  const bool emulated_;
  size_t number_ = 0;  // of a stamped kernel
  std::shared_ptr<Library> library_, packer_library_;
  KeptMemory kept_;
  mutable std::mutex mutex_;
  std::deque<Loaded> loaded_;  // one per device: a search beats a map
  struct Encoded {
    size_t number;
    void* address;
    CUtensorMap map;
  };
  std::vector<Encoded> encoded_;  // few: a search beats a map here too
};

}  // namespace kitsune::cuda
