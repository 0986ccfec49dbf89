// Headers that each per-instruction-set source includes before it switches the compiler to its instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "kernels.h"
#include "parallel.h"
#include "quantized.h"
#include "scratch.h"
#include "shares.h"
#include "tile_choices.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif
