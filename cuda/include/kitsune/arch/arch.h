// What a kernel sees of the machine: the only header of this folder that kernels include.
//
// Comes in: KITSUNE_SM (900: wgmma, bulk copies and clusters of sm_90a; 800: what every device has from sm_80 on) and, for the
// host, KITSUNE_EMULATE. Goes out: namespace kitsune::arch and the macros KITSUNE_DEVICE, KITSUNE_UNROLL, KITSUNE_NO_UNROLL and
// KITSUNE_KERNEL. Invariant: the emulator's header declares the same names with the same meaning, so that one kernel source serves
// both; inline PTX stands in this folder and nowhere else; nothing outside the project is included, because NVRTC has nothing else.
//
// "PTX ISA" in this folder cites the manual "Parallel Thread Execution ISA", version 9.0, by the name of its section.
#pragma once

#if !defined(KITSUNE_SM) || (KITSUNE_SM != 900 && KITSUNE_SM != 800)
#error "define KITSUNE_SM as 900 (sm_90a) or 800 (portable)"
#endif

#if defined(KITSUNE_EMULATE)
#include "emulator/arch.h"
#else

#if KITSUNE_SM == 900 && defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "KITSUNE_SM=900 uses wgmma and setmaxnreg: compile for sm_90a"
#endif

#include "kitsune/arch/convert.h"
#include "kitsune/arch/cp_async.h"
#include "kitsune/arch/device.h"
#include "kitsune/arch/identity.h"
#include "kitsune/arch/mbarrier.h"
#include "kitsune/arch/memory.h"
#include "kitsune/arch/mma.h"
#include "kitsune/arch/signal.h"
#include "kitsune/arch/types.h"
#include "kitsune/arch/warp.h"
#if KITSUNE_SM == 900
#include "kitsune/arch/bulk_copy.h"
#include "kitsune/arch/cluster.h"
#include "kitsune/arch/wgmma.h"
#endif

#endif
