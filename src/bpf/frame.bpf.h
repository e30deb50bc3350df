/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * A call's frame as a key, and where in the in-flight table it is kept.
 *
 * The key is the address of the context, less that of the table, which is a number
 * for the verifier. Frames of one function differ in the stack that they are on, and
 * stacks are 32 KiB apart, as they are 16 KiB large, aligned to that, and have a
 * guard page: so the bits from there on tell which set it is.
 */
#ifndef DWELL_FRAME_H
#define DWELL_FRAME_H

#include "inflight.bpf.h"

#define STACKS_APART 15
/* The bytes of a set, as a shift. */
#define SET_SHIFT 8
_Static_assert(sizeof(struct dwell_slot) * DWELL_WAYS == 1 << SET_SHIFT, "the bytes of a set");

static __always_inline __u64 key_of_frame(const __u64 *ctx)
{
	return offset_from_state(ctx);
}

static __always_inline struct dwell_slot *at_offset(__u64 offset)
{
	void *slot = (void *)&state + offset;

	/* Compilers would rather compute it again for each use than keep it. */
	asm volatile("" : "+r"(slot));
	return slot;
}

static __always_inline __u64 offset_of_set(__u64 key, __u32 mask)
{
	return (key >> (STACKS_APART - SET_SHIFT)) & ((__u64)mask << SET_SHIFT);
}

/* The set of a frame. */
static __always_inline struct dwell_slot *set_of_frame(__u64 key)
{
	/* The second mask is what the verifier believes. */
	return at_offset(offset_of_set(key, set_mask) & ((DWELL_SETS - 1) << SET_SHIFT));
}

/* The same, of a table of which all is in use. */
static __always_inline struct dwell_slot *whole_set_of_frame(__u64 key)
{
	return at_offset(offset_of_set(key, DWELL_SETS - 1));
}

#endif
