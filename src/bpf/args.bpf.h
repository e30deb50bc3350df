/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Reading a traced function's arguments and return value from the context. */
#ifndef DWELL_ARGS_H
#define DWELL_ARGS_H

/*
 * The context of fentry and fexit is an array of 64-bit words: the argument
 * registers, then (fexit only) the return value. The verifier only allows
 * constant offsets into it, so each word has its own load here; with a word
 * number from .rodata the verifier sees which case is taken and removes the
 * others. Inline assembly keeps the compiler from merging the cases back into
 * one computed offset.
 */
#define CTX_WORD(n)                                            \
	case n:                                                \
		asm volatile("%0 = *(u64 *)(%1 + %2)"          \
			     : "=r"(word)                      \
			     : "r"(ctx), "i"((n) * 8));        \
		break

/* No word of the context: it has 12 arguments (MAX_BPF_FUNC_ARGS) at most, and the return value behind them. */
#define NO_WORD 13

/* 0 of NO_WORD. */
static __always_inline __u64 ctx_word(const __u64 *ctx, __u32 n)
{
	__u64 word = 0;

	switch (n) {
	CTX_WORD(0);
	CTX_WORD(1);
	CTX_WORD(2);
	CTX_WORD(3);
	CTX_WORD(4);
	CTX_WORD(5);
	CTX_WORD(6);
	CTX_WORD(7);
	CTX_WORD(8);
	CTX_WORD(9);
	CTX_WORD(10);
	CTX_WORD(11);
	CTX_WORD(12);
	}
	return word;
}

/*
 * A pointer as a plain number. The verifier lets a privileged program turn a
 * pointer's bytes round, and forgets that it was one; so they are turned twice.
 */
static __always_inline __u64 address(__u64 pointer)
{
	asm volatile("%0 = be64 %0\n\t%0 = be64 %0" : "+r"(pointer));
	return pointer;
}

/*
 * The same, turned once: as good to tell pointers apart, and all that a fingerprint takes.
 */
static __always_inline __u64 scalar(__u64 pointer)
{
	asm volatile("%0 = be64 %0" : "+r"(pointer));
	return pointer;
}

#endif
