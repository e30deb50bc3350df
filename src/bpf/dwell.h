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

/* Steps of a histogram for each power of two, and how many buckets that makes up to 2^43 ns. */
#define DWELL_LOG2_STEPS 4
#define DWELL_BUCKETS 640
/* Latencies from here on (2 h 26 min) are counted beside the buckets. */
#define DWELL_BEYOND_BUCKETS (1ULL << 43)

/* One finished call, as it travels through a ring. */
struct dwell_record {
	__u64 start_ns;   /* bpf_ktime_get_ns() (CLOCK_MONOTONIC) at the start */
	__u64 latency_ns;
	__u64 ret;        /* raw return register; of a dropped packet, an address in who did it; else 0 */
	__u64 skb;        /* address of the packet, 0 where there is none */
	__u32 end;        /* which of all the ends that the probe's spans have */
	__u32 suspect;    /* 1: the start may be another call's, see is_certain() */
	__u32 len;        /* skb->len at the start, 0 where it can't be read */
	__u32 cpu_start;  /* these two as in struct dwell_start */
	__u32 cpu_end;
	__u32 pid;        /* what user space calls a pid: the thread group */
	__u32 tid;
	__u32 unused;
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
	__u64 stint;    /* which task, and how often it had been switched out */
	__u32 len;
	__u32 cpu;
	__u64 group;    /* whose histogram it belongs to; 0: nobody's */
};

/* A slot of the in-flight table; free where key is 0. */
struct dwell_slot {
	__u64 key;
	struct dwell_start start;
	__u64 starts; /* of calls for which that is counted here, by who holds the slot */
	__u64 unused; /* a cache line each */
};

/*
 * Two cache lines of counters, the busy ones first; each only ever grows. What was
 * completed is the count of its histogram.
 */
struct dwell_counters {
	__u64 started;     /* runs of the start program */
	__u64 emitted;     /* was to be an event; only where not all are */
	__u64 unmatched;   /* ends without a start */
	__u64 overwritten; /* starts that gave way to a later one, or to an earlier */
	__u64 mismatched;  /* starts met by another call's exit, and thrown away */
	__u64 untracked;   /* starts that found no room */
	__u64 ring_dropped; /* was to be an event, but the ring was full */
	__u64 abandoned;   /* starts whose packet, socket or thread went before the end */
	__u64 expired;     /* starts that were too old when they were met again */
	__u64 unkeyed;     /* runs at which there was nothing to match by */
	__u64 unseen;      /* of a session: ends without a start, but for calls that weren't to be measured;
			      of frames: calls from before it was on, of which there was no room to take a note */
	__u64 reserved[5];
};

/*
 * Latencies, by nanoseconds. Below 32 each has a bucket of its own; above there are
 * 16 for each power of two. The count is the sum of the buckets, and of what lies
 * beyond them.
 */
struct dwell_histogram {
	__u64 sum;
	__u64 max;
	__u64 min; /* begins with the largest number there is */
	__u64 beyond;
	__u64 buckets[DWELL_BUCKETS];
};

/* Whether a probe counts: what is behind all its programs' probe_on. */
enum dwell_on {
	DWELL_OFF,
	DWELL_ON,
	DWELL_CAREFUL, /* the kernel has skipped a program */
};

/*
 * The ring of one CPU, which user space maps: this, and then slots for records, a
 * power of two of them. A slot is a number and a record, which is whole once the
 * number is that of the record, counted from 1.
 */
struct dwell_ring_head {
	__u64 head;         /* records for which room was taken */
	__u64 unused[7];    /* each has a cache line of its own */
	__u64 limit;        /* records that there is room for, as far as the reader is: written by it alone */
	__u64 unused_too[7];
};

/* All that one span keeps in its .bss. */
struct dwell_state {
	struct dwell_slot slots[DWELL_SETS * DWELL_WAYS];
	struct dwell_counters counters[DWELL_COUNTER_SETS];
	__u64 overflow_live; /* entries in the overflow map, at most */
};

_Static_assert(sizeof(struct dwell_record) == 80, "record layout");
_Static_assert(sizeof(struct dwell_start) == 40, "start layout");
_Static_assert(sizeof(struct dwell_slot) == 64, "slot layout");
_Static_assert(sizeof(struct dwell_counters) == 128, "counters layout");
_Static_assert(sizeof(struct dwell_histogram) == (4 + DWELL_BUCKETS) * 8, "histogram layout");
_Static_assert(sizeof(struct dwell_ring_head) == 128, "ring layout");
_Static_assert(sizeof(struct dwell_flow) == 40, "flow layout");
_Static_assert(sizeof(struct dwell_keyed_record) == 136, "keyed record layout");

#endif
