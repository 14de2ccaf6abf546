/* The random numbers of decoding/sampler.py, of several counters at once: Philox4x64-10 (Salmon et
   al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), as numpy has it. Constants, rounds and
   the order of the words are part of what a seed means. */

#ifndef TINKERCLOUD_PHILOX_H
#define TINKERCLOUD_PHILOX_H

#include "vectors.h"

#define BLOCK_WORDS 8 /* random numbers of 32 bits that one counter gives */
#define ROUNDS 10

/* Vectors of four lanes are slower than one number at a time: these have an instruction for the
   product of 64 bits with 64. Of eight lanes one vector alone would wait for its own products. */
#if defined(__AVX512F__)
#define VECTORS 4
typedef uint64_t wide_t __attribute__((vector_size(64)));
#define COUNTERS (8 * VECTORS)
#else
#define VECTORS 1
typedef uint64_t wide_t;
#define COUNTERS 1
#endif

#define GROUP (COUNTERS * BLOCK_WORDS) /* tokens */

/* The upper and the lower half of a * factor. */
INLINE wide_t whole_product(wide_t a, uint64_t factor, wide_t *low) {
#if defined(__AVX512F__)
  const wide_t mask = (wide_t){} + 0xFFFFFFFFull;
  const __m512i factor_low = _mm512_set1_epi64((long long)(factor & 0xFFFFFFFFull));
  const __m512i factor_high = _mm512_set1_epi64((long long)(factor >> 32));
  __m512i a_low = (__m512i)a, a_high = (__m512i)(a >> 32);
  wide_t lowest = (wide_t)_mm512_mul_epu32(a_low, factor_low);
  wide_t middle = (wide_t)_mm512_mul_epu32(a_high, factor_low) + (lowest >> 32);
  wide_t other = (wide_t)_mm512_mul_epu32(a_low, factor_high) + (middle & mask);
  *low = (other << 32) | (lowest & mask);
  return (wide_t)_mm512_mul_epu32(a_high, factor_high) + (middle >> 32) + (other >> 32);
#else
  unsigned __int128 product = (unsigned __int128)a * factor;
  *low = (uint64_t)product;
  return (uint64_t)(product >> 64);
#endif
}

typedef struct {
  uint64_t seed, sample, position;
} noise_key_t;

/* blocks: of each counter a token's number / BLOCK_WORDS. words: by twos of each counter, as
   `word_at` says. */
INLINE void philox(const uint64_t blocks[COUNTERS], const noise_key_t *key,
                   uint32_t words[GROUP]) {
  wide_t a[VECTORS], b[VECTORS], c[VECTORS], d[VECTORS];
  uint64_t key0 = key->seed, key1 = key->sample;
  memcpy(a, blocks, sizeof a);
  EACH(v, VECTORS) {
    c[v] = d[v] = a[v] - a[v];
    b[v] = c[v] + key->position;
    a[v] += 1; /* numpy's generator counts before it draws */
  }
  for (int round = 0; round < ROUNDS; round++) {
    EACH(v, VECTORS) {
      wide_t low0, low1;
      wide_t high0 = whole_product(a[v], 0xD2E7470EE14C6C93ull, &low0);
      wide_t high1 = whole_product(c[v], 0xCA5A826395121157ull, &low1);
      a[v] = high1 ^ b[v] ^ key0;
      c[v] = high0 ^ d[v] ^ key1;
      b[v] = low1;
      d[v] = low0;
    }
    key0 += 0x9E3779B97F4A7C15ull;
    key1 += 0xBB67AE8584CAA73Bull;
  }
  memcpy(words, a, sizeof a);
  memcpy(words + 2 * COUNTERS, b, sizeof b);
  memcpy(words + 4 * COUNTERS, c, sizeof c);
  memcpy(words + 6 * COUNTERS, d, sizeof d);
}

/* Those of the GROUP tokens from `first` on, a multiple of it. */
INLINE void philox_group(int64_t first, const noise_key_t *key, uint32_t words[GROUP]) {
  uint64_t blocks[COUNTERS];
  for (int i = 0; i < COUNTERS; i++) blocks[i] = (uint64_t)(first / BLOCK_WORDS + i);
  philox(blocks, key, words);
}

/* Where a token's number is, which is of the `counter`-th counter of a call. */
INLINE int64_t word_at(int64_t counter, int64_t token) {
  int64_t word = token % BLOCK_WORDS;
  return (word / 2 * COUNTERS + counter) * 2 + word % 2;
}

#endif
