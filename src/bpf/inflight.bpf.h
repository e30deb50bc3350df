/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The in-flight table: the kernel-side store of started, unfinished spans.
 *
 * Two stores: a set-associative array in .bss with a hash map behind it, and,
 * for kernels that lack compare-and-swap (before 5.12), the hash map alone.
 * Who may touch a slot when depends on the key: see call.bpf.c and hook.bpf.c.
 */
#ifndef DWELL_INFLIGHT_H
#define DWELL_INFLIGHT_H

#include "args.bpf.h"
#include "dwell.h"

/* The number of sets in use, a power of two, less one. */
const volatile __u32 set_mask = DWELL_SETS - 1;
/* Starts older than this have expired; 0: none ever does. */
const volatile __u64 max_age_ns = 0;

struct dwell_state state = {};

/* Events tell whose packets they are about. */
const volatile __u32 with_identity = 0;

/* A start, and whose packet it was, if that is wanted. Else the map's values are a struct dwell_start alone. */
struct waiting {
	struct dwell_start start;
	struct dwell_identity identity;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__uint(key_size, sizeof(__u64));
	/* Without a type, so that it can be larger. */
	__uint(value_size, sizeof(struct dwell_start));
} dwell_overflow SEC(".maps");

/* The identities of the starts in the table, slot by slot; there is one element. */
struct identities {
	struct dwell_identity of[DWELL_SETS * DWELL_WAYS];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct identities);
} dwell_identities SEC(".maps");

static const __u32 first_key = 0;

/* One run of a program: at one end of one span. */
struct run {
	const __u64 *ctx;
	/* NULL: not to be had here, as before 5.11. */
	const struct task_struct *task;
	__u64 key;
	__u64 fingerprint;
	__u64 stint; /* where it matters */
	/* Of a start: whose histogram the span belongs to. */
	__u64 group;
	struct dwell_counters *counters;
	__u32 cpu;
};

static __always_inline struct dwell_counters *counters_of(__u32 cpu)
{
	return &state.counters[cpu % DWELL_COUNTER_SETS];
}

/*
 * Atomic, because a softirq or a preempting task may run the same program in
 * the middle of the addition. In assembly, because newer clangs make of
 * __sync_fetch_and_add() an instruction that Linux 5.10 lacks, even where its
 * result is unused.
 */
static __always_inline void add(__u64 *to, __s64 value)
{
	asm volatile("lock *(u64 *)(%0 + 0) += %1" : : "r"(to), "r"(value) : "memory");
}

static __always_inline void count(__u64 *counter)
{
	add(counter, 1);
}

/* The counter so many bytes behind, which a constant says: that takes an instruction less. */
static __always_inline void count_at(void *base, const int offset)
{
	asm volatile("lock *(u64 *)(%0 + %1) += %2" : : "r"(base), "i"(offset), "r"(1ULL) : "memory");
}

/* How far behind the state a pointer is, which is a number for the verifier. */
static __always_inline __u64 offset_from_state(const void *pointer)
{
	__u64 offset = (__u64)pointer;

	asm volatile("%0 -= %1" : "+r"(offset) : "r"(&state));
	return offset;
}

/* Where the identity is that belongs to a slot, if there are any. */
static __always_inline struct dwell_identity *identity_of(const struct dwell_slot *slot)
{
	struct identities *identities = bpf_map_lookup_elem(&dwell_identities, &first_key);

	if (!identities)
		return 0;
	return &identities->of[offset_from_state(slot) / sizeof(*slot) % (DWELL_SETS * DWELL_WAYS)];
}

/* Beside a slot, if that is wanted. */
static __always_inline void keep_identity(const struct dwell_slot *slot, const struct dwell_identity *identity)
{
	struct dwell_identity *to;

	if (!with_identity)
		return;
	to = identity_of(slot);
	if (to)
		*to = *identity;
}

/* What waits in a slot, before that is given back. */
static __always_inline void copy_out(struct waiting *to, const struct dwell_slot *slot)
{
	const struct dwell_identity *identity;

	to->start = slot->start;
	if (!with_identity)
		return;
	identity = identity_of(slot);
	if (identity)
		to->identity = *identity;
}

/* The set a key belongs to, by Fibonacci hashing: keys differ in few bits. */
static __always_inline struct dwell_slot *set_of(__u64 key)
{
	/* The highest bits are the best mixed; DWELL_SETS is 2^10. */
	__u64 set = (key * 0x9E3779B97F4A7C15ULL) >> 54;

	set &= set_mask;
	/* Not needed with a valid mask; it is what the verifier believes. */
	set &= DWELL_SETS - 1;
	return &state.slots[set * DWELL_WAYS];
}

/* Whether a slot was free and is `key`'s now. */
static __always_inline int take_free(struct dwell_slot *slot, __u64 key)
{
	__u64 seen;

	seen = __sync_val_compare_and_swap(&slot->key, 0, key);
	/* Of the comparison with 0 compilers would make a number, and compare that once more. */
	asm volatile("" : "+r"(seen));
	return !seen;
}

static __always_inline struct dwell_slot *find(struct dwell_slot *set, __u64 key)
{
#pragma unroll
	for (int way = 0; way < DWELL_WAYS; way++) {
		if (set[way].key == key)
			return &set[way];
	}
	return 0;
}

/* Whether a slot's key was `from`, and is `to` now. */
static __always_inline int swap_key(struct dwell_slot *slot, __u64 from, __u64 to)
{
	return __sync_val_compare_and_swap(&slot->key, from, to) == from;
}

/* Takes a free slot, by making `key` its key. */
static __always_inline struct dwell_slot *claim(struct dwell_slot *set, __u64 key)
{
#pragma unroll
	for (int way = 0; way < DWELL_WAYS; way++) {
		if (!set[way].key && take_free(&set[way], key))
			return &set[way];
	}
	return 0;
}

/*
 * Everything read from the slot must have been read before another CPU can
 * claim it. x86 keeps the order that the compiler left; elsewhere the exchange
 * does.
 */
static __always_inline void release(struct dwell_slot *slot)
{
#ifdef __TARGET_ARCH_x86
	asm volatile("" : : : "memory");
	*(volatile __u64 *)&slot->key = 0;
#else
	(void)__sync_lock_test_and_set(&slot->key, 0);
#endif
}

static __always_inline int is_expired(const struct dwell_start *start, __u64 now)
{
	/* A start that is younger than `now` isn't; the clock may be that of another CPU. */
	return max_age_ns && now > start->ns && now - start->ns > max_age_ns;
}

/* The time stamp comes last at the start and first at the end. */
static __always_inline void fill(struct dwell_start *start, const struct run *run, __u32 len)
{
	start->fingerprint = run->fingerprint;
	start->len = len;
	start->cpu = run->cpu;
	start->stint = run->stint;
	start->group = run->group;
	start->ns = bpf_ktime_get_ns();
}

/*
 * The map uses elements again at once, so one may become another key's between
 * its look-up and its use. The fingerprint of what is in it is therefore bound to
 * key and time: a mixture of two starts doesn't have the one that is looked for.
 */
static __always_inline void seal(struct dwell_start *start, __u64 key)
{
	start->fingerprint ^= key ^ start->ns;
}

/* Whether there was a start in the map that has gone now. */
static __always_inline int drop_from_hash(const struct run *run)
{
	__u64 key = run->key;

	if (bpf_map_delete_elem(&dwell_overflow, &key))
		return 0;
	add(&state.overflow_live, -1);
	return 1;
}

/* Whether there was a start in the map, and it was this run that took it out. */
static __always_inline int take_from_hash(const struct run *run, struct waiting *out)
{
	__u64 key = run->key;
	struct waiting *waiting = bpf_map_lookup_elem(&dwell_overflow, &key);

	if (!waiting)
		return 0;
	out->start = waiting->start;
	if (with_identity) {
		out->identity = waiting->identity;
		/* It isn't sealed: so is it still the same element's? */
		if (*(volatile __u64 *)&waiting->start.ns != out->start.ns)
			return 0;
	}
	if (bpf_map_delete_elem(&dwell_overflow, &key))
		return 0;
	add(&state.overflow_live, -1);
	seal(&out->start, key);
	return 1;
}

#endif
