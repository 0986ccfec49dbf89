// What the sources of every instruction set include before they switch the compiler to it.
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

#if defined(__x86_64__)
#include <immintrin.h>
#endif
