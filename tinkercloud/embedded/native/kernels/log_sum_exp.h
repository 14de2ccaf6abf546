/* The log of the sum of exp over a vocabulary: one function for sampler, scorer and trainer, so that
   a log-probability, (float)((double)logit - norm), is the same bits in each (log_sum_exp.c). */

#ifndef TINKERCLOUD_LOG_SUM_EXP_H
#define TINKERCLOUD_LOG_SUM_EXP_H

#include "team.h"
#include "vectors.h"

#define PARTITION 1024 /* logits that are summed by themselves, from token 0 on */

typedef struct {
  float top, sum; /* the largest logit, and the sum of exp(logit - top) */
} partition_t;

INLINE int64_t partitions_of(int64_t size) { return (size + PARTITION - 1) / PARTITION; }

/* Its tokens. */
INLINE range_t partition_at(int64_t size, int64_t index) {
  return (range_t){index * PARTITION, MIN((index + 1) * PARTITION, size)};
}

INTERNAL partition_t sum_partition(const float *logits, int64_t count);
INTERNAL double combine_partitions(const partition_t *partitions, int64_t count);
INTERNAL double norm_of(const float *logits, int64_t size, partition_t *partitions);

#endif
