/* The kernels of product.h: tiles of some rows and some panels, whose sums stay in registers while
   weights go by as vectors of outputs and inputs are broadcast. Tiles of other sizes differ in how
   many sums they hold at once, and in nothing else. With AMX, products in bfloat16 are amx/'s. */

#include "product.h"

#include "amx/amx.h"
#include "pairs.h"

#define VECS (PANEL / LANES) /* vectors of a panel */

/* PANELS_OF: how many panels a tile of 1, 2, ... rows holds, as registers allow; from MIXED_ROWS on
   they are the same, because tiles of one call differ by a row. Few rows take several panels at
   once, since a sum alone would wait for itself. */
#if LANES == 16 /* 32 registers */
#define TILE_ROWS 8
#define TILES(DEFINE, KIND)                                                                        \
  DEFINE(KIND, 1, 8) DEFINE(KIND, 2, 8) DEFINE(KIND, 3, 3) DEFINE(KIND, 4, 3) DEFINE(KIND, 5, 3)   \
  DEFINE(KIND, 6, 3) DEFINE(KIND, 7, 3) DEFINE(KIND, 8, 3)
#elif LANES == 8 /* 16 registers */
#define TILE_ROWS 6
#define TILES(DEFINE, KIND)                                                                        \
  DEFINE(KIND, 1, 3) DEFINE(KIND, 2, 2) DEFINE(KIND, 3, 1) DEFINE(KIND, 4, 1) DEFINE(KIND, 5, 1)   \
  DEFINE(KIND, 6, 1)
#else
#define TILE_ROWS 2
#define TILES(DEFINE, KIND) DEFINE(KIND, 1, 1) DEFINE(KIND, 2, 1)
#endif
#define MOST_PANELS 8
#define SUM_PANELS 12 /* whose sums are kept while inputs go by, a multiple of what tiles hold */
#define FEW_ROWS_PANELS 6 /* tiles of few rows hold so many, and wait for memory */

#define CHUNK_BYTES 2048 /* of a row of inputs that go together at most */
#define MANY_ROWS 32 /* widening these takes time, so that a task has MANY_PANELS or more */
#define MANY_PANELS 6

/* What a tile computes with. */
typedef struct {
  const char *x;
  int64_t x_stride; /* bytes */
  const char *w;
  int64_t w_stride; /* bytes from panel to panel */
  int64_t steps;
  const char *next; /* weights to fetch meanwhile */
  int64_t next_stride; /* bytes from step to step */
  float *sums; /* [row][SUM_PANELS * PANEL] */
  int begins;  /* from zero, not from `sums` */
} tile_t;

/* ---- one step of a tile: an input or a pair of inputs, and 64 bytes of each panel */

INLINE vec broadcast(const char *x) { return all(*(const float *)x); }

#define ADD_STEP(ROWS, PANELS, RIGHT, LEFT, ADD)                                                   \
  do {                                                                                             \
    vec right_[PANELS][VECS];                                                                      \
    EACH(c, PANELS) EACH(v, VECS) {                                                                \
      right_[c][v] = RIGHT(w + c * ws + v * LANES * 4);                                            \
      IN_REGISTER(right_[c][v]);                                                                   \
    }                                                                                              \
    EACH(r, ROWS) {                                                                                \
      vec left_ = LEFT(x[r / 3] + r % 3 * xs);                                                     \
      IN_REGISTER(left_);                                                                          \
      EACH(c, PANELS) EACH(v, VECS) ADD(a[r][c][v], left_, right_[c][v]);                          \
    }                                                                                              \
  } while (0)

INLINE vec load_weights(const char *w) { return load((const float *)w); }

#define wide_STRIDE 4 /* bytes of a step's inputs */
#define wide_STEP(ROWS, PANELS) ADD_STEP(ROWS, PANELS, load_weights, broadcast, ADD_PRODUCT)

#if HAS_PAIRS
#define paired_STRIDE 4
#define paired_STEP(ROWS, PANELS) ADD_STEP(ROWS, PANELS, load_weights, broadcast, ADD_PAIRS)
#endif

/* The compiler may not keep what it has read from there: registers are short. */
#define READ_AGAIN(pointer) __asm__("" : "+r"(pointer))

/* Inputs are widened before, weights as they are read. */
INLINE vec even_weights(const char *w) { return even_half(load_weights(w)); }
INLINE vec odd_weights(const char *w) { return odd_half(load_weights(w)); }
INLINE vec broadcast_odd(const char *x) { return broadcast(x + 4); }
#define EVEN_STEP(ROWS, PANELS) ADD_STEP(ROWS, PANELS, even_weights, broadcast, ADD_PRODUCT)
#define ODD_STEP(ROWS, PANELS) ADD_STEP(ROWS, PANELS, odd_weights, broadcast_odd, ADD_PRODUCT)
#define widened_STRIDE 8
#if HAS_PAIRS /* in the order of the instruction */
#define widened_STEP(ROWS, PANELS) ODD_STEP(ROWS, PANELS); EVEN_STEP(ROWS, PANELS)
#else
#define widened_STEP(ROWS, PANELS) EVEN_STEP(ROWS, PANELS); READ_AGAIN(w); ODD_STEP(ROWS, PANELS)
#endif

#define ALONE __attribute__((noinline)) /* the registers are all needed */

/* A step of 16 registers is short: counting the steps would be a twentieth of it. */
#if LANES == 8
#define UNROLLED _Pragma("GCC unroll 4")
#else
#define UNROLLED
#endif
/* A step of three rows has so many instructions that few steps are underway at once, too few to keep
   the memory busy; and while the rows of a second tile meet weights that are in the cache, nothing
   would be read of the next ones. With 16 lanes, without bfloat16's instruction, a pass of SmolLM2
   over 12 rows takes 23 ms so, and 27 without; of 3 rows by 3 panels 15 ms, by 6 panels 18. */
#define FETCHES_WEIGHTS(ROWS) (ROWS > 2)
#define SUM_AT(r, c, v) (sums + (r * SUM_PANELS + c) * PANEL + v * LANES)

#define DEFINE_TILE(KIND, ROWS, PANELS)                                                            \
  static ALONE void KIND##_##ROWS##_##PANELS(const tile_t *t) {                                    \
    const char *w = t->w, *x[(ROWS + 2) / 3]; /* three rows an address: few registers */           \
    int64_t xs = t->x_stride, ws = t->w_stride;                                                    \
    EACH(i, (ROWS + 2) / 3) x[i] = t->x + 3 * i * xs;                                              \
    float *sums = t->sums;                                                                         \
    int begins = t->begins;                                                                        \
    const char *next = t->next;                                                                    \
    int64_t next_stride = t->next_stride;                                                          \
    for (int64_t s = 0, end; s < t->steps; s = end) {                                              \
      vec a[ROWS][PANELS][VECS] = {};                                                              \
      end = MIN(s + BLOCK_STEPS, t->steps);                                                        \
      UNROLLED for (; s < end; s++) {                                                              \
        KIND##_STEP(ROWS, PANELS);                                                                 \
        if (FETCHES_WEIGHTS(ROWS)) {                                                               \
          EACH(c, PANELS) __builtin_prefetch(next + c * ws);                                       \
          next += next_stride;                                                                     \
        }                                                                                          \
        w += STEP_BYTES;                                                                           \
        EACH(i, (ROWS + 2) / 3) x[i] += KIND##_STRIDE;                                             \
      }                                                                                            \
      if (!begins || end > BLOCK_STEPS)                                                            \
        EACH(r, ROWS) EACH(c, PANELS) EACH(v, VECS)                                                \
          a[r][c][v] = load(SUM_AT(r, c, v)) + a[r][c][v];                                         \
      EACH(r, ROWS) EACH(c, PANELS) EACH(v, VECS) store(SUM_AT(r, c, v), a[r][c][v]);              \
    }                                                                                              \
  }
/* USE(KIND, ROWS, 1) ... USE(KIND, ROWS, PANELS) */
#define UP_TO_1(USE, KIND, ROWS) USE(KIND, ROWS, 1)
#define UP_TO_2(USE, KIND, ROWS) UP_TO_1(USE, KIND, ROWS) USE(KIND, ROWS, 2)
#define UP_TO_3(USE, KIND, ROWS) UP_TO_2(USE, KIND, ROWS) USE(KIND, ROWS, 3)
#define UP_TO_6(USE, KIND, ROWS)                                                                   \
  UP_TO_3(USE, KIND, ROWS) USE(KIND, ROWS, 4) USE(KIND, ROWS, 5) USE(KIND, ROWS, 6)
#define UP_TO_8(USE, KIND, ROWS) UP_TO_6(USE, KIND, ROWS) USE(KIND, ROWS, 7) USE(KIND, ROWS, 8)
#define DEFINE_TILES(KIND, ROWS, PANELS) UP_TO_##PANELS(DEFINE_TILE, KIND, ROWS)

typedef void run_tile_t(const tile_t *);

/* Tiles of a number of rows: of 1, 2, ... `panels` panels. */
typedef struct {
  run_tile_t *of[MOST_PANELS];
  int64_t panels;
} tiles_t;

#define NAME_TILE(KIND, ROWS, PANELS) KIND##_##ROWS##_##PANELS,
#define NAME_TILES(KIND, ROWS, PANELS) {{UP_TO_##PANELS(NAME_TILE, KIND, ROWS)}, PANELS},

/* What weights and inputs are when they are multiplied: floats, pairs of narrow numbers, these
   widened. */
enum { WIDE, PAIRED, WIDENED, NUM_KINDS };

TILES(DEFINE_TILES, wide)
#if !HAS_AMX
TILES(DEFINE_TILES, widened)
#if HAS_PAIRS
TILES(DEFINE_TILES, paired)
#endif
#endif

static const tiles_t tiles_of_kinds[NUM_KINDS][TILE_ROWS] = {
    [WIDE] = {TILES(NAME_TILES, wide)},
#if !HAS_AMX
    [WIDENED] = {TILES(NAME_TILES, widened)},
#if HAS_PAIRS
    [PAIRED] = {TILES(NAME_TILES, paired)},
#endif
#endif
};

static int widens(int64_t is_narrow) { return !HAS_AMX && is_narrow && widens_pairs(); }

static int kind_of(const product_t *p) {
  if (!p->is_narrow) return WIDE;
  return widens(1) ? WIDENED : PAIRED;
}

/* What the tiles of so many rows hold, of any kind. */
static const tiles_t *tiles_of(int64_t rows) {
  return &tiles_of_kinds[WIDE][MIN(rows, TILE_ROWS) - 1];
}

/* ---- rows times panels */

/* A chunk of some rows' inputs, as tiles read them. */
typedef struct {
  const char *x;
  int64_t stride; /* bytes */
} inputs_t;

static inputs_t inputs_of(const product_t *p, int kind, range_t rows, int64_t step,
                          int64_t steps) {
  static _Thread_local float wide[ROW_BLOCK * CHUNK_BYTES / 4] __attribute__((aligned(64)));
  int64_t stride = p->x_stride * (p->is_narrow ? (int64_t)sizeof(narrow) : (int64_t)sizeof(float));
  const char *x = (const char *)p->x + rows.first * stride + step * 4;
  if (kind != WIDENED) return (inputs_t){x, stride};
  for (int64_t r = 0; r < rows.end - rows.first; r++)
    read_numbers(1, x + r * stride, 0, wide + r * 2 * steps, 2 * steps);
  return (inputs_t){(const char *)wide, 2 * steps * (int64_t)sizeof(float)};
}

/* Some steps of some rows, up to ROW_BLOCK, and of the panels that a tile holds from `panel` on. */
typedef struct {
  const product_t *p;
  int kind;
  range_t rows;
  int64_t panel, panels; /* at most what tiles hold */
  int64_t step, steps;
  inputs_t inputs;
  const char *next; /* weights of the chunk that follows */
} chunk_t;

static void run_tile(run_tile_t *run, const tile_t *t, int64_t is_narrow) {
  if (!is_narrow) {
    run(t);
    return;
  }
  unsigned control = begin_pairs();
  run(t);
  end_pairs(control);
}

static void run_chunk(const chunk_t *c, float *sums) {
  const product_t *p = c->p;
  const tiles_t *tiles = tiles_of_kinds[c->kind];
  int64_t rows = c->rows.end - c->rows.first, count = parts(rows, TILE_ROWS);
  int64_t all_steps = steps_of(p->is_narrow, p->k), stride = all_steps * STEP_BYTES;
  int64_t col = c->panel * PANEL, width = MIN(c->panels * PANEL, p->out - col);
  int ends = c->step + c->steps == all_steps;
  tile_t t = {.x_stride = c->inputs.stride, .w_stride = stride, .steps = c->steps,
              .w = (const char *)p->w + c->panel * stride + c->step * STEP_BYTES,
              .begins = c->step == 0, .next_stride = STEP_BYTES / count};
  for (int64_t i = 0; i < count; i++) {
    int64_t first = rows * i / count, end = rows * (i + 1) / count;
    const tiles_t *tile = &tiles[end - first - 1];
    t.x = c->inputs.x + first * c->inputs.stride;
    t.sums = sums + first * SUM_PANELS * PANEL;
    t.next = c->next + i * c->steps * t.next_stride; /* each tile fetches its part */
    for (int64_t r = first; ends && r < end; r++)
      for (int64_t n = 0; n < width; n += LINE)
        __builtin_prefetch(p->y + (c->rows.first + r) * p->y_stride + col + n, 1);
    run_tile(tile->of[c->panels - 1], &t, p->is_narrow);
    if (ends)
      for (int64_t r = first; r < end; r++)
        put_sums(p, c->rows.first + r, col, width, sums + r * SUM_PANELS * PANEL);
  }
}

/* Up to SUM_PANELS panels, so that a chunk of inputs is made ready for several. */
static void multiply_some(const product_t *p, range_t rows, range_t panels, int64_t together) {
  static _Thread_local float sums[ROW_BLOCK * SUM_PANELS * PANEL] __attribute__((aligned(64)));
  int kind = kind_of(p);
  int64_t most = CHUNK_BYTES / (kind == WIDENED ? widened_STRIDE : wide_STRIDE);
  int64_t steps = steps_of(p->is_narrow, p->k);
  int64_t chunks = MAX(parts(steps, most), 1);
  int64_t size = rounded_up(parts(steps, chunks), BLOCK_STEPS);
  for (int64_t step = 0; step < steps; step += size) {
    chunk_t c = {.p = p, .kind = kind, .rows = rows, .step = step,
                 .steps = MIN(size, steps - step)};
    c.inputs = inputs_of(p, kind, rows, step, c.steps);
    for (c.panel = panels.first; c.panel < panels.end; c.panel += c.panels) {
      c.panels = MIN(together, panels.end - c.panel);
      int64_t next = c.panel + c.panels, next_step = step;
      if (next == panels.end && step + size < steps) {
        next = panels.first;
        next_step += size;
      }
      c.next = (const char *)p->w + (next * steps + next_step) * STEP_BYTES;
      run_chunk(&c, sums + (c.panel - panels.first) * PANEL);
    }
  }
}

static void multiply_block(const product_t *p, range_t rows, range_t panels) {
  int64_t together = tiles_of(rows.end - rows.first)->panels;
  int64_t most = (kind_of(p) == WIDENED ? SUM_PANELS : MOST_PANELS) / together * together;
  for (int64_t first = panels.first; first < panels.end; first += most)
    multiply_some(p, rows, (range_t){first, MIN(first + most, panels.end)}, together);
}

void multiply(const product_t *p, range_t rows, range_t panels) {
#if HAS_AMX
  if (p->is_narrow) {
    multiply_narrow(p, rows, panels);
    return;
  }
#endif
  int64_t count = rows.end - rows.first, blocks = parts(count, ROW_BLOCK);
  for (int64_t b = 0; b < blocks; b++) {
    int64_t first = rows.first + count * b / blocks, end = rows.first + count * (b + 1) / blocks;
    multiply_block(p, (range_t){first, end}, panels);
  }
}

/* Of a task, where there are so many. */
static int64_t task_rows_of(int64_t rows, int64_t is_narrow) {
  int by_tiles = HAS_AMX && is_narrow;
  int64_t most = by_tiles ? TILE_PRODUCT_ROWS : PRODUCT_ROWS;
  int64_t count = MAX(parts(rows, MAX(parts(rows, most), 1)), 1);
  return by_tiles && count > GROUP_ROWS ? rounded_up(count, GROUP_ROWS) : count;
}

/* Few rows: panels by what is read of memory. Many: by the work, so that threads end together. */
cut_t cut_product(int64_t rows, int64_t is_narrow, int64_t k, int64_t out) {
  int64_t steps = MAX(steps_of(is_narrow, k), 1), task_rows = task_rows_of(rows, is_narrow);
  int by_tiles = HAS_AMX && is_narrow;
  int64_t together = by_tiles ? panels_together(task_rows) : tiles_of(task_rows)->panels;
  int64_t task_steps = by_tiles ? TILE_TASK_STEPS : TASK_STEPS;
  int64_t panels = MIN(TASK_BYTES / (steps * STEP_BYTES), task_steps / (task_rows * steps));
  panels = MAX(panels / together, 1) * together;
  int is_many = widens(is_narrow) && task_rows >= MANY_ROWS;
  if (is_many) panels = MAX(panels, MANY_PANELS);
  int64_t panel_tasks = parts(panels_of(out), panels);
  int evens = is_many || together >= FEW_ROWS_PANELS || by_tiles;
  if (evens && panel_tasks > 1) { /* an even number, for two threads */
    panels = parts(panels_of(out), rounded_up(panel_tasks, 2));
    if (by_tiles) panels = rounded_up(panels, together);
    panel_tasks = parts(panels_of(out), panels);
  }
  return (cut_t){panels, task_rows, panel_tasks, MAX(parts(rows, task_rows), 1)};
}
