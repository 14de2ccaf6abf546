/* Functions of single numbers, by vectors: caps, and the gate of an MLP (network.h). */

#ifndef TINKERCLOUD_ACTIVATIONS_H
#define TINKERCLOUD_ACTIVATIONS_H

#include "network.h"
#include "vectors.h"

/* Within two units in the last place (Cephes' tanhf). */
static inline vec tanh_vec(vec x) {
  vec square = x * x, p = all(-5.70498872745e-3f);
  p = p * square + all(2.06390887954e-2f);
  p = p * square + all(-5.37397155531e-2f);
  p = p * square + all(1.33314422036e-1f);
  p = p * square + all(-3.33332819422e-1f);
  vec small = p * square * x + x;
  vec magnitude = (vec)((ivec)x & 0x7FFFFFFF);
  ivec is_large = magnitude > all(40.0f);
  vec bounded = (vec)(((ivec)magnitude & ~is_large) | ((ivec)all(40.0f) & is_large));
  vec large = all(1.0f) - all(2.0f) / (exp_vec(bounded * all(2.0f)) + all(1.0f));
  large = (vec)((ivec)large | ((ivec)x & INT32_MIN));
  ivec is_small = magnitude < all(0.625f);
  return (vec)(((ivec)small & is_small) | ((ivec)large & ~is_small));
}

/* cap * tanh(x / cap). */
INLINE vec capped(vec x, float cap) { return all(cap) * tanh_vec(x / all(cap)); }

static inline void cap_numbers(float *x, int64_t count, float cap) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) store(x + i, capped(load(x + i), cap));
  if (i == count) return;
  float rest[LANES] = {0};
  memcpy(rest, x + i, (size_t)(count - i) * sizeof *x);
  store(rest, capped(load(rest), cap));
  memcpy(x + i, rest, (size_t)(count - i) * sizeof *x);
}

/* cap * tanh(scale * x / cap) in place, and its derivative by scale * x; count: whole vectors. */
static inline void cap_scores(float *x, float *slopes, int64_t count, float scale, float cap) {
  for (int64_t i = 0; i < count; i += LANES) {
    vec share = tanh_vec(load(x + i) * all(scale) / all(cap));
    store(x + i, all(cap) * share);
    store(slopes + i, all(1.0f) - share * share);
  }
}

/* exp(-x). exp_vec ends at 88: below -87 it is what it is there, which no sum that a number divided
   by it is part of can tell from infinity. */
INLINE vec exp_of_negative(vec x) {
  vec down = -x;
  ivec large = down > all(87.0f);
  return exp_vec((vec)(((ivec)down & ~large) | ((ivec)all(87.0f) & large)));
}

#define GELU_SLOPE 1.5957691216057308f /* 2 sqrt(2 / pi) */
#define GELU_CUBE 0.044715f

/* Both activations are gate * sigmoid(z). */
INLINE vec gate_exponent(int64_t activation, vec gate) {
  if (activation == SILU) return gate;
  return all(GELU_SLOPE) * gate * (all(1.0f) + all(GELU_CUBE) * gate * gate);
}

/* The derivative of z by the gate. */
INLINE vec gate_exponent_slope(int64_t activation, vec gate) {
  if (activation == SILU) return all(1.0f);
  return all(GELU_SLOPE) * (all(1.0f) + all(3.0f * GELU_CUBE) * gate * gate);
}

/* The activation of gate, times up. */
INLINE vec gated(int64_t activation, vec gate, vec up) {
  return gate / (all(1.0f) + exp_of_negative(gate_exponent(activation, gate))) * up;
}

static inline float gated1(int64_t activation, float gate, float up) {
  float z = gate;
  if (activation != SILU) z = GELU_SLOPE * gate * (1.0f + GELU_CUBE * gate * gate);
  return gate / (1.0f + expf(-z)) * up;
}

#endif
