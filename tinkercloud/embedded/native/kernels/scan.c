/* From logits to the tokens that may win, for decoding/sampler.py: the Gumbel-max trick over the
   whole vocabulary, but with logarithms for a few tokens only. A row is one thread's, so that no
   result depends on their number. */

#include <math.h>
#include <string.h>

#include "log_sum_exp.h"
#include "noise.h"
#include "packed.h"
#include "scan.h"
#include "team.h"
#include "vectors.h"

/* Notes a token that may win; 0 when there are too many. */
static int offer(scan_t *s, int64_t row, int64_t id, uint32_t word) {
  int64_t count = s->count[row];
  if (count == s->limit) {
    s->count[row] = -1;
    return 0;
  }
  s->ids[row * s->limit + count] = id;
  s->words[row * s->limit + count] = word;
  s->count[row] = count + 1;
  return 1;
}

/* ---- top-k and top-p: the tokens that are kept are those up to one of them, best first */

typedef struct {
  float weight;
  int32_t id;
  double mass; /* exp(weight - the best weight) */
} item_t;

static int ranks_before(item_t a, item_t b) {
  return a.weight > b.weight || (a.weight == b.weight && a.id < b.id);
}

static void swap(item_t *items, int64_t a, int64_t b) {
  item_t kept = items[a];
  items[a] = items[b];
  items[b] = kept;
}

static item_t middle_of(item_t a, item_t b, item_t c) {
  if (ranks_before(b, a)) {
    item_t kept = a;
    a = b;
    b = kept;
  }
  return ranks_before(b, c) ? b : ranks_before(a, c) ? c : a;
}

/* Brings to the front, in any order, the items that fewer than `most` others and less than `mass`
   of their mass rank before; returns how many they are, at least 1. A quickselect, linear in n. */
static int64_t keep_best(item_t *items, int64_t n, int64_t most, double mass) {
  int64_t first = 0, end = n; /* all before `first` are kept, none from `end` on */
  double before = 0.0;        /* the mass of those before `first` */
  while (first < end) {
    item_t pivot = middle_of(items[first], items[(first + end) / 2], items[end - 1]);
    int64_t at = first;
    double above = before;
    for (int64_t i = first; i < end; i++)
      if (ranks_before(items[i], pivot)) {
        above += items[i].mass;
        swap(items, i, at++);
      }
    if (at > 0 && (at >= most || above >= mass)) {
      end = at;
      continue;
    }
    for (int64_t i = at; i < end; i++)
      if (items[i].id == pivot.id) {
        swap(items, i, at);
        break;
      }
    first = at + 1;
    before = above + pivot.mass;
    if (first >= most || before >= mass) return first;
  }
  return first;
}

static int64_t keep(const scan_t *s, int64_t row, const float *weights, item_t *items) {
  const draw_t *draw = &s->draws[row];
  float top = weights[s->best[row]];
  for (int64_t i = 0; i < s->size; i++)
    items[i] = (item_t){weights[i], (int32_t)i, exp((double)weights[i] - top)};
  int64_t count = s->size;
  if (draw->top_k > 0) count = keep_best(items, count, draw->top_k, INFINITY);
  if (draw->top_p < 1.0) {
    double total = 0.0;
    for (int64_t i = 0; i < count; i++) total += items[i].mass;
    count = keep_best(items, count, count, draw->top_p * total);
  }
  return count;
}

/* The random numbers of some items. */
static void find_words(const noise_key_t *key, const item_t *items, int64_t count,
                       uint32_t *words) {
  for (int64_t first = 0; first < count; first += COUNTERS) {
    int64_t some = MIN(COUNTERS, count - first);
    uint64_t blocks[COUNTERS] = {};
    uint32_t found[GROUP];
    for (int64_t i = 0; i < some; i++) blocks[i] = (uint64_t)items[first + i].id / BLOCK_WORDS;
    philox(blocks, key, found);
    for (int64_t i = 0; i < some; i++) words[first + i] = found[word_at(i, items[first + i].id)];
  }
}

static void scan_kept(scan_t *s, int64_t row, const float *weights, item_t *items,
                      uint32_t *words) {
  int64_t count = keep(s, row, weights, items);
  double mass = 0.0, least = -INFINITY;
  noise_key_t key = key_of(&s->draws[row]);
  find_words(&key, items, count, words);
  for (int64_t i = 0; i < count; i++) {
    mass += items[i].mass;
    least = MAX(least, score_of(items[i].weight, words[i]));
  }
  s->norm[row] = weights[s->best[row]] + log(mass);
  for (int64_t i = 0; i < count; i++)
    if (score_of(items[i].weight, words[i]) >= least - SLACK)
      if (!offer(s, row, items[i].id, words[i])) return;
}

/* ---- a row, by partitions that stay in the first-level cache */

/* What one thread needs for a row. */
typedef struct {
  float *weights;          /* [size] */
  uint32_t *words;         /* [size, up to a GROUP]: by groups, in each as philox leaves them */
  int32_t *lucky;          /* [most_lucky]: tokens */
  int64_t num_lucky, most_lucky;
  float *tops;             /* by partition: of the logits */
  partition_t *partitions; /* of the weights */
  item_t *items;           /* [size], for top-k and top-p */
} room_t;

static uint32_t word_of(const room_t *room, int64_t token) { return word_in(room->words, token); }

static double score_in(const room_t *room, const float *weights, int64_t token) {
  return score_of(weights[token], word_of(room, token));
}

/* The lowest id of the largest logit. */
static int64_t best_of(const float *logits, int64_t size, const float *tops) {
  int64_t count = partitions_of(size), at = 0;
  float top = -INFINITY;
  for (int64_t i = 0; i < count; i++) top = MAX(top, tops[i]);
  while (at < count - 1 && tops[at] != top) at++;
  int64_t i = at * PARTITION, last = MIN(i + PARTITION, size) - 1;
  while (i < last && logits[i] != top) i++;
  return i;
}

/* Notes those of a group that are lucky. */
INLINE void note_lucky(room_t *room, int64_t first, int64_t size) {
  if (!any_lucky(room->words + first)) return;
  for (int64_t i = first; i < MIN(first + GROUP, size); i++)
    if (word_of(room, i) < LUCKY_WORD && room->num_lucky++ < room->most_lucky)
      room->lucky[room->num_lucky - 1] = (int32_t)i;
}

static void find_noise(room_t *room, const noise_key_t *key, range_t tokens) {
  for (int64_t first = tokens.first; first < tokens.end; first += GROUP) {
    philox_group(first, key, room->words + first);
    note_lucky(room, first, tokens.end);
  }
}

/* Offers the tokens that may win: none of the others scores as much as the best of these. */
static void offer_all(scan_t *s, int64_t row, const room_t *room, const float *weights) {
  double least = score_in(room, weights, s->best[row]);
  for (int64_t i = 0; i < room->num_lucky; i++)
    least = MAX(least, score_in(room, weights, room->lucky[i]));
  least -= SLACK;
  float close = (float)(least - LUCK);
  for (int64_t i = 0; i < room->num_lucky; i++) {
    int64_t token = room->lucky[i];
    if (weights[token] >= close || !may_win(weights[token], word_of(room, token), least)) continue;
    if (!offer(s, row, token, word_of(room, token))) return;
  }
  for (int64_t part = 0; part < partitions_of(s->size); part++) {
    if (!(room->partitions[part].top >= close)) continue;
    range_t tokens = partition_at(s->size, part);
    for (int64_t first = tokens.first; first < tokens.end; first += LINE) {
      int64_t end = MIN(first + LINE, tokens.end);
      if (!any_reaches(weights + first, end - first, close)) continue;
      for (int64_t i = first; i < end; i++) {
        if (!(weights[i] >= close) || !may_win(weights[i], word_of(room, i), least)) continue;
        if (!offer(s, row, i, word_of(room, i))) return;
      }
    }
  }
}

/* What is computed next, into the cache. */
INLINE void fetch_ahead(const float *logits, range_t tokens) {
  for (int64_t i = tokens.first; i < tokens.end; i += LINE) __builtin_prefetch(logits + i);
}

static void scan_row(scan_t *s, int64_t row, room_t *room) {
  const float *logits = s->logits + row * s->size, *weights = logits;
  const draw_t *draw = &s->draws[row];
  int draws = draw->temperature > 0.0f;
  int is_cut = draws && (draw->top_k > 0 || draw->top_p < 1.0);
  int64_t count = partitions_of(s->size);
  float t = draws ? draw->temperature : 1.0f;
  noise_key_t key = key_of(draw);
  if (t != 1.0f) weights = room->weights;
  room->num_lucky = 0;
  for (int64_t part = 0; part < count; part++) {
    range_t tokens = partition_at(s->size, part);
    int64_t num_tokens = tokens.end - tokens.first;
    room->tops[part] = largest(logits + tokens.first, num_tokens);
    fetch_ahead(logits, partition_at(s->size, part + 1));
    if (t != 1.0f)
      for (int64_t i = tokens.first; i < tokens.end; i++) room->weights[i] = logits[i] / t;
    if (is_cut) continue;
    room->partitions[part] = sum_partition(weights + tokens.first, num_tokens);
    if (draws) find_noise(room, &key, tokens);
  }
  s->best[row] = best_of(logits, s->size, room->tops);
  s->count[row] = 0;
  if (is_cut) {
    scan_kept(s, row, weights, room->items, room->words);
    return;
  }
  s->norm[row] = combine_partitions(room->partitions, count);
  if (!draws) return;
  if (room->num_lucky > room->most_lucky)
    s->count[row] = -1;
  else
    offer_all(s, row, room, weights);
}

/* ---- memory */

static int64_t bytes_of(int64_t count, size_t size) {
  return rounded_up(count * (int64_t)size, LINE_BYTES);
}

/* Lays out a thread's room in `memory`; returns how many bytes it takes. */
static int64_t lay_out(room_t *room, char *memory, int64_t size) {
  int64_t count = partitions_of(size), padded = rounded_up(size, GROUP);
  room->most_lucky = size / 64 + LINE; /* of 2,981 one is */
  int64_t bytes[] = {bytes_of(size, sizeof *room->items),
                     bytes_of(size, sizeof *room->weights),
                     bytes_of(padded, sizeof *room->words),
                     bytes_of(room->most_lucky, sizeof *room->lucky),
                     bytes_of(count, sizeof *room->tops),
                     bytes_of(count, sizeof *room->partitions)};
  int64_t ends[6], used = 0;
  for (int i = 0; i < 6; i++) ends[i] = used += bytes[i];
  room->items = (item_t *)memory; /* what is not used is not touched */
  room->weights = (float *)(memory + ends[0]);
  room->words = (uint32_t *)(memory + ends[1]);
  room->lucky = (int32_t *)(memory + ends[2]);
  room->tops = (float *)(memory + ends[3]);
  room->partitions = (partition_t *)(memory + ends[4]);
  return used;
}

typedef struct {
  scan_t *scan;
  char *memory; /* of each thread, `bytes` apart */
  int64_t bytes;
  atomic_long next;
} job_t;

static void run_scan(team_t *team, int rank, void *argument) {
  (void)team;
  job_t *job = argument;
  room_t room;
  lay_out(&room, job->memory + rank * job->bytes, job->scan->size);
  for (int64_t row; (row = atomic_fetch_add(&job->next, 1)) < job->scan->rows;)
    scan_row(job->scan, row, &room);
}

/* 0, or -1 when there is no memory. The structure's arrays are the caller's. */
int scan(team_t *team, scan_t *s) {
  room_t room;
  job_t job = {.scan = s, .bytes = lay_out(&room, NULL, s->size)};
  job.memory = scratch(team, (size_t)(team->size * job.bytes));
  if (job.memory == NULL) return -1;
  work(team, run_scan, &job);
  return 0;
}
