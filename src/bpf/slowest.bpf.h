/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The slowest spans that have been completed, kept until user space asks for them.
 *
 * Each CPU keeps its own, twice: in one of two banks, of which user space says which
 * it is. Who finds that his bank is still of an older generation begins it anew.
 */
#ifndef DWELL_SLOWEST_H
#define DWELL_SLOWEST_H

#include "inflight.bpf.h"
#include "ring.bpf.h"
#include "shared.bpf.h"

/*
 * How many each CPU keeps; 0: none. And the bytes of a struct dwell_slow with its record.
 * Read where they are used, or before 5.16 the verifier may forget what they were.
 */
const volatile __u64 slowest_count = 0;
const volatile __u64 slowest_stride = 8;

/*
 * Raised by user space as it asks; the lowest bit is the bank. Once all programs that
 * were running at that moment are done, nobody writes to the other bank any more.
 */
volatile __u64 slowest_generation SEC(".data.slowest") = 0;

/* By CPU and bank. What all objects of a span have in common, and is as large as it must be. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct dwell_slowest);
} dwell_slowest SEC(".maps");

/* Whether spans that are completed make records, as events or to be kept. */
static __always_inline int makes_records(void)
{
	return wants_events || slowest_count;
}

static __always_inline struct dwell_slowest *slowest_of(__u32 cpu, __u64 generation)
{
	__u32 index = cpu << 1 | (generation & 1);

	return bpf_map_lookup_elem(&dwell_slowest, &index);
}

/* Whether it may be among the slowest: what nearly no span is. */
static __always_inline int is_slow(__u32 cpu, __u64 latency)
{
	__u64 generation = slowest_generation;
	struct dwell_slowest *slowest = slowest_of(cpu, generation);

	return slowest && (slowest->generation != generation || latency >= slowest->least);
}

static __always_inline struct dwell_slow *slow_at(struct dwell_slowest *slowest, __u64 n)
{
	/* In this order: older verifiers don't know a product that isn't by a constant. */
	asm volatile("%0 *= %1" : "+r"(n) : "r"(slowest_stride));
	return (void *)(slowest + 1) + n;
}

static __always_inline void unlock(struct dwell_slowest *slowest)
{
	add(&slowest->lock, -1);
}

/* In this order, or who interrupts this would take what was the least for what it is. */
static __always_inline void begin_anew(struct dwell_slowest *slowest, __u64 generation)
{
	for (__u64 n = 0; n < slowest_count; n++)
		slow_at(slowest, n)->rank = 0;
	slowest->which = 0;
	*(volatile __u64 *)&slowest->least = 0;
	*(volatile __u64 *)&slowest->generation = generation;
}

/*
 * A place for one that is slow, which put_slow() must follow; NULL: it isn't to be kept.
 *
 * Nobody waits: on this CPU there is only who was interrupted here, and would be waited
 * for in vain. So who isn't alone goes, and is counted. All kernels have what it takes:
 * of those who have added before they look, only the first can find that he is alone.
 */
static __always_inline struct dwell_slow *take_slow(struct dwell_slowest *slowest, __u64 generation, __u64 latency)
{
	__u64 of, which;
	struct dwell_slow *slow;

	add(&slowest->lock, 1);
	of = *(volatile __u64 *)&slowest->generation;
	/* Of a later generation: who was held up for so long must not touch what others keep now. */
	if (*(volatile __u64 *)&slowest->lock != 1 || of > generation) {
		count(&slowest->unkept);
		unlock(slowest);
		return 0;
	}
	if (of < generation)
		begin_anew(slowest, generation);
	/* Who has interrupted since is_slow() may have been slower. */
	if (latency < *(volatile __u64 *)&slowest->least) {
		unlock(slowest);
		return 0;
	}
	which = *(volatile __u64 *)&slowest->which;
	/* For the verifier. */
	if (which >= slowest_count) {
		unlock(slowest);
		return 0;
	}
	slow = slow_at(slowest, which);
	/* Put away as a pointer, if it has to be, of which the verifier remembers more than of a number. */
	asm volatile("" : "+r"(slow));
	slow->rank = 0;
	return slow;
}

/* Its record is there. Looks which is the next to give way. */
static __always_inline void put_slow(struct dwell_slowest *slowest, struct dwell_slow *slow, __u64 latency)
{
	__u64 rank;

	*(volatile __u64 *)&slow->rank = latency + 1;
	slowest->next_least = ~0ULL;
	/* In memory, of which the verifier forgets what it was: else each place would have a future of its own. */
	for (__u64 n = 0; n < slowest_count; n++) {
		rank = *(volatile __u64 *)&slow_at(slowest, n)->rank;
		if (rank < *(volatile __u64 *)&slowest->next_least) {
			*(volatile __u64 *)&slowest->next_least = rank;
			*(volatile __u64 *)&slowest->next_which = n;
		}
	}
	slowest->which = slowest->next_which;
	*(volatile __u64 *)&slowest->least = slowest->next_least;
	unlock(slowest);
}

#endif
