/* How a weight matrix [out N, in K] lies in memory, packed for product.c: by panels of 16 outputs.

   float32: [N / 16][K][16 outputs]; bfloat16: [N / 16][K / 2][16 outputs][2 inputs], K rounded up to
   32. N is rounded up to 16; what is beyond N or K is zero. So one step of a product, an input or a
   pair of them, reads 64 bytes of a panel, and 16 steps in bfloat16 are one tile of AMX. */

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

/* Weight [n][i]; in bfloat16 of a pair of inputs, i being the even one. */
INLINE const char *weight_at(const void *packed, int64_t is_narrow, int64_t k, int64_t n,
                             int64_t i) {
  return (const char *)packed + n / PANEL * panel_bytes(is_narrow, k) +
         (is_narrow ? i / 2 : i) * STEP_BYTES + n % PANEL * 4;
}

/* Weights [n][0..k-1] as floats: an embedding's row. */
INLINE void read_weights(const void *packed, int64_t is_narrow, int64_t k, int64_t n, float *out) {
  const char *at = weight_at(packed, is_narrow, k, n, 0);
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
