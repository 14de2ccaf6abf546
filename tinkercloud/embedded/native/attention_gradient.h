/* What is asked of the gradient of attention (attention_gradient.c); structures.py mirrors it. */

#ifndef TINKERCLOUD_ATTENTION_GRADIENT_H
#define TINKERCLOUD_ATTENTION_GRADIENT_H

#include <stdint.h>

/* q, k and v are float, or narrow where `is_narrow`; entry (b, l, h, d) of a tensor lies at
   (b L + l) row + h Dh + d. Gradients are float; results are written without gaps: a row is
   H Dh. */
typedef struct {
  int64_t is_narrow, batch, length, heads, kv_heads, head_dim;
  float scale;
  const void *q, *k, *v;
  const float *dout;
  int64_t q_row, k_row, v_row, dout_row;
  float *dq, *dk, *dv;
} attention_gradient_t;

#endif
