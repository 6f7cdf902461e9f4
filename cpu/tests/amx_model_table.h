// What a unit of the model exports, after it has named its base (amx_models.h).
#pragma once

#include "amx_models.h"
#include "tile_model.h"
// The kernels want the instructions declared before them.
#include "kernels/amx_outer.h"

namespace kitsune::cpu::KITSUNE_ISA {

#define KITSUNE_TEXT_OF(x) #x
#define KITSUNE_TEXT(x) KITSUNE_TEXT_OF(x)

test::Model make_model() {
  return {tile_table(KITSUNE_TEXT(KITSUNE_ISA)), &times_configured, &times_released, [] { return model.configured; }};
}

}  // namespace kitsune::cpu::KITSUNE_ISA
