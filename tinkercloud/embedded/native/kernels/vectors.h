/* Vectors of the machine's own width, with sums and exponentials that are always the same bits. */

#ifndef TINKERCLOUD_VECTORS_H
#define TINKERCLOUD_VECTORS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));
typedef float loose_vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))
/* So that no other library's function of this name is called instead. */
#define INTERNAL __attribute__((visibility("hidden")))
#define LINE_BYTES 64 /* of a cache line */
#define LINE 16       /* floats of one */

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

INLINE vec load(const float *p) { return *(const loose_vec *)p; }
INLINE void store(float *p, vec v) { *(loose_vec *)p = v; }
INLINE vec all(float x) { return x - (vec){}; }

/* a b + c, with one rounding where the processor has an instruction for it, else with two. The
   compiler fuses nothing by itself (-ffp-contract=off): a product and a sum that must be the same
   bits in two places of the source are so only if both say whether they are fused. */
#if defined(__AVX512F__)
INLINE vec fused(vec a, vec b, vec c) {
  return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
#elif defined(__FMA__)
INLINE vec fused(vec a, vec b, vec c) {
  return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
#elif defined(__FP_FAST_FMAF)
INLINE vec fused(vec a, vec b, vec c) {
  for (int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
}
#else
INLINE vec fused(vec a, vec b, vec c) { return a * b + c; }
#endif
#if defined(__FP_FAST_FMAF)
INLINE float fused1(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
INLINE float fused1(float a, float b, float c) { return a * b + c; }
#endif

/* sum = fused(a, b, sum). By hand, because the compiler would load an operand again for every use,
   and would add up elsewhere than in `sum`. */
#if defined(__FMA__)
#define IN_REGISTER(v) __asm__("" : "+v"(v))
#define ADD_PRODUCT(sum, a, b) __asm__("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "vm"(b))
#else
#define IN_REGISTER(v) (void)0
#define ADD_PRODUCT(sum, a, b) ((sum) = fused(a, b, sum))
#endif

#define EACH(i, count) _Pragma("GCC unroll 8") for (int i = 0; i < (count); i++)

/* ---- sums over the lanes of a vector: always in the same tree, since additions in another order
   would round to other bits. */

#if defined(__AVX512F__)
INLINE __m256 folded(vec v) {
  return _mm256_add_ps(_mm512_castps512_ps256((__m512)v),
                       _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd((__m512)v), 1)));
}
#elif defined(__AVX__)
INLINE __m256 folded(vec v) { return (__m256)v; }
#endif

#if defined(__AVX__)
/* The sums of four vectors. */
INLINE void sum4(vec a, vec b, vec c, vec d, float *out) {
  __m256 ab = _mm256_hadd_ps(folded(a), folded(b));
  __m256 cd = _mm256_hadd_ps(folded(c), folded(d));
  __m256 t = _mm256_hadd_ps(ab, cd);
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1)));
}
#else
INLINE void sum4(vec a, vec b, vec c, vec d, float *out) {
  out[0] = (a[0] + a[1]) + (a[2] + a[3]);
  out[1] = (b[0] + b[1]) + (b[2] + b[3]);
  out[2] = (c[0] + c[1]) + (c[2] + c[3]);
  out[3] = (d[0] + d[1]) + (d[2] + d[3]);
}
#endif

INLINE float sum1(vec a) {
  float out[4];
  sum4(a, a, a, a, out);
  return out[0];
}

/* In one order, so that a norm is the same in every batch. */
static inline float dot(const float *x, const float *w, int64_t k) {
  vec acc = {};
  int64_t i = 0;
  for (; i + LANES <= k; i += LANES) acc = fused(load(x + i), load(w + i), acc);
  float sum = sum1(acc);
  for (; i < k; i++) sum = fused1(x[i], w[i], sum);
  return sum;
}

/* In each lane b, where not a is more: also where one of them is no number. */
INLINE vec vec_max(vec a, vec b) {
#if defined(__AVX512F__)
  return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
  ivec more = a > b;
  return (vec)(((ivec)a & more) | ((ivec)b & ~more));
#endif
}

/* -INFINITY for none; what is no number is passed over. */
static inline float largest(const float *x, int64_t count) {
  vec mosts[4]; /* one would wait for its own comparisons */
  EACH(j, 4) mosts[j] = all(-INFINITY);
  int64_t i = 0;
  for (; i + 4 * LANES <= count; i += 4 * LANES)
    EACH(j, 4) mosts[j] = vec_max(load(x + i + j * LANES), mosts[j]);
  vec most = vec_max(vec_max(mosts[0], mosts[1]), vec_max(mosts[2], mosts[3]));
  for (; i + LANES <= count; i += LANES) most = vec_max(load(x + i), most);
  float top = -INFINITY;
  for (int j = 0; j < LANES; j++) top = MAX(top, most[j]);
  for (; i < count; i++) top = MAX(top, x[i]);
  return top;
}

/* exp(x) for x <= 88, within two units in the last place; 0 below -87 (Cephes' polynomial). */
INLINE vec exp_vec(vec x) {
  ivec low = x < all(-87.0f);
  x = (vec)(((ivec)x & ~low) | ((ivec)all(-87.0f) & low));
  const vec big = all(12582912.0f); /* 1.5 * 2^23: adding it rounds to a whole number */
  vec n = fused(x, all(1.44269504088896341f), big) - big;
  vec r = fused(n, all(2.12194440e-4f), fused(n, all(-0.693359375f), x));
  vec p = all(1.9875691500e-4f);
  p = fused(p, r, all(1.3981999507e-3f));
  p = fused(p, r, all(8.3334519073e-3f));
  p = fused(p, r, all(4.1665795894e-2f));
  p = fused(p, r, all(1.6666665459e-1f));
  p = fused(p, r, all(5.0000001201e-1f));
  p = fused(p, r * r, r) + all(1.0f);
  ivec scale = (__builtin_convertvector(n, ivec) + 127) << 23;
  return (vec)((ivec)(p * (vec)scale) & ~low);
}

/* log(x) for x > 0, within two units in the last place; numbers below 2^-126 count as that (Cephes'
   polynomial). */
INLINE vec log_vec(vec x) {
  const vec least = (vec)((ivec){} + 0x00800000);
  ivec low = x < least;
  ivec bits = ((ivec)x & ~low) | ((ivec)least & low);
  ivec exponent = (bits >> 23) - 126;
  vec m = (vec)((bits & 0x007FFFFF) | 0x3F000000); /* 0.5 to 1 */
  ivec half = m < all(0.707106781186547524f);
  exponent += half; /* a comparison that holds is -1 */
  m = m + (vec)((ivec)m & half) - all(1.0f);
  vec n = __builtin_convertvector(exponent, vec), square = m * m;
  vec p = all(7.0376836292e-2f);
  p = fused(p, m, all(-1.1514610310e-1f));
  p = fused(p, m, all(1.1676998740e-1f));
  p = fused(p, m, all(-1.2420140846e-1f));
  p = fused(p, m, all(1.4249322787e-1f));
  p = fused(p, m, all(-1.6668057665e-1f));
  p = fused(p, m, all(2.0000714765e-1f));
  p = fused(p, m, all(-2.4999993993e-1f));
  p = fused(p, m, all(3.3333331174e-1f));
  p = fused(p * m, square, n * all(-2.12194440e-4f));
  p = fused(square, all(-0.5f), p);
  return fused(n, all(0.693359375f), m + p);
}

#endif
