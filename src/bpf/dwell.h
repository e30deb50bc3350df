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

/* One finished call, as it travels through the ring buffer. */
struct dwell_record {
	__u64 start_ns;   /* bpf_ktime_get_ns() (CLOCK_MONOTONIC) at the start */
	__u64 latency_ns;
	__u64 ret;        /* raw return register, 0 where there is none */
	__u64 skb;        /* address of the packet, 0 where there is none */
	__u32 span;       /* index of the span in its probe */
	__u32 part;       /* which of the span's functions, or of its ends */
	__u32 pid;        /* what user space calls a pid: the thread group */
	__u32 tid;
	__u32 cpu_start;
	__u32 cpu_end;
	__u32 len;        /* skb->len at the start, 0 where it can't be read */
	__u32 suspect;    /* 1: the start may be another call's, see is_certain() */
	__u8 comm[DWELL_COMM_LEN];
};

/* Protocol, addresses and ports: a flow, in the direction of its packet. */
struct dwell_flow {
	__u8 saddr[16];   /* an IPv4 address takes the first four bytes, the rest is 0 */
	__u8 daddr[16];
	__u16 sport;      /* in network byte order; 0 where the protocol has no ports */
	__u16 dport;
	__u8 version;     /* 4 or 6; 0: not a flow */
	__u8 protocol;    /* IPPROTO_... */
	__u8 unused[2];
} __attribute__((aligned(8))); /* it is hashed by words */

/* One finished span between two hooks: a call's record, and what a key adds. */
struct dwell_keyed_record {
	struct dwell_record record;
	__u64 key;
	__u32 outcome;    /* enum dwell_outcome */
	__u32 reason;     /* enum skb_drop_reason, 0 where the kernel gives none */
	struct dwell_flow flow;
};

/* How a span between two hooks ended. */
enum dwell_outcome {
	DWELL_REACHED,  /* it got to its end */
	DWELL_DROPPED,  /* its packet was dropped before that */
	DWELL_CONSUMED, /* its packet was freed after use */
	DWELL_RELEASED, /* what the key stands for is no more; the kernel doesn't say why */
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

/* Two cache lines of counters, the busy ones first; each only ever grows. */
struct dwell_counters {
	__u64 started;     /* runs of the start program */
	__u64 completed;   /* starts matched by their end */
	__u64 unmatched;   /* ends without a start */
	__u64 overwritten; /* starts that gave way to a later one, or to an earlier */
	__u64 mismatched;  /* starts met by another call's exit, and thrown away */
	__u64 untracked;   /* starts that found no room */
	__u64 ring_dropped; /* was to be an event, but the ring buffer was full */
	__u64 abandoned;   /* starts whose packet, socket or thread went before the end */
	__u64 expired;     /* starts that were too old when they were met again */
	__u64 unkeyed;     /* runs at which there was nothing to match by */
	__u64 reserved[6];
};

/* All that one span keeps in its .bss. */
struct dwell_state {
	struct dwell_counters counters[DWELL_COUNTER_SETS];
	struct dwell_slot slots[DWELL_SETS * DWELL_WAYS];
	__u64 overflow_live; /* entries in the overflow map, at most */
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
_Static_assert(sizeof(struct dwell_counters) == 128, "counters layout");
_Static_assert(sizeof(struct dwell_flow) == 40, "flow layout");
_Static_assert(sizeof(struct dwell_keyed_record) == 136, "keyed record layout");

#endif
