/* Sums of products of bfloat16 pairs, where the processor has an instruction for them (vdpbf16ps).
   Some do it slowly: Intel's cores take four times as long for it as for a fused multiplication of
   floats, AMD's do not. So there are two forms of a sum, and the faster one is used: by the
   instruction, or by two fused multiplications of widened numbers.

   Both have the same bits. The instruction adds the product of the odd numbers of a pair first, then
   that of the even ones, each rounded once, and takes what is below 2^-126 for zero, in operands and
   in results. So `begin_pairs` has the processor compute all that a sum is made of like that, in
   both forms. */

#ifndef TINKERCLOUD_PAIRS_H
#define TINKERCLOUD_PAIRS_H

#include "vectors.h"

#if defined(__AVX512BF16__)
#define HAS_PAIRS 1

/* sum += products of a pair in each lane. */
#define ADD_PAIRS(sum, a, b)                                                                       \
  __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "vm"(b))

#define SMALL_IS_ZERO 0x8040u /* of the control register: in operands, in results */

/* Returns what `end_pairs` takes. */
INLINE unsigned begin_pairs(void) {
  unsigned control = _mm_getcsr();
  _mm_setcsr(control | SMALL_IS_ZERO);
  return control;
}

INLINE void end_pairs(unsigned control) { _mm_setcsr(control); }

/* Whether the form with widened numbers is the faster one here. */
INTERNAL int widens_pairs(void);

#else
#define HAS_PAIRS 0

INLINE unsigned begin_pairs(void) { return 0; }
INLINE void end_pairs(unsigned control) { (void)control; }
INLINE int widens_pairs(void) { return 1; }

#endif

/* The numbers of a pair, as floats. */
INLINE vec even_half(vec pairs) { return (vec)((ivec)pairs << 16); }
INLINE vec odd_half(vec pairs) { return (vec)((ivec)pairs & (int32_t)0xFFFF0000); }

#endif
