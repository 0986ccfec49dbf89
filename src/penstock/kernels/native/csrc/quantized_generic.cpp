// What every processor of the architecture has: SSE2 on x86-64, NEON on 64-bit Arm.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "parallel.h"
#include "quantized.h"
#include "scratch.h"
#include "shares.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define PENSTOCK_NAME "generic"
#define PENSTOCK_NAMESPACE penstock::quantized_generic
#define PENSTOCK_LANES 4
#define PENSTOCK_TILE_ROWS 6
#define PENSTOCK_INT4_TILE_ROWS 4
#define PENSTOCK_DOT_QUADS 0
#include "quantized.inl"

const penstock::QuantizedKernels* penstock::quantized_generic_kernels() { return &penstock::quantized_generic::kQuantizedTable; }
