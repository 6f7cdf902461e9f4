// A driver for tests, without a device: exports the CUDA driver's symbols, remembers what was asked of it and fails where it is
// told.
//
// FAKE_CUDA, an environment variable "key=value,key=value" that is read at every call, sets what this machine pretends to be:
//   version, devices, capability, multiprocessors, shared, cooperative, clusters, blocks,  what the queries answer; with a number
//   name, clock, memory_clock, bus, l2                                                     behind it (shared1) for that device only
//   gpcs=18+16+16                                                                          multiprocessors of each GPC, which say
//   how
//                                                                                          many clusters fit
//   active, records                                                                        is a device in use; the parameter with
//                                                                                          the buffer of a timeline
//   init, load, kernel, launch, encode, set, allocate, synchronize
//                                              error numbers to return
//   current=0                                                                              no context is current
//   capturing=1                                                                            every stream is being captured
//   pools=0                                                                                no allocation in the order of a stream
// A symbol is left out by renaming it: -DcuLaunchKernelEx=renamed. With -DFAKE_EMULATOR it runs images as the emulator would: each
// is a shared library that exports kitsune_region.
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "driver.h"

using namespace kitsune::cuda;

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

std::mutex mutex;
std::string journal;
std::map<void*, int> loaded;  // images that were not unloaded, each with its file
int memory = 0;               // allocations that were not freed
thread_local CUcontext pushed = nullptr;
#ifdef FAKE_EMULATOR
thread_local std::string last_error;
thread_local size_t sizes[64];
#endif

std::string text_setting(const std::string& key) {
  const char* text = std::getenv("FAKE_CUDA");
  for (std::string rest = text ? text : ""; !rest.empty();) {
    std::string item = rest.substr(0, rest.find(','));
    rest.erase(0, item.size() + 1);
    if (item.compare(0, key.size() + 1, key + "=") == 0) return item.substr(key.size() + 1);
  }
  return "";
}
long setting(const std::string& key, long otherwise) {
  std::string text = text_setting(key);
  return text.empty() ? otherwise : std::strtol(text.c_str(), nullptr, 0);
}

long of_device(const std::string& key, long device, long otherwise) {
  return setting(key + std::to_string(device), setting(key, otherwise));
}

void note(const std::string& line) {
  std::lock_guard<std::mutex> lock(mutex);
  journal += line + "\n";
}

// Context 1000 + d belongs to device d, and so does every stream from 100 * (d + 1) on.
CUcontext context_of(long device) { return reinterpret_cast<CUcontext>(1000 + device); }
long device_of(CUcontext context) { return reinterpret_cast<long>(context) - 1000; }

CUcontext current() {
  if (pushed) return pushed;
  long device = setting("current", 1);
  return device == 0 ? nullptr : context_of(device - 1);
}

unsigned cluster_of(const CUlaunchConfig& config) {
  for (unsigned i = 0; i < config.numAttrs; ++i)
    if (config.attrs[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) return config.attrs[i].value.clusterDim.x;
  return 1;
}

// Blocks that the current device holds at once.
long resident(const CUlaunchConfig& config) {
  long device = device_of(current()), size = cluster_of(config);
  if (size == 1) return setting("blocks", 1) * of_device("multiprocessors", device, 132);
  std::string gpcs = text_setting("gpcs" + std::to_string(device));
  if (gpcs.empty()) gpcs = text_setting("gpcs");
  if (gpcs.empty()) return size * setting("clusters", 66);
  long count = 0;
  for (const char* at = gpcs.c_str(); *at;) {
    char* end = nullptr;
    count += std::strtol(at, &end, 10) / size;
    at = *end == '+' ? end + 1 : end;
  }
  return size * count;
}

std::string shape(const CUlaunchConfig& config) {
  std::string text = "grid=" + std::to_string(config.gridDimX * config.gridDimY * config.gridDimZ) +
                     " block=" + std::to_string(config.blockDimX * config.blockDimY * config.blockDimZ) +
                     " shared=" + std::to_string(config.sharedMemBytes);
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const CUlaunchAttribute& a = config.attrs[i];
    if (a.id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) text += " cluster=" + std::to_string(a.value.clusterDim.x);
    if (a.id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE) text += " cooperative=" + std::to_string(a.value.cooperative);
  }
  return text;
}

}  // namespace

// --- for tests
EXPORT const char* fake_journal() {
  static std::string copy;
  std::lock_guard<std::mutex> lock(mutex);
  copy = journal;
  return copy.c_str();
}
EXPORT int fake_memory() { return memory; }
EXPORT int fake_loaded() { return static_cast<int>(loaded.size()); }

// --- the driver
EXPORT CUresult cuDriverGetVersion(int* version) {
  *version = static_cast<int>(setting("version", 12040));
  return 0;
}
EXPORT CUresult cuInit(unsigned) {
  note("init");
  return static_cast<CUresult>(setting("init", 0));
}
EXPORT CUresult cuGetProcAddress_v2(const char* name, void** function, int, uint64_t, int* status) {
  Dl_info self;
  dladdr(reinterpret_cast<void*>(&cuDriverGetVersion), &self);
  void* library = dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  *function = dlsym(library, (std::string(name) + "_v2").c_str());
  if (*function == nullptr) *function = dlsym(library, name);
  *status = *function ? 0 : 1;
  return *function ? 0 : 500;
}
EXPORT CUresult cuGetErrorName(CUresult error, const char** text) {
  static const std::map<int, const char*> names = {{1, "CUDA_ERROR_INVALID_VALUE"},
                                                   {100, "CUDA_ERROR_NO_DEVICE"},
                                                   {209, "CUDA_ERROR_NO_BINARY_FOR_GPU"},
                                                   {218, "CUDA_ERROR_INVALID_PTX"},
                                                   {500, "CUDA_ERROR_NOT_FOUND"},
                                                   {719, "CUDA_ERROR_LAUNCH_FAILED"},
                                                   {720, "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE"}};
  auto it = names.find(error);
  if (it == names.end()) return 1;
  *text = it->second;
  return 0;
}
EXPORT CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = error == 720 ? "too many blocks in cooperative launch" : "what went wrong";
  return 0;
}
EXPORT CUresult cuDeviceGetCount(int* count) {
  *count = static_cast<int>(setting("devices", 1));
  return 0;
}
EXPORT CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return 0;
}
EXPORT CUresult cuDeviceGetName(char* name, int bytes, CUdevice device) {
  std::string text = text_setting("name" + std::to_string(device));
  if (text.empty()) text = text_setting("name");
  std::strncpy(name, text.c_str(), bytes);
  return 0;
}
EXPORT CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  long capability = of_device("capability", device, 90);
  switch (static_cast<int>(attribute)) {
    case 16: *value = static_cast<int>(of_device("multiprocessors", device, 132)); return 0;
    case 13: *value = static_cast<int>(of_device("clock", device, 0)); return 0;
    case 36: *value = static_cast<int>(of_device("memory_clock", device, 0)); return 0;
    case 37: *value = static_cast<int>(of_device("bus", device, 0)); return 0;
    case 38: *value = static_cast<int>(of_device("l2", device, 0)); return 0;
    case 75: *value = static_cast<int>(capability / 10); return 0;
    case 76: *value = static_cast<int>(capability % 10); return 0;
    case 95: *value = static_cast<int>(setting("cooperative", 1)); return 0;
    case 97: *value = static_cast<int>(of_device("shared", device, 232448)); return 0;
    default: return 1;
  }
}
EXPORT CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = current();
  return 0;
}
EXPORT CUresult cuCtxGetDevice(CUdevice* device) {
  if (!current()) return 201;
  *device = static_cast<CUdevice>(device_of(current()));
  return 0;
}
EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context) {
  pushed = context;
  return 0;
}
EXPORT CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  *context = pushed;
  pushed = nullptr;
  return 0;
}
EXPORT CUresult cuStreamGetCtx(CUstream stream, CUcontext* context) {
  long number = reinterpret_cast<long>(stream);
  *context = number ? context_of(number / 100 - 1) : current();
  return *context ? 0 : 201;
}
EXPORT CUresult cuLibraryLoadData(CUlibrary* library, const void* code, CUjit_option* options, void** values, unsigned count, int*,
                                  void**, unsigned) {
  note("load");
  if (long error = setting("load", 0)) {
    char* log = nullptr;
    for (unsigned i = 0; i < count; ++i)
      if (options[i] == CU_JIT_ERROR_LOG_BUFFER) log = static_cast<char*>(values[i]);
    if (log) std::strcpy(log, "ptxas fatal: unexpected token");
    return static_cast<CUresult>(error);
  }
  void* handle = nullptr;
  int file = -1;
#ifdef FAKE_EMULATOR
  // The image does not say how long it is, but its section headers are the last thing in it.
  const auto* elf = static_cast<const unsigned char*>(code);
  if (std::memcmp(elf, "\177ELF", 4) != 0) return last_error = "the image is no shared library", 200;
  uint64_t headers;
  uint16_t size, number;
  std::memcpy(&headers, elf + 40, 8), std::memcpy(&size, elf + 58, 2), std::memcpy(&number, elf + 60, 2);
  // dlopen takes equal paths for equal libraries, so the file stays open and its number taken.
  file = memfd_create("image", 0);
  if (write(file, code, headers + size * number) < 0) return 304;
  handle = dlopen(("/proc/self/fd/" + std::to_string(file)).c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) return last_error = dlerror(), 200;
#else
  (void)code;
  handle = std::malloc(1);
#endif
  std::lock_guard<std::mutex> lock(mutex);
  loaded[handle] = file;
  *library = static_cast<CUlibrary>(handle);
  return 0;
}
EXPORT CUresult cuLibraryUnload(CUlibrary library) {
  note("unload");
  std::lock_guard<std::mutex> lock(mutex);
#ifdef FAKE_EMULATOR
  dlclose(library);
  close(loaded[library]);
#endif
  loaded.erase(library);
  return 0;
}
EXPORT CUresult cuLibraryGetKernel(CUkernel* kernel, CUlibrary library, const char* name) {
  if (long error = setting("kernel", 0)) return static_cast<CUresult>(error);
#ifdef FAKE_EMULATOR
  *kernel = reinterpret_cast<CUkernel>(dlsym(library, name));
  return *kernel ? 0 : 500;
#else
  *kernel = reinterpret_cast<CUkernel>(library);
  return std::string(name) == "kitsune_region" || std::string(name) == "kitsune_pack" ? 0 : 500;
#endif
}
EXPORT CUresult cuKernelGetFunction(CUfunction* function, CUkernel kernel) {
  note("function in context " + std::to_string(device_of(current())));
  *function = reinterpret_cast<CUfunction>(kernel);
  return 0;
}
EXPORT CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute attribute, int value) {
  note("set " + std::to_string(attribute) + "=" + std::to_string(value));
  return static_cast<CUresult>(setting("set", 0));
}
EXPORT CUresult cuFuncLoad(CUfunction) {
  note("function loaded");
  return 0;
}
EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int, size_t) {
  *blocks = static_cast<int>(setting("blocks", 1));
  return 0;
}
EXPORT CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction, const CUlaunchConfig* config) {
  *clusters = static_cast<int>(resident(*config) / cluster_of(*config));
  return 0;
}
EXPORT CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus* status) {
  *status = static_cast<CUstreamCaptureStatus>(setting("capturing", 0));
  return 0;
}
thread_local int capture_mode = 1;  // a thread that captures may not allocate
EXPORT CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  int was = capture_mode;
  capture_mode = *mode;
  *mode = static_cast<CUstreamCaptureMode>(was);
  return 0;
}
CUresult allocate(CUdeviceptr* address, size_t bytes, const std::string& how) {
  void* p = aligned_alloc(256, (bytes + 255) / 256 * 256);
  *address = reinterpret_cast<CUdeviceptr>(p);
  std::lock_guard<std::mutex> lock(mutex);
  journal += how + " " + std::to_string(bytes) + " context=" + std::to_string(device_of(current())) + "\n";
  return ++memory, 0;
}
CUresult release(CUdeviceptr address, const std::string& how) {
  std::free(reinterpret_cast<void*>(address));
  std::lock_guard<std::mutex> lock(mutex);
  journal += how + "\n";
  return --memory, 0;
}
EXPORT CUresult cuMemAlloc_v2(CUdeviceptr* address, size_t bytes) {
  if (setting("capturing", 0) && capture_mode != CU_STREAM_CAPTURE_MODE_RELAXED) return 900;  // STREAM_CAPTURE_UNSUPPORTED
  return allocate(address, bytes, "allocate");
}
EXPORT CUresult cuMemFree_v2(CUdeviceptr address) { return release(address, "free"); }
EXPORT CUresult cuMemAllocAsync(CUdeviceptr* address, size_t bytes, CUstream) {
  if (setting("pools", 1) == 0) return CUDA_ERROR_NOT_SUPPORTED;
  if (long error = setting("allocate", 0)) return static_cast<CUresult>(error);
  return allocate(address, bytes, "allocate in order");
}
EXPORT CUresult cuMemFreeAsync(CUdeviceptr address, CUstream) { return release(address, "free in order"); }
EXPORT CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream) {
  auto name = [](CUdeviceptr p) { return p % 16 ? std::to_string(p) : "aligned"; };
  note("copy " + name(from) + " to " + name(to) + " " + std::to_string(bytes));
#ifdef FAKE_EMULATOR
  std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
#endif
  return 0;
}
EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t bytes) {
  note("copy " + std::to_string(bytes) + " bytes in, context=" + std::to_string(device_of(current())));
  std::memcpy(reinterpret_cast<void*>(to), from, bytes);
  return 0;
}
EXPORT CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes) {
  note("copy " + std::to_string(bytes) + " bytes out, context=" + std::to_string(device_of(current())));
  std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
  return 0;
}
EXPORT CUresult cuCtxSynchronize() {
  note("synchronize context=" + std::to_string(device_of(current())));
  return static_cast<CUresult>(setting("synchronize", 0));
}
EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  *flags = 0;
  *active = static_cast<int>(of_device("active", device, 1));
  return 0;
}
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  *context = context_of(device);
  return 0;
}
EXPORT CUresult cuMemsetD8Async(CUdeviceptr address, unsigned char value, size_t bytes, CUstream stream) {
  note("memset " + std::to_string(address) + " " + std::to_string(bytes) +
       " stream=" + std::to_string(reinterpret_cast<long>(stream)));
#ifdef FAKE_EMULATOR
  std::memset(reinterpret_cast<void*>(address), value, bytes);
#else
  (void)value;
#endif
  return 0;
}
// A map that says of which array it is: its address, its rows and its columns.
EXPORT CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, uint32_t rank, void* address,
                                       const uint64_t* sizes, const uint64_t* pitches, const uint32_t* box, const uint32_t*,
                                       CUtensorMapInterleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                                       CUtensorMapFloatOOBfill) {
  if (long error = setting("encode", 0)) return static_cast<CUresult>(error);
  *map = {{reinterpret_cast<uint64_t>(address), sizes[1], sizes[0]}};
  note("encode type=" + std::to_string(type) + " rank=" + std::to_string(rank) + " " + std::to_string(sizes[1]) + "x" +
       std::to_string(sizes[0]) + " pitch=" + std::to_string(pitches[0]) + " box=" + std::to_string(box[1]) + "x" +
       std::to_string(box[0]) + " swizzle=" + std::to_string(swizzle) + " at=" + std::to_string(map->opaque[0]));
  return 0;
}
EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** params, void**) {
  if (long error = setting("launch", 0)) return static_cast<CUresult>(error);
  if (config->sharedMemBytes > of_device("shared", device_of(current()), 232448)) return 1;
  for (unsigned i = 0; i < config->numAttrs; ++i)
    if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE && config->gridDimX > resident(*config)) return 720;
  note("launch " + shape(*config) + " stream=" + std::to_string(reinterpret_cast<long>(config->hStream)) +
       " context=" + std::to_string(device_of(current())) + " first=" + std::to_string(*static_cast<uint64_t*>(params[0])));
  if (long at = setting("records", 0)) {  // the parameter with a timeline's buffer: the kernel takes a chunk, and writes one record
    auto* head = static_cast<uint32_t**>(params[0])[at];
    note("records of kernel " + std::to_string(static_cast<uint64_t*>(params[0])[at + 1]));
    if (head != nullptr) head[2] = 1, head[3] = 7, head[1024] = 4;
  }
#ifdef FAKE_EMULATOR
  last_error.clear();
  reinterpret_cast<void (*)(const void*)>(function)(params[0]);
  return last_error.empty() ? 0 : 719;
#else
  (void)function;
  return 0;
#endif
}

#ifdef FAKE_EMULATOR
EXPORT const char* kitsune_emulator_last_error() { return last_error.c_str(); }
EXPORT void kitsune_emulator_set_buffers(int64_t count, const void* const*, const size_t* bytes, const char* const*) {
  for (int64_t i = 0; i < count && i < 64; ++i) sizes[i] = bytes[i];
}
// --- for images
EXPORT size_t fake_bytes(int i) { return sizes[i]; }
EXPORT void fake_fail(const char* why) { last_error = why; }
#endif
