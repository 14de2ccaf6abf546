/* The operations of tiles.h in plain C, as the manual of Intel's processors specifies them ("Intel 64
   and IA-32 Architectures Software Developer's Manual", volume 2, TDPBF16PS): what the manual calls
   undefined or a fault ends the process.

   The sum of a tile of inputs is two chains from zero, of the even and of the odd inputs of all pairs
   in ascending order, each step fused; then the even chain plus the odd one, then that is added to
   what was there. Every step rounds to the nearest, to the even one of two; denormals are zero, read
   or written. */

#ifndef TINKERCLOUD_EMULATED_H
#define TINKERCLOUD_EMULATED_H

#include <math.h>
#include <string.h>

#include "tiles.h"

#define TILE_WORDS (TILE_ROW_BYTES / 4) /* of a row: a sum, or a pair of inputs */

typedef struct {
  char rows[MOST_TILE_ROWS][TILE_ROW_BYTES];
} tile_register_t;

static _Thread_local tile_config_t tile_config;
static _Thread_local tile_register_t tile_registers[NUM_TILES];

static inline void emulated_release(void) {
  memset(&tile_config, 0, sizeof tile_config);
  memset(tile_registers, 0, sizeof tile_registers);
}

static inline void emulated_configure(const tile_config_t *config) {
  static const uint8_t zeros[16];
  assert(config->palette == 1 && "the only palette");
  assert(config->first_row == 0 && memcmp(config->reserved, zeros, sizeof config->reserved) == 0);
  assert(memcmp(config->no_row_bytes, zeros, 16) == 0 && memcmp(config->no_rows, zeros, 8) == 0);
  for (int i = 0; i < NUM_TILES; i++) {
    assert(config->rows[i] <= MOST_TILE_ROWS && config->row_bytes[i] <= TILE_ROW_BYTES);
    assert((config->rows[i] == 0) == (config->row_bytes[i] == 0));
  }
  emulated_release();
  tile_config = *config;
}

static inline tile_register_t *tile_at(int tile) {
  assert(tile >= 0 && tile < NUM_TILES && tile_config.rows[tile] && "the tile is not configured");
  return &tile_registers[tile];
}

static inline void emulated_zero(int tile) { memset(tile_at(tile), 0, sizeof(tile_register_t)); }

static inline void emulated_load(int tile, const void *from, int64_t stride) {
  tile_register_t *to = tile_at(tile);
  emulated_zero(tile);
  for (int64_t i = 0; i < tile_config.rows[tile]; i++)
    memcpy(to->rows[i], (const char *)from + i * stride, tile_config.row_bytes[tile]);
}

static inline void emulated_store(int tile, void *to, int64_t stride) {
  const tile_register_t *from = tile_at(tile);
  for (int64_t i = 0; i < tile_config.rows[tile]; i++)
    memcpy((char *)to + i * stride, from->rows[i], tile_config.row_bytes[tile]);
}

/* A bfloat16; a denormal is zero, with its sign. */
static inline double number_of(const tile_register_t *tile, int row, int column) {
  uint16_t bits;
  memcpy(&bits, tile->rows[row] + 2 * column, sizeof bits);
  uint32_t wide = (uint32_t)(bits & 0x7F80 ? bits : bits & 0x8000) << 16;
  float number;
  memcpy(&number, &wide, sizeof number);
  return number;
}

/* A sum as float32. In double it has been rounded once already, which changes nothing: double has
   more than twice the digits of what was added. What would be below 2^-126 if exponents had no end
   is zero. */
static inline double as_float(double sum) {
  double rounded = (float)sum;
  return fabs(sum) < 0x1.ffffffp-127 ? copysign(0.0, sum) : rounded;
}

static inline void emulated_dot(int into, int inputs, int weights) {
  tile_register_t *to = tile_at(into), *left = tile_at(inputs), *right = tile_at(weights);
  assert(into != inputs && into != weights && inputs != weights);
  int rows = tile_config.rows[into], pairs = tile_config.rows[weights];
  int outputs = tile_config.row_bytes[into] / 4;
  assert(tile_config.rows[inputs] == rows && tile_config.row_bytes[inputs] == pairs * 4 &&
         tile_config.row_bytes[weights] == outputs * 4 && "shapes do not fit");
  double w[MOST_TILE_ROWS][2][TILE_WORDS] = {};
  for (int k = 0; k < pairs; k++)
    for (int n = 0; n < outputs; n++)
      for (int i = 0; i < 2; i++) w[k][i][n] = number_of(right, k, 2 * n + i);
  for (int m = 0; m < rows; m++) {
    double sums[2][TILE_WORDS] = {}; /* of even and odd inputs */
    for (int k = 0; k < pairs; k++)
      for (int i = 0; i < 2; i++) {
        double x = number_of(left, m, 2 * k + i);
        for (int n = 0; n < outputs; n++) sums[i][n] = as_float(x * w[k][i][n] + sums[i][n]);
      }
    float total[TILE_WORDS];
    memcpy(total, to->rows[m], sizeof total);
    for (int n = 0; n < outputs; n++)
      total[n] = (float)as_float(as_float(total[n]) + as_float(sums[0][n] + sums[1][n]));
    memcpy(to->rows[m], total, sizeof total);
  }
}

#endif
