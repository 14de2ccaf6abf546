/* What the instructions compute on this machine, for compiler.py, which asks before it uses them. */

#include "../packing.h"
#include "amx.h"

#if defined(__AMX_BF16__)

/* Whole groups of rows and not, some panels and one, a chain of sums that is interrupted, its last tile short. */
#define ROWS 83 /* 64 + 19 */
#define OUTPUTS 107
#define INPUTS 490
#define PADDED 512

typedef struct {
  narrow x[ROWS * PADDED];
  char w[PADDED * 112 * sizeof(narrow)];
  float found[ROWS * OUTPUTS], expected[ROWS * OUTPUTS];
} check_t;

/* Numbers that are the same in every run. */
static uint32_t next_random(uint32_t *state) {
  *state = *state * 1664525u + 1013904223u;
  return *state >> 8;
}

/* whole: small whole numbers, of which every sum is exact, in whatever order; else any. */
static narrow next_number(uint32_t *state, int whole) {
  uint32_t bits = next_random(state);
  return narrowed(whole ? (float)(bits % 17) - 8.0f : (float)bits / (1 << 23) - 1.0f);
}

static void fill(check_t *c, int whole) {
  static narrow rows[OUTPUTS * INPUTS];
  uint32_t state = 1;
  memset(c->x, 0, sizeof c->x);
  for (int64_t m = 0; m < ROWS; m++)
    for (int64_t i = 0; i < INPUTS; i++) c->x[m * PADDED + i] = next_number(&state, whole);
  for (int64_t i = 0; i < OUTPUTS * INPUTS; i++) rows[i] = next_number(&state, whole);
  matrix_t matrix = {1, OUTPUTS, INPUTS, PADDED};
  for (int64_t panel = 0; panel < panels_of(OUTPUTS); panel++)
    pack_panel(&matrix, panel, rows, c->w);
}

static product_t product_of(const check_t *c, float *y) {
  return (product_t){.x = c->x, .x_stride = PADDED, .w = c->w, .is_narrow = 1, .k = INPUTS,
                     .out = OUTPUTS, .y = y, .y_stride = OUTPUTS, .scale = 1.0f};
}

/* count: rows of each call. */
static void multiply_rows(rows_times_panels_t *form, const check_t *c, int64_t count, float *y) {
  product_t p = product_of(c, y);
  memset(y, 0xFF, sizeof c->found);
  for (int64_t first = 0; first < ROWS; first += count)
    form(&p, (range_t){first, MIN(first + count, ROWS)}, (range_t){0, panels_of(OUTPUTS)});
}

static int is_equal(check_t *c, rows_times_panels_t *form, int64_t count) {
  multiply_rows(form, c, count, c->expected);
  return memcmp(c->found, c->expected, sizeof c->found) == 0;
}

/* ---- attention: five queries, with whole and partial tiles of dimensions, and two units */

#define QUERIES 5
#define HEAD_DIM 40
#define KEY_SIZE 48
#define QUERY_SIZE 64
#define SUMS_WIDTH 48
#define BLOCKS 7

typedef struct {
  narrow queries[2 * QUERIES * QUERY_SIZE];
  narrow keys[BLOCKS][KEY_SIZE * KV_BLOCK], values[BLOCKS][HEAD_DIM * KV_BLOCK];
  float scores[MOST_UNITS * 2 * QUERIES * UNIT], sums[QUERIES * SUMS_WIDTH];
} attended_t;

static void fill_numbers(narrow *numbers, int64_t count, uint32_t *state, int whole) {
  for (int64_t i = 0; i < count; i++) numbers[i] = next_number(state, whole);
}

/* Of scores the rounded upper halves are then probabilities: any numbers do. */
static void attend_once(attended_t *a, attention_step_t *score, attention_step_t *add_values,
                        int whole) {
  const void *keys[BLOCKS], *values[BLOCKS];
  float keep[MOST_UNITS * QUERIES];
  int scales[MOST_UNITS] = {0, 1};
  uint32_t state = 2;
  memset(a, 0, sizeof *a);
  fill_numbers(a->queries, 2 * QUERIES * QUERY_SIZE, &state, whole);
  fill_numbers(a->keys[0], BLOCKS * KEY_SIZE * KV_BLOCK, &state, whole);
  fill_numbers(a->values[0], BLOCKS * HEAD_DIM * KV_BLOCK, &state, whole);
  for (int i = 0; i < BLOCKS; i++) keys[i] = a->keys[i], values[i] = a->values[i];
  for (int i = 0; i < MOST_UNITS * QUERIES; i++) keep[i] = 0.5f;
  attention_t attention = {.rows = 2 * QUERIES, .parts = 1, .blocks = BLOCKS, .head_dim = HEAD_DIM,
                           .width = SUMS_WIDTH, .key_size = KEY_SIZE, .query_size = QUERY_SIZE,
                           .queries = a->queries, .keys = keys, .values = values,
                           .scores = a->scores, .sums = a->sums, .keep = keep, .scales = scales};
  score(&attention);
  for (int64_t row = 0; row < MOST_UNITS * 2 * QUERIES; row++) {
    narrow shares[UNIT];
    for (int64_t i = 0; i < UNIT; i++) shares[i] = narrowed(a->scores[row * UNIT + i]);
    memcpy(a->scores + row * UNIT, shares, sizeof shares);
  }
  add_values(&attention);
}

static int attends_equally(int whole) {
  static attended_t found, expected;
  attend_once(&found, score_amx, add_values_amx, whole);
  attend_once(&expected, score_emulated, add_values_emulated, whole);
  return memcmp(&found, &expected, sizeof found) == 0;
}

/* 0: the instructions compute other products than these are, or a row's bits depend on the rows
   beside it. 1: they do not. 2: nor do they round otherwise than the plain C. */
int check_amx(void) {
  check_t *c = aligned_alloc(LINE_BYTES, rounded_up(sizeof *c, LINE_BYTES));
  if (c == NULL) return 0;
  fill(c, 1);
  multiply_rows(multiply_amx, c, ROWS, c->found);
  int is_right = is_equal(c, multiply_emulated, ROWS);
  fill(c, 0);
  multiply_rows(multiply_amx, c, ROWS, c->found);
  for (int64_t count = 1; count <= 3 * MOST_TILE_ROWS; count += 5)
    is_right = is_right && is_equal(c, multiply_amx, count);
  int is_same = is_equal(c, multiply_emulated, ROWS) && attends_equally(0);
  is_right = is_right && attends_equally(1);
  free(c);
  return is_right + (is_right && is_same);
}

#endif
