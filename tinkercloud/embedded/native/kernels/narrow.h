/* bfloat16, the upper half of a float32: read, written, multiplied. */

#ifndef TINKERCLOUD_NARROW_H
#define TINKERCLOUD_NARROW_H

#include "vectors.h"

typedef uint16_t narrow;
typedef uint16_t half_vec __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
typedef uint32_t uvec __attribute__((vector_size(LANES * 4)));

INLINE float widen1(narrow x) {
  uint32_t bits = (uint32_t)x << 16;
  float wide;
  memcpy(&wide, &bits, sizeof wide);
  return wide;
}

INLINE vec widen(const narrow *p) {
#if defined(__AVX512F__) /* the compiler would go by halves */
  return (vec)(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p)), 16));
#else
  return (vec)(__builtin_convertvector(*(const half_vec *)p, ivec) << 16);
#endif
}

/* To the nearest, to the even one of two, as PyTorch rounds; what is no number stays none
   (rounded up, some would carry over into the sign). */
INLINE narrow narrowed(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  if (x != x) return (narrow)(bits >> 16 | 0x40);
  return (narrow)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

/* In each lane `narrowed`, in the lower half. */
INLINE uvec narrowed_vec(vec x) {
  uvec bits = (uvec)x, is_none = (uvec)(x != x);
  return (((bits + 0x7FFF + (bits >> 16 & 1)) >> 16) & ~is_none) | ((bits >> 16 | 0x40) & is_none);
}

INLINE void store_narrow(narrow *p, uvec numbers) {
  *(half_vec *)p = __builtin_convertvector(numbers, half_vec);
}

/* What rounding takes off, rounded too. */
INLINE narrow error_of(float exact) { return narrowed(exact - widen1(narrowed(exact))); }
INLINE uvec errors_of(vec exact) {
  return narrowed_vec(exact - (vec)(narrowed_vec(exact) << 16));
}

INLINE const char *number_at(const void *start, int64_t index, int64_t bytes) {
  return (const char *)start + index * bytes;
}

/* `count` of them; x gets what they then are. */
static inline void round_to_narrow(float *x, int64_t count, narrow *out) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    uvec rounded = narrowed_vec(load(x + i));
    store_narrow(out + i, rounded);
    store(x + i, (vec)(rounded << 16));
  }
  for (; i < count; i++) {
    out[i] = narrowed(x[i]);
    x[i] = widen1(out[i]);
  }
}

/* `count` numbers, narrow ones or floats, from entry `at` on; what follows them in `to` up to a
   whole vector is zero. */
INLINE void read_numbers(int64_t is_narrow, const void *from, int64_t at, float *to,
                         int64_t count) {
  if (is_narrow) {
    const narrow *source = (const narrow *)from + at;
    for (int64_t i = 0; i < count; i++) to[i] = widen1(source[i]);
  } else {
    memcpy(to, (const float *)from + at, (size_t)count * sizeof *to);
  }
  for (int64_t i = count; i % LANES; i++) to[i] = 0.0f;
}

/* Up to a vector of them, with zeros beyond. */
INLINE vec some_numbers(int64_t is_narrow, const void *from, int64_t at, int64_t count) {
  float some[LANES];
  if (count >= LANES)
    return is_narrow ? widen((const narrow *)from + at) : load((const float *)from + at);
  read_numbers(is_narrow, from, at, some, count);
  return load(some);
}

INLINE void store_some(float *to, vec x, int64_t count) {
  if (count >= LANES)
    store(to, x);
  else
    memcpy(to, &x, (size_t)count * sizeof *to);
}

INLINE void write_numbers(int64_t is_narrow, void *to, int64_t at, const float *from,
                          int64_t count) {
  if (is_narrow) {
    narrow *target = (narrow *)to + at;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store_narrow(target + i, narrowed_vec(load(from + i)));
    for (; i < count; i++) target[i] = narrowed(from[i]);
  } else {
    memcpy((float *)to + at, from, (size_t)count * sizeof *from);
  }
}

#endif
