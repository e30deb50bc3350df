/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What the programs and the Rust side share: the layout of the ring's records
 * and of each span's state. src/wire.rs mirrors it; both sides assert sizes and
 * offsets. Only fixed-width members, the widest first, no holes.
 */
#ifndef DWELL_H
#define DWELL_H

/* The in-flight table: DWELL_SETS sets of DWELL_WAYS slots each. */
#define DWELL_WAYS 4
#define DWELL_SETS 1024

/*
 * The ledger's counters exist this many times, indexed by CPU modulo it. More
 * CPUs than that share counters, which stays exact (they are atomic) and only
 * costs cache traffic.
 */
#define DWELL_COUNTER_SETS 128

#define DWELL_COMM_LEN 16

/* One finished span, as it travels through the ring buffer. */
struct dwell_record {
	__u64 start_ns;   /* bpf_ktime_get_ns() (CLOCK_MONOTONIC) at the start */
	__u64 latency_ns;
	__u64 ret;        /* raw return register, 0 where the function is void */
	__u64 skb;        /* address of the packet, 0 where there is none */
	__u32 span;       /* index of the span in its probe */
	__u32 pid;        /* what user space calls a pid: the thread group */
	__u32 tid;
	__u32 cpu_start;
	__u32 cpu_end;
	__u32 len;        /* skb->len at the start */
	__u32 suspect;    /* 1: the start may be another call's, see is_certain() */
	__u32 reserved;
	__u8 comm[DWELL_COMM_LEN];
};

/* What is remembered of a started span until it ends. */
struct dwell_start {
	__u64 ns;
	__u64 fingerprint;
	__u32 len;
	__u16 cpu;
	__u16 switches; /* of the task, modulo 2^16 */
};

/* A slot of the in-flight table; free where key is 0. */
struct dwell_slot {
	__u64 key;
	struct dwell_start start;
};

/* A cache line of counters; each only ever grows. */
struct dwell_counters {
	__u64 started;     /* runs of the start program */
	__u64 completed;   /* starts matched by their exit */
	__u64 untracked;   /* starts that found no room */
	__u64 overwritten; /* starts whose exit never came, replaced by a later one */
	__u64 mismatched;  /* starts met by another call's exit, and thrown away */
	__u64 unmatched;   /* exits without a start */
	__u64 ring_dropped; /* completed, but the ring buffer was full */
	__u64 reserved;
};

/* All that one span keeps in its .bss. */
struct dwell_state {
	struct dwell_counters counters[DWELL_COUNTER_SETS];
	struct dwell_slot slots[DWELL_SETS * DWELL_WAYS];
	__u64 overflow_live; /* entries in the overflow map */
};

/* The elements of the control map, which all spans of a probe share; each is 0 or 1. */
enum {
	DWELL_ON,   /* calls count */
	DWELL_WAKE, /* the reader sleeps, and the next record must wake it */
	DWELL_CONTROLS,
};

_Static_assert(sizeof(struct dwell_record) == 80, "record layout");
_Static_assert(sizeof(struct dwell_start) == 24, "start layout");
_Static_assert(sizeof(struct dwell_slot) == 32, "slot layout");
_Static_assert(sizeof(struct dwell_counters) == 64, "counters layout");

#endif
