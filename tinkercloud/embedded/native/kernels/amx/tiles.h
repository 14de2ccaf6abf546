/* Tile registers: how many rows each has, and the operations of AMX that a product in bfloat16 needs.
   `tile` is a literal number, 0 to 7.

     TILE_CONFIGURE(config)           of this thread: before it no tile may be named
     TILE_RELEASE()                   of all tiles; from then on a switch of threads has none to save
     TILE_ZERO(tile)
     TILE_LOAD(tile, from, stride)    as many rows of 64 bytes as it has, `stride` bytes apart
     TILE_STORE(tile, to, stride)
     TILE_DOT(sums, inputs, weights)  sums [row][16] += inputs [row][16 pairs] weights [16 pairs][16] */

#ifndef TINKERCLOUD_TILES_H
#define TINKERCLOUD_TILES_H

#include <assert.h>
#include <stdint.h>

#include "amx.h"

#define NUM_TILES 8
#define TILE_ROW_BYTES 64

/* As LDTILECFG reads it. */
typedef struct {
  uint8_t palette, first_row, reserved[14];
  uint16_t row_bytes[NUM_TILES], no_row_bytes[8];
  uint8_t rows[NUM_TILES], no_rows[8];
} tile_config_t;

static_assert(sizeof(tile_config_t) == 64, "not what LDTILECFG reads");

#endif
