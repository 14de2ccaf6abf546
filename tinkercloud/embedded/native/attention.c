/* Attention over keys and values that lie in blocks, for forward.c.

   A query goes through its sequence's blocks in order, one after the other, with the largest score
   and the sums so far (the online softmax of Milakov and Gimelshein, arXiv 1805.02867). What it
   computes depends on the block size and on its own position alone: not on the rows beside it, nor
   on whether keys and values were written in this pass or an earlier one. */

#include "pass.h"

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

/* Norms, rotation, and the new keys and values into their blocks. No two rows write to one place: a
   block with room left is one sequence's alone, and those that several share are full. */
void place_rows(walk_t *w, const layer_t *layer) {
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
   loaded once; each query's own sums are in the same order whatever COUNT is. Keys lie by dimension,
   so that a vector is one dimension of LANES positions, and values by position: neither product
   needs a sum over lanes. */
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

/* Scores become exp(score - largest); returns the factor of what was gathered before. What a block
   holds past `count` is left from others and may be no number: it gets no share, and is not read
   as a value. */
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
  if (model->is_narrow)
    round_to_narrow(out, count * dh,
                    p->mixed_narrow + m * row_size(1, model->heads * dh) + first * dh);
}

/* The groups are as equal as can be, 4 heads are 2 and 2, since one query alone waits for its own
   sums. */
static void attend_one(const pass_t *p, const layer_t *layer, int64_t m, int64_t h) {
  int64_t heads = p->model->heads / p->model->kv_heads, parts = (heads + GROUP - 1) / GROUP;
  for (int64_t i = 0; i < parts; i++) {
    int64_t first = heads * i / parts, end = heads * (i + 1) / parts;
    attend_some(p, layer, m, h, h * heads + first, end - first);
  }
}

void attend(walk_t *w, const layer_t *layer) {
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
