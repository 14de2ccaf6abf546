/* Products in bfloat16 by the tiles of AMX, in two forms: by its instructions, and by plain C that
   computes what these are specified to (emulated.h), on any machine. */

#ifndef TINKERCLOUD_AMX_H
#define TINKERCLOUD_AMX_H

#include "../network.h"
#include "../product.h"

INTERNAL rows_times_panels_t multiply_amx, multiply_emulated;

/* ---- attention (attention_by_tiles.c) */

#define UNIT 64 /* positions that are scored at once, from position 0 on */
#define UNIT_BLOCKS (UNIT / KV_BLOCK)
#define MOST_UNITS 12 /* that go together */

/* Queries of one head with some blocks of its keys and values, from a unit's first on. Queries are
   parts of `rows` / 2 each; a query is two rows of a tile, its rounded numbers and their errors, whose
   scores are added up then. */
typedef struct {
  int64_t rows, parts, blocks;
  int64_t head_dim, width;      /* width: of `sums` */
  int64_t key_size, query_size; /* numbers of a key, in pairs; of a row of `queries` */
  const narrow *queries;        /* [part][rows][query_size] */
  const void *const *keys, *const *values; /* of each block */
  float *scores; /* [part][MOST_UNITS][rows][UNIT]; then probabilities, in the first half of a row */
  float *sums;       /* [part][rows / 2][width] */
  const float *keep; /* [part][MOST_UNITS][rows / 2], of `sums` before a unit is added */
  const int *scales; /* [part][MOST_UNITS]: whether any of these is not 1 */
} attention_t;

INLINE float *scores_at(const attention_t *a, int64_t part, int64_t unit) {
  return a->scores + (part * MOST_UNITS + unit) * a->rows * UNIT;
}

INLINE const float *keep_at(const attention_t *a, int64_t part, int64_t unit) {
  return a->keep + (part * MOST_UNITS + unit) * (a->rows / 2);
}

typedef void attention_step_t(const attention_t *);

INTERNAL attention_step_t score_amx, score_emulated, add_values_amx, add_values_emulated;

/* ---- */

/* Which of them the library multiplies with; other libraries have product.c alone. */
#if defined(AMX_EMULATED)
#define HAS_AMX 1
#define multiply_narrow multiply_emulated
#define score_narrow score_emulated
#define add_narrow_values add_values_emulated
#elif defined(__AMX_BF16__)
#define HAS_AMX 1
#define multiply_narrow multiply_amx
#define score_narrow score_amx
#define add_narrow_values add_values_amx
#else
#define HAS_AMX 0
#endif

#define MOST_TILE_ROWS 16
#define CHAIN_TILES 64 /* of 32 inputs, that one chain of sums has */
#define GROUP_ROWS (2 * MOST_TILE_ROWS) /* that are multiplied at once */

/* Panels that so many rows are multiplied by at once: four sums, since one would wait for itself. */
INLINE int64_t panels_together(int64_t rows) { return rows > MOST_TILE_ROWS ? 2 : 4; }
#define MOST_TOGETHER 4

#endif
