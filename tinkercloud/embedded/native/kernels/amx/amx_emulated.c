/* Products in bfloat16 by the same tiles in plain C: all of amx_product.c but the operations. */

#include "amx.h"

#if HAS_AMX

#include "emulated.h"

#define TILE_CONFIGURE(config) emulated_configure(&(config))
#define TILE_RELEASE() emulated_release()
#define TILE_ZERO(tile) emulated_zero(tile)
#define TILE_LOAD(tile, from, stride) emulated_load(tile, from, stride)
#define TILE_STORE(tile, to, stride) emulated_store(tile, to, stride)
#define TILE_DOT(sums, inputs, weights) emulated_dot(sums, inputs, weights)

#define MULTIPLY multiply_emulated
#define SCORE score_emulated
#define ADD_VALUES add_values_emulated
#include "multiply.h"
#include "attend.h"

#endif
