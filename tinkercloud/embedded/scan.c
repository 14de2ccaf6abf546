/* From logits to the tokens that may win, for decoding/sampler.py. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "team.h"
#include "vectors.h"

/* A token's score is its weight (logit / temperature) plus noise, -log(-log1p(-u)) with u uniform
   (decoding/sampler.py). Noise above LUCK is rare, and a token without it needs a weight close to
   the best score known: only those few are scored, exactly, by the caller. */

typedef struct {
  float temperature; /* 0: the best one is wanted, nothing else */
  uint64_t seed, sample, position;
} draw_t;

typedef struct {
  const float *logits; /* [rows][size] */
  int64_t rows, size, limit;
  const draw_t *draws;
  int64_t *best;   /* out: [rows], the lowest id with the largest logit */
  double *norm;    /* out: [rows], log of the sum of exp(weight) */
  int64_t *count;  /* out: [rows], how many may win; -1: more than `limit` */
  int64_t *ids;    /* out: [rows][limit], ascending */
  uint32_t *words; /* out: [rows][limit], the noise's random numbers */
  atomic_long next;
} scan_t;

#define LUCK 8.0
#define LUCKY_WORD 1440786u /* u below it: noise above LUCK */
#define SLACK 1e-3          /* for the rounding of what is compared here */

/* Philox4x64-10 (Salmon et al. 2011). */
static void philox(uint64_t counter[4], uint64_t key0, uint64_t key1, uint64_t out[4]) {
  uint64_t a = counter[0], b = counter[1], c = counter[2], d = counter[3];
  for (int i = 0; i < 10; i++) {
    unsigned __int128 first = (unsigned __int128)a * 0xD2E7470EE14C6C93ull;
    unsigned __int128 second = (unsigned __int128)c * 0xCA5A826395121157ull;
    uint64_t next_a = (uint64_t)(second >> 64) ^ b ^ key0, next_c = (uint64_t)(first >> 64) ^ d ^ key1;
    b = (uint64_t)second;
    d = (uint64_t)first;
    a = next_a;
    c = next_c;
    key0 += 0x9E3779B97F4A7C15ull;
    key1 += 0xBB67AE8584CAA73Bull;
  }
  out[0] = a;
  out[1] = b;
  out[2] = c;
  out[3] = d;
}

static double score_of(float weight, uint32_t word) {
  return weight - log(-log1p(-(word + 0.5) * 0x1p-32));
}

static void find_best(const float *logits, int64_t size, int64_t *best) {
  vec most = all(-INFINITY);
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) {
    vec x = load(logits + i);
    ivec more = x > most;
    most = (vec)(((ivec)x & more) | ((ivec)most & ~more));
  }
  float top = -INFINITY;
  for (int j = 0; j < LANES; j++) top = MAX(top, most[j]);
  for (; i < size; i++) top = MAX(top, logits[i]);
  for (i = 0; i < size - 1 && logits[i] != top; i++) continue;
  *best = i;
}

static double log_mass(const float *weights, int64_t size, float top) {
  double mass = 0.0;
  int64_t i = 0;
  while (i + LANES <= size) {
    vec sum = {};
    for (int j = 0; j < 16 && i + LANES <= size; j++, i += LANES)
      sum += exp_vec(load(weights + i) - all(top));
    mass += sum1(sum);
  }
  for (; i < size; i++) mass += expf(weights[i] - top);
  return top + log(mass);
}

static void scan_row(scan_t *s, int64_t row, float *weights, uint32_t *words) {
  const float *logits = s->logits + row * s->size;
  const draw_t *draw = &s->draws[row];
  find_best(logits, s->size, &s->best[row]);
  s->count[row] = 0;
  float t = draw->temperature > 0.0f ? draw->temperature : 1.0f;
  for (int64_t i = 0; i < s->size; i++) weights[i] = logits[i] / t;
  s->norm[row] = log_mass(weights, s->size, weights[s->best[row]]);
  if (draw->temperature <= 0.0f) return;
  uint64_t counter[4] = {0, draw->position, 0, 0};
  for (int64_t i = 0; i < s->size; i += 8) {
    uint64_t random[4];
    counter[0]++; /* numpy's generator counts before it draws */
    philox(counter, draw->seed, draw->sample, random);
    memcpy(words + i, random, sizeof random);
  }
  double least = score_of(weights[s->best[row]], words[s->best[row]]);
  for (int64_t i = 0; i < s->size; i++)
    if (words[i] < LUCKY_WORD) least = MAX(least, score_of(weights[i], words[i]));
  least -= SLACK;
  float close = (float)(least - LUCK);
  int64_t count = 0, *ids = s->ids + row * s->limit;
  for (int64_t i = 0; i < s->size; i++) {
    if (!(words[i] < LUCKY_WORD) && !(weights[i] >= close)) continue;
    if (score_of(weights[i], words[i]) < least) continue;
    if (count == s->limit) {
      s->count[row] = -1;
      return;
    }
    ids[count] = i;
    s->words[row * s->limit + count++] = words[i];
  }
  s->count[row] = count;
}

static void run_scan(team_t *team, int rank, void *argument) {
  (void)team, (void)rank;
  scan_t *s = argument;
  int64_t padded = (s->size + 7) / 8 * 8;
  float *weights = malloc((size_t)padded * (sizeof(float) + sizeof(uint32_t)));
  if (weights == NULL) return;
  for (;;) {
    int64_t row = atomic_fetch_add(&s->next, 1);
    if (row >= s->rows) break;
    scan_row(s, row, weights, (uint32_t *)(weights + padded));
  }
  free(weights);
}

/* 0, or -1 when there is no memory. The structure's arrays are the caller's. */
int scan(team_t *team, scan_t *s) {
  atomic_store(&s->next, 0);
  work(team, run_scan, s);
  return atomic_load(&s->next) >= s->rows ? 0 : -1;
}
