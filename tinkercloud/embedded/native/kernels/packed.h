/* How a weight matrix [out N, in K] lies in memory, packed for product.c: by panels of 16 outputs.

   float32: [N / 16][K][16 outputs]; bfloat16: [N / 16][K / 2][16 outputs][2 inputs], K rounded up to
   32. N is rounded up to 16; what is beyond N or K is zero. So one step of a product, an input or a
   pair of them, reads 64 bytes of a panel, and 16 steps in bfloat16 are one tile of AMX.

   In bfloat16 there may be more inputs after these, by blocks of 32: a product goes over all of a
   panel. `width` is how many inputs it has then. */

#ifndef TINKERCLOUD_PACKED_H
#define TINKERCLOUD_PACKED_H

#include <stdint.h>

#include "narrow.h"

#define PANEL 16        /* outputs */
#define STEP_BYTES 64   /* of a panel */
#define NARROW_BLOCK 32 /* inputs that bfloat16 is padded to */

INLINE int64_t rounded_up(int64_t count, int64_t multiple) {
  return (count + multiple - 1) / multiple * multiple;
}

INLINE int64_t panels_of(int64_t out) { return (out + PANEL - 1) / PANEL; }

/* How many numbers a row of a product's inputs takes; in bfloat16 those beyond k have to be zero. */
INLINE int64_t row_size(int64_t is_narrow, int64_t k) {
  return is_narrow ? rounded_up(k, NARROW_BLOCK) : k;
}

/* Steps of a product over k inputs. */
INLINE int64_t steps_of(int64_t is_narrow, int64_t k) {
  return is_narrow ? rounded_up(k, NARROW_BLOCK) / 2 : k;
}

INLINE int64_t panel_bytes(int64_t is_narrow, int64_t k) {
  return steps_of(is_narrow, k) * STEP_BYTES;
}

/* Weight [n][0]; in bfloat16 those of the first two inputs. */
INLINE const char *weight_at(const void *packed, int64_t is_narrow, int64_t width, int64_t n) {
  return (const char *)packed + n / PANEL * panel_bytes(is_narrow, width) + n % PANEL * 4;
}

/* An output's weights of k inputs as floats: an embedding's row. */
INLINE void read_weights(const char *at, int64_t is_narrow, int64_t k, float *out) {
  if (!is_narrow) {
    for (int64_t i = 0; i < k; i++, at += STEP_BYTES) memcpy(out + i, at, sizeof *out);
    return;
  }
  for (int64_t i = 0; i < k; i += 2, at += STEP_BYTES) {
    narrow pair[2];
    memcpy(pair, at, sizeof pair);
    out[i] = widen1(pair[0]);
    if (i + 1 < k) out[i + 1] = widen1(pair[1]);
  }
}

#endif
