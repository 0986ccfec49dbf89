// All kernels of one instruction set, and their table.

#include "simd.h"
#include "simd_integers.h"
#include "tiles.h"
#include "pairs.h"
#include "elementwise.inl"
#include "tile_registers.h"
#include "tile_products.inl"
#include "linear.inl"
#include "packing.inl"
#include "adapters.inl"
#include "latent.inl"
#include "greedy.inl"
#include "sampling.inl"
#include "masking.inl"
#include "attention_cache.inl"
#include "attention_tiles.inl"
#include "attention_int8.inl"
#include "attention_latent.inl"
#include "attention_plan.inl"
#include "attention_bfloat16.inl"
#include "attention.inl"
#include "attention_encoder.inl"
#include "attention_phases.inl"
#include "recurrence_states.inl"
#include "recurrence.inl"

namespace PENSTOCK_NAMESPACE {

static const Kernels kTable = {
    PENSTOCK_NAME, kHasPairProducts, kHasTileProducts, kPanel,        pack_weight, unpack_weight, linear,
    greedy,        attention,        rows,             lookup,        rms_norm,    gate_and_mul,  rotary,
    argmax,        draw,             allow_by_bits,    layer_norm,    activate,    adapters,      head_products,
    absorb,           convolve,         recur,            gated_norm,
};

}  // namespace PENSTOCK_NAMESPACE
