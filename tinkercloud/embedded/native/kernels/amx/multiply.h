/* Rows times panels in bfloat16, by tiles. amx_product.c and amx_emulated.c include it, each with its
   form of the operations of tiles.h (TILE_...) and the function's name (MULTIPLY).

   A tile of weights is 16 steps of a panel as they lie: 32 inputs of 16 outputs. A tile of inputs is
   these 32 of up to 16 rows, as they lie too. One row takes the same operations as many: how its sums
   are made follows from the number of inputs alone. Where a chain is interrupted changes no bit. */

#include "amx.h"
#include "tiles.h"

#define TILE_STEPS 16 /* of a panel */
#define TILE_BYTES (TILE_STEPS * STEP_BYTES)
#define CHUNK_TILES 10 /* of a panel, at most, that meet all rows before the next do: first-level cache */
#define AHEAD 4        /* tiles before which memory is asked for, where one group reads them */
#define MOST_SUMS 4
#define ALONE __attribute__((noinline)) /* the registers are all needed */

/* Rows and panels whose sums stay in tile registers. Tiles 0 to 3 are sums, 4 and 5 inputs, 6 and 7
   weights. With two tiles of rows, sums 0 and 1 are the first one's by two panels, 2 and 3 the
   second one's; with one tile of rows they are its sums by four panels. */
typedef struct {
  const char *x;
  int64_t x_stride; /* bytes */
  const char *w;
  int64_t w_stride; /* bytes from panel to panel */
  int64_t tiles;    /* of each panel */
  int begins;       /* from zero, not from `sums` */
  /* Weights that go into the second-level cache meanwhile: so many lines with each tile, from here
     on, of each panel. NULL: none. */
  const char *fetch;
  int64_t fetch_lines;
  float *sums;      /* so far, [panel][ROW_BLOCK][PANEL] */
  float *to;        /* where they go then */
  int64_t panel_step, row_step; /* of `to`, in floats */
} group_t;

INLINE int is_used(int both, int panels, int sum) { return (both ? sum % 2 : sum) < panels; }

/* Of a sum: its place among others that are a panel and a row apart. */
INLINE int64_t place_of(int both, int sum, int64_t panel_step, int64_t row_step) {
  int64_t panel = both ? sum % 2 : sum, row = both ? sum / 2 * MOST_TILE_ROWS : 0;
  return panel * panel_step + row * row_step;
}

INLINE float *sums_of(const group_t *g, int both, int sum) {
  return g->sums + place_of(both, sum, ROW_BLOCK * PANEL, PANEL);
}

INLINE void add_tiles(int both, int panels, const group_t *g, const char *x, const char *w) {
  TILE_LOAD(4, x, g->x_stride);
  if (both) TILE_LOAD(5, x + MOST_TILE_ROWS * g->x_stride, g->x_stride);
  TILE_LOAD(6, w, STEP_BYTES);
  TILE_DOT(0, 4, 6);
  if (both) TILE_DOT(2, 5, 6);
  if (panels > 1) {
    TILE_LOAD(7, w + g->w_stride, STEP_BYTES);
    TILE_DOT(1, 4, 7);
    if (both) TILE_DOT(3, 5, 7);
  }
  if (panels > 2) {
    TILE_LOAD(6, w + 2 * g->w_stride, STEP_BYTES);
    TILE_DOT(2, 4, 6);
    TILE_LOAD(7, w + 3 * g->w_stride, STEP_BYTES);
    TILE_DOT(3, 4, 7);
  }
}

INLINE void fetch_ahead(int panels, const group_t *g, int64_t tile) {
  const char *from = g->fetch + tile * g->fetch_lines * LINE_BYTES;
  for (int c = 0; c < panels; c++, from += g->w_stride)
    for (int64_t i = 0; i < g->fetch_lines; i++)
      __builtin_prefetch(from + i * LINE_BYTES, 0, 2);
}

INLINE void multiply_group(int both, int panels, const group_t *group) {
  const group_t copy = *group, *g = &copy; /* in registers: the operations may write any memory */
  if (g->begins) {
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
  } else {
    TILE_LOAD(0, sums_of(g, both, 0), STEP_BYTES);
    if (is_used(both, panels, 1)) TILE_LOAD(1, sums_of(g, both, 1), STEP_BYTES);
    if (is_used(both, panels, 2)) TILE_LOAD(2, sums_of(g, both, 2), STEP_BYTES);
    if (is_used(both, panels, 3)) TILE_LOAD(3, sums_of(g, both, 3), STEP_BYTES);
  }
  for (int64_t i = 0; i < g->tiles; i++) {
    if (g->fetch) fetch_ahead(panels, g, i);
    add_tiles(both, panels, g, g->x + i * TILE_ROW_BYTES, g->w + i * TILE_BYTES);
  }
  int64_t stride = g->row_step * (int64_t)sizeof(float);
  TILE_STORE(0, g->to, stride);
#define STORE(sum)                                                                                 \
  if (is_used(both, panels, sum))                                                                  \
  TILE_STORE(sum, g->to + place_of(both, sum, g->panel_step, g->row_step), stride)
  STORE(1);
  STORE(2);
  STORE(3);
#undef STORE
}

static ALONE void multiply_2_2(const group_t *g) { multiply_group(1, 2, g); }
static ALONE void multiply_2_1(const group_t *g) { multiply_group(1, 1, g); }
static ALONE void multiply_1_4(const group_t *g) { multiply_group(0, 4, g); }
static ALONE void multiply_1_1(const group_t *g) { multiply_group(0, 1, g); }

/* [both][some, not one] */
static void (*const group_kernels[2][2])(const group_t *) = {{multiply_1_1, multiply_1_4},
                                                             {multiply_2_1, multiply_2_2}};

/* Sums of up to ROW_BLOCK rows and the panels that a group has. */
typedef struct {
  float of[MOST_TOGETHER * ROW_BLOCK * PANEL] __attribute__((aligned(LINE_BYTES)));
} sums_t;

/* Up to ROW_BLOCK rows, whole groups or less than one, and the panels that a group has, or one. */
typedef struct {
  const product_t *p;
  range_t rows;
  int both, is_first; /* is_first: of those that these panels meet */
  int64_t panel, panels;
  const char *next; /* panels that are fetched meanwhile; or NULL */
} block_t;

/* What a group of some fetches: of the next panels' same tiles a part, one behind the other, since the
   processor reads on from lines that follow each other, and waits 170 ns for each that does not. One
   group alone: what it reads soon. first: of its tiles. */
static void set_fetch(const block_t *b, int64_t group, int64_t groups, int64_t first, group_t *g) {
  g->fetch_lines = parts(TILE_STEPS, groups);
  if (groups == 1)
    g->fetch = g->w + AHEAD * TILE_BYTES;
  else if (b->next)
    g->fetch = b->next + first * TILE_BYTES + g->tiles * TILE_STEPS * group / groups * LINE_BYTES;
}

/* The tiles first..first + count - 1 of panels, which are one chain or a part of it, into `sums`, or
   where `is_last` into y. */
static void add_chunk(const block_t *b, range_t tiles, int begins, sums_t *sums, int is_last) {
  const product_t *p = b->p;
  int64_t rows = b->rows.end - b->rows.first, x_stride = p->x_stride * (int64_t)sizeof(narrow);
  group_t g = {.x_stride = x_stride, .w_stride = steps_of(1, p->k) * STEP_BYTES,
               .tiles = tiles.end - tiles.first, .begins = begins,
               .panel_step = is_last ? PANEL : ROW_BLOCK * PANEL,
               .row_step = is_last ? p->y_stride : PANEL};
  g.w = (const char *)p->w + b->panel * g.w_stride + tiles.first * TILE_BYTES;
  for (int64_t row = 0; row < rows; row += GROUP_ROWS) {
    g.x = (const char *)p->x + (b->rows.first + row) * x_stride + tiles.first * TILE_ROW_BYTES;
    g.sums = sums->of + row * PANEL;
    g.to = g.sums;
    if (b->is_first) set_fetch(b, row / GROUP_ROWS, parts(rows, GROUP_ROWS), tiles.first, &g);
    if (is_last) g.to = p->y + (b->rows.first + row) * p->y_stride + b->panel * PANEL;
    group_kernels[b->both][b->panels > 1](&g);
  }
}

/* One chain of sums. */
static void add_chain(const block_t *b, range_t tiles, sums_t *sums, int into_y) {
  int64_t all = tiles.end - tiles.first;
  int64_t chunks = b->rows.end - b->rows.first > GROUP_ROWS ? parts(all, CHUNK_TILES) : 1;
  for (int64_t i = 0; i < chunks; i++) {
    range_t some = {tiles.first + all * i / chunks, tiles.first + all * (i + 1) / chunks};
    add_chunk(b, some, i == 0, sums, into_y && i + 1 == chunks);
  }
}

static void add_sums(const block_t *b, sums_t *sums, const sums_t *later) {
  for (int64_t c = 0; c < b->panels; c++) {
    int64_t first = c * ROW_BLOCK * PANEL, end = first + (b->rows.end - b->rows.first) * PANEL;
    for (int64_t j = first; j < end; j += LANES)
      store(sums->of + j, load(sums->of + j) + load(later->of + j));
  }
}

static void multiply_panels(const block_t *b) {
  static _Thread_local sums_t sums, later;
  const product_t *p = b->p;
  int64_t tiles = steps_of(1, p->k) / TILE_STEPS;
  int into_y = !p->add && !p->bias && tiles <= CHAIN_TILES &&
               (b->panel + b->panels) * PANEL <= p->out;
  for (int64_t first = 0; first < tiles; first += CHAIN_TILES) {
    range_t chain = {first, MIN(first + CHAIN_TILES, tiles)};
    add_chain(b, chain, first ? &later : &sums, into_y);
    if (first) add_sums(b, &sums, &later);
  }
  if (into_y) return;
  for (int64_t row = b->rows.first; row < b->rows.end; row++)
    for (int64_t c = 0; c < b->panels; c++) {
      int64_t col = (b->panel + c) * PANEL;
      put_sums(p, row, col, MIN(PANEL, p->out - col),
               sums.of + (c * ROW_BLOCK + row - b->rows.first) * PANEL);
    }
}

/* first, second: rows of the two tiles of each group. */
static void configure(int64_t first, int64_t second) {
  tile_config_t config = {.palette = 1};
  for (int i = 0; i < NUM_TILES; i++) {
    int is_second = i == 5 || (second > 0 && (i == 2 || i == 3));
    config.rows[i] = (uint8_t)(i >= 6 ? TILE_STEPS : is_second ? second : first);
    config.row_bytes[i] = config.rows[i] ? TILE_ROW_BYTES : 0;
  }
  TILE_CONFIGURE(config);
}

/* Whole groups of rows, or less than one. */
static void multiply_groups(const product_t *p, range_t rows, range_t panels) {
  int64_t count = MIN(rows.end - rows.first, GROUP_ROWS);
  int64_t tile_rows[2] = {MIN(count, MOST_TILE_ROWS), MAX(count - MOST_TILE_ROWS, 0)};
  int64_t together = panels_together(count), stride = panel_bytes(1, p->k);
  configure(tile_rows[0], tile_rows[1]);
  for (int64_t row = rows.first; row < rows.end; row += ROW_BLOCK)
    for (int64_t panel = panels.first, some; panel < panels.end; panel += some) {
      some = panel + together <= panels.end ? together : 1;
      int ends = panel + some == panels.end;
      multiply_panels(&(block_t){p, {row, MIN(row + ROW_BLOCK, rows.end)}, tile_rows[1] > 0,
                                 row == rows.first, panel, some,
                                 ends ? p->next : (const char *)p->w + (panel + some) * stride});
    }
}

/* The tiles are this function's alone: what else the thread calls may configure its own, and a switch
   of threads between calls has none to save. */
void MULTIPLY(const product_t *p, range_t rows, range_t panels) {
  if (rows.end <= rows.first) return;
  int64_t middle = rows.end - (rows.end - rows.first) % GROUP_ROWS;
  if (rows.first < middle) multiply_groups(p, (range_t){rows.first, middle}, panels);
  if (middle < rows.end) multiply_groups(p, (range_t){middle, rows.end}, panels);
  TILE_RELEASE();
}
