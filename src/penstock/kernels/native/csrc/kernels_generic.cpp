// What every processor of the architecture has: SSE2 on x86-64, NEON on 64-bit Arm.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "kernels.h"
#include "parallel.h"
#include "scratch.h"
#include "shares.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define PENSTOCK_NAME "generic"
#define PENSTOCK_NAMESPACE penstock::generic
#define PENSTOCK_LANES 4
#define PENSTOCK_PANEL_VECTORS 2
#define PENSTOCK_TILE_ROWS 6
#include "kernels.inl"

const penstock::Kernels* penstock::generic_kernels() { return &penstock::generic::kTable; }
