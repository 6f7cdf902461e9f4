// What the parts of the emulated CUDA driver share: its results, its handles, its lock.

#pragma once

#include <dlfcn.h>
#include <unistd.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace kitsune::emulator::driver {

enum Status : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kInvalidImage = 200,
  kInvalidContext = 201,
  kInvalidHandle = 400,
  kNotFound = 500,
  kLaunchOutOfResources = 701,
  kLaunchFailed = 719,
  kCooperativeTooLarge = 720,
};

constexpr int kDefaultShared = 49152;

struct Function {
  void (*entry)(const void*) = nullptr;
  unsigned max_threads = 1024, registers = 0;
  int shared_limit = kDefaultShared;
  bool any_cluster = false;
};
struct Library {
  int file = -1;  // stays open: dlopen knows libraries by their path, and the path is /proc/self/fd/<file>
  void* handle = nullptr;
  std::map<std::string, std::unique_ptr<Function>> functions;
  ~Library() {
    if (handle) dlclose(handle);
    if (file >= 0) close(file);
  }
};

// Held during a launch, and while `last_error` is read or written.
inline std::mutex launching;
inline std::string last_error;

}  // namespace kitsune::emulator::driver
