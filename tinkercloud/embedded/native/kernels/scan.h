/* What is asked of a look at logits (scan.c), and its answers; structures.py mirrors it. */

#ifndef TINKERCLOUD_SCAN_H
#define TINKERCLOUD_SCAN_H

#include <stdint.h>

typedef struct {
  float temperature; /* 0: the best one is wanted, nothing else */
  int64_t top_k;     /* of all tokens; 0 or less: every one */
  double top_p;      /* 1 or more: every one */
  uint64_t seed, sample, position;
} draw_t;

typedef struct {
  const float *logits; /* [rows][size] */
  int64_t rows, size, limit;
  const draw_t *draws;
  int64_t *best;   /* out: [rows], the lowest id with the largest logit */
  double *norm;    /* out: [rows], log of the sum of exp(weight) of what top-k and top-p leave */
  int64_t *count;  /* out: [rows], how many may win; -1: more than `limit` */
  int64_t *ids;    /* out: [rows][limit] */
  uint32_t *words; /* out: [rows][limit], the noise's random numbers */
} scan_t;

#endif
