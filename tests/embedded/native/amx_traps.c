/* Lets code that is compiled for AMX run on a processor without: each of its instructions is an
   illegal one there, and the handler of that signal decodes it and computes it in plain C. */

#define _GNU_SOURCE
#include <signal.h>
#include <stdatomic.h>
#include <ucontext.h>

#include "amx/emulated.h"

/* By the VEX prefix's `pp`: the mandatory prefix none, 66, F3 or F2. */
enum { NO_PREFIX, PREFIX_66, PREFIX_F3, PREFIX_F2 };

typedef struct {
  int opcode, prefix, mod, reg, rm, third; /* third: the operand that the VEX prefix names */
  int length;                              /* bytes */
  int64_t address, stride; /* address: base and displacement; stride: the index, scaled */
} instruction_t;

atomic_long trapped_dots;

static int64_t register_value(const ucontext_t *context, int number) {
  static const int places[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP,
                               REG_RSI, REG_RDI, REG_R8,  REG_R9,  REG_R10, REG_R11,
                               REG_R12, REG_R13, REG_R14, REG_R15};
  return context->uc_mcontext.gregs[places[number]];
}

static int64_t displacement(const uint8_t *at, int bytes) {
  if (bytes == 1) return (int8_t)*at;
  int32_t wide = 0;
  memcpy(&wide, at, (size_t)bytes);
  return wide;
}

/* What a memory operand names, from the byte after the ModRM byte on. */
static void decode_memory(instruction_t *i, const ucontext_t *context, const uint8_t *code,
                          int more_base, int more_index) {
  int base = i->rm, bytes = i->mod == 1 ? 1 : i->mod == 2 ? 4 : 0;
  int from_here = i->mod == 0 && i->rm == 5;
  if (i->rm == 4) {
    int sib = code[i->length++], index = (sib >> 3 & 7) | more_index;
    base = sib & 7;
    if (index != 4) i->stride = register_value(context, index) << (sib >> 6);
  }
  int has_no_base = i->mod == 0 && base == 5;
  if (has_no_base) bytes = 4;
  i->address = displacement(code + i->length, bytes);
  i->length += bytes;
  if (from_here)
    i->address += (int64_t)code + i->length;
  else if (!has_no_base)
    i->address += register_value(context, base | more_base);
}

/* Whether it is one that AMX may have. */
static int decode(instruction_t *i, const ucontext_t *context, const uint8_t *code) {
  if (code[0] != 0xC4) return 0;
  int first = ~code[1] & 0xE0, map = code[1] & 0x1F, second = code[2];
  if (map != 2 || second & 0x84 || first & 0x80) return 0; /* W and L are 0, tiles end at 7 */
  *i = (instruction_t){.opcode = code[3], .prefix = second & 3, .mod = code[4] >> 6,
                       .reg = code[4] >> 3 & 7, .rm = code[4] & 7,
                       .third = ~second >> 3 & 15, .length = 5};
  if (i->mod != 3) decode_memory(i, context, code, (first & 0x20) >> 2, (first & 0x40) >> 3);
  return 1;
}

/* Whether it is one of AMX that products take. */
static int compute(const instruction_t *i) {
  int in_memory = i->mod != 3;
  if (i->opcode == 0x49 && i->prefix == NO_PREFIX && in_memory)
    emulated_configure((const tile_config_t *)(i->address + i->stride));
  else if (i->opcode == 0x49 && i->prefix == NO_PREFIX)
    emulated_release();
  else if (i->opcode == 0x49 && i->prefix == PREFIX_F2 && !in_memory)
    emulated_zero(i->reg);
  else if (i->opcode == 0x4B && i->prefix == PREFIX_F2 && i->rm == 4)
    emulated_load(i->reg, (const void *)i->address, i->stride);
  else if (i->opcode == 0x4B && i->prefix == PREFIX_F3 && i->rm == 4)
    emulated_store(i->reg, (void *)i->address, i->stride);
  else if (i->opcode == 0x5C && i->prefix == PREFIX_F3 && !in_memory)
    emulated_dot(i->reg, i->rm, i->third), atomic_fetch_add(&trapped_dots, 1);
  else
    return 0;
  return 1;
}

static void trap(int number, siginfo_t *info, void *argument) {
  (void)info;
  ucontext_t *context = argument;
  greg_t *next = &context->uc_mcontext.gregs[REG_RIP];
  instruction_t instruction;
  if (decode(&instruction, context, (const uint8_t *)*next) && compute(&instruction))
    *next += instruction.length;
  else
    signal(number, SIG_DFL); /* it is illegal */
}

void trap_amx(void) {
  struct sigaction action = {.sa_sigaction = trap, .sa_flags = SA_SIGINFO};
  sigaction(SIGILL, &action, NULL);
}
