/* One pass over a batch, and how threads go through it; what forward.c, linear.c and attention.c
   share. */

#ifndef TINKERCLOUD_PASS_H
#define TINKERCLOUD_PASS_H

#include <assert.h>
#include <math.h>

#include "log_sum_exp.h"
#include "narrow.h"
#include "network.h"
#include "packed.h"
#include "team.h"
#include "vectors.h"

/* Inputs of products in bfloat16 [rows][width]: rounded, and from row_size(1, in) on what rounding
   took off the salient ones, rounded too. Zeros between, and beyond. */
typedef struct {
  narrow *inputs;
  int64_t in, width;
} narrow_rows_t;

/* Of a draft head alone: STATES, and JOINED, which is what its q, k and v read. */
enum { NORMED, MIXED, GATED, CHOSEN, STATES, JOINED, NARROW_ROWS };

/* What a norm puts out, for products to read. */
typedef struct {
  float *wide; /* [rows][D] */
  narrow_rows_t narrow;
} normed_t;

/* Tokens of a partition that may be drawn; count -1: more than fit. */
#define MOST_OFFERS 6
typedef struct {
  int32_t count, ids[MOST_OFFERS];
  uint32_t words[MOST_OFFERS];
  float weights[MOST_OFFERS];
} offers_t;

/* Of a partition, or a row: the token with the best score, and the second best score. */
typedef struct {
  int64_t id;
  float best, second;
} guess_t;

typedef struct {
  const model_t *model;
  const batch_t *batch;
  float *x, *normed, *q, *k, *v, *mixed, *gate, *low, *chosen;
  narrow_rows_t narrow_rows[NARROW_ROWS];
  float *gates;          /* [threads]: of the task underway, linear.c */
  int64_t num_normed;    /* copies of what a norm puts out: one, or one of each thread */
  int tiles_place;       /* attention places the rows of each of its tiles before these attend */
  int64_t low_stride; /* of one row of the low-rank products, 3 modules side by side */
  int64_t max_rank;
  partition_t *partitions; /* [scored or drawn rows][partitions of the vocabulary] */
  float *tiles;            /* [threads][SCORE_ROWS][PARTITION]: logits that are scored or drawn */
  offers_t *offers;        /* [drawn rows][partitions of the vocabulary] */
  _Atomic double *bounds;  /* [drawn rows]: a score that the winner has at least */
  guess_t *guesses;        /* [guessed rows][partitions of the vocabulary] */
  atomic_long *next_task; /* of each stage */
} pass_t;

/* A pass is a row of stages, and a stage a number of tasks, which threads take as they get free:
   other work on the machine may hold any of them up. Which thread has a task changes no bit, since
   no two tasks of a stage write the same numbers and none reads what another one writes. */
typedef struct {
  const pass_t *p;
  team_t *team;
  int rank;
  normed_t normed;    /* this thread's own, where each has one */
  int64_t stage, end; /* end: of the stages that the step underway may have */
  step_time_t *time;  /* of that step, on the thread that takes times; else NULL */
} walk_t;

/* The next task of this stage. Relaxed: only who gets which task is decided here; what the stages
   before have written is seen because of the barrier in `end_stage`. */
INLINE int64_t take(const walk_t *w) {
  assert(w->stage < w->end && "a step has more stages than its table says");
  return atomic_fetch_add_explicit(&w->p->next_task[w->stage], 1, memory_order_relaxed);
}

/* Every thread gets here before any goes on. */
static inline void end_stage(walk_t *w) {
  w->stage++;
  int64_t began = w->time ? nanoseconds() : 0;
  meet_and(w->team, 1);
  if (w->time) w->time->waiting_ns += nanoseconds() - began;
}

/* Of a big batch a block of keys at once: a cache line has one number of each of its 16 keys, and would go
   from thread to thread. */
#define BIG_BATCH 256 /* rows */
#define FEW_TASK_ROWS 4
static inline int64_t task_rows(int64_t rows) { return rows < BIG_BATCH ? FEW_TASK_ROWS : KV_BLOCK; }

#define EACH_ROW(w, m, rows)                                                                       \
  for (int64_t task_, size_ = task_rows(rows); (task_ = take(w) * size_) < (rows);)                \
    for (int64_t m = task_; m < MIN(task_ + size_, (rows)); m++)

static inline float inverse_norm(const float *x, int64_t size, float eps) {
  return 1.0f / sqrtf(dot(x, x, size) / (float)size + eps);
}

/* y may be x. */
static inline void rms_norm(const float *x, const float *weight, int64_t size, float eps,
                            float *y) {
  float scale = inverse_norm(x, size, eps);
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) store(y + i, load(weight + i) * (load(x + i) * all(scale)));
  for (; i < size; i++) y[i] = weight[i] * (x[i] * scale);
}

/* Of a module's salient inputs, how many are below `input`. */
static inline int64_t first_salient(const linear_t *linear, int64_t input) {
  int64_t low = 0, high = linear->num_salient;
  if (input >= linear->in) return high;
  while (low < high) {
    int64_t middle = (low + high) / 2;
    if (linear->salient[middle] < input)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

/* Inputs first..first + count - 1 of row m. reader: of the modules that multiply them, the first. x
   gets what it is when rounded, which adapters read. */
static inline void round_inputs(const linear_t *reader, const narrow_rows_t *to, int64_t m,
                                int64_t first, int64_t count, float *x) {
  narrow *inputs = to->inputs + m * to->width, *errors = inputs + row_size(1, to->in);
  int64_t i = first_salient(reader, first), end = first_salient(reader, first + count);
  for (; i + LANES <= end; i += LANES) {
    float exact[LANES];
    EACH(j, LANES) exact[j] = x[reader->salient[i + j] - first];
    store_narrow(errors + i, errors_of(load(exact)));
  }
  for (; i < end; i++) errors[i] = error_of(x[reader->salient[i] - first]);
  round_to_narrow(x, count, inputs + first);
}

/* ---- linear.c */

/* At most, of a product: the low-rank factors of adapters, the product. */
#define PRODUCT_STAGES 2

/* Where one module's results go. */
typedef struct {
  const linear_t *linear;
  int module; /* its place in a segment's modules */
  float *y;
  int64_t y_stride;
  int add; /* to what is there */
  float scale; /* of all that the module puts out */
} output_t;

typedef struct {
  const float *x; /* [rows][in] */
  const narrow_rows_t *narrow_rows; /* the same, where the model is narrow */
  int64_t rows;
  const output_t *outputs; /* modules that read these rows */
  int count;
  const int64_t *chosen; /* which of the batch's rows these are, ascending; NULL: all */
} read_t;

INTERNAL void multiply_modules(walk_t *w, const read_t *read);
INTERNAL void multiply_gates(walk_t *w, const read_t *read, const output_t *down, void *kept);
INTERNAL int64_t gates_size(const pass_t *p); /* floats of a thread */

/* What `multiply_modules` is made of: a stage for the low-rank factors, where there are adapters,
   which it returns; then some rows and some panels of module `i` at a time. next: as in product.h. */
INTERNAL int multiply_low_rank(walk_t *w, const read_t *read);
INTERNAL const void *panel_of(const model_t *model, const linear_t *linear, int64_t panel);
INTERNAL void multiply_part(const pass_t *p, const read_t *read, int i, range_t rows,
                            range_t panels, const void *next, int adapted);

/* ---- unembed.c, steps of a pass */

/* What is done with the logits of a row of `read` over a partition, which it may change. */
typedef void visit_t(const walk_t *w, int64_t row, int64_t part, float *logits);

#define SCORE_ROWS 128 /* of a tile: its logits of a partition lie in the second-level cache */
#define SCORE_STAGES (PRODUCT_STAGES + 1)

INTERNAL void choose(walk_t *w, int64_t index);
INTERNAL void unembed(walk_t *w, int64_t index);
INTERNAL void cap_logits(walk_t *w, int64_t index);
INTERNAL void choose_scored(walk_t *w, int64_t index);
INTERNAL void score_targets(walk_t *w, int64_t index);
INTERNAL void choose_rows(walk_t *w, const int64_t *rows, int64_t count);
INTERNAL void visit_partitions(walk_t *w, const int64_t *rows, int64_t count, visit_t *visit);

/* ---- forward.c */

int forward(team_t *team, const model_t *model, const batch_t *batch);
INTERNAL void embed_row(const model_t *model, int64_t token, float *x);

/* ---- draft_head.c, steps of a pass */

INTERNAL void fuse_states(walk_t *w, int64_t index);
INTERNAL void join_inputs(walk_t *w);
INTERNAL void choose_guessed(walk_t *w, int64_t index);
INTERNAL void guess_tokens(walk_t *w, int64_t index);

/* ---- draw.c, steps of a pass */

INTERNAL void choose_drawn(walk_t *w, int64_t index);
INTERNAL void draw_tokens(walk_t *w, int64_t index);

/* ---- norm_rows.c, a stage each, but for few rows norm_rows none: then each thread has all */

INTERNAL void norm_rows(walk_t *w, const float *weight, const linear_t *reader, float *kept);
INTERNAL void add_normed(walk_t *w, const float *weight, float *kept);

/* ---- attention.c, a stage each */

INTERNAL int tiles_are_alone(const pass_t *p);
INTERNAL void place_rows(walk_t *w, const layer_t *layer);
INTERNAL void attend(walk_t *w, const layer_t *layer);

#endif
