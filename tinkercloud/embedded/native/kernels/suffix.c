/* Suffix automata of what samples have written, and where a sample's end was seen in several of
   them: what speculative/drafters says in Python (suffix.py, suffix_matches.py), in the same order
   and with the same roundings, so that the drafts are the same. One thread.

   A state's first edge lies in it. Further ones are a list, in the order in which they came, and a
   hash table of the whole automaton finds them: the root may have thousands. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "suffix.h"

enum { ROOT = 0, NONE = -1 };

typedef struct {
  int32_t link, length, count;
  int32_t token, next;             /* the edge that came first */
  int32_t first_more, last_more;   /* edges */
} state_t;

typedef struct {
  int32_t state, token, next;
  int32_t following; /* edge of the same state */
} edge_t;

struct automaton_s {
  state_t *states;
  edge_t *edges;
  int32_t *table; /* edges; NONE where there is none */
  int64_t num_states, most_states, num_edges, most_edges, table_size;
};

automaton_t *suffix_new(void) {
  automaton_t *a = calloc(1, sizeof *a);
  if (!a || !(a->states = calloc(1, sizeof *a->states))) {
    free(a);
    return NULL;
  }
  a->num_states = a->most_states = 1;
  a->states[ROOT] = (state_t){NONE, 0, 0, NONE, NONE, NONE, NONE};
  return a;
}

void suffix_free(automaton_t *a) {
  free(a->states);
  free(a->edges);
  free(a->table);
  free(a);
}

int64_t suffix_bytes(const automaton_t *a) {
  return (int64_t)sizeof *a + a->most_states * (int64_t)sizeof *a->states +
         a->most_edges * (int64_t)sizeof *a->edges + a->table_size * (int64_t)sizeof *a->table;
}

int64_t suffix_num_states(const automaton_t *a) { return a->num_states; }

/* ---- edges */

static uint64_t place_of(const automaton_t *a, int32_t state, int32_t token) {
  uint64_t key = (uint64_t)(uint32_t)state << 32 | (uint32_t)token;
  return (key * 0x9e3779b97f4a7c15u >> 20) & (uint64_t)(a->table_size - 1);
}

/* The edge, or NONE. */
static int32_t find_more(const automaton_t *a, int32_t state, int32_t token) {
  if (a->states[state].first_more == NONE) return NONE;
  uint64_t at = place_of(a, state, token);
  for (int32_t edge; (edge = a->table[at]) != NONE; at = (at + 1) & (a->table_size - 1))
    if (a->edges[edge].state == state && a->edges[edge].token == token) return edge;
  return NONE;
}

static int32_t after(const automaton_t *a, int32_t state, int32_t token) {
  const state_t *s = a->states + state;
  if (s->token == token) return s->next;
  int32_t edge = find_more(a, state, token);
  return edge == NONE ? NONE : a->edges[edge].next;
}

static void enter(automaton_t *a, int32_t edge) {
  uint64_t at = place_of(a, a->edges[edge].state, a->edges[edge].token);
  while (a->table[at] != NONE) at = (at + 1) & (a->table_size - 1);
  a->table[at] = edge;
}

/* 0 where memory is short: then nothing has changed. */
static int room_for_edge(automaton_t *a) {
  if (a->num_edges == a->most_edges) {
    int64_t most = a->most_edges ? 2 * a->most_edges : 16;
    edge_t *edges = realloc(a->edges, most * sizeof *edges);
    if (!edges) return 0;
    a->edges = edges;
    a->most_edges = most;
  }
  if (2 * (a->num_edges + 1) > a->table_size) {
    int64_t size = a->table_size ? 2 * a->table_size : 64;
    int32_t *table = malloc(size * sizeof *table);
    if (!table) return 0;
    free(a->table);
    a->table = table;
    a->table_size = size;
    memset(table, 0xff, size * sizeof *table);
    for (int64_t edge = 0; edge < a->num_edges; edge++) enter(a, (int32_t)edge);
  }
  return 1;
}

static int add_edge(automaton_t *a, int32_t state, int32_t token, int32_t next) {
  if (!room_for_edge(a)) return 0;
  int32_t edge = (int32_t)a->num_edges++;
  a->edges[edge] = (edge_t){state, token, next, NONE};
  state_t *s = a->states + state;
  if (s->first_more == NONE)
    s->first_more = edge;
  else
    a->edges[s->last_more].following = edge;
  s->last_more = edge;
  enter(a, edge);
  return 1;
}

static int join(automaton_t *a, int32_t state, int32_t token, int32_t next) {
  state_t *s = a->states + state;
  if (s->token == NONE || s->token == token) {
    s->token = token;
    s->next = next;
    return 1;
  }
  int32_t edge = find_more(a, state, token);
  if (edge == NONE) return add_edge(a, state, token, next);
  a->edges[edge].next = next;
  return 1;
}

/* ---- writing */

static int32_t new_state(automaton_t *a, int32_t length, int32_t link, int32_t count) {
  if (a->num_states == a->most_states) {
    int64_t most = a->most_states + a->most_states / 2 + 16;
    state_t *states = realloc(a->states, most * sizeof *states);
    if (!states) return NONE;
    a->states = states;
    a->most_states = most;
  }
  a->states[a->num_states] = (state_t){link, length, count, NONE, NONE, NONE, NONE};
  return (int32_t)a->num_states++;
}

/* The state after `at` whose longest string is that of `at` and the token. */
static int32_t exactly(automaton_t *a, int32_t at, int32_t next, int32_t token) {
  const state_t was = a->states[next];
  if (was.length == a->states[at].length + 1) return next;
  int32_t copy = new_state(a, a->states[at].length + 1, was.link, was.count);
  if (copy == NONE) return NONE;
  a->states[copy].token = was.token;
  a->states[copy].next = was.next;
  for (int32_t edge = was.first_more; edge != NONE; edge = a->edges[edge].following)
    if (!add_edge(a, copy, a->edges[edge].token, a->edges[edge].next)) return NONE;
  a->states[next].link = copy;
  for (; at != NONE && after(a, at, token) == next; at = a->states[at].link)
    if (!join(a, at, token, copy)) return NONE;
  return copy;
}

static int32_t extend(automaton_t *a, int32_t last, int32_t token) {
  int32_t next = after(a, last, token);
  if (next != NONE) return exactly(a, last, next, token);
  int32_t state = new_state(a, a->states[last].length + 1, ROOT, 0), at = last;
  if (state == NONE) return NONE;
  for (; at != NONE && (next = after(a, at, token)) == NONE; at = a->states[at].link)
    if (!join(a, at, token, state)) return NONE;
  if (at != NONE) {
    int32_t link = exactly(a, at, next, token);
    if (link == NONE) return NONE;
    a->states[state].link = link;
  }
  return state;
}

int32_t suffix_write(automaton_t *a, int32_t state, const int32_t *tokens, int64_t num) {
  for (int64_t i = 0; i < num; i++) {
    if ((state = extend(a, state, tokens[i])) == NONE) return NONE;
    int32_t suffix = state;
    for (int n = 0; n < COUNTED_LINKS && suffix != ROOT; n++) {
      a->states[suffix].count++;
      suffix = a->states[suffix].link;
    }
  }
  return state;
}

/* ---- reading */

static void follow(match_t *m, const int32_t *tokens, int64_t num) {
  const automaton_t *a = m->automaton;
  for (int64_t i = 0; i < num; i++) {
    int32_t next = after(a, m->state, tokens[i]);
    while (next == NONE && m->state != ROOT) {
      m->state = a->states[m->state].link;
      m->length = a->states[m->state].length;
      next = after(a, m->state, tokens[i]);
    }
    if (next == NONE) {
      m->length = 0;
    } else {
      m->state = next;
      m->length++;
    }
  }
}

typedef struct {
  int32_t token, next, times; /* times: that any followed */
} likeliest_t;

static likeliest_t likeliest(const automaton_t *a, int32_t state) {
  const state_t *s = a->states + state;
  likeliest_t best = {s->token, s->next, a->states[s->next].count};
  int32_t most = best.times;
  for (int32_t edge = s->first_more; edge != NONE; edge = a->edges[edge].following) {
    int32_t count = a->states[a->edges[edge].next].count;
    best.times += count;
    if (count > most) {
      most = count;
      best.token = a->edges[edge].token;
      best.next = a->edges[edge].next;
    }
  }
  return best;
}

/* As follow, but a token that never followed is replaced by the likeliest, which halves the
   length. */
static void follow_loosely(match_t *m, const int32_t *tokens, int64_t num) {
  const automaton_t *a = m->automaton;
  for (int64_t i = 0; i < num; i++) {
    int32_t next = after(a, m->state, tokens[i]);
    if (next != NONE) {
      m->length++;
    } else if (a->states[m->state].token != NONE) {
      next = likeliest(a, m->state).next;
      m->length /= 2;
    } else {
      m->length = 0;
      return;
    }
    m->state = next;
  }
}

static match_t continued(match_t m) {
  const state_t *states = m.automaton->states;
  while (states[m.state].token == NONE && m.state != ROOT) {
    m.state = states[m.state].link;
    m.length = states[m.state].length;
  }
  return m;
}

/* How often the match is followed by the token: next, as any was `times`. */
static double share_of(match_t m, likeliest_t chosen, const suffix_rule_t *rule) {
  const automaton_t *a = m.automaton;
  int32_t followed[MOST_SHORTER + 1], times[MOST_SHORTER + 1], length[MOST_SHORTER + 1];
  followed[0] = a->states[chosen.next].count;
  times[0] = chosen.times;
  length[0] = m.length;
  int64_t last = 0;
  for (int32_t s = m.state; last < rule->num_shorter && a->states[s].link != ROOT;) {
    s = a->states[s].link;
    last++;
    followed[last] = a->states[after(a, s, chosen.token)].count;
    times[last] = a->states[s].count;
    length[last] = a->states[s].length;
  }
  double share = followed[last] / (times[last] + rule->doubt / length[last]);
  while (last-- > 0) {
    double ratio = length[last] / rule->longest;
    double weight = rule->shorter / (1 + ratio * ratio);
    share = (followed[last] + weight * share) / (times[last] + weight);
  }
  return share;
}

static int64_t continuation(match_t m, int64_t most, const suffix_rule_t *rule, int32_t *tokens,
                            double *shares) {
  int64_t num = 0;
  double product = 1.0;
  while (num < most) {
    m = continued(m);
    if (m.length < rule->shortest || m.automaton->states[m.state].token == NONE) break;
    likeliest_t chosen = likeliest(m.automaton, m.state);
    double share = share_of(m, chosen, rule);
    product *= share;
    if (product < rule->share) break;
    tokens[num] = chosen.token;
    shares[num++] = share;
    m.state = chosen.next;
    m.length++;
  }
  return num;
}

/* ---- of a sample */

/* 0 where memory is short. written: the match in the text that the sample is written to, NONE:
   none but the first, its own output. */
int64_t suffix_read(suffix_matches_t *s, const int32_t *tokens, int64_t num, int64_t written) {
  /* Before the tokens are written: else they would match themselves. */
  if (s->drafted_from.automaton) follow_loosely(&s->drafted_from, tokens, num);
  for (int64_t i = 0; i < s->num; i++) {
    match_t *m = s->matches + i;
    if (i && i != written) {
      follow(m, tokens, num);
      continue;
    }
    if ((m->state = suffix_write(m->automaton, m->state, tokens, num)) == NONE) return 0;
    m->length = m->automaton->states[m->state].length;
  }
  return 1;
}

void suffix_place(match_t *m, int32_t state) {
  m->state = state;
  m->length = m->automaton->states[state].length;
}

void suffix_follow(match_t *m, const int32_t *tokens, int64_t num) { follow(m, tokens, num); }

/* How many tokens; chosen: the match that is drafted from from now on, NONE where it stays. */
int64_t suffix_draft(suffix_matches_t *s, int64_t most, const suffix_rule_t *rule, int32_t *tokens,
                     double *shares, int64_t *chosen) {
  match_t best = s->matches[0];
  best.state = ROOT;
  best.length = 0;
  int64_t from = 0;
  for (int64_t i = 0; i < s->num; i++) {
    match_t m = continued(s->matches[i]);
    if (m.length > best.length) {
      best = m;
      from = i;
    }
  }
  *chosen = NONE;
  if (rule->skips_mismatches) {
    if (!s->drafted_from.automaton || best.length >= s->drafted_from.length) {
      s->drafted_from = best;
      *chosen = from;
    }
    best = s->drafted_from;
  }
  double allowed = rule->factor * best.length;
  if (allowed < (double)most) most = (int64_t)allowed;
  return continuation(best, most, rule, tokens, shares);
}
