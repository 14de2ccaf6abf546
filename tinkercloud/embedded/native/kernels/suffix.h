/* Suffix automata, and a sample's matches in several of them (suffix.c). */

#ifndef SUFFIX_H
#define SUFFIX_H

#include <stdint.h>

enum {
  COUNTED_LINKS = 16, /* as in speculative/drafters/suffix.py */
  MOST_SHORTER = 15,
};

typedef struct automaton_s automaton_t;

/* `length` of a sample's last tokens are a string of `state`. */
typedef struct {
  automaton_t *automaton;
  int32_t state, length;
} match_t;

/* matches: in the sample's own output, then in other texts. drafted_from: automaton NULL where
   nothing was drafted. */
typedef struct {
  match_t *matches;
  int64_t num;
  match_t drafted_from;
} suffix_matches_t;

/* longest: `long` of ContinuationRule; the rest as there and in SuffixSettings. */
typedef struct {
  double share, doubt, shorter, longest, factor;
  int64_t shortest, num_shorter, skips_mismatches;
} suffix_rule_t;

#endif
