// Baseline instruction sets: SSE2 on x86-64, NEON on 64-bit Arm.
#include "every_instruction_set.h"

#define PENSTOCK_NAME "generic"
#define PENSTOCK_LANES 4
#define PENSTOCK_TILE_ROWS 6

#define PENSTOCK_NAMESPACE penstock::generic
#define PENSTOCK_PANEL_VECTORS 2
#include "kernels.inl"
#undef PENSTOCK_NAMESPACE

#define PENSTOCK_NAMESPACE penstock::quantized_generic
#define PENSTOCK_QUANTIZED_TILE_ROWS 4
#define PENSTOCK_DOT_QUADS 0
#include "quantized.inl"

const penstock::Kernels* penstock::generic_kernels() { return &penstock::generic::kTable; }
const penstock::QuantizedKernels* penstock::quantized_generic_kernels() { return &penstock::quantized_generic::kQuantizedTable; }
