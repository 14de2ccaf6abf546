/* The network and the batch, as Python describes them: structures.py mirrors these structures, and
   layouts.c says how they lie in memory, so that a mirror that differs is refused. */

#ifndef TINKERCLOUD_NETWORK_H
#define TINKERCLOUD_NETWORK_H

#include <stdint.h>

#include "scan.h"

#define KV_BLOCK 16 /* tokens of a block of keys and values */

typedef struct {
  /* Packed (packed.h): float, or narrow where the model is. A row of its inputs takes `width`
     numbers, the same in modules with as many inputs. */
  const void *weight;
  const float *bias;
  int64_t out, in, width;
  /* Where the model is narrow, inputs that are read as pairs, a rounded number and its rounded
     error: their numbers, ascending. Their weights are there once more, from input row_size(1, in)
     on. Modules that read the same rows have the same ones. */
  const int64_t *salient;
  int64_t num_salient;
} linear_t;

enum { Q, K_, V_, O, GATE, UP, DOWN, NUM_LINEAR };

/* What norms multiply with; NULL: there is none at that place. q_norm and k_norm: of one head, or of
   all together (network's norm_spans_heads). */
typedef struct {
  const float *input_norm, *mixed_norm, *mlp_norm, *fed_norm; /* before and after attention, MLP */
  const float *q_norm, *k_norm;
  linear_t linear[NUM_LINEAR];
  /* Blocks of KV_BLOCK tokens. float: [block][Hkv][Dh][token] and [block][Hkv][token][Dh]; narrow:
     by pairs, of dimensions [block][Hkv][(Dh + key_errors) / 2][token][2] and of tokens
     [block][Hkv][token / 2][Dh][2]. */
  void *keys, *values;
  const int64_t *key_dims; /* narrow: [Hkv][key_errors], whose rounding errors go with a key */
  int64_t window; /* a row sees the last `window` positions, its own among them; 0: all */
  int64_t rotary; /* which of the rotary tables it reads */
} layer_t;

/* Of the gate: gate * sigmoid(gate), or gate * sigmoid(2 u) with u = sqrt(2 / pi) (gate + 0.044715
   gate^3), which is the tanh form of GELU. */
enum { SILU, GELU_TANH };

/* What makes a draft head of a network with one layer (draft_head.c). A row's inputs are a feature,
   in x, and a token of the target's; q, k and v read both, normed and side by side, the token's
   embedding first. Its number type is narrow, whatever the target's is. */
typedef struct {
  linear_t fuse;      /* of a target's states, side by side, to a feature */
  int64_t num_states; /* that it reads of each row */
  const float *embed_norm, *feature_norm;
  const int64_t *ids; /* [vocab], ascending: the target's number of each token that it can draft */
} draft_head_t;

typedef struct {
  int64_t num_layers, hidden, heads, kv_heads, head_dim, inner, vocab, is_narrow;
  int64_t norm_spans_heads, activation;
  int64_t num_rotated, rotates_neighbours, num_rotary; /* of a head: dimensions; tables */
  int64_t key_errors; /* an even number; 0 where the model is not narrow */
  float eps;
  float score_scale, score_cap; /* cap * tanh(score / cap) in place of each score; 0: none */
  float embedding_scale, residual_scale; /* residual: of what attention and MLP add */
  float logit_cap; /* as score_cap, of logits */
  const void *embed; /* packed [vocab, hidden]; of a draft head all of the target's */
  int64_t embed_width, embed_is_narrow;
  const float *final_norm;
  linear_t head;
  const layer_t *layers;
  const draft_head_t *draft; /* NULL: it is none */
} model_t;

typedef struct {
  const float *a, *b; /* packed [rank, in] and [out, rank]; NULL: this module has none */
  int64_t rank;
} lora_t;

/* Rows first..first+count-1 read one adapter: NUM_LINEAR modules of each layer, then the head's. */
typedef struct {
  int64_t first, count;
  float scale;
  const lora_t *modules;
} segment_t;

/* Where one layer's activations go that its gradient needs: numbers are those that products and
   attention have read, without the errors of queries and salient inputs. */
typedef struct {
  float *middle;        /* [rows][D], what lies between attention and MLP */
  float *mixed_out, *fed_out; /* [rows][D], what enters the norms after these; NULL without them */
  float *raw_q, *raw_k; /* [rows][heads][Dh], what enters the norms of heads; NULL without these */
  void *q, *k, *v;      /* numbers [rows][heads][Dh], rotated */
  void *mixed;          /* numbers [rows][Hq Dh] */
  void *gates;          /* numbers [rows][gate and up: 2 F] */
} kept_t;

/* How long a step of a pass took on its first thread, in all layers together; of that, how long it
   waited for the other threads at the ends of stages. Nanoseconds. */
typedef struct {
  int64_t ns, waiting_ns;
} step_time_t;

/* Rows whose targets' logits are wanted, and nothing else of their logits. */
typedef struct {
  int64_t num_rows;
  const int64_t *rows;   /* of the batch, ascending */
  const int64_t *starts; /* [num_rows + 1]: a row's targets in `ids` begin there */
  const int64_t *ids;
  float *logits; /* out: of each target */
  double *norms; /* out: [num_rows], the log of the sum of exp of all logits of a row */
} scores_t;

/* Rows from which a token each is drawn: all of the vocabulary can be drawn. What may win is as of a
   `scan_t`, with its weights. Of most rows nothing else is wanted of their logits. */
typedef struct {
  int64_t num_rows, limit;
  const int64_t *rows; /* of the batch, ascending */
  const draw_t *draws; /* [num_rows]: top_k and top_p are not read */
  double *norms;       /* out: [num_rows], the log of the sum of exp(weight) */
  int64_t *count;      /* out: [num_rows], how many may win; -1: more than `limit` */
  int64_t *ids;        /* out: [num_rows][limit] */
  uint32_t *words;     /* out: [num_rows][limit], the noise's random numbers */
  float *weights;      /* out: [num_rows][limit] */
  const int64_t *kept; /* [num_rows]: which of `logits` are the row's; -1: they are not kept */
  float *logits;       /* out: [number of rows that keep theirs][V] */
  const int64_t *drafted; /* [num_rows]: a token whose logit is told besides; -1: none */
  float *drafted_logits;  /* out: [num_rows], of rows with such a token */
} drawing_t;

/* Rows from which a draft head draws a token each, of all that it can: its number among them, -1
   where no logit is a number, and by how much its score (noise.h), at temperature 0 its logit, leads
   the second best one's. */
typedef struct {
  int64_t num_rows;
  const int64_t *rows; /* of the batch, ascending */
  const draw_t *draws; /* [num_rows]: top_k and top_p are not read */
  int64_t *ids;        /* out: [num_rows] */
  float *leads;        /* out: [num_rows] */
} guesses_t;

/* A pass may be cut between layers, and before the logits: a part of it computes the embeddings
   where `embeds`, of a draft head the features where there are `states`, the layers first_layer..end_layer - 1, after the model's last layer the final
   norm where `hidden` is given, and from that the logits of `logit_rows`, `scores` and `drawing`. */
typedef struct {
  int64_t rows, embeds, first_layer, end_layer;
  float *x;           /* in and out: [rows][D], between layers; NULL where nobody cuts */
  const kept_t *kept; /* of each of these layers; or NULL */
  const int64_t *tokens;
  const int32_t *positions;  /* of each row in its sequence */
  const int32_t *sequence;   /* of each row: its row in `tables` */
  const int32_t *tables;     /* block numbers of each sequence, in order */
  int64_t table_stride;
  const float *cosine, *sine; /* [position][table][num_rotated / 2] */
  int64_t num_segments;
  const segment_t *segments;
  int64_t num_logit_rows;
  const int64_t *logit_rows; /* rows whose logits are asked for, ascending */
  int64_t num_captured;
  const int64_t *captured_layers; /* 1 the first; the last one is `hidden` */
  float *captured;       /* out: [rows][num_captured][D], what these layers put out */
  float *hidden;         /* out: [rows][D], after the final norm */
  float *logits;         /* out: [num_logit_rows][V] */
  const scores_t *scores; /* or NULL */
  const drawing_t *drawing; /* or NULL */
  step_time_t *times;    /* out: [num_steps], added to what is there; or NULL */
  /* Of a draft head, or NULL. */
  const float *states;      /* [rows][num_states][D], the target's */
  const guesses_t *guesses;
} batch_t;

/* Chains of tokens that a draft head draws one after the other, each of a sequence of its own. A
   token's row takes the places behind those that the sequence has in its blocks; no one reads them
   there afterwards. */
typedef struct {
  int64_t chains, steps;
  const int64_t *most;    /* [chains], 1..steps: tokens of each */
  const float *outputs;   /* [chains][D]: the layer's, of each sequence's last row */
  const int32_t *lengths; /* [chains]: rows of each sequence */
  const int32_t *tables;  /* [chains][table_stride] */
  int64_t table_stride;
  const float *cosine, *sine;
  const draw_t *draws; /* [chains]: of the first token; the next ones have the next positions */
  int64_t *tokens;     /* out: [chains][steps], the target's; -1 from where nothing can be drawn */
  float *leads;        /* out: [chains][steps], of each */
  float least_lead;    /* a token that leads by less is the last one of its chain */
} chains_t;

#endif
