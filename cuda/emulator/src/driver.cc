// The CUDA driver API, as far as launching needs it, on top of the emulator.
//
// Comes in: what launch code calls on libcuda.so; an image is the bytes of an ELF shared library that exports the kernel, and
// beside it <kernel>_max_threads and <kernel>_registers. Goes out: driver results; a launch runs to its end before it returns, on
// one emulated device of compute capability 9.0 with 132 SMs (an H100 SXM or H200), or as many as a test asks for. Invariant:
// layouts and values are those of cuda.h (CUDA 12.0 and later). The limits of a real launch are checked: shared memory must be
// asked for, clusters beyond 8 be allowed, cooperative launches fit.
//
// A kernel's parameters are pointers, without sizes: kitsune_emulator_set_buffers names the memory that the next launch of this OS
// thread may touch. Launches of several threads run one after the other.

#include "driver.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#include "emulator/emulator.h"

namespace {

using namespace kitsune::emulator;
using namespace kitsune::emulator::driver;

// A cluster lies in one GPC, and a GPC of an H100 SXM has 16 or 18 SMs: from size 8 on fewer clusters fit than 132 / size.
constexpr int kClustersOf8 = 16, kClustersOf16 = 8;
constexpr int kMaxSharedOptIn = 232448, kPortableCluster = 8, kMaxCluster = 16;
constexpr size_t kMemoryAlignment = 256;

struct Attribute {
  int id;
  char pad[4];
  union {
    char bytes[64];
    int cooperative;
    struct {
      unsigned x, y, z;
    } cluster;
    void* aligned;
  } value;
};
struct Config {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
  void* stream;
  Attribute* attributes;
  unsigned attribute_count;
};
static_assert(sizeof(Attribute) == 72 && sizeof(Config) == 56);

u64 seed = 1;
std::atomic<int> multiprocessors{132};
struct Stats {
  u64 launches = 0, steps = 0, copies = 0;
  double flops = 0, seconds = 0;
} stats;

struct NamedBuffer {
  const void* address;
  size_t bytes;
  std::string name;
};
thread_local std::vector<NamedBuffer> buffers;
thread_local std::vector<void*> contexts{reinterpret_cast<void*>(1)};  // one device, one context

int read_config(kitsune::emulator::Launch& launch, const Config& c) {
  if (c.grid_y != 1 || c.grid_z != 1 || c.block_y != 1 || c.block_z != 1 || !c.grid_x || !c.block_x) return kInvalidValue;
  launch.grid = c.grid_x;
  launch.block = c.block_x;
  launch.shared_bytes = c.shared_bytes;
  for (unsigned i = 0; i < c.attribute_count; ++i) {
    const Attribute& a = c.attributes[i];
    if (a.id == 2) launch.cooperative = a.value.cooperative != 0;
    if (a.id == 4) {
      if (a.value.cluster.y != 1 || a.value.cluster.z != 1) return kInvalidValue;
      launch.cluster = a.value.cluster.x;
    }
  }
  if (!launch.cluster || launch.grid % launch.cluster) return kInvalidValue;
  return kSuccess;
}

int max_clusters(const kitsune::emulator::Launch& launch, const Function& f) {
  int size = static_cast<int>(launch.cluster);
  if (size > kMaxCluster || (size > kPortableCluster && !f.any_cluster)) return 0;
  if (static_cast<int>(launch.shared_bytes) > f.shared_limit || launch.block > f.max_threads) return 0;
  int most = multiprocessors / size;
  if (size > 8) return most < kClustersOf16 ? most : kClustersOf16;
  if (size == 8) return most < kClustersOf8 ? most : kClustersOf8;
  return most;
}

// One CTA an SM: kernels are compiled for that.
int check_launch(const kitsune::emulator::Launch& launch, const Function& f) {
  if (launch.block > f.max_threads || launch.block % 32) return kInvalidValue;
  if (static_cast<int>(launch.shared_bytes) > f.shared_limit) return kInvalidValue;
  int clusters = max_clusters(launch, f);
  if (clusters == 0) return kInvalidValue;
  if (launch.cooperative && launch.grid / launch.cluster > static_cast<unsigned>(clusters)) return kCooperativeTooLarge;
  return kSuccess;
}

const std::map<int, std::pair<const char*, const char*>>& errors() {
  static const std::map<int, std::pair<const char*, const char*>> all = {
      {kSuccess, {"CUDA_SUCCESS", "no error"}},
      {kInvalidValue, {"CUDA_ERROR_INVALID_VALUE", "invalid argument"}},
      {kOutOfMemory, {"CUDA_ERROR_OUT_OF_MEMORY", "out of memory"}},
      {kInvalidImage, {"CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"}},
      {kInvalidContext, {"CUDA_ERROR_INVALID_CONTEXT", "invalid device context"}},
      {kInvalidHandle, {"CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"}},
      {kNotFound, {"CUDA_ERROR_NOT_FOUND", "named symbol not found"}},
      {kLaunchOutOfResources, {"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"}},
      {kLaunchFailed, {"CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"}},
      {kCooperativeTooLarge, {"CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE", "too many blocks in cooperative launch"}}};
  return all;
}

}  // namespace

// --- the emulator's own entry points

EXPORT void kitsune_emulator_set_buffers(long long count, const void* const* addresses, const size_t* bytes,
                                         const char* const* names) {
  buffers.clear();
  for (long long i = 0; i < count; ++i)
    buffers.push_back({addresses[i], bytes[i], names && names[i] ? names[i] : "buffer " + std::to_string(i)});
}

EXPORT void kitsune_emulator_set_seed(u64 value) {
  std::lock_guard<std::mutex> lock(launching);
  seed = value;
}

// A device with fewer SMs, or a part of one.
EXPORT void kitsune_emulator_set_multiprocessors(int count) { multiprocessors = count; }

// The message stays valid until this OS thread asks again.
EXPORT const char* kitsune_emulator_last_error() {
  static thread_local std::string copy;
  std::lock_guard<std::mutex> lock(launching);
  copy = last_error;
  return copy.c_str();
}

// launches, scheduling steps, pieces of asynchronous copies, floating-point operations of matrix instructions, microseconds.
EXPORT void kitsune_emulator_stats(double out[5]) {
  std::lock_guard<std::mutex> lock(launching);
  out[0] = static_cast<double>(stats.launches);
  out[1] = static_cast<double>(stats.steps);
  out[2] = static_cast<double>(stats.copies);
  out[3] = stats.flops;
  out[4] = stats.seconds * 1e6;
}

// --- device and contexts

EXPORT int cuInit(unsigned) { return kSuccess; }
EXPORT int cuDriverGetVersion(int* version) {
  *version = 12080;
  return kSuccess;
}
EXPORT int cuDeviceGetCount(int* count) {
  *count = 1;
  return kSuccess;
}
EXPORT int cuDeviceGet(int* device, int ordinal) {
  *device = 0;
  return ordinal == 0 ? kSuccess : 101;  // CUDA_ERROR_INVALID_DEVICE
}
EXPORT int cuDeviceGetName(char* name, int bytes, int) {
  snprintf(name, static_cast<size_t>(bytes), "emulated device");
  return kSuccess;
}
EXPORT int cuDeviceGetAttribute(int* value, int attribute, int) {
  switch (attribute) {
    case 1: *value = 1024; return kSuccess;              // MAX_THREADS_PER_BLOCK
    case 8: *value = kDefaultShared; return kSuccess;    // MAX_SHARED_MEMORY_PER_BLOCK
    case 10: *value = 32; return kSuccess;               // WARP_SIZE
    case 12: *value = 65536; return kSuccess;            // MAX_REGISTERS_PER_BLOCK
    case 16: *value = multiprocessors; return kSuccess;  // MULTIPROCESSOR_COUNT
    case 75: *value = 9; return kSuccess;                // COMPUTE_CAPABILITY_MAJOR
    case 76: *value = 0; return kSuccess;                // COMPUTE_CAPABILITY_MINOR
    case 95: *value = 1; return kSuccess;                // COOPERATIVE_LAUNCH
    case 97: *value = kMaxSharedOptIn; return kSuccess;  // MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    case 120: *value = 1; return kSuccess;               // CLUSTER_LAUNCH
    default: return kInvalidValue;
  }
}
EXPORT int cuCtxGetDevice(int* device) {
  *device = 0;
  return contexts.empty() ? kInvalidContext : kSuccess;
}
EXPORT int cuCtxGetCurrent(void** context) {
  *context = contexts.empty() ? nullptr : contexts.back();
  return kSuccess;
}
EXPORT int cuCtxSetCurrent(void* context) {
  if (!contexts.empty()) contexts.pop_back();
  if (context) contexts.push_back(context);
  return kSuccess;
}
EXPORT int cuCtxPushCurrent_v2(void* context) {
  contexts.push_back(context);
  return kSuccess;
}
EXPORT int cuCtxPopCurrent_v2(void** context) {
  if (contexts.empty()) return kInvalidContext;
  if (context) *context = contexts.back();
  contexts.pop_back();
  return kSuccess;
}
EXPORT int cuStreamGetCtx(void*, void** context) {
  *context = reinterpret_cast<void*>(1);
  return kSuccess;
}
EXPORT int cuStreamSynchronize(void*) { return kSuccess; }
EXPORT int cuCtxSynchronize() { return kSuccess; }
EXPORT int cuStreamIsCapturing(void*, int* status) {
  *status = 0;
  return kSuccess;
}
EXPORT int cuThreadExchangeStreamCaptureMode(int*) { return kSuccess; }

// --- memory, aligned as the driver's

EXPORT int cuMemAlloc_v2(unsigned long long* address, size_t bytes) {
  void* p = bytes ? aligned_alloc(kMemoryAlignment, (bytes + kMemoryAlignment - 1) / kMemoryAlignment * kMemoryAlignment) : nullptr;
  if (!p) return bytes ? kOutOfMemory : kInvalidValue;
  *address = reinterpret_cast<unsigned long long>(p);
  return kSuccess;
}
EXPORT int cuMemFree_v2(unsigned long long address) {
  free(reinterpret_cast<void*>(address));
  return kSuccess;
}
EXPORT int cuMemAllocAsync(unsigned long long* address, size_t bytes, void*) { return cuMemAlloc_v2(address, bytes); }
EXPORT int cuMemFreeAsync(unsigned long long address, void*) { return cuMemFree_v2(address); }
EXPORT int cuMemcpyDtoDAsync_v2(unsigned long long to, unsigned long long from, size_t bytes, void*) {
  memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
  return kSuccess;
}

EXPORT int cuMemcpyDtoH_v2(void* to, unsigned long long from, size_t bytes) {
  memcpy(to, reinterpret_cast<const void*>(from), bytes);
  return kSuccess;
}
EXPORT int cuMemcpyHtoD_v2(unsigned long long to, const void* from, size_t bytes) {
  memcpy(reinterpret_cast<void*>(to), from, bytes);
  return kSuccess;
}

EXPORT int cuFuncSetAttribute(void* function, int attribute, int value) {
  auto* f = static_cast<Function*>(function);
  if (!f) return kInvalidHandle;
  if (attribute == 8) {  // MAX_DYNAMIC_SHARED_SIZE_BYTES
    if (value < 0 || value > kMaxSharedOptIn) return kInvalidValue;
    f->shared_limit = value;
    return kSuccess;
  }
  if (attribute == 14) {  // NON_PORTABLE_CLUSTER_SIZE_ALLOWED
    f->any_cluster = value != 0;
    return kSuccess;
  }
  return kInvalidValue;
}
EXPORT int cuFuncGetAttribute(int* value, int attribute, void* function) {
  auto* f = static_cast<Function*>(function);
  if (!f) return kInvalidHandle;
  if (attribute == 0)  // MAX_THREADS_PER_BLOCK
    *value = static_cast<int>(f->max_threads);
  else if (attribute == 8)
    *value = f->shared_limit;
  else if (attribute == 14)
    *value = f->any_cluster;
  else
    return kInvalidValue;
  return kSuccess;
}
EXPORT int cuFuncLoad(void* function) { return function ? kSuccess : kInvalidHandle; }

// --- tensor maps

// Of 16-bit elements in two dimensions, with the 128-byte swizzle. The limits are those of the driver.
EXPORT int cuTensorMapEncodeTiled(TensorMap* map, int type, unsigned rank, void* address, const u64* sizes, const u64* pitches,
                                  const unsigned* box, const unsigned* strides, int interleave, int swizzle, int, int fill) {
  constexpr int kUint16 = 1, kSwizzle128 = 3;
  if (!map || type != kUint16 || rank != 2 || strides[0] != 1 || strides[1] != 1 || interleave || swizzle != kSwizzle128 || fill)
    return kInvalidValue;
  if (pitches[0] < 2 * sizes[0] || !sizes[0] || !sizes[1]) return kInvalidValue;
  *map = make_tensor_map(address, TileType::b16, sizes[0], sizes[1], pitches[0], box[0], box[1], true);
  return map->opaque[0] ? kSuccess : kInvalidValue;
}

// --- launches

EXPORT int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void* function, int block, size_t shared_bytes) {
  auto* f = static_cast<Function*>(function);
  if (!f) return kInvalidHandle;
  *blocks = block > 0 && static_cast<unsigned>(block) <= f->max_threads && shared_bytes <= static_cast<size_t>(f->shared_limit);
  return kSuccess;
}
EXPORT int cuOccupancyMaxActiveClusters(int* clusters, void* function, const Config* config) {
  kitsune::emulator::Launch launch;
  if (!function) return kInvalidHandle;
  if (int error = read_config(launch, *config)) return error;
  *clusters = max_clusters(launch, *static_cast<Function*>(function));
  return kSuccess;
}
EXPORT int cuMemsetD8Async(unsigned long long address, unsigned char value, size_t bytes, void*) {
  memset(reinterpret_cast<void*>(address), value, bytes);
  return kSuccess;
}
EXPORT int cuMemsetD32Async(unsigned long long address, unsigned value, size_t words, void*) {
  auto* p = reinterpret_cast<unsigned*>(address);
  for (size_t i = 0; i < words; ++i) p[i] = value;
  return kSuccess;
}

EXPORT int cuLaunchKernelEx(const Config* config, void* function, void** parameters, void** extra) {
  auto* f = static_cast<Function*>(function);
  if (!f || !parameters || extra) return kInvalidValue;
  kitsune::emulator::Launch launch;
  if (int error = read_config(launch, *config)) return error;
  if (int error = check_launch(launch, *f)) return error;
  std::lock_guard<std::mutex> lock(launching);
  clear_globals();
  for (const NamedBuffer& b : buffers) register_global(b.address, b.bytes, b.name.c_str());
  Options options;
  options.seed = seed;
  launch.registers = f->registers;
  const void* parameter = parameters[0];
  Result result = run(launch, [f, parameter] { f->entry(parameter); }, options);
  clear_globals();
  ++stats.launches;
  stats.steps += result.steps;
  stats.copies += result.copies;
  stats.flops += result.flops;
  stats.seconds += result.seconds;
  if (result.ok) return kSuccess;
  last_error = result.message + "\n  (emulator seed " + std::to_string(seed) + ")";
  return kLaunchFailed;
}

EXPORT int cuGetErrorString(int error, const char** text) {
  auto it = errors().find(error);
  *text = it == errors().end() ? nullptr : it->second.second;
  return it == errors().end() ? kInvalidValue : kSuccess;
}
EXPORT int cuGetErrorName(int error, const char** text) {
  auto it = errors().find(error);
  *text = it == errors().end() ? nullptr : it->second.first;
  return it == errors().end() ? kInvalidValue : kSuccess;
}

// Names map to the versions above, whatever version is asked for.
EXPORT int cuGetProcAddress_v2(const char* name, void** address, int, u64, int* status) {
  static const char* const versioned[] = {"cuCtxPushCurrent", "cuCtxPopCurrent", "cuGetProcAddress",
                                          "cuMemAlloc",       "cuMemFree",       "cuMemcpyDtoDAsync"};
  std::string symbol = name;
  for (const char* v : versioned)
    if (symbol == v) symbol += "_v2";
  Dl_info self;
  void* library = dladdr(reinterpret_cast<void*>(&cuInit), &self) ? dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD) : nullptr;
  *address = library ? dlsym(library, symbol.c_str()) : nullptr;
  if (library) dlclose(library);
  if (status) *status = *address ? 0 : 1;  // CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND
  return *address ? kSuccess : kNotFound;
}
