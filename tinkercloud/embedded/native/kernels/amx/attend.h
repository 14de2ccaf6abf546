/* The products of attention in bfloat16 by tiles, for attention_by_tiles.c. amx_product.c and
   amx_emulated.c include it, each with its form of the operations of tiles.h (TILE_...) and the
   functions' names (SCORE, ADD_VALUES).

   A block of keys is tiles of weights as it lies: pairs of dimensions of 16 tokens. A block of values
   is one of each 16 dimensions: the 8 pairs of its tokens. */

#include "amx.h"
#include "tiles.h"

#define PAIR_BYTES 4
#define BLOCK_PAIRS (KV_BLOCK / 2)

static void shape_tile(tile_config_t *config, int tile, int64_t rows, int64_t row_bytes) {
  config->rows[tile] = (uint8_t)(row_bytes ? rows : 0);
  config->row_bytes[tile] = (uint16_t)(rows ? row_bytes : 0);
}

/* ---- scores */

#define EACH_BLOCK(USE) USE(0) if (blocks > 1) { USE(1) } if (blocks > 2) { USE(2) } if (blocks > 3) { USE(3) }

/* Tiles 0 to 3: sums of a block each; 4 and 5: queries and keys; 6 and 7: what is left of them. */
INLINE void score_unit(const attention_t *a, const char *queries, int64_t unit, float *scores) {
  int64_t blocks = MIN(UNIT_BLOCKS, a->blocks - unit * UNIT_BLOCKS);
  int64_t stride = a->query_size * (int64_t)sizeof(narrow), whole = a->key_size / NARROW_BLOCK;
  const void *const *keys = a->keys + unit * UNIT_BLOCKS;
#define ZERO(i) TILE_ZERO(i);
  EACH_BLOCK(ZERO)
#undef ZERO
  for (int64_t k = 0; k < whole; k++) {
    TILE_LOAD(4, queries + k * TILE_ROW_BYTES, stride);
#define ADD(i)                                                                                     \
  TILE_LOAD(5, (const char *)keys[i] + k * MOST_TILE_ROWS * TILE_ROW_BYTES, TILE_ROW_BYTES);       \
  TILE_DOT(i, 4, 5);
    EACH_BLOCK(ADD)
#undef ADD
  }
  if (a->key_size % NARROW_BLOCK) {
    TILE_LOAD(6, queries + whole * TILE_ROW_BYTES, stride);
#define ADD(i)                                                                                     \
  TILE_LOAD(7, (const char *)keys[i] + whole * MOST_TILE_ROWS * TILE_ROW_BYTES, TILE_ROW_BYTES);   \
  TILE_DOT(i, 6, 7);
    EACH_BLOCK(ADD)
#undef ADD
  }
#define STORE(i) TILE_STORE(i, scores + (i) * KV_BLOCK, UNIT * (int64_t)sizeof(float));
  EACH_BLOCK(STORE)
#undef STORE
}

void SCORE(const attention_t *a) {
  int64_t rest = a->key_size % NARROW_BLOCK / 2;
  tile_config_t config = {.palette = 1};
  for (int i = 0; i < 5; i++) shape_tile(&config, i, a->rows, TILE_ROW_BYTES);
  shape_tile(&config, 5, MOST_TILE_ROWS, TILE_ROW_BYTES);
  shape_tile(&config, 6, a->rows, rest * PAIR_BYTES);
  shape_tile(&config, 7, rest, TILE_ROW_BYTES);
  TILE_CONFIGURE(config);
  for (int64_t part = 0; part < a->parts; part++)
    for (int64_t unit = 0; unit * UNIT_BLOCKS < a->blocks; unit++) {
      const narrow *queries = a->queries + part * a->rows * a->query_size;
      score_unit(a, (const char *)queries, unit, scores_at(a, part, unit));
    }
  TILE_RELEASE();
}

/* ---- values */

/* A vector of 16 dimensions for each of `wide`, from `dim` on, or what is left of them. */
#define EACH_SUM(USE) USE(0) if (wide > 1) { USE(1) } if (wide > 2) { USE(2) } if (wide > 3) { USE(3) }

INLINE void scale_sums(const attention_t *a, float *sums, const float *keep, int64_t dims) {
  for (int64_t r = 0; r < a->rows / 2; r++)
    for (int64_t d = 0; d < dims; d += LANES)
      store(sums + r * a->width + d, load(sums + r * a->width + d) * all(keep[r]));
}

/* Tiles 0 to 3: sums of 16 dimensions each; 4 and 5: probabilities and values. */
INLINE void add_whole(const attention_t *a, int64_t part, int64_t dim, int wide) {
  float *sums = a->sums + part * a->rows / 2 * a->width + dim;
  int64_t stride = a->width * (int64_t)sizeof(float), row = a->head_dim * PAIR_BYTES;
#define LOAD(i) TILE_LOAD(i, sums + (i) * PANEL, stride);
#define STORE(i) TILE_STORE(i, sums + (i) * PANEL, stride);
  EACH_SUM(LOAD)
  for (int64_t block = 0; block < a->blocks; block++) {
    int64_t unit = block / UNIT_BLOCKS, inside = block % UNIT_BLOCKS;
    const float *shares = scores_at(a, part, unit), *keep = keep_at(a, part, unit);
    if (inside == 0 && a->scales[part * MOST_UNITS + unit]) {
      EACH_SUM(STORE)
      scale_sums(a, sums, keep, wide * PANEL);
      EACH_SUM(LOAD)
    }
    const char *values = (const char *)a->values[block] + dim * PAIR_BYTES;
    TILE_LOAD(4, shares + inside * BLOCK_PAIRS, UNIT * (int64_t)sizeof(float));
#define ADD(i)                                                                                     \
  TILE_LOAD(5, values + (i) * TILE_ROW_BYTES, row);                                                \
  TILE_DOT(i, 4, 5);
    EACH_SUM(ADD)
#undef ADD
  }
  EACH_SUM(STORE)
#undef LOAD
#undef STORE
}

/* Tiles 6 and 7: sums and values of less than 16 dimensions. */
INLINE void add_rest(const attention_t *a, int64_t part, int64_t dim) {
  float *sums = a->sums + part * a->rows / 2 * a->width + dim;
  int64_t stride = a->width * (int64_t)sizeof(float), row = a->head_dim * PAIR_BYTES;
  TILE_LOAD(6, sums, stride);
  for (int64_t block = 0; block < a->blocks; block++) {
    int64_t unit = block / UNIT_BLOCKS, inside = block % UNIT_BLOCKS;
    if (inside == 0 && a->scales[part * MOST_UNITS + unit]) {
      TILE_STORE(6, sums, stride);
      scale_sums(a, sums, keep_at(a, part, unit), a->head_dim - dim);
      TILE_LOAD(6, sums, stride);
    }
    TILE_LOAD(4, scores_at(a, part, unit) + inside * BLOCK_PAIRS, UNIT * (int64_t)sizeof(float));
    TILE_LOAD(7, (const char *)a->values[block] + dim * PAIR_BYTES, row);
    TILE_DOT(6, 4, 7);
  }
  TILE_STORE(6, sums, stride);
}

void ADD_VALUES(const attention_t *a) {
  int64_t queries = a->rows / 2, rest = a->head_dim % PANEL;
  tile_config_t config = {.palette = 1};
  for (int i = 0; i < 4; i++) shape_tile(&config, i, queries, TILE_ROW_BYTES);
  shape_tile(&config, 4, queries, BLOCK_PAIRS * PAIR_BYTES);
  shape_tile(&config, 5, BLOCK_PAIRS, TILE_ROW_BYTES);
  shape_tile(&config, 6, queries, rest * PAIR_BYTES);
  shape_tile(&config, 7, BLOCK_PAIRS, rest * PAIR_BYTES);
  TILE_CONFIGURE(config);
  for (int64_t part = 0; part < a->parts; part++) {
    int64_t dim = 0, whole = a->head_dim - rest;
    for (; dim + MOST_SUMS * PANEL <= whole; dim += MOST_SUMS * PANEL)
      add_whole(a, part, dim, MOST_SUMS);
    if (dim < whole) add_whole(a, part, dim, (int)((whole - dim) / PANEL));
    if (rest) add_rest(a, part, whole);
  }
  TILE_RELEASE();
}
