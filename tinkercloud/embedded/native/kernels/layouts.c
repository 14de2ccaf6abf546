/* How the structures that Python fills lie in memory, for structures.py, which compares its mirrors
   when the library is loaded: a field that one side lacks or has elsewhere would be read as another
   one's bytes. */

#include <stddef.h>

#include "gradients.h"
#include "network.h"
#include "packing.h"
#include "scan.h"
#include "suffix.h"

/* field: NULL for the structure as a whole. */
typedef struct {
  const char *structure, *field;
  int64_t offset, size;
} layout_t;

#define STRUCTURE(name) {#name, NULL, 0, sizeof(name##_t)}
#define FIELD(name, field) \
  {#name, #field, offsetof(name##_t, field), sizeof(((name##_t *)0)->field)}

const layout_t layouts[] = {
    STRUCTURE(linear),
    FIELD(linear, weight), FIELD(linear, bias), FIELD(linear, out), FIELD(linear, in),
    FIELD(linear, width), FIELD(linear, salient), FIELD(linear, num_salient),
    STRUCTURE(matrix),
    FIELD(matrix, is_narrow), FIELD(matrix, out), FIELD(matrix, k), FIELD(matrix, width),
    STRUCTURE(packing),
    FIELD(packing, matrix), FIELD(packing, from), FIELD(packing, to),
    STRUCTURE(layer),
    FIELD(layer, input_norm), FIELD(layer, mixed_norm), FIELD(layer, mlp_norm),
    FIELD(layer, fed_norm), FIELD(layer, q_norm), FIELD(layer, k_norm), FIELD(layer, linear),
    FIELD(layer, keys), FIELD(layer, values), FIELD(layer, key_dims), FIELD(layer, window),
    FIELD(layer, rotary),
    STRUCTURE(model),
    FIELD(model, num_layers), FIELD(model, hidden), FIELD(model, heads), FIELD(model, kv_heads),
    FIELD(model, head_dim), FIELD(model, inner), FIELD(model, vocab), FIELD(model, is_narrow),
    FIELD(model, norm_spans_heads), FIELD(model, activation), FIELD(model, num_rotated),
    FIELD(model, rotates_neighbours), FIELD(model, num_rotary), FIELD(model, key_errors),
    FIELD(model, eps),
    FIELD(model, score_scale), FIELD(model, score_cap), FIELD(model, embedding_scale),
    FIELD(model, residual_scale), FIELD(model, logit_cap), FIELD(model, embed),
    FIELD(model, embed_width), FIELD(model, embed_is_narrow), FIELD(model, final_norm),
    FIELD(model, head), FIELD(model, layers), FIELD(model, draft),
    STRUCTURE(draft_head),
    FIELD(draft_head, fuse), FIELD(draft_head, num_states), FIELD(draft_head, embed_norm),
    FIELD(draft_head, feature_norm), FIELD(draft_head, ids),
    STRUCTURE(lora),
    FIELD(lora, a), FIELD(lora, b), FIELD(lora, rank),
    STRUCTURE(segment),
    FIELD(segment, first), FIELD(segment, count), FIELD(segment, scale), FIELD(segment, modules),
    STRUCTURE(kept),
    FIELD(kept, middle), FIELD(kept, mixed_out), FIELD(kept, fed_out), FIELD(kept, raw_q), FIELD(kept, raw_k), FIELD(kept, q), FIELD(kept, k),
    FIELD(kept, v), FIELD(kept, mixed), FIELD(kept, gates),
    STRUCTURE(batch),
    FIELD(batch, rows), FIELD(batch, embeds), FIELD(batch, first_layer), FIELD(batch, end_layer),
    FIELD(batch, x), FIELD(batch, kept), FIELD(batch, tokens), FIELD(batch, positions),
    FIELD(batch, sequence), FIELD(batch, tables), FIELD(batch, table_stride), FIELD(batch, cosine), FIELD(batch, sine),
    FIELD(batch, num_segments), FIELD(batch, segments), FIELD(batch, num_logit_rows),
    FIELD(batch, logit_rows), FIELD(batch, num_captured), FIELD(batch, captured_layers),
    FIELD(batch, captured), FIELD(batch, hidden), FIELD(batch, logits),
    FIELD(batch, scores), FIELD(batch, drawing), FIELD(batch, times), FIELD(batch, states),
    FIELD(batch, guesses),
    STRUCTURE(guesses),
    FIELD(guesses, num_rows), FIELD(guesses, rows), FIELD(guesses, draws), FIELD(guesses, ids),
    FIELD(guesses, leads),
    STRUCTURE(chains),
    FIELD(chains, chains), FIELD(chains, steps), FIELD(chains, most), FIELD(chains, outputs),
    FIELD(chains, lengths), FIELD(chains, tables), FIELD(chains, table_stride),
    FIELD(chains, cosine), FIELD(chains, sine), FIELD(chains, draws), FIELD(chains, tokens),
    FIELD(chains, leads), FIELD(chains, least_lead),
    STRUCTURE(scores),
    FIELD(scores, num_rows), FIELD(scores, rows), FIELD(scores, starts), FIELD(scores, ids),
    FIELD(scores, logits), FIELD(scores, norms),
    STRUCTURE(drawing),
    FIELD(drawing, num_rows), FIELD(drawing, limit), FIELD(drawing, rows), FIELD(drawing, draws),
    FIELD(drawing, norms), FIELD(drawing, count), FIELD(drawing, ids), FIELD(drawing, words),
    FIELD(drawing, weights), FIELD(drawing, kept), FIELD(drawing, logits),
    FIELD(drawing, drafted), FIELD(drawing, drafted_logits),
    STRUCTURE(draw),
    FIELD(draw, temperature), FIELD(draw, top_k), FIELD(draw, top_p), FIELD(draw, seed),
    FIELD(draw, sample), FIELD(draw, position),
    STRUCTURE(scan),
    FIELD(scan, logits), FIELD(scan, rows), FIELD(scan, size), FIELD(scan, limit),
    FIELD(scan, draws), FIELD(scan, best), FIELD(scan, norm), FIELD(scan, count), FIELD(scan, ids),
    FIELD(scan, words),
    STRUCTURE(attention_gradient),
    FIELD(attention_gradient, is_narrow), FIELD(attention_gradient, num_sequences),
    FIELD(attention_gradient, heads),
    FIELD(attention_gradient, kv_heads), FIELD(attention_gradient, head_dim),
    FIELD(attention_gradient, window), FIELD(attention_gradient, scale),
    FIELD(attention_gradient, cap), FIELD(attention_gradient, q), FIELD(attention_gradient, k),
    FIELD(attention_gradient, v), FIELD(attention_gradient, dout),
    FIELD(attention_gradient, q_stride), FIELD(attention_gradient, k_stride),
    FIELD(attention_gradient, v_stride), FIELD(attention_gradient, dout_stride),
    FIELD(attention_gradient, dq), FIELD(attention_gradient, dk), FIELD(attention_gradient, dv),
    FIELD(attention_gradient, dq_stride), FIELD(attention_gradient, dk_stride),
    FIELD(attention_gradient, dv_stride), FIELD(attention_gradient, starts),
    FIELD(attention_gradient, rows), FIELD(attention_gradient, out_rows),
    FIELD(attention_gradient, owned),
    STRUCTURE(match), FIELD(match, automaton), FIELD(match, state), FIELD(match, length),
    STRUCTURE(suffix_matches),
    FIELD(suffix_matches, matches), FIELD(suffix_matches, num),
    FIELD(suffix_matches, drafted_from),
    STRUCTURE(suffix_rule),
    FIELD(suffix_rule, share), FIELD(suffix_rule, doubt), FIELD(suffix_rule, shorter),
    FIELD(suffix_rule, longest), FIELD(suffix_rule, factor), FIELD(suffix_rule, shortest),
    FIELD(suffix_rule, num_shorter), FIELD(suffix_rule, skips_mismatches),
    STRUCTURE(module_gradient),
    FIELD(module_gradient, weight), FIELD(module_gradient, out), FIELD(module_gradient, width),
    FIELD(module_gradient, column),
    STRUCTURE(lora_gradient),
    FIELD(lora_gradient, a), FIELD(lora_gradient, b), FIELD(lora_gradient, da),
    FIELD(lora_gradient, db),
    STRUCTURE(segment_gradient),
    FIELD(segment_gradient, first), FIELD(segment_gradient, count), FIELD(segment_gradient, rank),
    FIELD(segment_gradient, scale), FIELD(segment_gradient, modules),
    STRUCTURE(softmax_gradient),
    FIELD(softmax_gradient, norms), FIELD(softmax_gradient, totals),
    FIELD(softmax_gradient, starts), FIELD(softmax_gradient, ids),
    FIELD(softmax_gradient, gradients),
    STRUCTURE(linear_gradient),
    FIELD(linear_gradient, is_narrow), FIELD(linear_gradient, activation),
    FIELD(linear_gradient, rows), FIELD(linear_gradient, in),
    FIELD(linear_gradient, num_modules), FIELD(linear_gradient, modules), FIELD(linear_gradient, x),
    FIELD(linear_gradient, x_gates), FIELD(linear_gradient, dy), FIELD(linear_gradient, dy_row),
    FIELD(linear_gradient, softmax), FIELD(linear_gradient, dy_gates), FIELD(linear_gradient, dx),
    FIELD(linear_gradient, num_segments), FIELD(linear_gradient, segments),
};

/* The build names it. */
const char *instruction_set(void) { return INSTRUCTION_SET; }

const int64_t num_layouts = sizeof layouts / sizeof *layouts;
