/* The Gumbel-max trick (decoding/sampler.py) with logarithms for a few tokens only: of a look at
   whole logits (scan.c) and of a draw beside making them (draw.c).

   A token's score is its weight (logit / temperature) plus noise, -log(-log1p(-u)) with u uniform.
   Noise above LUCK is rare, and a token without it needs a weight close to the best score known:
   only those few are scored, exactly, by the caller. */

#ifndef TINKERCLOUD_NOISE_H
#define TINKERCLOUD_NOISE_H

#include "philox.h"
#include "scan.h"
#include "vectors.h"

#define LUCK 8.0
#define LUCKY_WORD 1440786u /* u below it: noise above LUCK */
#define SLACK 1e-3          /* for the rounding of what is compared here */

INLINE noise_key_t key_of(const draw_t *draw) {
  return (noise_key_t){draw->seed, draw->sample, draw->position};
}

static inline double score_of(float weight, uint32_t word) {
  return weight - log(-log1p(-(word + 0.5) * 0x1p-32));
}

/* Whether the score is `least` or more. Of a small u the noise is at most -log u, so that most tokens
   need no logarithms of their own. */
static inline int may_win(float weight, uint32_t word, double least) {
  return (word + 0.5) * 0x1p-32 <= exp(weight - least) && score_of(weight, word) >= least;
}

INLINE int any_reaches(const float *weights, int64_t count, float limit) {
  int any = 0;
  for (int64_t i = 0; i < count; i++) any |= weights[i] >= limit;
  return any;
}

/* Whether some of a group's numbers are lucky: few groups have one. */
INLINE int any_lucky(const uint32_t words[GROUP]) {
#if defined(__AVX512F__)
  __mmask16 any = 0;
  for (int i = 0; i < GROUP; i += 16)
    any |= _mm512_cmplt_epu32_mask(_mm512_loadu_si512(words + i), _mm512_set1_epi32(LUCKY_WORD));
  return any != 0;
#else
  int any = 0;
  for (int i = 0; i < GROUP; i++) any |= words[i] < LUCKY_WORD;
  return any;
#endif
}

/* The number of a token in words that groups of `philox_group` follow each other in. */
INLINE uint32_t word_in(const uint32_t *words, int64_t token) {
  int64_t inside = token % GROUP;
  return words[token - inside + word_at(inside / BLOCK_WORDS, token)];
}

#endif
