/* A decoder's forward pass over a ragged batch of rows, on the cores of one machine, in float32 or
   with weights, keys and values in bfloat16. Then what a product with them reads is rounded to
   bfloat16 too; all else stays float32, also between layers.

   Every value is computed by one thread in an order that depends on the row's own sequence alone:
   not on the other rows, on how many there are, or on the number of threads. So the logits of a
   token are the same bits whether it comes in a prompt, alone, or beside a hundred others.

   Compiled on the machine that runs it (native.py), for its vector unit. Names: M rows, D hidden
   size, Hq / Hkv query and key/value heads, Dh head size, F inner size, V vocabulary, K the length
   of a dot product. Weights are row-major [out, in], as Hugging Face has them. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "product.h"
#include "team.h"
#include "vectors.h"

/* ---- the network; native.py has the same structures */

typedef struct {
  const void *weight; /* numbers: float, or narrow where the model is */
  const float *bias;
  int64_t out, in;
} linear_t;

enum { Q, K_, V_, O, GATE, UP, DOWN, NUM_LINEAR };

typedef struct {
  const float *input_norm, *post_norm, *q_norm, *k_norm; /* the last two may be NULL */
  linear_t linear[NUM_LINEAR];
  void *keys;   /* numbers [block][Hkv][Dh][block_size] */
  void *values; /* numbers [block][Hkv][block_size][Dh] */
} layer_t;

typedef struct {
  int64_t num_layers, hidden, heads, kv_heads, head_dim, inner, vocab, block_size, is_narrow;
  float eps;
  const void *embed; /* numbers */
  const float *final_norm;
  linear_t head;
  const layer_t *layers;
} model_t;

typedef struct {
  const float *a, *b; /* [rank, in] and [out, rank]; NULL: this module has none */
  int64_t rank;
} lora_t;

/* Rows first..first+count-1 read one adapter: NUM_LINEAR modules of each layer, then the head's. */
typedef struct {
  int64_t first, count;
  float scale;
  const lora_t *modules;
} segment_t;

typedef struct {
  int64_t rows;
  const int64_t *tokens;
  const int32_t *positions;  /* of each row in its sequence */
  const int32_t *sequence;   /* of each row: its row in `tables` */
  const int32_t *tables;     /* block numbers of each sequence, in order */
  int64_t table_stride;
  const float *cosine, *sine; /* [position][Dh / 2] */
  int64_t num_segments;
  const segment_t *segments;
  int64_t num_wanted;
  const int64_t *wanted; /* rows whose logits are wanted, ascending */
  int64_t num_captured;
  const int64_t *captured_layers; /* 1 the first; the last one is `hidden` */
  float *captured;       /* out: [rows][num_captured][D], what these layers put out */
  float *hidden;         /* out: [rows][D], after the final norm */
  float *logits;         /* out: [num_wanted][V] */
} batch_t;

typedef struct {
  const model_t *model;
  const batch_t *batch;
  float *x, *normed, *q, *k, *v, *mixed, *gate, *up, *low, *chosen;
  narrow *normed_narrow, *mixed_narrow, *gate_narrow, *chosen_narrow; /* what products read */
  float *packed; /* rows that a product reads, by strips */
  int64_t low_stride; /* of one row of the low-rank products, 3 modules side by side */
  int64_t max_rank;
  atomic_long *next_task; /* of each stage */
} pass_t;

/* A pass is a row of stages, and a stage a number of tasks, which threads take as they get free:
   other work on the machine may hold any of them up. Which thread has a task changes no bit. */
typedef struct {
  const pass_t *p;
  team_t *team;
  int64_t stage;
} walk_t;

#define STAGES_OF_A_LAYER 16
#define OTHER_STAGES 8

INLINE int64_t take(const walk_t *w) {
  return atomic_fetch_add_explicit(&w->p->next_task[w->stage], 1, memory_order_relaxed);
}

/* Every thread gets here before any goes on. */
static void end_stage(walk_t *w) {
  w->stage++;
  meet_and(w->team, 1);
}

#define TASK_ROWS 4
#define EACH_ROW(w, m, rows)                                                                       \
  for (int64_t task_; (task_ = take(w) * TASK_ROWS) < (rows);)                                     \
    for (int64_t m = task_; m < MIN(task_ + TASK_ROWS, (rows)); m++)

static void rms_norm(const float *x, const float *weight, int64_t size, float eps, float *y) {
  float scale = 1.0f / sqrtf(dot(x, x, size) / (float)size + eps);
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) store(y + i, load(weight + i) * (load(x + i) * all(scale)));
  for (; i < size; i++) y[i] = weight[i] * (x[i] * scale);
}

/* narrow_out: or NULL. */
static void norm_rows(walk_t *w, const float *weight, float *out, narrow *narrow_out) {
  const pass_t *p = w->p;
  int64_t d = p->model->hidden;
  EACH_ROW(w, m, p->batch->rows) {
    rms_norm(p->x + m * d, weight, d, p->model->eps, out + m * d);
    if (narrow_out) round_to_narrow(out + m * d, d, narrow_out + m * d);
  }
  end_stage(w);
}

typedef struct {
  const linear_t *linear;
  int module; /* its place in a segment's modules */
  float *y;
  int64_t y_stride;
  int add;
} output_t;

/* Segments over the rows of `wanted` instead of the batch's. */
static segment_t over_wanted(const pass_t *p, const segment_t *segment) {
  int64_t first = 0, end = 0;
  for (int64_t i = 0; i < p->batch->num_wanted; i++) {
    first += p->batch->wanted[i] < segment->first;
    end += p->batch->wanted[i] < segment->first + segment->count;
  }
  return (segment_t){first, end - first, segment->scale, segment->modules};
}

static int has_adapter(const pass_t *p, const output_t *outputs, int count) {
  for (int64_t s = 0; s < p->batch->num_segments; s++)
    for (int i = 0; i < count; i++)
      if (p->batch->segments[s].modules[outputs[i].module].a) return 1;
  return 0;
}

typedef struct {
  const float *x; /* [rows][in] */
  const narrow *x_narrow; /* the same, or NULL */
  int64_t rows;
  const output_t *outputs; /* modules that read these rows */
  int count, over_wanted;
} read_t;

static segment_t segment_of(const pass_t *p, const read_t *read, int64_t s) {
  segment_t segment = p->batch->segments[s];
  return read->over_wanted ? over_wanted(p, &segment) : segment;
}

/* x A^T of every row and module, beside each other in p->low. */
static void low_rank(walk_t *w, const read_t *read) {
  const pass_t *p = w->p;
  int64_t in = read->outputs[0].linear->in;
  int64_t parts = (p->max_rank + SOME_COLUMNS - 1) / SOME_COLUMNS;
  int64_t tasks = p->batch->num_segments * read->count * parts;
  for (int64_t task; (task = take(w)) < tasks;) {
    int64_t i = task / parts % read->count, first = task % parts * SOME_COLUMNS;
    segment_t segment = segment_of(p, read, task / parts / read->count);
    const lora_t *lora = &segment.modules[read->outputs[i].module];
    if (!lora->a || first >= lora->rank) continue;
    product_t down = {.x = read->x + segment.first * in, .x_stride = in, .rows = segment.count,
                      .w = lora->a, .k = in, .bias = NULL,
                      .y = p->low + segment.first * p->low_stride + i * p->max_rank,
                      .y_stride = p->low_stride, .add = 0, .scale = 1.0f};
    multiply(&down, (range_t){first, MIN(first + SOME_COLUMNS, lora->rank)});
  }
  end_stage(w);
}

/* The rows by strips, where that pays. */
static int pack(walk_t *w, const read_t *read) {
  int64_t in = read->outputs[0].linear->in;
  if (w->p->model->is_narrow || !by_strips(read->rows, in)) return 0;
  for (int64_t strip; (strip = take(w)) < strips_of(read->rows);)
    pack_strip(read->x, in, read->rows, in, strip, w->p->packed);
  end_stage(w);
  return 1;
}

/* What is done to the rows before their products. */
typedef struct {
  int adapted, packed;
} ready_t;

static ready_t prepare(walk_t *w, const read_t *read) {
  ready_t ready = {has_adapter(w->p, read->outputs, read->count), pack(w, read)};
  if (ready.adapted) low_rank(w, read);
  return ready;
}

/* Some columns of one module. */
static void columns(const pass_t *p, const read_t *read, int i, range_t cols, ready_t ready) {
  const output_t *o = &read->outputs[i];
  int is_narrow = read->x_narrow != NULL;
  product_t main = {.x = is_narrow ? (const void *)read->x_narrow : read->x,
                    .x_stride = o->linear->in, .rows = read->rows,
                    .packed = ready.packed ? p->packed : NULL, .is_narrow = is_narrow,
                    .w = o->linear->weight, .k = o->linear->in, .bias = o->linear->bias,
                    .y = o->y, .y_stride = o->y_stride, .add = o->add, .scale = 1.0f};
  multiply(&main, cols);
  for (int64_t s = 0; ready.adapted && s < p->batch->num_segments; s++) {
    segment_t segment = segment_of(p, read, s);
    const lora_t *lora = &segment.modules[o->module];
    if (!lora->a) continue;
    product_t up = {.x = p->low + segment.first * p->low_stride + i * p->max_rank,
                    .x_stride = p->low_stride, .rows = segment.count, .w = lora->b,
                    .k = lora->rank, .bias = NULL, .y = o->y + segment.first * o->y_stride,
                    .y_stride = o->y_stride, .add = 1, .scale = segment.scale};
    multiply(&up, cols);
  }
}

static int64_t width_of(const pass_t *p, const read_t *read) {
  size_t bytes = p->model->is_narrow ? sizeof(narrow) : sizeof(float);
  return task_columns(read->outputs[0].linear->in, (int64_t)bytes);
}

/* One or more modules that read the same rows, block of columns by block of columns. */
static void modules(walk_t *w, const read_t *read) {
  ready_t ready = prepare(w, read);
  int64_t width = width_of(w->p, read);
  for (int64_t task; ; ) {
    task = take(w);
    int i = 0;
    for (; i < read->count; i++) {
      int64_t blocks = (read->outputs[i].linear->out + width - 1) / width;
      if (task < blocks) break;
      task -= blocks;
    }
    if (i == read->count) break;
    int64_t end = MIN((task + 1) * width, read->outputs[i].linear->out);
    columns(w->p, read, i, (range_t){task * width, end}, ready);
  }
  end_stage(w);
}

/* silu(gate) * up into gate, on some columns. */
static void swiglu(const pass_t *p, range_t cols) {
  int64_t inner = p->model->inner;
  for (int64_t m = 0; m < p->batch->rows; m++) {
    float *gate = p->gate + m * inner, *up = p->up + m * inner;
    int64_t i = cols.first;
    for (; i + LANES <= cols.end; i += LANES) {
      vec g = load(gate + i), most = all(87.0f);
      ivec above = -g > most;
      vec e = exp_vec((vec)(((ivec)-g & ~above) | ((ivec)most & above)));
      store(gate + i, g / (all(1.0f) + e) * load(up + i));
    }
    for (; i < cols.end; i++) gate[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
    if (p->model->is_narrow)
      round_to_narrow(gate + cols.first, cols.end - cols.first,
                      p->gate_narrow + m * inner + cols.first);
  }
}

/* Gate and up, and what comes of them, of the same columns while they are near. */
static void gates(walk_t *w, const read_t *read) {
  ready_t ready = prepare(w, read);
  int64_t width = width_of(w->p, read), inner = w->p->model->inner;
  for (int64_t first; (first = take(w) * width) < inner;) {
    range_t cols = {first, MIN(first + width, inner)};
    columns(w->p, read, 0, cols, ready);
    columns(w->p, read, 1, cols, ready);
    swiglu(w->p, cols);
  }
  end_stage(w);
}

static void rotate(float *head, const float *cosine, const float *sine, int64_t half) {
  for (int64_t i = 0; i < half; i++) {
    float first = head[i], second = head[half + i];
    head[i] = first * cosine[i] - second * sine[i];
    head[half + i] = second * cosine[i] + first * sine[i];
  }
}

/* One row's key and value into their block of one head. */
#define DEFINE_PLACE(KIND, NUMBER, AS_NUMBER)                                                      \
  static void place_##KIND(const float *k, const float *v, int64_t dh, int64_t size, int64_t slot, \
                           NUMBER *keys, NUMBER *values) {                                         \
    for (int64_t i = 0; i < dh; i++) keys[i * size + slot] = AS_NUMBER(k[i]);                      \
    for (int64_t i = 0; i < dh; i++) values[slot * dh + i] = AS_NUMBER(v[i]);                      \
  }

#define AS_IT_IS(x) (x)
DEFINE_PLACE(wide, float, AS_IT_IS)
DEFINE_PLACE(narrow, narrow, narrowed)

/* Norms, rotation, and the new keys and values into their blocks. */
static void place_rows(walk_t *w, const layer_t *layer) {
  const pass_t *p = w->p;
  const model_t *model = p->model;
  const batch_t *batch = p->batch;
  int64_t dh = model->head_dim, size = model->block_size;
  EACH_ROW(w, m, batch->rows) {
    int64_t position = batch->positions[m], slot = position % size;
    const float *cosine = batch->cosine + position * dh / 2;
    const float *sine = batch->sine + position * dh / 2;
    for (int64_t h = 0; h < model->heads; h++) {
      float *q = p->q + (m * model->heads + h) * dh;
      if (layer->q_norm) rms_norm(q, layer->q_norm, dh, model->eps, q);
      rotate(q, cosine, sine, dh / 2);
    }
    int64_t block = batch->tables[batch->sequence[m] * batch->table_stride + position / size];
    for (int64_t h = 0; h < model->kv_heads; h++) {
      float *k = p->k + (m * model->kv_heads + h) * dh;
      if (layer->k_norm) rms_norm(k, layer->k_norm, dh, model->eps, k);
      rotate(k, cosine, sine, dh / 2);
      int64_t start = (block * model->kv_heads + h) * dh * size;
      const float *v = p->v + (m * model->kv_heads + h) * dh;
      if (model->is_narrow)
        place_narrow(k, v, dh, size, slot, (narrow *)layer->keys + start,
                     (narrow *)layer->values + start);
      else
        place_wide(k, v, dh, size, slot, (float *)layer->keys + start,
                   (float *)layer->values + start);
    }
  }
  end_stage(w);
}

#define MAX_BLOCK 64
#define MAX_HEAD 512
#define GROUP 3               /* queries that go through a block together: as registers allow */
#define WIDE (LANES < 16 ? 2 : 1) /* vectors of scores that are computed at once */

/* What one query has gathered so far: the largest score, and sums relative to it. */
typedef struct {
  float best, mass;
  float sum[MAX_HEAD];
} mixture_t;

/* Every function here works on COUNT queries of one key/value head, so that keys and values are
   loaded once; each query's own sums are in the same order whatever COUNT is. */
#define DEFINE_MIX(KIND, NUMBER, LOAD, WIDEN1, COUNT)                                              \
  static void score_##KIND##_##COUNT(const float *q, int64_t dh, const NUMBER *keys, int64_t size, \
                            float scale, float scores[COUNT][MAX_BLOCK]) {                         \
    for (int64_t j = 0; j < size; j += WIDE * LANES) {                                             \
      vec even[COUNT][WIDE] = {}, odd[COUNT][WIDE] = {}; /* one chain would wait for itself */     \
      for (int64_t i = 0; i < dh; i += 2) {                                                        \
        const NUMBER *key = keys + i * size + j;                                                   \
        _Pragma("GCC unroll 2") for (int v = 0; v < WIDE; v++) {                                   \
          vec first = LOAD(key + v * LANES), second = LOAD(key + size + v * LANES);                \
          _Pragma("GCC unroll 4") for (int g = 0; g < COUNT; g++) {                                \
            even[g][v] += all(q[g * dh + i]) * first;                                              \
            odd[g][v] += all(q[g * dh + i + 1]) * second;                                          \
          }                                                                                        \
        }                                                                                          \
      }                                                                                            \
      _Pragma("GCC unroll 4") for (int g = 0; g < COUNT; g++)                                      \
          _Pragma("GCC unroll 2") for (int v = 0; v < WIDE; v++)                                   \
              store(scores[g] + j + v * LANES, (even[g][v] + odd[g][v]) * all(scale));             \
    }                                                                                              \
  }                                                                                                \
                                                                                                   \
  static void add_values_##KIND##_##COUNT(const float shares[COUNT][MAX_BLOCK], const float *keep, \
                                 const NUMBER *values, int64_t dh, int64_t count,                  \
                                 mixture_t *mixes) {                                               \
    int64_t i = 0;                                                                                 \
    for (; i + 4 * LANES <= dh; i += 4 * LANES) {                                                  \
      vec acc[COUNT][4];                                                                           \
      _Pragma("GCC unroll 4") for (int g = 0; g < COUNT; g++)                                      \
          _Pragma("GCC unroll 4") for (int v = 0; v < 4; v++)                                      \
              acc[g][v] = load(mixes[g].sum + i + v * LANES) * all(keep[g]);                       \
      for (int64_t j = 0; j < count; j++)                                                          \
        _Pragma("GCC unroll 4") for (int v = 0; v < 4; v++) {                                      \
          vec value = LOAD(values + j * dh + i + v * LANES);                                       \
          _Pragma("GCC unroll 4") for (int g = 0; g < COUNT; g++)                                  \
              acc[g][v] += all(shares[g][j]) * value;                                              \
        }                                                                                          \
      _Pragma("GCC unroll 4") for (int g = 0; g < COUNT; g++)                                      \
          _Pragma("GCC unroll 4") for (int v = 0; v < 4; v++)                                      \
              store(mixes[g].sum + i + v * LANES, acc[g][v]);                                      \
    }                                                                                              \
    for (; i < dh; i++)                                                                            \
      for (int g = 0; g < COUNT; g++) {                                                            \
        float value = mixes[g].sum[i] * keep[g];                                                   \
        for (int64_t j = 0; j < count; j++) value += shares[g][j] * WIDEN1(values[j * dh + i]);    \
        mixes[g].sum[i] = value;                                                                   \
      }                                                                                            \
  }                                                                                                \
                                                                                                   \
  /* One block of keys and values into the mixtures; `count` positions of it are there. */         \
  static void mix_##KIND##_##COUNT(const float *q, const void *keys, const void *values, int64_t dh, \
                          int64_t size, int64_t count, float scale, mixture_t *mixes) {            \
    float scores[COUNT][MAX_BLOCK], keep[COUNT];                                                   \
    score_##KIND##_##COUNT(q, dh, keys, size, scale, scores);                                      \
    for (int g = 0; g < COUNT; g++) keep[g] = to_shares(scores[g], size, count, &mixes[g]);        \
    add_values_##KIND##_##COUNT(scores, keep, values, dh, count, mixes);                           \
  }

/* Scores become exp(score - largest); returns the factor of what was gathered before. */
static float to_shares(float *scores, int64_t size, int64_t count, mixture_t *mix) {
  float best = mix->best;
  for (int64_t j = 0; j < count; j++) best = MAX(best, scores[j]);
  for (int64_t j = count; j < size; j++) scores[j] = -INFINITY;
  for (int64_t j = 0; j < size; j += LANES)
    store(scores + j, exp_vec(load(scores + j) - all(best)));
  float keep[LANES];
  store(keep, exp_vec(all(mix->best - best)));
  float mass = mix->mass * keep[0];
  for (int64_t j = 0; j < count; j++) mass += scores[j];
  mix->mass = mass;
  mix->best = best;
  return keep[0];
}

DEFINE_MIX(wide, float, load, AS_IT_IS, 1)
DEFINE_MIX(wide, float, load, AS_IT_IS, 2)
DEFINE_MIX(wide, float, load, AS_IT_IS, 3)
DEFINE_MIX(narrow, narrow, widen, widen1, 1)
DEFINE_MIX(narrow, narrow, widen, widen1, 2)
DEFINE_MIX(narrow, narrow, widen, widen1, 3)

typedef void mix_t(const float *, const void *, const void *, int64_t, int64_t, int64_t, float,
                   mixture_t *);

/* Up to GROUP query heads of one key/value head h, from head `first` on, of row m. */
static void attend_some(const pass_t *p, const layer_t *layer, int64_t m, int64_t h, int64_t first,
                        int64_t count) {
  static mix_t *const mixes_of[2][GROUP] = {{mix_wide_1, mix_wide_2, mix_wide_3},
                                            {mix_narrow_1, mix_narrow_2, mix_narrow_3}};
  const model_t *model = p->model;
  mix_t *const *mix = mixes_of[model->is_narrow];
  size_t bytes = model->is_narrow ? sizeof(narrow) : sizeof(float);
  const batch_t *batch = p->batch;
  int64_t dh = model->head_dim, size = model->block_size, length = batch->positions[m] + 1;
  const int32_t *table = batch->tables + batch->sequence[m] * batch->table_stride;
  const float *q = p->q + (m * model->heads + first) * dh;
  float scale = 1.0f / sqrtf((float)dh);
  mixture_t mixes[GROUP];
  for (int64_t g = 0; g < count; g++) {
    mixes[g].best = -INFINITY;
    mixes[g].mass = 0.0f;
    memset(mixes[g].sum, 0, (size_t)dh * sizeof(float));
  }
  for (int64_t start = 0; start < length; start += size) {
    int64_t at = (table[start / size] * model->kv_heads + h) * dh * size;
    mix[count - 1](q, number_at(layer->keys, at, (int64_t)bytes),
                   number_at(layer->values, at, (int64_t)bytes), dh, size,
                   MIN(size, length - start), scale, mixes);
  }
  float *out = p->mixed + (m * model->heads + first) * dh;
  for (int64_t g = 0; g < count; g++)
    for (int64_t i = 0; i < dh; i++) out[g * dh + i] = mixes[g].sum[i] / mixes[g].mass;
  if (model->is_narrow) round_to_narrow(out, count * dh, p->mixed_narrow + (out - p->mixed));
}

/* The groups are as equal as can be: 4 heads are 2 and 2. */
static void attend_one(const pass_t *p, const layer_t *layer, int64_t m, int64_t h) {
  int64_t heads = p->model->heads / p->model->kv_heads, parts = (heads + GROUP - 1) / GROUP;
  for (int64_t i = 0; i < parts; i++) {
    int64_t first = heads * i / parts, end = heads * (i + 1) / parts;
    attend_some(p, layer, m, h, h * heads + first, end - first);
  }
}

static void attend(walk_t *w, const layer_t *layer) {
  const pass_t *p = w->p;
  int64_t per_head = (p->batch->rows + TASK_ROWS - 1) / TASK_ROWS;
  int64_t tasks = per_head * p->model->kv_heads;
  for (int64_t task; (task = take(w)) < tasks;) {
    int64_t h = task / per_head, first = task % per_head * TASK_ROWS;
    for (int64_t m = first; m < MIN(first + TASK_ROWS, p->batch->rows); m++)
      attend_one(p, layer, m, h);
  }
  end_stage(w);
}

static void run_layer(walk_t *w, int64_t index) {
  const pass_t *p = w->p;
  const layer_t *layer = &p->model->layers[index];
  const linear_t *linear = layer->linear;
  int64_t rows = p->batch->rows, d = p->model->hidden, inner = p->model->inner;
  int base = (int)index * NUM_LINEAR;
  output_t qkv[] = {{&linear[Q], base + Q, p->q, linear[Q].out, 0},
                    {&linear[K_], base + K_, p->k, linear[K_].out, 0},
                    {&linear[V_], base + V_, p->v, linear[V_].out, 0}};
  output_t back[] = {{&linear[O], base + O, p->x, d, 1}};
  output_t up[] = {{&linear[GATE], base + GATE, p->gate, inner, 0},
                   {&linear[UP], base + UP, p->up, inner, 0}};
  output_t down[] = {{&linear[DOWN], base + DOWN, p->x, d, 1}};
  norm_rows(w, layer->input_norm, p->normed, p->normed_narrow);
  modules(w, &(read_t){p->normed, p->normed_narrow, rows, qkv, 3, 0});
  place_rows(w, layer);
  attend(w, layer);
  modules(w, &(read_t){p->mixed, p->mixed_narrow, rows, back, 1, 0});
  norm_rows(w, layer->post_norm, p->normed, p->normed_narrow);
  gates(w, &(read_t){p->normed, p->normed_narrow, rows, up, 2, 0});
  modules(w, &(read_t){p->gate, p->gate_narrow, rows, down, 1, 0});
}

static void embed_row(const model_t *model, int64_t token, float *x) {
  int64_t d = model->hidden, at = token * d;
  if (model->is_narrow)
    for (int64_t i = 0; i < d; i++) x[i] = widen1(((const narrow *)model->embed)[at + i]);
  else
    memcpy(x, (const float *)model->embed + at, (size_t)d * sizeof(float));
}

/* What layer `number` put out, where it is wanted. */
static void capture(walk_t *w, int64_t number, const float *outputs) {
  const batch_t *batch = w->p->batch;
  int64_t d = w->p->model->hidden, count = batch->num_captured;
  for (int64_t c = 0; c < count; c++) {
    if (batch->captured_layers[c] != number) continue;
    EACH_ROW(w, m, batch->rows)
      memcpy(batch->captured + (m * count + c) * d, outputs + m * d, (size_t)d * sizeof(float));
    end_stage(w);
  }
}

static void run(team_t *team, int rank, void *argument) {
  (void)rank;
  const pass_t *p = argument;
  const model_t *model = p->model;
  const batch_t *batch = p->batch;
  walk_t walk = {p, team, 0}, *w = &walk;
  int64_t d = model->hidden;
  EACH_ROW(w, m, batch->rows) embed_row(model, batch->tokens[m], p->x + m * d);
  end_stage(w);
  for (int64_t i = 0; i < model->num_layers; i++) {
    run_layer(w, i);
    if (i + 1 < model->num_layers) capture(w, i + 1, p->x);
  }
  norm_rows(w, model->final_norm, batch->hidden, NULL);
  capture(w, model->num_layers, batch->hidden);
  EACH_ROW(w, i, batch->num_wanted) {
    memcpy(p->chosen + i * d, batch->hidden + batch->wanted[i] * d, (size_t)d * sizeof(float));
    if (model->is_narrow) round_to_narrow(p->chosen + i * d, d, p->chosen_narrow + i * d);
  }
  end_stage(w);
  int module = (int)model->num_layers * NUM_LINEAR;
  output_t head[] = {{&model->head, module, batch->logits, model->vocab, 0}};
  modules(w, &(read_t){p->chosen, p->chosen_narrow, batch->num_wanted, head, 1, 1});
}

static int64_t largest_rank(const pass_t *p) {
  int64_t largest = 0;
  for (int64_t s = 0; s < p->batch->num_segments; s++)
    for (int64_t i = 0; i <= p->model->num_layers * NUM_LINEAR; i++)
      largest = MAX(largest, p->batch->segments[s].modules[i].rank);
  return largest;
}

/* 0, or -1 when there is no memory. Keys and values of the rows are written into their blocks. */
int forward(team_t *team, const model_t *model, const batch_t *batch) {
  pass_t p = {.model = model, .batch = batch};
  p.max_rank = (largest_rank(&p) + 15) / 16 * 16;
  p.low_stride = 3 * p.max_rank;
  int64_t q_size = model->heads * model->head_dim, kv_size = model->kv_heads * model->head_dim;
  int64_t sizes[] = {model->hidden, model->hidden, q_size, kv_size, kv_size, q_size,
                     model->inner, model->inner, p.low_stride, model->hidden};
  float **places[] = {&p.x, &p.normed, &p.q, &p.k, &p.v, &p.mixed, &p.gate, &p.up, &p.low,
                      &p.chosen};
  int64_t per_row = 0;
  for (int i = 0; i < 10; i++) per_row += sizes[i];
  int64_t widest = MAX(MAX(model->hidden, q_size), model->inner);
  int64_t narrow_sizes[] = {model->hidden, q_size, model->inner, model->hidden};
  narrow **narrow_places[] = {&p.normed_narrow, &p.mixed_narrow, &p.gate_narrow, &p.chosen_narrow};
  for (int i = 0; i < 4 && model->is_narrow; i++) per_row += (narrow_sizes[i] + 1) / 2;
  int64_t packed = model->is_narrow || batch->rows < MANY_ROWS ? 0 : packed_size(batch->rows, widest);
  int64_t floats = batch->rows * per_row + packed;
  float *memory = scratch(team, (size_t)floats * sizeof(float));
  int64_t stages = model->num_layers * STAGES_OF_A_LAYER + OTHER_STAGES + batch->num_captured;
  p.next_task = calloc((size_t)stages, sizeof(atomic_long));
  int64_t offset = 0;
  for (int i = 0; i < 10; i++) {
    *places[i] = memory + offset;
    offset += sizes[i] * batch->rows;
  }
  for (int i = 0; i < 4 && model->is_narrow; i++) {
    *narrow_places[i] = (narrow *)(memory + offset);
    offset += (narrow_sizes[i] + 1) / 2 * batch->rows;
  }
  p.packed = memory + offset;
  if (memory != NULL && p.next_task != NULL) work(team, run, &p);
  int failed = memory == NULL || p.next_task == NULL;
  free(p.next_task);
  return failed ? -1 : 0;
}
