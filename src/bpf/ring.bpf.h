/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The way of a record to user space, and which spans become records.
 *
 * Each CPU has a ring of its own in memory that the reader has mapped, where a
 * record costs a few instructions. It takes compare-and-swap, which kernels before
 * 5.12 lack; there the kernel's own ring buffer carries the records. Elsewhere that
 * only wakes the reader.
 */
#ifndef DWELL_RING_H
#define DWELL_RING_H

#include "inflight.bpf.h"
#include "shared.bpf.h"

/* Which latencies become events: none; those of at least so much; of those one in so many. */
const volatile __u32 wants_events = 0;
const volatile __u64 min_latency_ns = 0;
const volatile __u32 one_in = 1;
/* The slots of each CPU's ring, a power of two, less one; and a slot's bytes. */
const volatile __u32 ring_mask = 0;
const volatile __u32 ring_stride = 8;

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct dwell_ring_head);
} dwell_rings SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 12);
} dwell_ring SEC(".maps");

/* A place for a record. */
struct place {
	void *record; /* NULL: there is none */
	__u64 *whole; /* in a CPU's ring: where to say that the record is whole, */
	__u64 number; /* by this */
};

/* The reader polls; a record wakes it only where it said that it sleeps. */
static __always_inline __u64 wake_flag(void)
{
	if (!reader_sleeps)
		return BPF_RB_NO_WAKEUP;
	reader_sleeps = 0;
	return BPF_RB_FORCE_WAKEUP;
}

static __always_inline struct place place_in_ring(struct dwell_ring_head *ring, __u64 number, __u64 mask, __u64 stride)
{
	__u64 *whole = (void *)(ring + 1) + (number & mask) * stride;

	/* One address, of which compilers would rather make several. */
	asm volatile("" : "+r"(whole));
	return (struct place){ .record = whole + 1, .whole = whole, .number = number + 1 };
}

/* `stride` is ring_stride, by whoever knows it. */
static __always_inline struct place reserve(__u32 cpu, __u32 size, __u64 stride, int in_cpu_ring)
{
	struct place place = {};
	struct dwell_ring_head *ring;
	__u64 head, seen, mask;

	if (!in_cpu_ring) {
		place.record = bpf_ringbuf_reserve(&dwell_ring, size, 0);
		return place;
	}
	ring = bpf_map_lookup_elem(&dwell_rings, &cpu);
	if (!ring)
		return place;
	mask = ring_mask;
	/* Lost only against who has interrupted this very moment. */
	head = *(volatile __u64 *)&ring->head;
#pragma unroll
	for (int attempt = 0; attempt < 4; attempt++) {
		/* An old head may be below the limit where the true one isn't; then the exchange fails. */
		if (head >= *(volatile __u64 *)&ring->limit)
			return place;
		seen = __sync_val_compare_and_swap(&ring->head, head, head + 1);
		/* As in take_free(). */
		asm volatile("" : "+r"(seen));
		if (seen == head)
			return place_in_ring(ring, head, mask, stride);
		head = seen;
	}
	return place;
}

static __always_inline void submit(const struct place *place, int in_cpu_ring)
{
	__u64 bell = 0;

	if (!in_cpu_ring) {
		bpf_ringbuf_submit(place->record, wake_flag());
		return;
	}
	/* The record must be there before its number is; x86 keeps the order of stores. */
#ifdef __TARGET_ARCH_x86
	asm volatile("" : : : "memory");
	*(volatile __u64 *)place->whole = place->number;
#else
	(void)__sync_lock_test_and_set(place->whole, place->number);
#endif
	if (reader_sleeps) {
		reader_sleeps = 0;
		bpf_ringbuf_output(&dwell_ring, &bell, sizeof(bell), BPF_RB_FORCE_WAKEUP);
	}
}

/* Whether a completed span becomes an event, if any do. */
static __always_inline int is_wanted_event(struct dwell_counters *counters, __u64 now, __u64 latency)
{
	if (latency < min_latency_ns)
		return 0;
	/* The clock's low bits are as good as chance; mixed, since it may tick in steps. */
	if (one_in > 1 && (__u32)(now * 0x9E3779B97F4A7C15ULL >> 32) % one_in)
		return 0;
	if (min_latency_ns || one_in > 1)
		count(&counters->emitted);
	return 1;
}

#endif
