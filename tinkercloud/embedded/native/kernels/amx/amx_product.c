/* Products in bfloat16 by AMX's instructions.

   By inline assembly and not by the compiler's functions, because those of older compilers do not say
   that they read and write memory: stores before a load could move behind it. AT&T's order: the
   operand that is written comes last. */

#include "amx.h"

#if defined(__AMX_BF16__)

#define TILE_CONFIGURE(config) __asm__ volatile("ldtilecfg %0" : : "m"(config) : "memory")
#define TILE_RELEASE() __asm__ volatile("tilerelease" : : : "memory")
#define TILE_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile : :)
#define TILE_LOAD(tile, from, stride)                                                              \
  __asm__ volatile("tileloadd (%0,%1), %%tmm" #tile                                                \
                   :                                                                               \
                   : "r"(from), "r"((int64_t)(stride))                                             \
                   : "memory")
#define TILE_STORE(tile, to, stride)                                                               \
  __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1)"                                            \
                   :                                                                               \
                   : "r"(to), "r"((int64_t)(stride))                                               \
                   : "memory")
#define TILE_DOT(sums, inputs, weights)                                                            \
  __asm__ volatile("tdpbf16ps %%tmm" #weights ", %%tmm" #inputs ", %%tmm" #sums : :)

#define MULTIPLY multiply_amx
#define SCORE score_amx
#define ADD_VALUES add_values_amx
#include "multiply.h"
#include "attend.h"

#endif
