// The part of the CUDA driver API that launching needs, as a table of functions filled at run time.
//
// Comes in: libcuda.so.1, or a library that exports the same C symbols (the emulator). Goes out: `Driver`, whose required entries
// are never null, or a DriverError that says in one sentence what to do. Invariant: building and importing this extension need no
// CUDA header and no driver; the library is opened by the first function that needs it and never closed.
//
// The types are declared by hand and have the layout of cuda.h (CUDA 12.0 and later); a test compares the two where there is one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace kitsune::cuda {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = struct CUctx_st*;
using CUstream = struct CUstream_st*;
using CUlibrary = struct CUlib_st*;
using CUkernel = struct CUkern_st*;
using CUfunction = struct CUfunc_st*;

inline constexpr CUresult CUDA_SUCCESS = 0;
inline constexpr CUresult CUDA_ERROR_NO_DEVICE = 100;
inline constexpr CUresult CUDA_ERROR_INVALID_IMAGE = 200;
inline constexpr CUresult CUDA_ERROR_NO_BINARY_FOR_GPU = 209;
inline constexpr CUresult CUDA_ERROR_UNSUPPORTED_PTX_VERSION = 222;
inline constexpr CUresult CUDA_ERROR_LAUNCH_FAILED = 719;
inline constexpr CUresult CUDA_ERROR_NOT_SUPPORTED = 801;

enum CUdevice_attribute : int {
  CU_DEVICE_ATTRIBUTE_CLOCK_RATE = 13,
  CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
  CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE = 36,
  CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH = 37,
  CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE = 38,
  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
  CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH = 95,
  CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97,
};

enum CUfunction_attribute : int {
  CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8,
  CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14,
};

enum CUjit_option : int {
  CU_JIT_ERROR_LOG_BUFFER = 5,
  CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES = 6,
};

enum CUstreamCaptureMode : int { CU_STREAM_CAPTURE_MODE_RELAXED = 2 };
enum CUstreamCaptureStatus : int { CU_STREAM_CAPTURE_STATUS_NONE = 0 };

enum CUlaunchAttributeID : int {
  CU_LAUNCH_ATTRIBUTE_COOPERATIVE = 2,
  CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION = 4,
};

// What a tensor map says of its array and of its boxes (cuTensorMapEncodeTiled).
enum CUtensorMapDataType : int { CU_TENSOR_MAP_DATA_TYPE_UINT16 = 1 };
enum CUtensorMapInterleave : int { CU_TENSOR_MAP_INTERLEAVE_NONE = 0 };
enum CUtensorMapSwizzle : int { CU_TENSOR_MAP_SWIZZLE_128B = 3 };
enum CUtensorMapL2promotion : int { CU_TENSOR_MAP_L2_PROMOTION_L2_128B = 2 };
enum CUtensorMapFloatOOBfill : int { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE = 0 };
// Aligned as from CUDA 13 on; before, 64 were enough.
struct alignas(128) CUtensorMap {
  unsigned long long opaque[16];
};

union CUlaunchAttributeValue {
  char pad[64];
  int cooperative;
  struct {
    unsigned x, y, z;
  } clusterDim;
  void* aligned;  // the driver's union holds pointers
};

struct CUlaunchAttribute {
  CUlaunchAttributeID id;
  char pad[8 - sizeof(CUlaunchAttributeID)];
  CUlaunchAttributeValue value;
};

struct CUlaunchConfig {
  unsigned gridDimX, gridDimY, gridDimZ;
  unsigned blockDimX, blockDimY, blockDimZ;
  unsigned sharedMemBytes;
  CUstream hStream;
  CUlaunchAttribute* attrs;
  unsigned numAttrs;
};

// X(exported symbol, parameters).
#define KITSUNE_DRIVER_FUNCTIONS(X)                                                                                              \
  X(cuInit, (unsigned flags))                                                                                                    \
  X(cuGetErrorName, (CUresult error, const char** text))                                                                         \
  X(cuGetErrorString, (CUresult error, const char** text))                                                                       \
  X(cuDeviceGetCount, (int* count))                                                                                              \
  X(cuDeviceGet, (CUdevice * device, int ordinal))                                                                               \
  X(cuDeviceGetName, (char* name, int bytes, CUdevice device))                                                                   \
  X(cuDeviceGetAttribute, (int* value, CUdevice_attribute attribute, CUdevice device))                                           \
  X(cuCtxGetCurrent, (CUcontext * context))                                                                                      \
  X(cuCtxGetDevice, (CUdevice * device))                                                                                         \
  X(cuCtxPushCurrent_v2, (CUcontext context))                                                                                    \
  X(cuCtxPopCurrent_v2, (CUcontext * context))                                                                                   \
  X(cuStreamGetCtx, (CUstream stream, CUcontext * context))                                                                      \
  X(cuLibraryLoadData, (CUlibrary * library, const void* code, CUjit_option* jit_options, void** jit_values, unsigned jit_count, \
                        int* options, void** values, unsigned count))                                                            \
  X(cuLibraryUnload, (CUlibrary library))                                                                                        \
  X(cuLibraryGetKernel, (CUkernel * kernel, CUlibrary library, const char* name))                                                \
  X(cuKernelGetFunction, (CUfunction * function, CUkernel kernel))                                                               \
  X(cuFuncSetAttribute, (CUfunction function, CUfunction_attribute attribute, int value))                                        \
  X(cuOccupancyMaxActiveBlocksPerMultiprocessor, (int* blocks, CUfunction function, int block, size_t shared_bytes))             \
  X(cuOccupancyMaxActiveClusters, (int* clusters, CUfunction function, const CUlaunchConfig* config))                            \
  X(cuStreamIsCapturing, (CUstream stream, CUstreamCaptureStatus * status))                                                      \
  X(cuThreadExchangeStreamCaptureMode, (CUstreamCaptureMode * mode))                                                             \
  X(cuMemAlloc_v2, (CUdeviceptr * address, size_t bytes))                                                                        \
  X(cuMemFree_v2, (CUdeviceptr address))                                                                                         \
  X(cuMemAllocAsync, (CUdeviceptr * address, size_t bytes, CUstream stream))                                                     \
  X(cuMemFreeAsync, (CUdeviceptr address, CUstream stream))                                                                      \
  X(cuMemcpyDtoDAsync_v2, (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream))                                     \
  X(cuMemsetD8Async, (CUdeviceptr address, unsigned char value, size_t bytes, CUstream stream))                                  \
  X(cuTensorMapEncodeTiled,                                                                                                      \
    (CUtensorMap * map, CUtensorMapDataType type, uint32_t rank, void* address, const uint64_t* sizes, const uint64_t* pitches,  \
     const uint32_t* box, const uint32_t* strides, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,                 \
     CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill))                                                            \
  X(cuLaunchKernelEx, (const CUlaunchConfig* config, CUfunction function, void** params, void** extra))

// What a driver may lack: cuFuncLoad came with CUDA 12.4; five functions are for timelines alone; the rest is the emulator's.
#define KITSUNE_OPTIONAL_DRIVER_FUNCTIONS(X)                                               \
  X(cuFuncLoad, CUresult, (CUfunction function))                                           \
  X(cuCtxSynchronize, CUresult, ())                                                        \
  X(cuDevicePrimaryCtxGetState, CUresult, (CUdevice device, unsigned* flags, int* active)) \
  X(cuDevicePrimaryCtxRetain, CUresult, (CUcontext * context, CUdevice device))            \
  X(cuMemcpyDtoH_v2, CUresult, (void* to, CUdeviceptr from, size_t bytes))                 \
  X(cuMemcpyHtoD_v2, CUresult, (CUdeviceptr to, const void* from, size_t bytes))           \
  X(kitsune_emulator_last_error, const char*, ())                                          \
  X(kitsune_emulator_set_buffers, void,                                                    \
    (int64_t count, const void* const* addresses, const size_t* bytes, const char* const* names))

struct Driver {
#define KITSUNE_DECLARE(name, parameters) CUresult(*name) parameters = nullptr;
  KITSUNE_DRIVER_FUNCTIONS(KITSUNE_DECLARE)
#undef KITSUNE_DECLARE
#define KITSUNE_DECLARE(name, result, parameters) result(*name) parameters = nullptr;
  KITSUNE_OPTIONAL_DRIVER_FUNCTIONS(KITSUNE_DECLARE)
#undef KITSUNE_DECLARE
  int version = 0;        // 12040 is CUDA 12.4
  bool emulated = false;  // the host runs the kernels: no streams, no contexts
};

struct DriverError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The driver of this machine's devices. A failure is remembered: a driver does not appear while the process runs.
const Driver& device_driver();

// The emulator that `use_emulator` opened. One per process: compiled kernels bind to its symbols when they are loaded.
const Driver& emulator_driver();
void use_emulator(const std::string& path);

// "CUDA_ERROR_INVALID_VALUE (invalid argument)".
std::string error_text(const Driver& driver, CUresult error);
// "cuLaunchKernelEx failed: CUDA_ERROR_...", and what the emulator has to say about it.
std::string failure_text(const Driver& driver, const char* function, CUresult error);

struct DeviceInfo {
  int capability;  // 90 is compute capability 9.0
  int multiprocessors;
  int shared_bytes;  // the most a block may ask for
  std::string name;  // "NVIDIA H200"; of a MIG slice with "MIG 1g.18gb"
  // What the driver does not say is 0.
  int clock_khz;         // the fastest
  int memory_clock_khz;  // two transfers a cycle
  int memory_bus_bits;
  int l2_bytes;
};
int device_attribute(const Driver& driver, CUdevice device, CUdevice_attribute attribute);
int compute_capability(const Driver& driver, CUdevice device);
std::vector<DeviceInfo> devices(const Driver& driver);

}  // namespace kitsune::cuda
