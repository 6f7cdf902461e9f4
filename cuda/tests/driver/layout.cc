// The types declared by hand in cuda/src/driver.h against the toolkit's cuda.h: compiled, never run.
#include <cuda.h>

#include "driver.h"

namespace ours = kitsune::cuda;

#define SAME_FIELD(type, field)                                                                                               \
  static_assert(offsetof(ours::type, field) == offsetof(::type, field) && sizeof(ours::type::field) == sizeof(::type::field), \
                #type "." #field)
#define SAME_VALUE(name) static_assert(static_cast<int>(ours::name) == static_cast<int>(::name), #name)

static_assert(sizeof(ours::CUlaunchConfig) == sizeof(::CUlaunchConfig));
SAME_FIELD(CUlaunchConfig, gridDimX);
SAME_FIELD(CUlaunchConfig, gridDimZ);
SAME_FIELD(CUlaunchConfig, blockDimX);
SAME_FIELD(CUlaunchConfig, sharedMemBytes);
SAME_FIELD(CUlaunchConfig, hStream);
SAME_FIELD(CUlaunchConfig, attrs);
SAME_FIELD(CUlaunchConfig, numAttrs);
static_assert(sizeof(ours::CUlaunchAttribute) == sizeof(::CUlaunchAttribute));
static_assert(alignof(ours::CUlaunchAttribute) == alignof(::CUlaunchAttribute));
SAME_FIELD(CUlaunchAttribute, id);
SAME_FIELD(CUlaunchAttribute, value);
SAME_FIELD(CUlaunchAttributeValue, cooperative);
SAME_FIELD(CUlaunchAttributeValue, clusterDim);
SAME_FIELD(CUlaunchAttributeValue, clusterDim.z);
static_assert(sizeof(ours::CUdeviceptr) == sizeof(::CUdeviceptr) && sizeof(ours::CUresult) == sizeof(::CUresult));

static_assert(sizeof(ours::CUtensorMap) == sizeof(::CUtensorMap) && alignof(ours::CUtensorMap) == alignof(::CUtensorMap));

SAME_VALUE(CU_TENSOR_MAP_DATA_TYPE_UINT16);
SAME_VALUE(CU_TENSOR_MAP_INTERLEAVE_NONE);
SAME_VALUE(CU_TENSOR_MAP_SWIZZLE_128B);
SAME_VALUE(CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
SAME_VALUE(CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
SAME_VALUE(CUDA_SUCCESS);
SAME_VALUE(CUDA_ERROR_NO_DEVICE);
SAME_VALUE(CUDA_ERROR_INVALID_IMAGE);
SAME_VALUE(CUDA_ERROR_NO_BINARY_FOR_GPU);
SAME_VALUE(CUDA_ERROR_UNSUPPORTED_PTX_VERSION);
SAME_VALUE(CUDA_ERROR_LAUNCH_FAILED);
SAME_VALUE(CUDA_ERROR_NOT_SUPPORTED);
SAME_VALUE(CU_STREAM_CAPTURE_MODE_RELAXED);
SAME_VALUE(CU_STREAM_CAPTURE_STATUS_NONE);
SAME_VALUE(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
SAME_VALUE(CU_DEVICE_ATTRIBUTE_CLOCK_RATE);
SAME_VALUE(CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE);
SAME_VALUE(CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH);
SAME_VALUE(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE);
SAME_VALUE(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
SAME_VALUE(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
SAME_VALUE(CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH);
SAME_VALUE(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
SAME_VALUE(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
SAME_VALUE(CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED);
SAME_VALUE(CU_JIT_ERROR_LOG_BUFFER);
SAME_VALUE(CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES);
SAME_VALUE(CU_LAUNCH_ATTRIBUTE_COOPERATIVE);
SAME_VALUE(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);

// Each entry of the table can be called with what cuda.h declares: same number of parameters, each of the same size.
template <class Result, class... A, class Other, class... B>
constexpr bool same_call(Result (*)(A...), Other (*)(B...)) {
  if constexpr (sizeof...(A) == sizeof...(B))
    return sizeof(Result) == sizeof(Other) && ((sizeof(A) == sizeof(B)) && ...);
  else
    return false;
}
#define SAME_CALL(name, parameters) \
  static_assert(same_call(decltype(ours::Driver::name){}, static_cast<decltype(&::name)>(nullptr)), #name);
KITSUNE_DRIVER_FUNCTIONS(SAME_CALL)
