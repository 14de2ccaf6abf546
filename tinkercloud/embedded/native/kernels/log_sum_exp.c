/* The log of the sum of exp over a vocabulary. The sum of a partition is float32, that of all is
   float64: float32 alone is off by 1e-5 over 50,000 terms. Partitions lie at fixed places, so that
   who has only a tile of the logits at a time comes to the same bits as who reads whole rows. */

#include "log_sum_exp.h"

#include <math.h>

#include "team.h"

partition_t sum_partition(const float *logits, int64_t count) {
  float top = largest(logits, count);
  vec base = all(top == -INFINITY ? 0.0f : top); /* of masked tokens alone the sum is 0, not NaN */
  vec sum = {};
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) sum += exp_vec(load(logits + i) - base);
  if (i < count) {
    vec rest = all(-INFINITY);
    for (int64_t j = 0; i + j < count; j++) rest[j] = logits[i + j];
    sum += exp_vec(rest - base);
  }
  return (partition_t){top, sum1(sum)};
}

double combine_partitions(const partition_t *partitions, int64_t count) {
  float top = -INFINITY;
  for (int64_t i = 0; i < count; i++) top = MAX(top, partitions[i].top);
  double total = 0.0;
  for (int64_t i = 0; i < count; i++)
    total += partitions[i].sum * exp((double)partitions[i].top - top);
  return top + log(total);
}

/* partitions: room for those of the row. */
double norm_of(const float *logits, int64_t size, partition_t *partitions) {
  int64_t count = partitions_of(size);
  for (int64_t i = 0; i < count; i++) {
    int64_t first = i * PARTITION;
    partitions[i] = sum_partition(logits + first, MIN(PARTITION, size - first));
  }
  return combine_partitions(partitions, count);
}

typedef struct {
  const float *logits; /* [rows][size] */
  int64_t rows, size;
  double *norms; /* out: [rows] */
  partition_t *partitions; /* [threads][those of a row] */
  atomic_long next;
} job_t;

static void run_rows(team_t *team, int rank, void *argument) {
  (void)team;
  job_t *job = argument;
  partition_t *partitions = job->partitions + rank * partitions_of(job->size);
  for (int64_t row; (row = atomic_fetch_add(&job->next, 1)) < job->rows;)
    job->norms[row] = norm_of(job->logits + row * job->size, job->size, partitions);
}

/* 0, or -1 when there is no memory. */
int log_sum_exp(team_t *team, const float *logits, int64_t rows, int64_t size, double *norms) {
  job_t job = {.logits = logits, .rows = rows, .size = size, .norms = norms};
  size_t bytes = (size_t)(team->size * partitions_of(size)) * sizeof(partition_t);
  job.partitions = scratch(team, bytes);
  if (job.partitions == NULL) return -1;
  work(team, run_rows, &job);
  return 0;
}
