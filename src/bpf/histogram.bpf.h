/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Each CPU counts the latencies of a span in a histogram of its own. */
#ifndef DWELL_HISTOGRAM_H
#define DWELL_HISTOGRAM_H

#include "group.bpf.h"
#include "inflight.bpf.h"
#include "shared.bpf.h"

/* The histograms that each CPU has, and each group; the second only where there can be such pairs. */
enum row {
	CERTAIN,
	UNCERTAIN, /* of pairs that are only believed if nothing was skipped */
	ROWS,
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct dwell_histogram);
} dwell_histograms SEC(".maps");

/* Not from the stack, where a key would have to be written first. */
static const __u32 row_keys[ROWS] = { CERTAIN, UNCERTAIN };

/* By what they are grouped by; those that find no room go to the others. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1);
	__type(key, __u64);
	__type(value, struct dwell_histogram[ROWS]);
} dwell_groups SEC(".maps");

static const struct dwell_histogram empty_group[ROWS] = { { .min = ~0ULL }, { .min = ~0ULL } };

/*
 * Uncertain pairs that started before this aren't counted: the kernel has skipped
 * programs since. User space says so.
 */
volatile __u64 doubtful_before SEC(".data.doubt") = 0;

/* 1 + floor(log2(n)); 0 for 0. */
#define BITS_16(n) n, n, n, n, n, n, n, n, n, n, n, n, n, n, n, n
static const __u8 bits_of[256] = {
	0, 1, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 4, 4, 4, 4,
	BITS_16(5), BITS_16(6), BITS_16(6), BITS_16(7), BITS_16(7), BITS_16(7), BITS_16(7),
	BITS_16(8), BITS_16(8), BITS_16(8), BITS_16(8), BITS_16(8), BITS_16(8), BITS_16(8), BITS_16(8),
};

/*
 * DWELL_BUCKETS or more: it lies beyond them. The latencies that are met most take
 * the fewest steps.
 */
static __always_inline __u64 bucket_of(__u64 value)
{
	__u64 shift;

	if (value < 1 << 13)
		shift = bits_of[value >> 5];
	else if (value < 1 << 21)
		shift = 8 + bits_of[value >> 13];
	else if (value < 1 << 29)
		shift = 16 + bits_of[value >> 21];
	else if (value < 1ULL << 37)
		shift = 24 + bits_of[value >> 29];
	else if (value < DWELL_BEYOND_BUCKETS)
		shift = 32 + bits_of[(value >> 37) & 255];
	else
		return DWELL_BUCKETS;
	return (shift << DWELL_LOG2_STEPS) + (value >> shift);
}

/*
 * A program may be interrupted here, and another of the same span run. Each who
 * loses against another has lost against a more extreme value, so a few attempts
 * are enough.
 */
FUNCTION int push_extremes(struct dwell_histogram *histogram, __u64 latency)
{
	__u64 old;

	/* For the verifier. */
	if (!histogram)
		return 0;
#pragma unroll
	for (int attempt = 0; attempt < 4; attempt++) {
		old = *(volatile __u64 *)&histogram->max;
		if (latency <= old || __sync_val_compare_and_swap(&histogram->max, old, latency) == old)
			break;
	}
#pragma unroll
	for (int attempt = 0; attempt < 4; attempt++) {
		old = *(volatile __u64 *)&histogram->min;
		if (latency >= old || __sync_val_compare_and_swap(&histogram->min, old, latency) == old)
			break;
	}
	return 0;
}

static __always_inline void add_latency(struct dwell_histogram *histogram, __u64 latency, int has_cmpxchg)
{
	__u64 bucket = bucket_of(latency);

	if (bucket < DWELL_BUCKETS)
		count_at((void *)histogram + bucket * sizeof(__u64), __builtin_offsetof(struct dwell_histogram, buckets));
	else
		count(&histogram->beyond);
	add(&histogram->sum, latency);
	/* The extremes get rarer the longer it counts. */
	if (latency <= histogram->max && latency >= histogram->min)
		return;
	if (has_cmpxchg) {
		push_extremes(histogram, latency);
		return;
	}
	/* In the middle of this there can only be an interrupt. If it pushes further, the bucket still tells. */
	if (latency > histogram->max)
		histogram->max = latency;
	if (latency < histogram->min)
		histogram->min = latency;
}

/* Counts a latency that belongs to no group, where it is known which row it is. */
static __always_inline void add_to_row(__u64 row, __u64 latency, int has_cmpxchg)
{
	struct dwell_histogram *histogram = bpf_map_lookup_elem(&dwell_histograms, &row_keys[row]);

	/* There are these rows. */
	if (histogram)
		add_latency(histogram, latency, has_cmpxchg);
}

/* NULL: there is no room for one more group. */
static __always_inline struct dwell_histogram *histogram_of_group(__u64 group, __u64 row)
{
	struct dwell_histogram *rows = bpf_map_lookup_elem(&dwell_groups, &group);

	if (!rows) {
		/* Should another CPU be faster, then it is there as well. */
		bpf_map_update_elem(&dwell_groups, &group, empty_group, BPF_NOEXIST);
		rows = bpf_map_lookup_elem(&dwell_groups, &group);
		if (!rows)
			return 0;
	}
	/* Or compilers add first, and ask then, which the verifier doesn't allow. */
	asm volatile("" : "+r"(rows));
	return rows + row;
}

/* Counts a span that has reached its end; 0: it isn't to be believed. */
static __always_inline int record_latency(const struct run *run, const struct dwell_start *start, __u64 latency,
					  int certain, int has_cmpxchg)
{
	struct dwell_histogram *histogram = 0;
	__u64 row = certain ? CERTAIN : UNCERTAIN;

	/* As 64 bits, or compilers put half of it away for later, and before 5.16 the verifier forgets what that was. */
	asm volatile("" : "+r"(row));
	if (!certain && start->ns < doubtful_before) {
		count(&run->counters->mismatched);
		return 0;
	}
	if (start->group && group_by)
		histogram = histogram_of_group(start->group, row);
	if (histogram)
		add_latency(histogram, latency, has_cmpxchg);
	else
		add_to_row(row, latency, has_cmpxchg);
	return 1;
}

#endif
