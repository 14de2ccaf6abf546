/* Rotary positions of one head: pairs of its dimensions are turned, a half apart from each other, or
   neighbours. Dimensions beyond 2 half are left as they are. */

#ifndef TINKERCLOUD_ROTARY_H
#define TINKERCLOUD_ROTARY_H

#include <stdint.h>

typedef struct {
  const float *cosine, *sine; /* [half] */
  int64_t half, of_neighbours;
} rotary_t;

static inline void rotate_head(const rotary_t *r, float *head) {
  const float *cosine = r->cosine, *sine = r->sine;
  int64_t half = r->half;
  for (int64_t i = 0; i < half && !r->of_neighbours; i++) {
    float first = head[i], second = head[half + i];
    head[i] = first * cosine[i] - second * sine[i];
    head[half + i] = second * cosine[i] + first * sine[i];
  }
  for (int64_t i = 0; i < half && r->of_neighbours; i++) {
    float first = head[2 * i], second = head[2 * i + 1];
    head[2 * i] = first * cosine[i] - second * sine[i];
    head[2 * i + 1] = second * cosine[i] + first * sine[i];
  }
}

#endif
