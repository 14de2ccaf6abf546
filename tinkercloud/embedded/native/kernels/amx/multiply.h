/* Rows times panels in bfloat16, by tiles. amx_product.c and amx_emulated.c include it, each with its
   form of the operations of tiles.h (TILE_...) and the function's name (MULTIPLY).

   A tile of weights is 16 steps of a panel as they lie: 32 inputs of 16 outputs. A tile of inputs is
   these 32 of up to 16 rows, as they lie too. One row takes the same operations as many: how its sums
   are made follows from the number of inputs alone. */

#include "amx.h"
#include "tiles.h"

#define TILE_STEPS 16 /* of a panel */
#define TILE_BYTES (TILE_STEPS * STEP_BYTES)
#define BLOCK_TILES (BLOCK_STEPS / TILE_STEPS)
#define CHUNK_TILES 8 /* of a panel that meet all rows before the next do: first-level cache */
#define AHEAD 4       /* tiles before which memory is asked for, where weights are read once */
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
  int64_t rows[2];  /* of the tiles of rows; the second may have none */
  float *sums;      /* [panel][ROW_BLOCK][PANEL] */
} group_t;

INLINE int is_used(int both, int panels, int sum) { return (both ? sum % 2 : sum) < panels; }

INLINE float *sums_of(const group_t *g, int both, int sum) {
  int64_t panel = both ? sum % 2 : sum, row = both ? sum / 2 * MOST_TILE_ROWS : 0;
  return g->sums + (panel * ROW_BLOCK + row) * PANEL;
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

/* Into the second-level cache: later tiles of the panels; at their end, of those that follow them. */
INLINE void fetch_ahead(int panels, const group_t *g, int64_t tile) {
  int64_t end = tile + AHEAD < g->tiles ? 0 : (panels - 1) * g->w_stride;
  const char *w = g->w + (tile + AHEAD) * TILE_BYTES + end;
  for (int c = 0; c < panels; c++, w += g->w_stride)
    for (int i = 0; i < TILE_BYTES; i += LINE_BYTES) __builtin_prefetch(w + i, 0, 2);
}

/* One chain of sums from zero, of some tiles of the panels, into `to`. */
INLINE void chain(int both, int panels, const group_t *g, int64_t first, int64_t end,
                  float *const *to) {
  TILE_ZERO(0);
  TILE_ZERO(1);
  TILE_ZERO(2);
  TILE_ZERO(3);
  for (int64_t i = first; i < end; i++) {
    if (!both) fetch_ahead(panels, g, i);
    add_tiles(both, panels, g, g->x + i * TILE_ROW_BYTES, g->w + i * TILE_BYTES);
  }
  TILE_STORE(0, to[0], STEP_BYTES);
  if (is_used(both, panels, 1)) TILE_STORE(1, to[1], STEP_BYTES);
  if (is_used(both, panels, 2)) TILE_STORE(2, to[2], STEP_BYTES);
  if (is_used(both, panels, 3)) TILE_STORE(3, to[3], STEP_BYTES);
}

INLINE void multiply_group(int both, int panels, const group_t *group) {
  const group_t copy = *group, *g = &copy; /* in registers: the operations may write any memory */
  float later[MOST_SUMS][MOST_TILE_ROWS * PANEL] __attribute__((aligned(LINE_BYTES)));
  for (int64_t first = 0; first < g->tiles; first += BLOCK_TILES) {
    int begins = g->begins && first == 0;
    float *to[MOST_SUMS];
    EACH(i, MOST_SUMS) to[i] = begins ? sums_of(g, both, i) : later[i];
    chain(both, panels, g, first, MIN(first + BLOCK_TILES, g->tiles), to);
    EACH(i, MOST_SUMS) {
      if (begins || !is_used(both, panels, i)) continue;
      float *sums = sums_of(g, both, i);
      for (int64_t j = 0; j < g->rows[both ? i / 2 : 0] * PANEL; j += LANES)
        store(sums + j, load(sums + j) + load(later[i] + j));
    }
  }
}

static ALONE void multiply_2_2(const group_t *g) { multiply_group(1, 2, g); }
static ALONE void multiply_2_1(const group_t *g) { multiply_group(1, 1, g); }
static ALONE void multiply_1_4(const group_t *g) { multiply_group(0, 4, g); }
static ALONE void multiply_1_1(const group_t *g) { multiply_group(0, 1, g); }

/* [both][some, not one] */
static void (*const group_kernels[2][2])(const group_t *) = {{multiply_1_1, multiply_1_4},
                                                             {multiply_2_1, multiply_2_2}};

/* Up to ROW_BLOCK rows, whole groups or less than one, and the panels that a group has, or one. */
static void multiply_panels(const product_t *p, range_t rows, const int64_t *tile_rows,
                            int64_t panel, int64_t panels) {
  static _Thread_local float sums[MOST_TOGETHER * ROW_BLOCK * PANEL]
      __attribute__((aligned(LINE_BYTES)));
  int64_t tiles = steps_of(1, p->k) / TILE_STEPS, x_stride = p->x_stride * (int64_t)sizeof(narrow);
  int64_t chunk = rows.end - rows.first > GROUP_ROWS ? CHUNK_TILES : tiles;
  group_t g = {.x_stride = x_stride, .w_stride = tiles * TILE_BYTES,
               .rows = {tile_rows[0], tile_rows[1]}};
  for (int64_t first = 0; first < tiles; first += chunk)
    for (int64_t row = rows.first; row < rows.end; row += GROUP_ROWS) {
      g.x = (const char *)p->x + row * x_stride + first * TILE_ROW_BYTES;
      g.w = (const char *)p->w + panel * g.w_stride + first * TILE_BYTES;
      g.tiles = MIN(chunk, tiles - first);
      g.begins = first == 0;
      g.sums = sums + (row - rows.first) * PANEL;
      group_kernels[tile_rows[1] > 0][panels > 1](&g);
    }
  for (int64_t row = rows.first; row < rows.end; row++)
    for (int64_t c = 0; c < panels; c++) {
      int64_t col = (panel + c) * PANEL;
      put_sums(p, row, col, MIN(PANEL, p->out - col),
               sums + (c * ROW_BLOCK + row - rows.first) * PANEL);
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
  int64_t together = panels_together(count);
  configure(tile_rows[0], tile_rows[1]);
  for (int64_t row = rows.first; row < rows.end; row += ROW_BLOCK)
    for (int64_t panel = panels.first, some; panel < panels.end; panel += some) {
      some = panel + together <= panels.end ? together : 1;
      multiply_panels(p, (range_t){row, MIN(row + ROW_BLOCK, rows.end)}, tile_rows, panel, some);
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
