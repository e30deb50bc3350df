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

/* What of a struct dwell_identity is known. */
enum dwell_known {
	DWELL_KNOWS_VERSION = 1 << 0,   /* of IP */
	DWELL_KNOWS_PROTOCOL = 1 << 1,
	DWELL_KNOWS_ADDRESSES = 1 << 2,
	DWELL_KNOWS_SPORT = 1 << 3,
	DWELL_KNOWS_DPORT = 1 << 4,
	DWELL_KNOWS_HEADER = 1 << 5,    /* tos and ttl */
	DWELL_KNOWS_TCP = 1 << 6,       /* seq and tcp_flags */
	DWELL_KNOWS_VLAN = 1 << 7,
	DWELL_KNOWS_PACKET = 1 << 8,    /* len and hash */
	DWELL_KNOWS_MARK = 1 << 9,
	DWELL_KNOWS_QUEUE = 1 << 10,
	DWELL_KNOWS_INTERFACE = 1 << 11,
	DWELL_KNOWS_RECEIVED = 1 << 12, /* received_on */
	DWELL_KNOWS_NETNS = 1 << 13,
	DWELL_KNOWS_CGROUP = 1 << 14,
	DWELL_KNOWS_COOKIE = 1 << 15,
	DWELL_KNOWS_NOT_IP = 1 << 16,   /* it is another protocol's */
	DWELL_KNOWS_NO_PORTS = 1 << 17, /* its protocol has none, or it is a later fragment */
};

/* Which way it goes, seen from this network namespace. */
enum dwell_direction {
	DWELL_UNKNOWN_DIRECTION,
	DWELL_OUTGOING,
	DWELL_INCOMING,
};

/* Whose packet it was, read at the start. */
struct dwell_identity {
	struct dwell_flow flow;
	__u64 cgroup;      /* id of the socket's */
	__u64 cookie;      /* the socket's */
	__u32 known;       /* enum dwell_known */
	__u32 len;
	__u32 seq;
	__u32 mark;
	__u32 hash;
	__u32 netns;       /* inode */
	__u32 interface;   /* where it is */
	__u32 received_on; /* the interface */
	__u16 vlan;        /* id */
	__u16 queue;
	__u8 tos;
	__u8 ttl;
	__u8 tcp_flags;
	__u8 direction;    /* enum dwell_direction */
};

/* A record of either kind, with an identity: that of a call leaves out what it hasn't. */
struct dwell_identified_record {
	struct dwell_keyed_record keyed;
	struct dwell_identity identity;
};

/* For whom a CPU works. */
enum dwell_context {
	DWELL_UNKNOWN_CONTEXT,
	DWELL_TASK,    /* the current thread */
	DWELL_SOFTIRQ, /* whoever that is */
	DWELL_HARDIRQ,
	DWELL_NMI,
	DWELL_IDLE,
};

#define DWELL_STACK 64
#define DWELL_UNKNOWN_SWITCHES (~0ULL)

/* What the kernel was doing at the end of a span. */
struct dwell_story {
	__u64 switches;   /* how often the thread has been switched out since the start, or DWELL_UNKNOWN_SWITCHES */
	__u32 context;    /* enum dwell_context */
	__s32 bytes;      /* of the stack; negative: it couldn't be had */
	__u64 stack[DWELL_STACK]; /* return addresses, the innermost first, those of the programs included */
};

/* A record of either kind, with a story, and an identity if there are any. */
struct dwell_full_record {
	struct dwell_identified_record identified;
	struct dwell_story story;
};

/* What a filter asks of a packet or a thread: a table of these, each of which leads to a later one. */
struct dwell_test {
	__u32 field;    /* enum dwell_field */
	__u32 negated;  /* where it can't be told, it is as if the field had matched, or not, for this being so */
	__u32 on_true;  /* the test to go on with, or DWELL_ACCEPT, DWELL_REJECT */
	__u32 on_false;
	__u32 mask[4];  /* of an address or a name; the first, of a number */
	__u32 low[4];   /* what that must be; or, of a number, the least */
	__u32 high;     /* of a number, the most; of an address, its version; of a cgroup, its depth */
	__u32 unused;
};

#define DWELL_TESTS 32
#define DWELL_ACCEPT 254
#define DWELL_REJECT 255

enum dwell_field {
	DWELL_NO_FIELD,
	DWELL_SOURCE_ADDRESS,
	DWELL_DESTINATION_ADDRESS,
	DWELL_SOURCE_PORT,
	DWELL_DESTINATION_PORT,
	DWELL_LOCAL_PORT,
	DWELL_REMOTE_PORT,
	DWELL_PROTOCOL,
	DWELL_VERSION,
	DWELL_LENGTH,
	DWELL_MARK,
	DWELL_INTERFACE,
	DWELL_RECEIVED_ON,
	DWELL_NETNS,
	DWELL_PID,
	DWELL_TID,
	DWELL_COMM,
	DWELL_CGROUP,
	DWELL_PCAP, /* all of what the pcap expression asks */
};

/* An instruction of classic BPF, as libpcap has it. */
struct dwell_cbpf {
	__u16 code;
	__u8 jt;
	__u8 jf;
	__u32 k;
};

#define DWELL_CBPF 128
/* Of scratch memory: a power of two. */
#define DWELL_CBPF_WORDS 4

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
	__u64 unparsed;    /* starts left out since it couldn't be told whether they are wanted */
	__u64 reserved[4];
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

/*
 * The slowest spans of one CPU, of one generation: this, and then places for so many, each
 * a struct dwell_slow and a record.
 */
struct dwell_slowest {
	__u64 generation;
	__u64 least;      /* the least rank, once there is no place left; 0 until then */
	__u64 which;      /* where that is, or a place that is free */
	__u64 lock;       /* 1: somebody is writing here; more: and others have found him at it, */
	__u64 unkept;     /* and gone: so often, in all generations */
	__u64 next_least; /* these belong to who is writing */
	__u64 next_which;
	__u64 unused;
};

struct dwell_slow {
	__u64 rank; /* the latency, plus 1; 0: free */
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
_Static_assert(sizeof(struct dwell_slowest) == 64, "layout of what is slowest");
_Static_assert(sizeof(struct dwell_flow) == 40, "flow layout");
_Static_assert(sizeof(struct dwell_keyed_record) == 136, "keyed record layout");
_Static_assert(sizeof(struct dwell_identity) == 96, "identity layout");
_Static_assert(sizeof(struct dwell_identified_record) == 232, "identified record layout");
_Static_assert(sizeof(struct dwell_full_record) == 760, "full record layout");
_Static_assert(sizeof(struct dwell_test) == 56, "test layout");
_Static_assert(sizeof(struct dwell_cbpf) == 8, "instruction layout");

#endif
