/* Queries, keys and values of a row, made ready for attention: norms, rotation, and a place in the
   blocks. For attention.c. */

#ifndef TINKERCLOUD_PLACING_H
#define TINKERCLOUD_PLACING_H

#include "pass.h"
#include "rotary.h"

static inline int64_t word_bytes(const model_t *model) { return model->is_narrow ? 2 : 4; }

/* Keys, or values, of one head in a block; size: their numbers of a token. */
static inline void *block_at(const model_t *model, void *blocks, int64_t size, int64_t block,
                             int64_t h) {
  return (char *)blocks + (block * model->kv_heads + h) * size * KV_BLOCK * word_bytes(model);
}

static inline void *keys_at(const model_t *model, const layer_t *layer, int64_t block, int64_t h) {
  return block_at(model, layer->keys, model->head_dim + model->key_errors, block, h);
}

static inline void *values_at(const model_t *model, const layer_t *layer, int64_t block,
                              int64_t h) {
  return block_at(model, layer->values, model->head_dim, block, h);
}

static inline void place_wide(const float *k, const float *v, int64_t dh, int64_t slot, float *keys,
                       float *values) {
  for (int64_t i = 0; i < dh; i++) keys[i * KV_BLOCK + slot] = k[i];
  memcpy(values + slot * dh, v, (size_t)dh * sizeof *v);
}

/* dims: whose rounding errors go behind. */
static inline void place_key(const model_t *model, const int64_t *dims, float *k, int64_t slot,
                             narrow *keys) {
  int64_t dh = model->head_dim, size = dh + model->key_errors;
  narrow numbers[size];
  for (int64_t i = dh; i < size; i++) numbers[i] = error_of(k[dims[i - dh]]);
  round_to_narrow(k, dh, numbers);
  for (int64_t i = 0; i < size; i += 2) {
    memcpy(keys + (i / 2 * KV_BLOCK + slot) * 2, numbers + i, 4);
    __asm__("" ::: "memory"); /* one by one: the compiler's scatter takes several times as long */
  }
}

/* Every second number of LANES pairs, the first ones or the odd ones, from the lower halves. What is
   there is not read: in a fresh block the processor would wait for it. */
INLINE void store_every_second(narrow *pairs, uvec numbers, int odd) {
#if defined(__AVX512BW__)
  __m512i words = (__m512i)(numbers << 16 * odd);
  _mm512_mask_storeu_epi16(pairs, odd ? 0xAAAAAAAA : 0x55555555, words);
#else
  for (int j = 0; j < LANES; j++) pairs[2 * j + odd] = (narrow)numbers[j];
#endif
}

/* ends: this is the last token of its sequence. Then the value beside it is read, with probability
   0, and may be left from a sequence whose numbers are none. */
static inline void place_value(float *v, int64_t dh, int64_t slot, int ends, narrow *values) {
  narrow *pairs = values + slot / 2 * dh * 2;
  int odd = slot % 2;
  int64_t i = 0;
  for (; i + LANES <= dh; i += LANES) {
    uvec rounded = narrowed_vec(load(v + i));
    store(v + i, (vec)(rounded << 16));
    if (ends && !odd)
      store((float *)(pairs + 2 * i), (vec)rounded);
    else
      store_every_second(pairs + 2 * i, rounded, odd);
  }
  for (; i < dh; i++) {
    pairs[2 * i + odd] = narrowed(v[i]);
    v[i] = widen1(pairs[2 * i + odd]);
    if (ends && !odd) pairs[2 * i + 1] = 0;
  }
}

static inline int ends_sequence(const batch_t *batch, int64_t m) {
  return m + 1 == batch->rows || batch->sequence[m + 1] != batch->sequence[m];
}

/* The norm of one head, where heads have norms of their own, and its rotation. */
static inline void ready_head(const model_t *model, const float *norm, const rotary_t *rotary, float *x) {
  if (norm && !model->norm_spans_heads) rms_norm(x, norm, model->head_dim, model->eps, x);
  rotate_head(rotary, x);
}

/* Norms, rotation, and the new key and value of a row into its block, of key/value head h and the
   queries that read it; q, k and v are then what attention computes with, where keys are narrow q as
   pairs of numbers. No two rows write to one place: a block with room left is one sequence's alone,
   and those that several share are full. */
static inline void place_head(const pass_t *p, const layer_t *layer, int64_t m, int64_t h) {
  const model_t *model = p->model;
  const batch_t *batch = p->batch;
  int64_t dh = model->head_dim, group = model->heads / model->kv_heads;
  int64_t position = batch->positions[m], slot = position % KV_BLOCK;
  int64_t half = model->num_rotated / 2;
  int64_t angles = (position * model->num_rotary + layer->rotary) * half;
  const rotary_t rotary = {batch->cosine + angles, batch->sine + angles, half,
                           model->rotates_neighbours};
  for (int64_t i = h * group; i < (h + 1) * group; i++)
    ready_head(model, layer->q_norm, &rotary, p->q + (m * model->heads + i) * dh);
  float *k = p->k + (m * model->kv_heads + h) * dh, *v = p->v + (m * model->kv_heads + h) * dh;
  ready_head(model, layer->k_norm, &rotary, k);
  int64_t block = batch->tables[batch->sequence[m] * batch->table_stride + position / KV_BLOCK];
  void *keys = keys_at(model, layer, block, h), *values = values_at(model, layer, block, h);
  if (model->is_narrow) {
    place_value(v, dh, slot, ends_sequence(batch, m), values);
    place_key(model, layer->key_dims + h * model->key_errors, k, slot, keys);
  } else {
    place_wide(k, v, dh, slot, keys, values);
  }
}

static inline void fetch(const void *from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += LINE_BYTES) __builtin_prefetch((const char *)from + i);
}

/* Into the cache, what `place_head` will read and where it will write. */
static inline void fetch_place(const pass_t *p, const layer_t *layer, int64_t m, int64_t h) {
  const model_t *model = p->model;
  const batch_t *batch = p->batch;
  int64_t block = batch->tables[batch->sequence[m] * batch->table_stride +
                                batch->positions[m] / KV_BLOCK];
  int64_t bytes = word_bytes(model), value = model->head_dim * bytes;
  int64_t keys = (model->head_dim + model->key_errors) * KV_BLOCK * bytes;
  int64_t slot = batch->positions[m] % KV_BLOCK, head = model->head_dim * (int64_t)sizeof *p->q;
  int64_t group = model->heads / model->kv_heads, at = m * model->kv_heads + h;
  fetch(p->q + at * group * model->head_dim, group * head);
  fetch(p->k + at * model->head_dim, head);
  fetch(p->v + at * model->head_dim, head);
  fetch(keys_at(model, layer, block, h), keys);
  if (model->is_narrow) slot = slot / 2, value *= 2; /* two tokens side by side */
  fetch((const char *)values_at(model, layer, block, h) + slot * value, value);
}

/* Norms of all heads together, of a row. */
static inline void norm_all_heads(const pass_t *p, const layer_t *layer, int64_t m) {
  const model_t *model = p->model;
  int64_t q_size = model->heads * model->head_dim, kv_size = model->kv_heads * model->head_dim;
  float *q = p->q + m * q_size, *k = p->k + m * kv_size;
  rms_norm(q, layer->q_norm, q_size, model->eps, q);
  rms_norm(k, layer->k_norm, kv_size, model->eps, k);
}

#endif
