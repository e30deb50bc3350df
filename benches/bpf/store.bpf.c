// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Starts and ends of spans, in the crate's in-flight table and in every kind of
 * BPF hash map. Each program makes PAIRS of them in a row, as test runs.
 *
 * The clock isn't what is measured, so reading it is reading a number; and the
 * empty program does everything but the storing.
 */
#include "kernel.h"
#include <bpf/bpf_helpers.h>

static volatile __u64 now = 1;
#define bpf_ktime_get_ns() (now)
#include "inflight.bpf.h"

#define PAIRS 8
/* Keys that are in use, on each CPU. A power of two. */
#define KEYS 256
#define CPUS 128

/* The kernel's, of enum bpf_map_type and of the flags for maps. */
enum {
	BPF_MAP_TYPE_PERCPU_HASH = 5,
	BPF_MAP_TYPE_LRU_HASH = 9,
	BPF_MAP_TYPE_LRU_PERCPU_HASH = 10,
};
enum {
	BPF_F_NO_PREALLOC = 1,
	BPF_F_NO_COMMON_LRU = 2,
};

/* Of one CPU; two cache lines. */
struct progress {
	__u64 pairs;   /* all there have been */
	__u64 matched; /* those of which the end found the start */
	__u64 unused[14];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, CPUS);
	__type(key, __u32);
	__type(value, struct progress);
} progress SEC(".maps");

#define STORE(name, map_type, flags)                         \
	struct {                                             \
		__uint(type, map_type);                      \
		__uint(map_flags, flags);                    \
		__uint(max_entries, 8192);                   \
		__type(key, __u64);                          \
		__type(value, struct dwell_start);           \
	} name SEC(".maps")

STORE(hash, BPF_MAP_TYPE_HASH, 0);
STORE(hash_no_prealloc, BPF_MAP_TYPE_HASH, BPF_F_NO_PREALLOC);
STORE(percpu_hash, BPF_MAP_TYPE_PERCPU_HASH, 0);
STORE(lru, BPF_MAP_TYPE_LRU_HASH, 0);
STORE(lru_no_common, BPF_MAP_TYPE_LRU_HASH, BPF_F_NO_COMMON_LRU);
STORE(lru_percpu, BPF_MAP_TYPE_LRU_PERCPU_HASH, 0);

/* A start in a hash map, as it is done where there is nothing else. */
static __always_inline void start_in(void *map, const struct run *run)
{
	struct dwell_start start;
	__u64 key = run->key;

	fill(&start, run, 0);
	bpf_map_update_elem(map, &key, &start, 0);
}

static __always_inline int end_in(void *map, const struct run *run, struct dwell_start *out)
{
	__u64 key = run->key;
	struct dwell_start *start = bpf_map_lookup_elem(map, &key);

	if (!start)
		return 0;
	*out = *start;
	bpf_map_delete_elem(map, &key);
	return 1;
}

/* The same in the table, step by step as the programs of a function's calls do it. */
static __always_inline void start_in_table(const struct run *run)
{
	struct dwell_slot *set, *slot;
	struct dwell_start stale;

	if (state.overflow_live && take_from_hash(run, &stale))
		return;
	set = set_of(run->key);
	slot = find(set, run->key);
	if (!slot)
		slot = claim(set, run->key);
	if (slot)
		fill(&slot->start, run, 0);
	else
		start_in(&dwell_overflow, run);
}

static __always_inline int end_in_table(const struct run *run, struct dwell_start *out)
{
	struct dwell_slot *slot = find(set_of(run->key), run->key);

	if (!slot)
		return state.overflow_live && take_from_hash(run, out);
	*out = slot->start;
	release(slot);
	return 1;
}

/* Keys such as trampoline frames have: one on each of many stacks of 16 KiB. */
static __always_inline struct run run_of(__u32 cpu, __u64 number)
{
	__u64 stack = (__u64)cpu * KEYS + number % KEYS;

	return (struct run){
		.key = 0xffffc90000003e58ULL + (stack << 14),
		.fingerprint = number,
		.cpu = cpu,
	};
}

#define PROGRAM(name, start, end)                                        \
	SEC("tc")                                                        \
	int name##_pairs(void *ctx)                                      \
	{                                                                \
		__u32 cpu = bpf_get_smp_processor_id() % CPUS;           \
		struct progress *mine = bpf_map_lookup_elem(&progress, &cpu); \
		struct dwell_start found;                                \
		__u64 number, matched = 0;                               \
		struct run run;                                          \
									 \
		(void)ctx;                                               \
		if (!mine)                                               \
			return 0;                                        \
		number = mine->pairs;                                    \
		for (int pair = 0; pair < PAIRS; pair++, number++) {     \
			run = run_of(cpu, number);                       \
			start;                                           \
			if ((end) && found.fingerprint == run.fingerprint) \
				matched++;                               \
		}                                                        \
		mine->pairs = number;                                    \
		mine->matched += matched;                                \
		return 0;                                                \
	}

#define MAP_PROGRAM(map) PROGRAM(map, start_in(&map, &run), end_in(&map, &run, &found))

PROGRAM(empty, found.fingerprint = run.fingerprint, run.key)
PROGRAM(table, start_in_table(&run), end_in_table(&run, &found))
MAP_PROGRAM(hash)
MAP_PROGRAM(hash_no_prealloc)
MAP_PROGRAM(percpu_hash)
MAP_PROGRAM(lru)
MAP_PROGRAM(lru_no_common)
MAP_PROGRAM(lru_percpu)

char LICENSE[] SEC("license") = "Dual BSD/GPL";
