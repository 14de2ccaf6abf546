/* Products in bfloat16 by the tiles of AMX, in two forms: by its instructions, and by plain C that
   computes what these are specified to (emulated.h), on any machine. */

#ifndef TINKERCLOUD_AMX_H
#define TINKERCLOUD_AMX_H

#include "../product.h"

INTERNAL rows_times_panels_t multiply_amx, multiply_emulated;

/* Which of them the library multiplies with; other libraries have product.c alone. */
#if defined(AMX_EMULATED)
#define HAS_AMX 1
#define multiply_narrow multiply_emulated
#elif defined(__AMX_BF16__)
#define HAS_AMX 1
#define multiply_narrow multiply_amx
#else
#define HAS_AMX 0
#endif

#define MOST_TILE_ROWS 16
#define GROUP_ROWS (2 * MOST_TILE_ROWS) /* that are multiplied at once */

/* Panels that so many rows are multiplied by at once: four sums, since one would wait for itself. */
INLINE int64_t panels_together(int64_t rows) { return rows > MOST_TILE_ROWS ? 2 : 4; }
#define MOST_TOGETHER 4

#endif
