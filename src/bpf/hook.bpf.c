// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The hooks of a span between hooks: programs at the entry or the exit of
 * functions, or at raw tracepoints. There are several alike here, each
 * specialised through .rodata; a span that has more hooks than that takes more
 * objects, which share .bss, in which the started spans wait, and the overflow
 * map.
 *
 * Unlike a call, a key may be met on several CPUs at once. So a slot is only
 * touched by who has exchanged its key for BUSY.
 */
#include "kernel.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include "filter.bpf.h"
#include "histogram.bpf.h"
#include "ring.bpf.h"
#include "slowest.bpf.h"
#include "story.bpf.h"

#define HOOKS 10

/* What makes a program that of its hook. */
struct hook {
	__u32 end;         /* its number among the ends of the probe */
	__u32 role;        /* what happens here to the span: enum role */
	__u32 key_source;  /* what matches the ends: enum key_source, */
	__u32 key_word;    /* made of this word of the context */
	__u32 skb_word;    /* the word that is the packet, NO_WORD if there is none */
	__u32 return_word; /* the word that is the value returned, or tells where a packet was dropped */
	__u32 outcome;     /* ROLE_ABANDON: why a packet goes here (enum dwell_outcome), */
	__u32 reason_word; /* and the word that is the kernel's reason */
	__u32 reversed;    /* the packet here flows the other way */
	__u32 late;        /* the packet may be gone, so it isn't read */
	__u32 subject_source; /* a start: where its group is found, and whose packet it is: enum subject_source, */
	__u32 subject_word;   /* in this word; NO_WORD: nowhere */
	__u32 subject_sock;   /* beside a packet, the word that is its socket, or NO_WORD */
};

const volatile struct hook hooks[HOOKS] = {};
/* A start that is met again stays; else the later one replaces it. */
const volatile __u32 keep_first = 0;
/* Abandoned spans become events, too. */
const volatile __u32 emit_abandoned = 0;
/* Of hash_of_flow(): random. */
const volatile __u32 flow_keys[2][FLOW_WORDS] = {};
/*
 * Not every way to free a packet is seen here, so its data's address must be the
 * same at both ends, as it hardly is in another packet at the same address that
 * came another way.
 */
const volatile __u32 guard_head = 0;
/* Keys may be met without a packet's life to bound them: the reader must look at what was skipped. */
const volatile __u32 suspect = 0;

enum role {
	ROLE_START,
	ROLE_END,
	ROLE_ABANDON, /* the end of a life: of a packet, a socket, a thread */
};

enum key_source {
	KEY_ADDRESS,     /* the word is a pointer, which is the key */
	KEY_SKB_HEAD,    /* the address of a packet's data */
	KEY_SKB_SOCK,    /* a packet's socket */
	KEY_SOCKET_SOCK, /* a struct socket's sock */
	KEY_FLOW_SKB,
	KEY_FLOW_SOCK,
	KEY_FLOW_SOCKET,
	KEY_THREAD,
};

/* One program's run, and what it is for. */
struct at {
	struct run run;
	const volatile struct hook *hook;
	/* Pointers have types here and can be followed: not so in a plain raw tracepoint. */
	int typed;
	struct dwell_flow flow;
};

/* The key of a slot that somebody is working on. No key has this value. */
#define BUSY 1
/* Where a function returns a pointer, the last page of addresses are errors. */
#define MAX_ERRNO 4095

/* As in call.bpf.h. */
const volatile struct dwell_full_record full_record_layout = {};

static __always_inline __u64 key_of_sock(const struct sock *sk)
{
	return address((__u64)sk);
}

/* Idle tasks all have the number 0, so theirs is the CPU's. */
static __always_inline __u64 key_of_thread(__u32 cpu)
{
	__u32 tid = bpf_get_current_pid_tgid();

	return tid ? 1ULL << 32 | tid : 2ULL << 32 | cpu;
}

/* 0: there is nothing to match by. */
FUNCTION int key_of_flow(struct at *at, __u64 word)
{
	__u32 source = at->hook->key_source;
	struct sock *sk = 0;

	if (source == KEY_FLOW_SKB) {
		if (!flow_of_skb((const struct sk_buff *)word, &at->flow))
			return 0;
	} else {
		sk = source == KEY_FLOW_SOCKET ? ((struct socket *)word)->sk : (struct sock *)word;
		if (!sk || !flow_of_sock(sk, &at->flow))
			return 0;
	}
	if (at->hook->reversed)
		reverse(&at->flow);
	/* Neither 0 nor BUSY. */
	at->run.key = hash_of_flow(&at->flow, flow_keys[0]) | 2;
	at->run.fingerprint = hash_of_flow(&at->flow, flow_keys[1]);
	return 1;
}

/* Not NULL, not BUSY, and not an error in the place of a pointer. */
static __always_inline int is_pointer(__u64 key)
{
	return key > BUSY && key < (__u64)-MAX_ERRNO;
}

/* Sets the run's key; 0: there is nothing to match by. */
static __always_inline int find_key(struct at *at)
{
	__u32 source = at->hook->key_source;
	struct run *run = &at->run;
	__u64 word;

	if (source == KEY_THREAD) {
		run->key = key_of_thread(run->cpu);
		return 1;
	}
	word = ctx_word(run->ctx, at->hook->key_word);
	if (source == KEY_ADDRESS) {
		run->key = address(word);
		if (guard_head && at->typed && word)
			run->fingerprint = address((__u64)((struct sk_buff *)word)->head);
		return is_pointer(run->key);
	}
	/* What follows reads through the pointer. */
	if (!at->typed || !word)
		return 0;
	switch (source) {
	case KEY_SKB_HEAD:
		/* Since 6.18 what an untyped pointer points to can be read, too, and it is no number. */
		run->key = address((__u64)((struct sk_buff *)word)->head);
		break;
	case KEY_SKB_SOCK:
		run->key = key_of_sock(((struct sk_buff *)word)->sk);
		break;
	case KEY_SOCKET_SOCK:
		run->key = key_of_sock(((struct socket *)word)->sk);
		break;
	default:
		return key_of_flow(at, word);
	}
	return is_pointer(run->key);
}

static __always_inline __u32 skb_len(const struct at *at)
{
	struct sk_buff *skb;

	if (!makes_records() || !at->typed || at->hook->late || at->hook->skb_word >= NO_WORD)
		return 0;
	skb = (struct sk_buff *)ctx_word(at->run.ctx, at->hook->skb_word);
	return skb ? skb->len : 0;
}

static __always_inline void write_record(struct dwell_keyed_record *r, const struct at *at,
					 const struct dwell_start *start, const struct dwell_identity *identity,
					 __u64 latency)
{
	const volatile struct hook *hook = at->hook;

	r->record.start_ns = start->ns;
	r->record.latency_ns = latency;
	r->record.ret = ctx_word(at->run.ctx, hook->return_word);
	r->record.skb = ctx_word(at->run.ctx, hook->skb_word);
	r->record.end = hook->end;
	r->record.cpu_start = start->cpu;
	r->record.cpu_end = at->run.cpu;
	r->record.len = start->len;
	r->record.suspect = suspect;
	identify(&r->record, at->run.task);
	r->key = at->run.key;
	r->outcome = hook->role == ROLE_ABANDON ? hook->outcome : DWELL_REACHED;
	r->reason = hook->role == ROLE_ABANDON ? ctx_word(at->run.ctx, hook->reason_word) : 0;
	r->flow = at->flow;
	if (with_identity)
		((struct dwell_identified_record *)r)->identity = *identity;
	if (with_story)
		tell(&r->record, &at->run, start);
}

static __always_inline void emit(const struct at *at, const struct dwell_start *start,
				 const struct dwell_identity *identity, __u64 latency, int in_table)
{
	__u32 size = with_story ? sizeof(struct dwell_full_record) :
		     with_identity ? sizeof(struct dwell_identified_record) : sizeof(struct dwell_keyed_record);
	struct place place = reserve(at->run.cpu, size, ring_stride, in_table);

	if (!place.record) {
		count(&at->run.counters->ring_dropped);
		return;
	}
	write_record(place.record, at, start, identity, latency);
	submit(&place, in_table);
}

/*
 * Keeps a span that is slow, unless others have been slower by now. Returns 1, which
 * callers must look at, as that of find_subject().
 */
FUNCTION int keep_slow(const struct at *at, const struct waiting *ended, __u64 latency)
{
	__u64 generation = slowest_generation;
	struct dwell_slowest *slowest = slowest_of(at->run.cpu, generation);
	struct dwell_slow *slow;
	int done = 1;

	if (slowest) {
		slow = take_slow(slowest, generation, latency);
		if (slow) {
			write_record((void *)(slow + 1), at, &ended->start, &ended->identity, latency);
			put_slow(slowest, slow, latency);
		}
	}
	asm volatile("" : "+r"(done));
	return done;
}

static __always_inline int finish(const struct at *at, const struct waiting *ended, __u64 now, int in_table)
{
	struct dwell_counters *counters = at->run.counters;
	const struct dwell_start *start = &ended->start;
	__u64 latency = now - start->ns;

	/*
	 * Another flow's start, whose key is the same by chance; one that is being
	 * written at this moment (0); or a clock that went backwards, which the
	 * kernel's fast clock may across an NMI.
	 */
	if (start->fingerprint != at->run.fingerprint || !start->ns || now < start->ns) {
		count(&counters->mismatched);
		return 0;
	}
	if (is_expired(start, now)) {
		count(&counters->expired);
		return 0;
	}
	if (at->hook->role == ROLE_ABANDON)
		count(&counters->abandoned);
	else if (!record_latency(&at->run, start, latency, !suspect, in_table) ||
		 (slowest_count && is_slow(at->run.cpu, latency) && !keep_slow(at, ended, latency)))
		return 0;
	if ((at->hook->role != ROLE_ABANDON || emit_abandoned) && wants_events &&
	    is_wanted_event(counters, now, latency))
		emit(at, start, &ended->identity, latency, in_table);
	return 0;
}

/* Once for kernels with compare-and-swap, and once for those that don't know the instruction. */
FUNCTION int finish_from_table(const struct at *at, const struct waiting *ended, __u64 now)
{
	return finish(at, ended, now, 1);
}

FUNCTION int finish_from_hash(const struct at *at, const struct waiting *ended, __u64 now)
{
	return finish(at, ended, now, 0);
}

/* Of a start that a later one of its key takes the place of. */
static __always_inline void replaced(const struct run *run, int expired)
{
	if (expired)
		count(&run->counters->expired);
	else
		count(&run->counters->overwritten);
}

/* The exchange makes what was written before visible before the key is. */
static __always_inline void publish(struct dwell_slot *slot, __u64 key)
{
	(void)__sync_lock_test_and_set(&slot->key, key);
}

/*
 * Two CPUs that start the same key at once, or a softirq on top of a start, may
 * each take a slot for it. All look at the whole set after they have published,
 * so at least one sees the other; who is later in the set gives way, whoever
 * sees it first.
 */
static __always_inline void settle(const struct run *run, struct dwell_slot *set, struct dwell_slot *mine)
{
	int before = 1;

#pragma unroll
	for (int way = 0; way < DWELL_WAYS; way++) {
		struct dwell_slot *loser = before ? mine : &set[way];

		if (&set[way] == mine) {
			before = 0;
			continue;
		}
		if (set[way].key == run->key && swap_key(loser, run->key, BUSY)) {
			release(loser);
			count(&run->counters->overwritten);
			if (before)
				return;
		}
	}
	if (state.overflow_live && drop_from_hash(run))
		count(&run->counters->overwritten);
}

/* A slot whose start has expired; busy from here on. */
static __always_inline struct dwell_slot *evict(const struct run *run, struct dwell_slot *set)
{
	struct run other = *run;
	__u64 now, key;

	if (!max_age_ns)
		return 0;
	now = bpf_ktime_get_ns();
#pragma unroll
	for (int way = 0; way < DWELL_WAYS; way++) {
		key = set[way].key;
		if (key > BUSY && is_expired(&set[way].start, now) && swap_key(&set[way], key, BUSY)) {
			/* It may have got a new start before it was ours. */
			if (is_expired(&set[way].start, now)) {
				count(&run->counters->expired);
				return &set[way];
			}
			publish(&set[way], key);
			/* Nor could anybody see it who started it meanwhile. */
			other.key = key;
			settle(&other, set, &set[way]);
		}
	}
	return 0;
}

/* Whether there is a start of this key in the overflow map, and it stays. Else it has gone. */
static __always_inline int is_kept_in_hash(const struct run *run)
{
	__u64 key = run->key;
	struct dwell_start *earlier = bpf_map_lookup_elem(&dwell_overflow, &key);
	int expired;

	if (!earlier)
		return 0;
	expired = is_expired(earlier, bpf_ktime_get_ns());
	if (keep_first && !expired) {
		count(&run->counters->overwritten);
		return 1;
	}
	if (drop_from_hash(run))
		replaced(run, expired);
	return 0;
}

/*
 * Inserted as it is, in one piece: where several CPUs work on one key, an element
 * that is filled afterwards may have been another's since. That puts the map's
 * cost within the span.
 */
static __always_inline void insert_in_hash(const struct run *run, __u32 len, struct waiting *waiting, int in_table)
{
	__u64 key = run->key;
	long error;

	/* Before it can be found, so that who looks for it doesn't leave it out. */
	add(&state.overflow_live, 1);
	fill(&waiting->start, run, len);
	seal(&waiting->start, key);
	error = bpf_map_update_elem(&dwell_overflow, &key, waiting, BPF_NOEXIST);
	if (!error) {
		/* What another CPU has put into the table meanwhile stays, as in settle(). */
		if (in_table && find(set_of(key), key) && drop_from_hash(run))
			count(&run->counters->overwritten);
		return;
	}
	add(&state.overflow_live, -1);
	/* Another CPU was faster, or the map is full. */
	if (error == -EEXIST)
		count(&run->counters->overwritten);
	else
		count(&run->counters->untracked);
}

/* `waiting` has the identity, if that is wanted. */
FUNCTION int start_in_table(const struct run *run, __u32 len, struct waiting *waiting)
{
	struct dwell_slot *set = set_of(run->key), *slot;
	__u64 key = run->key;

	if (state.overflow_live && is_kept_in_hash(run))
		return 0;
	slot = find(set, key);
	/* Not touched, so that an end finds it at any time. */
	if (slot && keep_first && !is_expired(&slot->start, bpf_ktime_get_ns())) {
		count(&run->counters->overwritten);
		return 0;
	}
	if (slot && swap_key(slot, key, BUSY)) {
		replaced(run, is_expired(&slot->start, bpf_ktime_get_ns()));
	} else {
		slot = claim(set, BUSY);
		if (!slot)
			slot = evict(run, set);
	}
	if (!slot) {
		insert_in_hash(run, len, waiting, 1);
		return 0;
	}
	keep_identity(slot, &waiting->identity);
	fill(&slot->start, run, len);
	publish(slot, key);
	settle(run, set, slot);
	return 0;
}

/* Where there is no table. */
FUNCTION int start_in_hash(const struct run *run, __u32 len, struct waiting *waiting)
{
	if (!is_kept_in_hash(run))
		insert_in_hash(run, len, waiting, 0);
	return 0;
}

static __always_inline int take_from_table(const struct run *run, struct waiting *out)
{
	struct dwell_slot *slot = find(set_of(run->key), run->key);

	if (!slot || !swap_key(slot, run->key, BUSY))
		return state.overflow_live && take_from_hash(run, out);
	copy_out(out, slot);
	release(slot);
	return 1;
}

/* Whether a span is to be measured that starts here; and whose packet it is, if anybody wants to know. */
FUNCTION int is_wanted(const struct at *at, struct subject *subject)
{
	const volatile struct hook *hook = at->hook;

	if (cbpf_count)
		ask_pcap(at->run.ctx, hook->subject_source, hook->subject_word, subject);
	if (needs_subject && !find_subject(at->run.ctx, hook->subject_source, hook->subject_word, hook->subject_sock,
					   subject))
		return 0;
	return !test_count || passes(subject, at->run.counters);
}

static __always_inline int at_hook(const __u64 *ctx, const struct task_struct *task,
				   const volatile struct hook *hook, int typed, int in_table)
{
	__u64 now = hook->role == ROLE_END ? bpf_ktime_get_ns() : 0;
	struct at at = { .run = { .ctx = ctx, .task = task }, .hook = hook, .typed = typed };
	/* At a start what begins, at an end what has ended: all functions together don't have much stack. */
	struct subject subject;
	struct waiting *ended = &subject.waiting;
	struct run *run = &at.run;

	if (!probe_on)
		return 0;
	run->cpu = bpf_get_smp_processor_id();
	run->counters = counters_of(run->cpu);
	run->stint = switches_so_far();
	if (!find_key(&at)) {
		if (hook->role != ROLE_ABANDON)
			count(&run->counters->unkeyed);
		return 0;
	}
	if (hook->role == ROLE_START) {
		/* Where nobody asks, not even the call is made. */
		if ((test_count || needs_subject) && !is_wanted(&at, &subject)) {
			/* Nor may its end meet an earlier start. */
			if (!keep_first &&
			    (in_table ? take_from_table(run, ended) : take_from_hash(run, ended)))
				count(&run->counters->overwritten);
			return 0;
		}
		count(&run->counters->started);
		if (group_by && typed && hook->subject_word < NO_WORD)
			run->group = group_of(ctx, hook->subject_source, hook->subject_word);
		if (in_table)
			start_in_table(run, skb_len(&at), &subject.waiting);
		else
			start_in_hash(run, skb_len(&at), &subject.waiting);
	} else if (in_table ? take_from_table(run, ended) : take_from_hash(run, ended)) {
		/* Most that goes is in no span: only what is needs the time. */
		now = hook->role == ROLE_END ? now : bpf_ktime_get_ns();
		if (in_table)
			finish_from_table(&at, ended, now);
		else
			finish_from_hash(&at, ended, now);
	} else if (hook->role == ROLE_END && !test_count) {
		count(&run->counters->unmatched);
	}
	return 0;
}

/*
 * Four programs for each hook, of which one is loaded: whether typed (the attach
 * type is set at load time: fentry, fexit or tp_btf) or a plain raw tracepoint,
 * which can't follow the pointer to the task either; and each once more for
 * kernels before 5.12, as in call.bpf.c.
 */
#define HOOK(n)                                                                             \
	SEC("fentry")                                                                       \
	int hook_##n(__u64 *ctx)                                                            \
	{                                                                                   \
		return at_hook(ctx, bpf_get_current_task_btf(), &hooks[n], 1, 1);           \
	}                                                                                   \
	SEC("fentry")                                                                       \
	int hook_hash_##n(__u64 *ctx)                                                       \
	{                                                                                   \
		return at_hook(ctx, 0, &hooks[n], 1, 0);                                    \
	}                                                                                   \
	SEC("raw_tp")                                                                       \
	int plain_##n(__u64 *ctx)                                                           \
	{                                                                                   \
		return at_hook(ctx, 0, &hooks[n], 0, 1);                                    \
	}                                                                                   \
	SEC("raw_tp")                                                                       \
	int plain_hash_##n(__u64 *ctx)                                                      \
	{                                                                                   \
		return at_hook(ctx, 0, &hooks[n], 0, 0);                                    \
	}

HOOK(0)
HOOK(1)
HOOK(2)
HOOK(3)
HOOK(4)
HOOK(5)
HOOK(6)
HOOK(7)
HOOK(8)
HOOK(9)
_Static_assert(HOOKS == 10, "a program for each hook");

char LICENSE[] SEC("license") = "Dual BSD/GPL";
